"""Rows and the environments of --env: each row needs one, each environment needs rows.

pytest tests/data/test_env_rows.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config.environments import EnvSpec
from megarl.data.env_rows import first_rows, rows_errors
from megarl.data.prompts import PromptDataset

ONE = (EnvSpec(None, "env.py:Env"),)
TWO = (EnvSpec("calc", "env.py:Calc"), EnvSpec("search", "env.py:Search"))


def dataset(folder: Path, *sources: str | None) -> PromptDataset:
    file = folder / f"{len(sources)}.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1", "data_source": source}) + "\n" for source in sources))
    return PromptDataset.load(file)


def test_the_first_row_of_each_environment_is_tried(tmp_path):
    train, held_out = dataset(tmp_path, "calc", "calc", "search"), dataset(tmp_path, "search", "search")
    found = first_rows(TWO, {"--train-data": train, "--eval-data": held_out})
    assert {flag: [row["index"] for row in rows] for flag, rows in found.items()} == {
        "--train-data": [0, 2],
        "--eval-data": [0],
    }
    found = first_rows(ONE, {"--train-data": train})
    assert [row["index"] for row in found["--train-data"]] == [0]


def test_a_row_of_an_unknown_environment_is_an_error(tmp_path):
    train = dataset(tmp_path, "calc", "serch", "search", "serch", None)
    wanted = (
        "--train-data: the data_source of 3 of 5 rows is no environment's name: 'serch' (2), '' (1). The first is "
        f"{tmp_path / '5.jsonl'}:2. It must be one of calc, search. Try --env calc=env.py:Calc search=env.py:Search "
        "serch=path/to/file.py:Class, or leave these rows out."
    )
    assert [*rows_errors(TWO, train, "--train-data")] == [wanted]
    with pytest.raises(ValueError) as raised:
        first_rows(TWO, {"--train-data": train})
    assert str(raised.value) == wanted
    assert not [*rows_errors(ONE, train, "--train-data")] and not [*rows_errors((), train, "--train-data")]


def test_an_environment_without_rows_is_an_error_in_training_only(tmp_path):
    rows = dataset(tmp_path, "calc")
    with pytest.raises(
        ValueError, match="--env .search=env.py:Search.: no row of --train-data has the data_source"
    ):
        first_rows(TWO, {"--train-data": rows})
    assert len(first_rows(TWO, {"--eval-data": rows})["--eval-data"]) == 1
