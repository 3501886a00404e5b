"""The text of --help, generated from the schema and the algorithms."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping

from megarl.config.flags import SECTIONS, Flag, section_flags

_HEAD = """\
usage: {prog} [@file.args ...] [--flag value ...]

@file.args reads flags from a file: as typed here, over any number of lines, # for comments, @other.args to include another file.
A flag given here overrides args files, and a later file an earlier one. --flag=value passes a value that starts with -- or @,
and `none` stands for no value where a flag has none by default.
"""
_TAIL = """\
and also
  --rollout-<name>        Any other engine argument of the installed vLLM, e.g. --rollout-scheduling-policy fcfs.
  --<name>                Any other field of the installed Megatron-Core's TransformerConfig, e.g. --attention-softmax-in-fp32.
                          The model's shape is not among them: it comes from --model.
  --actor-2-<name>        With --num-actors: a flag of the second actor alone. Of one of its roles: --critic-2-<name>, --rollout-2-<name>.
"""


def help_text(algorithms: Mapping[str, type], prog: str) -> str:
    """Every flag, grouped as in the schema, with its default."""
    width = min(_terminal_width(), 140)
    groups = [_algorithm_group(algorithms, width)]
    for name, cls in algorithms.items():
        groups.append(_group(f"{name}: {_first_line(cls)}", section_flags("algorithm", cls), width))
    seen: set[type] = set()
    for section, cls in SECTIONS.items():
        if cls not in seen:
            groups.append(_group(_first_line(cls), section_flags(section, cls), width))
        seen.add(cls)
    return "\n".join([_HEAD.format(prog=prog), *groups, _TAIL])


def _terminal_width() -> int:
    try:
        return os.get_terminal_size().columns
    except OSError:  # not a terminal
        return 120


def _first_line(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0]


def _algorithm_group(algorithms: Mapping[str, type], width: int) -> str:
    lines = [
        f"  --algorithm {{{','.join(algorithms)}}}",
        *_wrapped("How to train. Each algorithm brings its own flags. Required.", width),
    ]
    return "\n".join(["algorithm", *lines, ""])


def _group(title: str, flags: list[Flag], width: int) -> str:
    return "\n".join([title, *(line for flag in flags for line in _flag_lines(flag, width)), ""])


def _flag_lines(flag: Flag, width: int) -> Iterator[str]:
    yield (
        f"  --{flag.name}, --no-{flag.name}" if flag.kind.is_bool else f"  --{flag.name} {flag.kind.metavar}"
    )
    yield from _wrapped(f"{flag.help} {_default(flag)}", width)


def _default(flag: Flag) -> str:
    if flag.required:
        return "Required."
    if "Default:" in flag.help:  # the schema says it better, e.g. what None stands for
        return ""
    if flag.kind.is_bool and flag.default is not None:
        return f"Default: {'on' if flag.default else 'off'}."
    values = flag.default if isinstance(flag.default, tuple) else [flag.default]
    return f"Default: {' '.join('none' if value is None else str(value) for value in values) or 'none'}."


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False
    )
