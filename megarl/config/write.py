"""TrainConfig -> args file: the resolved configuration of a run, which parses back to an equal TrainConfig."""

from __future__ import annotations

from megarl.config.flags import ROLES, SECTIONS, Flag, flag_name, section_flags
from megarl.config.schema import ParallelConfig, TrainConfig
from megarl.config.values import format_flag


def algorithm_name(cls: type) -> str:
    """The value of --algorithm that chooses a class: its attribute `name`, or the class's name in lower case."""
    return getattr(cls, "name", cls.__name__.lower())


def write_args(config: TrainConfig) -> str:
    """Every value, defaults too, so that the file means the same when a default changes; None only where it is not the default."""
    cls = type(config.algorithm)
    name = algorithm_name(cls)
    groups = [("algorithm", [format_flag("algorithm", name), *_lines(config.algorithm, section_flags("algorithm", cls))])]
    for section, section_cls in SECTIONS.items():
        if section_cls is not ParallelConfig:
            groups.append((_title(section_cls), _lines(getattr(config, section), section_flags(section, section_cls))))
        elif section == ROLES[0]:
            groups.append((_title(section_cls), _role_lines(config)))
    groups.append(
        ("other vLLM engine arguments", [format_flag(flag_name(k, "rollout-"), v) for k, v in config.rollout.engine_args.items()])
    )
    groups.append(("other Megatron TransformerConfig fields", [format_flag(flag_name(k), v) for k, v in config.transformer.items()]))
    return "\n".join("\n".join([f"# {title}", *lines, ""]) for title, lines in groups if lines)


def _title(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).splitlines()[0]


def _lines(node: object, flags: list[Flag]) -> list[str]:
    values = [(flag, getattr(node, flag.targets[0][1])) for flag in flags]
    return [format_flag(flag.name, value) for flag, value in values if value is not None or flag.default is not None]


def _role_lines(config: TrainConfig) -> list[str]:
    """A flag for every role where all agree, one per role where they do not."""
    lines = []
    for flag in section_flags("", ParallelConfig):
        field = flag.targets[0][1]
        values = [getattr(getattr(config, role), field) for role in ROLES]
        if all(value == values[0] for value in values):
            lines += _lines(getattr(config, ROLES[0]), [flag])
        else:
            lines += [format_flag(flag_name(field, f"{role}-"), value) for role, value in zip(ROLES, values)]
    return lines
