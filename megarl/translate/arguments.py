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
    lines: list[str] = [_comment(remark) for remark in source.remarks]
    flags: dict[str, Flag] = {}
    written: dict[str, str] = {}
    for row, found in _translated(settings):
        is_given = _is_given(row, settings)
        for line in found:
            if line.flag == "algorithm":
                flags = build_flags(algorithms[str(line.value)])
                defaults.update({name: flag.default for name, flag in flags.items()})
            if not line.flag:
                lines.append(_comment(line.note))
                continue
            flag = flags.get(line.flag)
            if line.value is None and not (flag is not None and flag.kind.optional):
                lines.append(_comment(f"--{line.flag}: has no value there; megarl's default counts"))
                continue
            known = as_number(line.value)
            if line.flag not in values:
                values[line.flag] = line.value if known is None else known
            if flag is not None and flag.kind.bases == ("int",) and isinstance(known, int):
                line = line._replace(value=known)  # 1e3 and 16.0 are whole numbers there
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
        return _comment(f"--{line.flag} = {value}")
    value = tuple(map(_without_tilde, value)) if isinstance(value, list) else _without_tilde(value)
    text = format_flag(line.flag, value)
    return f"{text}  {_comment(note)}" if note else text


def _comment(text: str) -> str:
    """Return a comment of an args file, on one line, because a line break would make flags of the rest."""
    return f"# {' '.join(text.split())}"


def _without_tilde(value: object) -> object:
    """Return a path with the home directory in the place of ~; any other value as it is."""
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _comments(source: Source, written: Collection[str]) -> Iterator[str]:
    """Yield a comment for every setting that has no counterpart here, and for every one that is not known.

    Args:
        written: our flags that are in the args file."""
    table = source.framework.table
    set_here = {*written, *(flag.removeprefix("actor-") for flag in written)}
    for name, reason in source.unknown.items():
        row = next((row for row in table if row.has(name)), None)
        if row is None or row.flags or row.lines:
            flags = ", ".join(f"--{flag}" for flag in sorted(row.flags_here())) if row else ""
            yield _comment(f"{name}: {reason}{f'; set {flags}' if flags else ''}")
    by_reason: dict[str, list[str]] = {}
    for name, value in source.settings.items():
        if reason := _reason(name, value, table, set_here):
            by_reason.setdefault(reason, []).append(f"{name}={_short(value)}")
    for reason, settings in by_reason.items():
        yield _comment(f"{reason}:")
        yield from (f"#   {' '.join(setting.split())}" for setting in settings)


def _reason(name: str, value: object, table: tuple[Row, ...], set_here: Collection[str]) -> str:
    """Return why a setting is a comment in the args file; "" if it is none.

    Args:
        set_here: our flags that are in the args file."""
    row = next((row for row in table if row.has(name)), None)
    if value is None:
        is_lost = row is not None and row.flags and row.lines is None and row.default is not None
        return "there is no such value here; megarl's default counts" if is_lost else ""
    if row is None:
        names = [name for row in table for name in row.names.split() if "*" not in name]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        return f"not known here{f'; the nearest known is {near[0]}' if near else ''}"
    if row.lines is None:
        unknown = "" if row.has_counterpart(value) else f"not one of {', '.join(row.values)}"
        return unknown if row.flags else row.instead
    is_set = not row.flags or any(flag in set_here for flag in row.flags_here())
    return "" if is_set else row.instead or "no effect in this configuration"


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) < 60 else f"{text[:57]}..."
