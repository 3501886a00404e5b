"""Write the configuration tree as text: the args file of a resolved configuration, and --help."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from megarl.config.args_file import numbered
from megarl.config.flags import (
    OF_ROLES,
    SECTIONS,
    Flag,
    algorithm_name,
    flag_name,
    format_flag,
    section_flags,
)
from megarl.config.hub import with_names
from megarl.config.rules_streaming import stale_defaults
from megarl.config.schema import TrainConfig

_HEAD = """\
usage: {prog} [@file.args ...] [--flag value ...]

@file.args reads flags from a file: as typed here, over any number of lines, # for comments, @other.args to
include another file. A flag given here overrides args files, and a later file an earlier one. --flag=value
passes a value that starts with -- or @, and `none` stands for no value where a flag has none by default.
"""
_TAIL = """\
and also
  --rollout-<name>
        Any other engine argument of the installed vLLM, e.g. --rollout-scheduling-policy fcfs.
  --<name>
        Any other field of the installed Megatron-Core's TransformerConfig, e.g. --attention-softmax-in-fp32.
        The model's shape is not among them: it comes from --model.
  --actor-2-<name>
        With --num-actors: a flag of the second actor alone. Of one of its roles: --critic-2-<name>,
        --rollout-2-<name>.
"""
_REST = """\
Every other flag of `megarl train --help` is accepted, e.g. --rollout-<name> and parallel sizes.
"""

_SECTION_OF: dict[type, str] = {}
"""Dataclass -> first section of the tree that is an instance of it."""
for _section, _cls in SECTIONS.items():
    _SECTION_OF.setdefault(_cls, _section)


def write_args(config: TrainConfig) -> str:
    """Return the text of the args file that parses back to an equal configuration.

    The file holds every value, so that it means the same after a default has changed. A None is left out if
    it is the default with every --staleness."""
    cls = type(config.algorithm)
    chosen = format_flag("algorithm", algorithm_name(cls))
    always = stale_defaults(config.streaming.staleness)
    lines = _lines(config.algorithm, section_flags("algorithm", cls), always)
    groups = [("algorithm", [chosen, *lines])]
    for section_cls, section in _SECTION_OF.items():
        if section_cls in OF_ROLES:
            lines = _role_lines(config, section_cls)
        else:
            lines = _lines(getattr(config, section), section_flags(section, section_cls))
        groups.append((_first_line(section_cls).partition(" (")[0], lines))
    for title, prefix, values in (
        ("other vLLM engine arguments", "rollout-", config.rollout.engine_args),
        ("other Megatron TransformerConfig fields", "", config.transformer),
    ):
        groups.append((title, [format_flag(flag_name(name, prefix), v) for name, v in values.items()]))
    for number, other in enumerate(config.others, 2):
        groups.append((f"actor {number}", list(_differences(config, other, number))))
    return with_names("\n".join("\n".join([f"# {title}", *lines, ""]) for title, lines in groups if lines))


def _lines(node: object, flags: Sequence[Flag], always: Iterable[str] = ()) -> list[str]:
    """Return a line of an args file per flag, without flags whose value is None by default.

    Args:
        always: fields that have a line even then."""
    values = [(flag, getattr(node, flag.field)) for flag in flags]
    return [
        format_flag(flag.name, value)
        for flag, value in values
        if value is not None or flag.default is not None or flag.field in always
    ]


def _role_lines(config: TrainConfig, cls: type) -> list[str]:
    """Return the lines of an args file for a section that each role has: one flag per field if all roles have
    the same value, else one flag per role."""
    nodes = {role: getattr(config, section) for role, section in OF_ROLES[cls].items()}
    nodes = {role: node for role, node in nodes.items() if node is not None}
    lines = []
    for flag in section_flags("", cls):
        values = {role: getattr(node, flag.field) for role, node in nodes.items()}
        first, *others = values.values()
        if all(value == first for value in others):
            lines += _lines(next(iter(nodes.values())), [flag])
        else:
            lines += [format_flag(f"{role}-{flag.name}", value) for role, value in values.items()]
    return lines


def _differences(first: TrainConfig, other: TrainConfig, number: int) -> Iterator[str]:
    """Yield the flags that turn the first actor's configuration into that of another actor."""
    cls = type(other.algorithm)
    if cls is not type(first.algorithm):
        yield format_flag(numbered("algorithm", number), algorithm_name(cls))
    for flag in section_flags("algorithm", cls):
        yield from _other_values(flag, {"": (first.algorithm, other.algorithm)}, number)
    for cls, section in sorted(_SECTION_OF.items(), key=lambda item: item[0] in OF_ROLES):
        names = {f"{role}-": name for role, name in OF_ROLES.get(cls, {}).items()} or {"": section}
        nodes = {prefix: (getattr(first, name), getattr(other, name)) for prefix, name in names.items()}
        for flag in section_flags(section, cls):
            yield from _other_values(flag, nodes, number)
    for prefix, theirs, mine in (
        ("rollout-", first.rollout.engine_args, other.rollout.engine_args),
        ("", first.transformer, other.transformer),
    ):
        if missing := theirs.keys() - mine.keys():
            raise ValueError(
                f"--{flag_name(min(missing), prefix)}: the first actor has it and actor {number} "
                "has not, which no flag can say."
            )
        for name, value in mine.items():
            if value != theirs.get(name):
                yield format_flag(numbered(flag_name(name, prefix), number), value)


