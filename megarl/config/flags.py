"""Make flags from the configuration tree, parse their words into values, and format values as flags."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import json
import shlex
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from megarl.config.errors import Errors, field_types
from megarl.config.installed import visible_gpus
from megarl.config.run_sections import RankCount
from megarl.config.schema import (
    CheckpointConfig,
    LoRAConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    RunConfig,
    StreamingConfig,
    TrainConfig,
)
from megarl.frameworks.answers import is_override


class Word(NamedTuple):
    """A word of the command line or of an args file. A quoted word of a file is a value, whatever it begins
    with."""

    text: str
    quoted: bool = False


PREFIXES = {"rollout": "rollout-"}
"""Section -> prefix of its flags. The flags of every other section are its field names."""


def _dataclass_in(hint: object) -> type | None:
    """Return the dataclass X of an annotation `X` or `X | None`; None if the annotation has no dataclass."""
    if typing.get_origin(hint) is tuple:
        return None
    return next((cls for cls in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(cls)), None)


SECTIONS: dict[str, type] = {
    name: cls for name, hint in field_types(TrainConfig).items() if (cls := _dataclass_in(hint)) is not None
}
OF_ROLES: dict[type, dict[str, str]] = {
    ParallelConfig: {"actor": "actor", "reference": "reference", "critic": "critic", "reward": "reward"},
    OptimizerConfig: {"actor": "optimizer", "critic": "critic_optimizer"},
    LoRAConfig: {"actor": "lora", "critic": "critic_lora"},
}
"""Dataclass -> role -> section of the role. A flag of such a dataclass sets every role; with a role's name
in front it sets that role."""
ROLES = tuple(OF_ROLES[ParallelConfig])
FOLLOWERS = {"actor": ("reference",)}
"""Role -> roles that its flags set too. The reference is a copy of the actor, so it is split alike."""
_PLACEMENT_OF_JOB = (
    "nproc_per_node nnodes elastic_min_nodes executor ray_address num_actors pools offload_ahead_bytes "
    "call_timeout_s".split()
)
OF_JOB = frozenset(
    {
        ("batch", "train_iters"),
        ("episodes", "share_episodes"),
        *(("placement", name) for name in _PLACEMENT_OF_JOB),
        *(("checkpoint", field.name) for field in dataclasses.fields(CheckpointConfig)),
        *(("profile", field.name) for field in dataclasses.fields(ProfileConfig)),
        *(("streaming", field.name) for field in dataclasses.fields(StreamingConfig)),
        *(("run", f.name) for f in dataclasses.fields(RunConfig) if not f.name.startswith("gate_")),
    }
)
"""(section, field) pairs whose value all actors share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """The type of a flag's value: how its words are parsed, and how --help shows it.

    Args:
        bases: names in `_PARSERS`, tried in that order.
        choices: accepted values. Empty: any value of the bases.
        many: container of the values if the flag takes several words.
        one_or_many: whether a single word gives the bare value and not a container.
        optional: whether the unquoted word `none` gives None.
    """

    bases: tuple[str, ...] = ("str",)
    choices: tuple[object, ...] = ()
    many: type | None = None
    one_or_many: bool = False
    optional: bool = False

    @property
    def is_bool(self) -> bool:
        return self.bases == ("bool",) and self.many is None

    @property
    def metavar(self) -> str:
        """The placeholder of the value in --help."""
        if self.is_bool:
            return ""
        one = "{" + ",".join(map(str, self.choices)) + "}" if self.choices else "|".join(self.bases).upper()
        return f"{one} ..." if self.many else one

    def parse(self, words: Sequence[Word]) -> object:
        """Return the value of the words after a flag. Raises: ValueError with the broken rule."""
        if self.optional and len(words) == 1 and words[0] == Word("none"):
            return None
        if self.many and not (self.one_or_many and len(words) == 1):
            return self.many(self._parse_one(word.text) for word in words)
        if not words:
            raise ValueError("needs a value.")
        if len(words) > 1:
            raise ValueError(f"takes one value, not {len(words)}. Quote a value that has spaces.")
        return self._parse_one(words[0].text)

    def _parse_one(self, text: str) -> object:
        for choice in self.choices:
            if text == str(choice):
                return choice
        for base in () if self.choices else self.bases:
            try:
                return _PARSERS[base][1](text)
            except ValueError:
                continue
        if self.choices:
            accepted = f"one of {', '.join(map(str, self.choices))}"
        else:
            accepted = " or ".join(_PARSERS[base][0] for base in self.bases)
        raise ValueError(f"must be {accepted}{', or none' if self.optional else ''}.")


def _parse_json(text: str) -> dict[str, object]:
    if not text.lstrip().startswith("{"):
        raise ValueError("not an object")
    return json.loads(text)


def _parse_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("not a boolean")
    return text == "true"


def _parse_int(text: str) -> int:
    if "_" in text:  # int() takes 1_000; vLLM's and Megatron's parsers print it back differently
        raise ValueError("not an integer")
    return int(text)


def _parse_low_high(text: str) -> int:
    low, high = map(_parse_int, text.split("-"))
    if not 1 <= low <= high:
        raise ValueError("not a range")
    gpus = visible_gpus()
    return min(max(gpus, low), high) if gpus else high


_PARSERS = {
    "bool": ("true or false", _parse_bool),
    "int": ("a whole number", _parse_int),
    "low-high": ("a range like 1-8", _parse_low_high),
    "float": ("a number", float),
    "json": ("a JSON object", _parse_json),
    "str": ("text", str),
}
"""Base of a Kind -> (its name in errors, its parser)."""


