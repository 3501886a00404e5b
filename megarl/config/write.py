"""TrainConfig -> args file: the resolved configuration of a run, which parses back to an equal
TrainConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.config.flags import OF_JOB, OF_ROLES, SECTIONS, Flag, flag_name, numbered, section_flags
from megarl.config.schema import TrainConfig
from megarl.config.values import format_flag


def algorithm_name(cls: type) -> str:
    """The value of --algorithm that chooses a class: its attribute `name`, or the class's name in lower
    case."""
    return getattr(cls, "name", cls.__name__.lower())


def write_args(config: TrainConfig) -> str:
    """Every value, defaults too, so that the file means the same when a default changes; None only where it
    is not the default."""
    cls = type(config.algorithm)
    name = algorithm_name(cls)
    groups = [
        (
            "algorithm",
            [format_flag("algorithm", name), *_lines(config.algorithm, section_flags("algorithm", cls))],
        )
    ]
    written: set[type] = set()
    for section, section_cls in SECTIONS.items():
        if section_cls not in OF_ROLES:
            groups.append(
                (_title(section_cls), _lines(getattr(config, section), section_flags(section, section_cls)))
            )
        elif section_cls not in written:
            groups.append((_title(section_cls), _role_lines(config, section_cls)))
        written.add(section_cls)
    groups.append(
        (
            "other vLLM engine arguments",
            [format_flag(flag_name(k, "rollout-"), v) for k, v in config.rollout.engine_args.items()],
        )
    )
    groups.append(
        (
            "other Megatron TransformerConfig fields",
            [format_flag(flag_name(k), v) for k, v in config.transformer.items()],
        )
    )
    groups += [
        (f"actor {number}", _differences(config, other, number))
        for number, other in enumerate(config.others, 2)
    ]
    return "\n".join("\n".join([f"# {title}", *lines, ""]) for title, lines in groups if lines)


def _differences(first: TrainConfig, other: TrainConfig, number: int) -> list[str]:
    """Flags that make of the first actor's configuration that of another one."""
    cls, lines = type(other.algorithm), []
    if cls is not type(first.algorithm):
        lines.append(format_flag(numbered("algorithm", number), algorithm_name(cls)))
    pairs = [(section_flags("algorithm", cls), {"": (first.algorithm, other.algorithm)})]
    pairs += [
        (section_flags(section, section_cls), {"": (getattr(first, section), getattr(other, section))})
        for section, section_cls in SECTIONS.items()
        if section_cls not in OF_ROLES
    ]
    for section_cls, section_of in OF_ROLES.items():
        of_roles = {
            f"{role}-": (getattr(first, section), getattr(other, section))
            for role, section in section_of.items()
        }
        pairs.append((section_flags("", section_cls), of_roles))
    lines += [
        line for flags, of_roles in pairs for flag in flags for line in _other_values(flag, of_roles, number)
    ]
    passed_on = {
        "rollout-": (first.rollout.engine_args, other.rollout.engine_args),
        "": (first.transformer, other.transformer),
    }
    for prefix, (theirs, mine) in passed_on.items():
        if missing := theirs.keys() - mine.keys():
            raise ValueError(
                f"--{flag_name(min(missing), prefix)}: the first actor has it and actor {number} "
                "has not, which no flag can say."
            )
        lines += [
            format_flag(numbered(flag_name(name, prefix), number), value)
            for name, value in mine.items()
            if value != theirs.get(name)
        ]
    return lines


def _other_values(
    flag: Flag, nodes: Mapping[str, tuple[object | None, object | None]], number: int
) -> list[str]:
    """nodes: prefix of the flag -> (first actor's node of the tree, this one's). For all roles if for any, as
    the actor's flag sets the reference's too."""
    field = flag.targets[0][1]
    if OF_JOB.issuperset(flag.targets):
        return []
    values = {
        prefix: (getattr(theirs, field, ...), getattr(mine, field))
        for prefix, (theirs, mine) in nodes.items()
        if mine is not None
    }
    if all(theirs == mine for theirs, mine in values.values()):
        return []
    return [
        format_flag(numbered(prefix + flag_name(field) if prefix else flag.name, number), mine)
        for prefix, (_, mine) in values.items()
    ]


def _title(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).splitlines()[0].partition(" (")[0]


def _lines(node: object, flags: Sequence[Flag]) -> list[str]:
    values = [(flag, getattr(node, flag.targets[0][1])) for flag in flags]
    return [
        format_flag(flag.name, value)
        for flag, value in values
        if value is not None or flag.default is not None
    ]


def _role_lines(config: TrainConfig, cls: type) -> list[str]:
    """A flag for every role where all agree, one per role where they do not."""
    nodes = {
        role: node
        for role, section in OF_ROLES[cls].items()
        if (node := getattr(config, section)) is not None
    }
    lines = []
    for flag in section_flags("", cls):
        field = flag.targets[0][1]
        values = {role: getattr(node, field) for role, node in nodes.items()}
        first = next(iter(values.values()))
        if all(value == first for value in values.values()):
            lines += _lines(next(iter(nodes.values())), [flag])
        else:
            lines += [format_flag(flag_name(field, f"{role}-"), value) for role, value in values.items()]
    return lines