def _other_values(flag: Flag, nodes: Mapping[str, tuple[object, object]], number: int) -> Iterator[str]:
    """Yield the flags of a field if its value differs from the first actor's in any role.

    All roles get a flag, because the actor's flag sets the reference's value too.

    Args:
        nodes: prefix of the flag -> (section of the first actor, section of this actor)."""
    values = {
        prefix: (getattr(theirs, flag.field, ...), getattr(mine, flag.field))
        for prefix, (theirs, mine) in nodes.items()
        if mine is not None
    }
    if flag.is_of_job or all(theirs == mine for theirs, mine in values.values()):
        return
    for prefix, (_, mine) in values.items():
        yield format_flag(numbered(prefix + flag.name, number), mine)


def help_text(algorithms: Mapping[str, type], prog: str) -> str:
    """Return the text of --help: every flag with its default, grouped as in the schema."""
    width = min(shutil.get_terminal_size((120, 24)).columns, 140)
    about = _wrapped("How to train. Each algorithm brings its own flags. Required.", width)
    groups = ["\n".join(["algorithm", f"  --algorithm {{{','.join(algorithms)}}}", *about, ""])]
    groups += _algorithm_groups(algorithms, width)
    for cls, section in _SECTION_OF.items():
        groups.append(_group(_first_line(cls), section_flags(section, cls), width))
    return "\n".join([_HEAD.format(prog=prog), *groups, _TAIL])


def _algorithm_groups(algorithms: Mapping[str, type], width: int) -> list[str]:
    """Return one group of help per algorithm, with the flags that it alone has, and one per set of algorithms
    that share flags."""
    owners: dict[Flag, list[str]] = {}
    for name, cls in algorithms.items():
        for flag in section_flags("algorithm", cls):
            of_any = replace(flag, owner=None)
            same = next((f for f in owners if replace(f, owner=None) == of_any and f.help == flag.help), flag)
            owners.setdefault(same, []).append(name)
    flags_of: dict[tuple[str, ...], list[Flag]] = {(name,): [] for name in algorithms}
    for flag, names in owners.items():
        flags_of.setdefault(tuple(names), []).append(flag)
    groups = []
    for names, flags in flags_of.items():
        own = len(names) == 1
        title = f"{names[0]}: {_first_line(algorithms[names[0]])}" if own else f"flags of {', '.join(names)}"
        groups.append(_group(title, flags, width))
    return groups


def help_of(shown: Mapping[str, Sequence[str]], texts: Mapping[str, str]) -> str:
    """Return the text of --help for a command that has only some of the flags.

    Args:
        shown: section -> its fields whose flags are shown.
        texts: flag -> its text, if not that of a training job."""
    width = min(shutil.get_terminal_size((120, 24)).columns, 140)
    groups = []
    for section, fields in shown.items():
        flags = {flag.field: flag for flag in section_flags(section, SECTIONS[section])}
        title = _first_line(SECTIONS[section]).partition(" (")[0]
        groups.append(_group(title, [flags[field] for field in fields], width, texts))
    return "\n".join([*groups, _REST])


def _first_line(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0]


def _group(title: str, flags: Sequence[Flag], width: int, texts: Mapping[str, str] | None = None) -> str:
    lines = []
    for flag in flags:
        value = f", --no-{flag.name}" if flag.kind.is_bool else f" {flag.kind.metavar}"
        text = (texts or {}).get(flag.name)
        lines.append(f"  --{flag.name}{value}")
        lines += _wrapped(f"{flag.help} {_default(flag)}" if text is None else text, width)
    return "\n".join([title, *lines, ""])


def _default(flag: Flag) -> str:
    if flag.required:
        return "Required."
    if "Default:" in flag.help:  # the docstring of the field explains it, e.g. the meaning of None
        return ""
    if flag.kind.is_bool and flag.default is not None:
        return f"Default: {'on' if flag.default else 'off'}."
    values = flag.default if isinstance(flag.default, tuple) else [flag.default]
    return f"Default: {' '.join('none' if value is None else str(value) for value in values) or 'none'}."


def _wrapped(text: str, width: int) -> list[str]:
    indent = " " * 8
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
