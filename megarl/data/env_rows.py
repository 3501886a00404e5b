"""Find the rows of each environment of --env: a row has the one whose name is its `data_source`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.config.environments import EnvSpec, names, of_source
from megarl.data.prompts import PromptDataset

_MOST_SHOWN = 5


def rows_errors(specs: Sequence[EnvSpec], dataset: PromptDataset, flag: str) -> Iterator[str]:
    """Yield an error if some rows have no environment."""
    sources = Counter(prompt.data_source for prompt in dataset if not of_source(specs, prompt.data_source))
    if not specs or not sources:
        return
    first = next(number for number, prompt in enumerate(dataset) if prompt.data_source in sources)
    (place,) = dataset.places([first])
    shown = ", ".join(f"{source!r} ({count})" for source, count in sources.most_common(_MOST_SHOWN))
    yield (
        f"{flag}: the data_source of {sources.total()} of {dataset.counted_rows} is no environment's name: {shown}. "
        f"The first is {place}. It must be one of {', '.join(names(specs))}. Try --env {' '.join(map(str, specs))} "
        f"{dataset[first].data_source or 'NAME'}=path/to/file.py:Class, or leave these rows out."
    )


def first_rows(
    specs: Sequence[EnvSpec], datasets: Mapping[str, PromptDataset]
) -> dict[str, list[dict[str, Any]]]:
    """Return flag -> the first row of each environment that has rows in the flag's files.

    Args:
        datasets: flag -> its rows.
    Raises: ValueError for rows without an environment, and in training for an environment without rows."""
    found: dict[str, list[dict[str, Any]]] = {}
    errors = [error for flag, dataset in datasets.items() for error in rows_errors(specs, dataset, flag)]
    seen: set[EnvSpec | None] = set()
    for flag, dataset in datasets.items():
        firsts: dict[EnvSpec | None, int] = {}
        for number, prompt in enumerate(dataset):
            firsts.setdefault(of_source(specs, prompt.data_source), number)
        found[flag] = [dataset[number].columns for number in firsts.values()]
        seen |= firsts.keys()
    if "--train-data" in datasets and not errors:  # an evaluation may be of some of a run's environments
        errors += [
            f"--env ({spec}): no row of {' or '.join(datasets)} has the data_source {spec.name!r}. Leave it out, "
            "or add such rows."
            for spec in specs
            if spec not in seen
        ]
    if errors:
        raise ValueError("\n".join(errors))
    return found
