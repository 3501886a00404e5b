"""Make an args file from the settings of another framework."""

from __future__ import annotations

import difflib
import os
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping

from megarl.config.flags import Flag, build_flags, format_flag
from megarl.frameworks.rows import TIMES, Line, Row, Settings, as_number
from megarl.translate.sources import Source


def write_arguments(
    source: Source, algorithms: Mapping[str, type], rows: int | None, ranks: int | None
) -> str:
    """Return the text of an args file, with comments for what has no counterpart.

    Args:
        algorithms: --algorithm -> its class, whose fields are flags.
        rows: number of rows of the training data, if it is known.
        ranks: number of processes, if it is known."""
    table = source.framework.table
    defaults: dict[str, object] = {}
    values: dict[str, object] = {}
    settings = Settings(source.settings, table, rows, ranks, ChainMap(values, defaults))
    there = source.framework.name
    lines: list[str] = [f"# {remark}" for remark in source.remarks]
    flags: dict[str, Flag] = {}
    written: dict[str, str] = {}
    for row, found in _translated(settings):
        is_given = _is_given(row, settings)
        for line in found:
            if line.flag == "algorithm":
                flags = build_flags(algorithms[str(line.value)])
                defaults.update({name: flag.default for name, flag in flags.items()})
            if not line.flag:
                lines.append(f"# {line.note}")
                continue
            flag = flags.get(line.flag)
            known = as_number(line.value)
            if line.flag not in values:
                values[line.flag] = line.value if known is None else known
            if not is_given and flag is not None and not flag.required and _is_default(flag, line.value):
                continue
            note = line.note or ("" if is_given else f"{there}'s default")
            written.setdefault(line.flag, _written(line, note))
    return "\n".join([*written.values(), *lines, *_comments(source, written.keys()), ""])


def _translated(settings: Settings) -> Iterator[tuple[Row, list[Line]]]:
    """Yield each row of the table that applies to the configuration, with its lines of the args file."""
    done = set()
    for row in settings.table:
        if row.lines is not None:
            if row.lines not in done:
                done.add(row.lines)
                yield row, list(row.lines(settings))
            continue
        names = [name for name in settings.given if row.has(name)]
        value = settings.given[names[0]] if names else row.default
        if row.flags and value is not None:
            yield row, row.lines_here(value, settings.ours)


def _is_given(row: Row, settings: Settings) -> bool:
    """Whether the configuration has a setting of this row, or of a row that is translated with it."""
    rows = [row] if row.lines is None else [other for other in settings.table if other.lines is row.lines]
    return any(one.has(name) for one in rows for name in settings.given)


def _is_default(flag: Flag, value: object) -> bool:
    default = flag.default
    if isinstance(default, tuple):
        default = list(default)
    try:
        return value == default or (
            not isinstance(default, bool) and float(str(value)) == float(str(default))
        )
    except ValueError:
        return str(value) == str(default)


def _written(line: Line, note: str) -> str:
    """Return a line of an args file; a comment if its value is not known."""
    value = line.value
    if isinstance(value, str) and TIMES in value:
        return f"# --{line.flag} = {value}"
    value = tuple(map(_without_tilde, value)) if isinstance(value, list) else _without_tilde(value)
    text = format_flag(line.flag, value)
    return f"{text}  # {note}" if note else text


def _without_tilde(value: object) -> object:
    """Return a path with the home directory in the place of ~; any other value as it is."""
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _comments(source: Source, written: Collection[str]) -> Iterator[str]:
    """Yield a comment for every setting that has no counterpart here, and for every one that is not known.

    Args:
        written: our flags that are in the args file."""
    table = source.framework.table
    for name, reason in source.unknown.items():
        row = next((row for row in table if row.has(name)), None)
        if row is None or row.flags or row.lines:
            flags = row.flags.replace(" {}", "") if row else ""
            yield f"# {name}: {reason}{f'; set {flags}' if flags.startswith('--') else ''}"
    by_reason: dict[str, list[str]] = {}
    for name, value in source.settings.items():
        row = next((row for row in table if row.has(name)), None)
        if row is None:
            reason = "not known here"
            names = [name for row in table for name in row.names.split() if "*" not in name]
            if near := difflib.get_close_matches(name, names, n=1, cutoff=0.5):
                reason += f"; the nearest known is {near[0]}"
        elif row.lines is None and not row.flags:
            reason = row.instead
        elif row.lines is not None and row.flags and not row.flags_here() & set(written):
            reason = row.instead or "no effect in this configuration"
        else:
            continue
        by_reason.setdefault(reason, []).append(f"{name}={_short(value)}")
    for reason, settings in by_reason.items():
        yield f"# {reason}:"
        yield from (f"#   {setting}" for setting in settings)


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) < 60 else f"{text[:57]}..."
