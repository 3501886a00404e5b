"""The dataclass tree as flags: one table of name -> Flag, built from the schema and the chosen algorithm."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path

from megarl.config.checkpoint_flags import CheckpointConfig
from megarl.config.roles import KINDS
from megarl.config.schema import LoRAConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from megarl.config.values import Kind, kind_of_hint

# Sections whose flags carry a prefix. Every other section's flags are its field names.
PREFIXES = {"rollout": "rollout-"}


def _dataclass_in(hint: object) -> type | None:
    """The dataclass of an annotation `X` or `X | None`."""
    if typing.get_origin(hint) is tuple:
        return None
    return next((cls for cls in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(cls)), None)


SECTIONS: dict[str, type] = {
    name: cls
    for name, hint in typing.get_type_hints(TrainConfig).items()
    if (cls := _dataclass_in(hint)) is not None
}
OF_ROLES: dict[type, dict[str, str]] = {
    ParallelConfig: {"actor": "actor", "reference": "reference", "critic": "critic", "reward": "reward"},
    OptimizerConfig: {"actor": "optimizer", "critic": "critic_optimizer"},
    LoRAConfig: {"actor": "lora", "critic": "critic_lora"},
}
"""Dataclass -> role -> the section that holds the role's. Their flags set every role, and with the role's
name in front that one."""
ROLES = tuple(OF_ROLES[ParallelConfig])
FOLLOWERS = {"actor": ("reference",)}
"""Roles that a role's own flags set too: the reference is the actor as it was."""
_PLACEMENT_OF_JOB = (
    "nproc_per_node",
    "executor",
    "num_actors",
    "pools",
    "offload_ahead_bytes",
    "call_timeout_s",
)
OF_JOB = frozenset(
    {
        ("batch", "train_iters"),
        *(("placement", name) for name in _PLACEMENT_OF_JOB),
        *(("checkpoint", field.name) for field in dataclasses.fields(CheckpointConfig)),
        *(
            ("run", field.name)
            for field in dataclasses.fields(RunConfig)
            if not field.name.startswith("gate_")
        ),
    }
)
"""(section, field) of what all actors share."""
_NUMBERED = re.compile(rf"(no-)?({'|'.join(KINDS)})-([2-9]|[1-9][0-9]{{1,8}})-(.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag and where its value goes.

    Args:
        name: without the dashes, e.g. actor-tensor-model-parallel-size.
        targets: (section, field) pairs that it sets; a flag of every role has as many as there are roles. Of
            two flags the one with fewer targets holds.
        required: it has no default.
        help: the string under the field.
    """

    name: str
    targets: tuple[tuple[str, str], ...]
    kind: Kind
    default: object = None
    required: bool = False
    help: str = ""


def number_and_name(name: str) -> tuple[int, str]:
    """Which actor a flag is about, and the flag as it is without the number: (2, "critic-lr") of critic-2-lr,
    (1, "lr") of lr."""
    match = _NUMBERED.fullmatch(name)
    return (int(match[3]), f"{match[1] or ''}{match[2]}-{match[4]}") if match else (1, name)


def numbered(name: str, number: int) -> str:
    """The flag of one actor: critic-2-lr of critic-lr, actor-2-seed of seed."""
    kind, _, rest = name.partition("-")
    return (
        name
        if number == 1
        else f"{kind}-{number}-{rest}"
        if kind in KINDS and rest
        else f"actor-{number}-{name}"
    )


def flag_name(field: str, prefix: str = "") -> str:
    return prefix + field.replace("_", "-")


def build_flags(algorithm: type | None) -> dict[str, Flag]:
    """All flags by name, in the order of the schema.

    Args:
        algorithm: the chosen algorithm's dataclass; None leaves its flags out.
    Raises: TypeError if two fields claim one flag or a field's type fits no flag: mistakes of ours, not of
        the user.
    """
    flags: dict[str, Flag] = {}
    for flag in _all_flags(algorithm):
        if flag.name in flags:
            raise TypeError(
                f"--{flag.name} is claimed by {flags[flag.name].targets} and {flag.targets}; rename one field"
            )
        flags[flag.name] = flag
    return flags


def _all_flags(algorithm: type | None) -> Iterator[Flag]:
    if algorithm is not None:
        yield from section_flags("algorithm", algorithm)
    for section, cls in SECTIONS.items():
        if cls not in OF_ROLES:
            yield from section_flags(section, cls)
    for cls, section_of in OF_ROLES.items():
        yield from _with_targets(cls, "", tuple(section_of.values()))
        for role, section in section_of.items():
            followers = tuple(section_of[r] for r in FOLLOWERS.get(role, ()) if r in section_of)
            yield from _with_targets(cls, f"{role}-", (section, *followers))


def _with_targets(cls: type, prefix: str, sections: tuple[str, ...]) -> Iterator[Flag]:
    for flag in section_flags("", cls):
        field = flag.targets[0][1]
        yield dataclasses.replace(
            flag, name=flag_name(field, prefix), targets=tuple((section, field) for section in sections)
        )


@functools.cache
def section_flags(section: str, cls: type) -> tuple[Flag, ...]:
    """The flags of one dataclass. Dict fields are left out: flags that the schema does not know go there."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    flags = []
    for field in dataclasses.fields(cls):
        if typing.get_origin(hints[field.name]) is dict:
            continue
        required = field.default is MISSING and field.default_factory is MISSING
        default = (
            None if required else field.default if field.default is not MISSING else field.default_factory()
        )
        flags.append(
            Flag(
                name=flag_name(field.name, PREFIXES.get(section, "")),
                targets=((section, field.name),),
                kind=kind_of_hint(hints[field.name]),
                default=default,
                required=required,
                help=docs.get(field.name, ""),
            )
        )
    return tuple(flags)


def algorithm_flags(algorithms: Mapping[str, type]) -> dict[str, list[str]]:
    """Flag name -> names of the algorithms that have it."""
    owners: dict[str, list[str]] = {}
    for name, cls in algorithms.items():
        for field in dataclasses.fields(cls):
            owners.setdefault(flag_name(field.name), []).append(name)
    return owners


def field_docs(cls: type) -> dict[str, str]:
    """The string literal under each field of a dataclass and of its base classes, on one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        source = getattr(sys.modules.get(base.__module__), "__file__", None)
        if dataclasses.is_dataclass(base) and source is not None:
            docs |= _docs_by_class(source).get(base.__name__, {})
    return docs


@functools.cache
def _docs_by_class(source: str) -> dict[str, dict[str, str]]:
    tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    return {node.name: _docs_in(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _docs_in(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for field, text in itertools.pairwise(node.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            docs[field.target.id] = " ".join(text.value.value.split())
    return docs
