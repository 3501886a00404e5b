"""Read and check --teachers: which models teach the rows of which data source, and with which weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

TEACHERS_RULE = "must be data_source=folder, each source once. Try openai/gsm8k=path/to/teacher."
WEIGHED_RULE = "must be data_source=folder, each of these texts once. Try openai/gsm8k=path/to/teacher."


def teachers_of(algorithm: object) -> dict[str, dict[str, float]]:
    """Return data source -> folder of each of its teachers -> weight, for an algorithm that may have several
    teachers. The weights of a source add up to 1."""
    given = getattr(algorithm, "teachers", ())
    weights = getattr(algorithm, "teacher_weights", None) or (1.0,) * len(given)
    found: dict[str, dict[str, float]] = {}
    for (source, folder), weight in zip(map(_parts, given), weights, strict=True):
        found.setdefault(source, {})[folder] = weight
    return found


def teacher_folders(algorithm: object) -> list[str]:
    """Return the folders of all teachers beside the reference, each once."""
    return [*dict.fromkeys(_parts(one)[1] for one in getattr(algorithm, "teachers", ()))]


def teachers_errors(algorithm: object, sources: Iterable[str]) -> list[str]:
    """Return an error for each data source of --teachers that no row has.

    Args:
        sources: the data sources of the training rows."""
    names = sorted({*sources})
    return [
        f"--teachers ({source}={' '.join(folders)}): no row of --train-data has the data_source {source!r}. "
        f"There are: {', '.join(map(repr, names))}."
        for source, folders in teachers_of(algorithm).items()
        if source not in names
    ]


def are_teachers(given: Sequence[str]) -> bool:
    """Return whether each text is data_source=folder, and no source comes twice."""
    return are_weighed_teachers(given) and len({_parts(one)[0] for one in given}) == len(given)


def are_weighed_teachers(given: Sequence[str]) -> bool:
    """Return whether each text is data_source=folder, and none comes twice."""
    return all(map(all, map(_parts, given))) and len({*given}) == len(given)


def weight_rules(teachers: Sequence[str], weights: Sequence[float] | None) -> Iterable[tuple[bool, str, str]]:
    """Yield (whether it holds, field, rule) of --teacher-weights."""
    if weights is None:
        named = (
            f"{TEACHERS_RULE.removesuffix('.')}, or add --teacher-weights for several teachers of a source."
        )
        yield are_teachers(teachers), "teachers", named
        return
    of_source: dict[str, list[float]] = {}
    for one, weight in zip(teachers, weights):
        of_source.setdefault(_parts(one)[0], []).append(weight)
    yield (
        len(weights) == len(teachers),
        "teacher_weights",
        f"must be one number for each of the {len(teachers)} --teachers.",
    )
    yield (
        all(weight > 0 for weight in weights),
        "teacher_weights",
        "must be above 0. Leave a teacher without weight out.",
    )
    for source, own in of_source.items():
        rule = f"must add up to 1 over the teachers of {source}. Try {' '.join(['%.4g' % (1 / len(own))] * len(own))}."
        yield math.isclose(sum(own), 1.0, abs_tol=1e-3), "teacher_weights", rule


def _parts(one: str) -> tuple[str, str]:
    source, _, folder = one.partition("=")
    return source, folder
