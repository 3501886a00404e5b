"""Read and check --teachers: which model teaches the rows of which data source."""

from __future__ import annotations

from collections.abc import Sequence

TEACHERS_RULE = "must be data_source=folder, each source once. Try openai/gsm8k=path/to/teacher."


def teacher_folders(algorithm: object) -> dict[str, str]:
    """Return data source -> folder of its teacher, for an algorithm that may have several."""
    return dict(one.split("=", 1) for one in getattr(algorithm, "teachers", ()))


def are_teachers(given: Sequence[str]) -> bool:
    """Return whether each text is data_source=folder, and no source comes twice."""
    parts = [one.partition("=") for one in given]
    return all(source and folder for source, _, folder in parts) and len({p[0] for p in parts}) == len(parts)
