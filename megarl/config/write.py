"""TrainConfig -> args file: the resolved configuration of a run, which parses back to an equal TrainConfig."""

from __future__ import annotations

from megarl.config.flags import OF_ROLES, SECTIONS, Flag, flag_name, section_flags
from megarl.config.schema import TrainConfig
from megarl.config.values import format_flag


def algorithm_name(cls: type) -> str:
    """The value of --algorithm that chooses a class: its attribute `name`, or the class's name in lower case."""
    return getattr(cls, "name", cls.__name__.lower())


def write_args(config: TrainConfig) -> str:
    """Every value, defaults too, so that the file means the same when a default changes; None only where it is not the default."""
    cls = type(config.algorithm)
    name = algorithm_name(cls)
    groups = [("algorithm", [format_flag("algorithm", name), *_lines(config.algorithm, section_flags("algorithm", cls))])]
    written: set[type] = set()
    for section, section_cls in SECTIONS.items():
        if section_cls not in OF_ROLES:
            groups.append((_title(section_cls), _lines(getattr(config, section), section_flags(section, section_cls))))
        elif section_cls not in written:
            groups.append((_title(section_cls), _role_lines(config, section_cls)))
        written.add(section_cls)
    groups.append(
        ("other vLLM engine arguments", [format_flag(flag_name(k, "rollout-"), v) for k, v in config.rollout.engine_args.items()])
    )
    groups.append(("other Megatron TransformerConfig fields", [format_flag(flag_name(k), v) for k, v in config.transformer.items()]))
    return "\n".join("\n".join([f"# {title}", *lines, ""]) for title, lines in groups if lines)


def _title(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).splitlines()[0].partition(" (")[0]


def _lines(node: object, flags: list[Flag]) -> list[str]:
    values = [(flag, getattr(node, flag.targets[0][1])) for flag in flags]
    return [format_flag(flag.name, value) for flag, value in values if value is not None or flag.default is not None]


def _role_lines(config: TrainConfig, cls: type) -> list[str]:
    """A flag for every role where all agree, one per role where they do not."""
    nodes = {role: node for role, section in OF_ROLES[cls].items() if (node := getattr(config, section)) is not None}
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
