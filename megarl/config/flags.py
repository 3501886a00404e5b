"""The dataclass tree as flags: one table of name -> Flag, built from the schema and the chosen algorithm."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path

from megarl.config.schema import ParallelConfig, TrainConfig
from megarl.config.values import Kind, kind_of_hint

# Sections whose flags carry a prefix. Every other section's flags are its field names.
PREFIXES = {"rollout": "rollout-"}
# A role is a field of TrainConfig that is a ParallelConfig: adding one there adds its prefixed flags here.
SECTIONS: dict[str, type] = {name: hint for name, hint in typing.get_type_hints(TrainConfig).items() if dataclasses.is_dataclass(hint)}
ROLES: tuple[str, ...] = tuple(name for name, cls in SECTIONS.items() if cls is ParallelConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag and where its value goes.

    Args:
        name: without the dashes, e.g. actor-tensor-model-parallel-size.
        targets: (section, field) pairs that it sets; a flag of every Megatron role has as many as there are roles.
        one_role: a role's own form of such a flag.
        required: it has no default.
        help: the string under the field.
    """

    name: str
    targets: tuple[tuple[str, str], ...]
    kind: Kind
    one_role: bool = False
    default: object = None
    required: bool = False
    help: str = ""


def flag_name(field: str, prefix: str = "") -> str:
    return prefix + field.replace("_", "-")


def build_flags(algorithm: type | None) -> dict[str, Flag]:
    """All flags by name, in the order of the schema.

    Args:
        algorithm: the chosen algorithm's dataclass; None leaves its flags out.
    Raises: TypeError if two fields claim one flag or a field's type fits no flag: mistakes of ours, not of the user.
    """
    flags: dict[str, Flag] = {}
    for flag in _all_flags(algorithm):
        if flag.name in flags:
            raise TypeError(f"--{flag.name} is claimed by {flags[flag.name].targets} and {flag.targets}; rename one field")
        flags[flag.name] = flag
    return flags


def _all_flags(algorithm: type | None) -> Iterator[Flag]:
    if algorithm is not None:
        yield from section_flags("algorithm", algorithm)
    for section, cls in SECTIONS.items():
        if cls is not ParallelConfig:
            yield from section_flags(section, cls)
    for prefix, roles in [("", ROLES), *((f"{role}-", (role,)) for role in ROLES)]:
        for flag in section_flags("", ParallelConfig):
            field = flag.targets[0][1]
            targets = tuple((role, field) for role in roles)
            yield dataclasses.replace(flag, name=flag_name(field, prefix), targets=targets, one_role=prefix != "")


def section_flags(section: str, cls: type) -> list[Flag]:
    """The flags of one dataclass. Dict fields are left out: flags that the schema does not know go there."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    flags = []
    for field in dataclasses.fields(cls):
        if typing.get_origin(hints[field.name]) is dict:
            continue
        required = field.default is MISSING and field.default_factory is MISSING
        default = None if required else field.default if field.default is not MISSING else field.default_factory()
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
    return flags


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