def kind_of_hint(hint: object) -> Kind:
    """Return the `Kind` that parses the values of a field with this annotation. Raises: TypeError for a type
    that no flag can carry."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return kind_of_hint(arguments[0])
    if origin in (typing.Union, types.UnionType):
        members = [argument for argument in arguments if argument not in (type(None), typing.Never)]
        if members:
            kind = functools.reduce(_either, map(kind_of_hint, members))
            return replace(kind, optional=type(None) in arguments)
    elif origin is typing.Literal:
        return Kind(choices=arguments)
    elif (container := origin or hint) in (tuple, list, set):
        return replace(kind_of_hint(arguments[0] if arguments else str), many=container)
    elif container is dict:
        return Kind(bases=("json",))
    elif hint is RankCount:
        return Kind(bases=("int", "low-high"))
    elif hint in (bool, int, float, str):
        return Kind(bases=(hint.__name__,))
    raise TypeError(
        f"no flag can carry {hint}; use bool, int, float, str, Literal, tuple[X, ...], or one of "
        "these or None"
    )


def _either(left: Kind, right: Kind) -> Kind:
    """Return a `Kind` that accepts the values of both kinds; text is tried last, as it accepts everything."""
    many = left.many or right.many
    return Kind(
        bases=tuple(sorted({*left.bases, *right.bases}, key=[*_PARSERS].index)),
        choices=left.choices + right.choices if left.choices and right.choices else (),
        many=many,
        one_or_many=many is not None and (left.many is None or right.many is None),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag and the fields that it sets.

    Args:
        name: without the dashes, e.g. actor-tensor-model-parallel-size.
        targets: (section, field) pairs that the flag sets, one per role for a flag of all roles. If two flags
            set a field, the flag with fewer targets wins.
        default: default of the field, or MISSING.
        owner: dataclass of the field. None for a flag that the schema does not define.
    """

    name: str
    targets: tuple[tuple[str, str], ...]
    kind: Kind
    default: object = None
    owner: type | None = None

    @property
    def field(self) -> str:
        """The name of the field that the flag sets, the same in all sections."""
        return self.targets[0][1]

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def help(self) -> str:
        """The text for --help: the string literal under the field in the source, on one line; "" if there is
        none.

        The source is read on first use, as this takes long."""
        return field_docs(self.owner).get(self.field, "") if self.owner is not None else ""

    @property
    def is_of_job(self) -> bool:
        """Whether all actors share the value."""
        return OF_JOB.issuperset(self.targets)


def flag_name(field: str, prefix: str = "") -> str:
    """Return the name of a field's flag without the leading dashes, e.g. min-lr for min_lr."""
    return prefix + field.replace("_", "-")


def build_flags(algorithm: type | None) -> dict[str, Flag]:
    """Return name -> `Flag` for all fields of the schema and of the chosen algorithm.

    Args:
        algorithm: dataclass of the chosen algorithm. None: no flags of an algorithm.
    Raises: TypeError if two fields have the same flag, or no flag can carry a field's type. The author of the
        dataclass must correct this, not the user.
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
        targets = tuple((section, flag.field) for section in sections)
        yield replace(flag, name=prefix + flag.name, targets=targets)


@functools.cache
def section_flags(section: str, cls: type) -> tuple[Flag, ...]:
    """Return one flag per field of a dataclass. A dict field has none: it holds the values of flags that the
    schema does not define."""
    hints = field_types(cls)
    return tuple(
        Flag(
            name=flag_name(field.name, PREFIXES.get(section, "")),
            targets=((section, field.name),),
            kind=kind_of_hint(hints[field.name]),
            default=field.default if field.default_factory is MISSING else field.default_factory(),
            owner=cls,
        )
        for field in dataclasses.fields(cls)
        if typing.get_origin(hints[field.name]) is not dict
    )


def refuse_set(node: object, reason: str, *names: str, flag_of: Callable[[str], str] | None = None) -> Errors:
    """Yield an error with this reason for each field whose value is not the default.

    Args:
        names: fields to check. Without names all fields are checked.
        flag_of: returns the flag of a field. Default: the flag without a role."""
    for flag in section_flags("", type(node)):
        value = getattr(node, flag.field)
        if value != flag.default and (not names or flag.field in names):
            name = f"--{flag.name}" if flag_of is None else flag_of(flag.field)
            yield f"{name} ({words_of(value)}): {reason}"


def words_of(value: object) -> str:
    """Format a value for an error, as one would type it after the flag."""
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def algorithm_name(cls: type) -> str:
    """Return the value of --algorithm for a class: its `name`, else the class name in lower case."""
    return getattr(cls, "name", cls.__name__.lower())


def algorithm_flags(algorithms: Mapping[str, type]) -> dict[str, list[str]]:
    """Return flag name -> names of the algorithms that have the flag."""
    owners: dict[str, list[str]] = {}
    for name, cls in algorithms.items():
        for field in dataclasses.fields(cls):
            owners.setdefault(flag_name(field.name), []).append(name)
    return owners


def field_docs(cls: type) -> dict[str, str]:
    """Return field -> the string literal under it, on one line, for a dataclass and its base classes."""
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
    for pair in itertools.pairwise(node.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = " ".join(doc.split())
    return docs


def format_flag(name: str, value: object) -> str:
    """Return one line of an args file that parses back to `value`."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    words = value if isinstance(value, (tuple, list)) else [value]
    return " ".join([f"--{name}", *map(_format_one, words)])


def _format_one(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return _quoted(json.dumps(value))
    if isinstance(value, str):
        plain = shlex.quote(value)
        is_value = plain[0] not in "-@" and plain != "none" and not is_override(plain)
        return plain if is_value else _quoted(value)
    return repr(value)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"
