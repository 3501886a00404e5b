"""Write everything that the quickstart trains on, as the files that a user would bring."""

from __future__ import annotations

import json
import os
import random
from typing import Any

from sums.model import write_model_folder
from sums.problems import Split, snap_answer, sums, sums_row, worked_answer

NUM_TRAIN_ROWS = 4096
NUM_TEST_ROWS = 200
# Stage A reads 360 steps x 64 rows, each row once: from rows read several times the model learns the steps as
# fast, but it remembers them, and is less sure on held-out ones (seed 0, both stopped early: 0.88 from 8192
# rows, 0.91 from 25,600, after GRPO).
NUM_WORKED_ROWS = 23_040
# Stage B is 40 steps x 64 rows, each row once.
NUM_MIXED_ROWS = 2560
NUM_PAIRS = 2560
WORKED_SHARE = 0.3
_FIRST_TEST_SEED = 10_000


def make_sums(out: str | os.PathLike[str], seed: int = 0) -> dict[str, str]:
    """Write the data files and the model folder into `out`. The same seed gives the same bytes.

    Returns: path by name: train, test, test_parquet, pairs, pairs_test, sft_worked, sft_mixed, model. The
        test rows and the tokenizer do not depend on the seed; everything else does.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed ({seed}) must be in 0 .. {2**32 - 1}.")
    out = os.fspath(out)
    os.makedirs(out, exist_ok=True)
    names = {"train": "train.jsonl", "test": "test.jsonl", "test_parquet": "test.parquet"}
    names |= {"pairs": "pairs.jsonl", "pairs_test": "pairs_test.jsonl"}
    names |= {"sft_worked": "sft_worked.jsonl", "sft_mixed": "sft_mixed.jsonl", "model": "model"}
    paths = {name: os.path.join(out, file) for name, file in names.items()}
    _write_jsonl(paths["train"], _train_rows(seed))
    _write_jsonl(paths["test"], test_rows())
    _write_parquet(paths["test_parquet"], test_rows())
    _write_jsonl(paths["pairs"], _pair_rows(f"{seed}/pairs", NUM_PAIRS, "train"))
    _write_jsonl(paths["pairs_test"], _pair_rows("pairs_test", NUM_TEST_ROWS, "test"))
    _write_jsonl(paths["sft_worked"], _sft_rows(f"{seed}/worked", NUM_WORKED_ROWS, worked_share=1.0))
    _write_jsonl(paths["sft_mixed"], _sft_rows(f"{seed}/mixed", NUM_MIXED_ROWS, worked_share=WORKED_SHARE))
    write_model_folder(paths["model"], seed)
    return paths


def write_labelled(pairs: str | os.PathLike[str], out: str | os.PathLike[str]) -> str:
    """Write both answers of every pair of a file as rows of their own, with a label, and return the path."""
    rows = []
    with open(pairs, encoding="utf-8") as file:
        for row in map(json.loads, file):
            for column, label in (("chosen", True), ("rejected", False)):
                rows.append({"prompt": row["prompt"], "completion": row[column], "label": label})
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    _write_jsonl(os.fspath(out), rows)
    return os.fspath(out)


def test_rows() -> list[dict[str, Any]]:
    """Return the held-out rows. Each has its own generator, so a problem may occur twice."""
    split: Split = "test"
    return [
        sums_row(sums(random.Random(_FIRST_TEST_SEED + i), split), split, i) for i in range(NUM_TEST_ROWS)
    ]


def _train_rows(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"{seed}/train")
    return [sums_row(sums(rng, "train"), "train", i) for i in range(NUM_TRAIN_ROWS)]


def _pair_rows(stream: str, num_rows: int, split: Split) -> list[dict[str, Any]]:
    """Return rows whose chosen answer is worked out and right, and whose rejected one is a wrong guess."""
    rng, rows = random.Random(stream), []
    for index in range(num_rows):
        problem = sums(rng, split)
        right = f"#### {problem.answer}"
        wrong = right
        while wrong == right:
            wrong = snap_answer(problem, rng)
        pair = {
            "chosen": worked_answer(problem),
            "rejected": wrong,
            "score_chosen": 1.0,
            "score_rejected": 0.0,
        }
        rows.append(sums_row(problem, split, index) | pair)
    return rows


def _sft_rows(stream: str, num_rows: int, worked_share: float) -> list[dict[str, Any]]:
    rng = random.Random(stream)
    rows = []
    for index in range(num_rows):
        problem = sums(rng, "train")
        answer = worked_answer(problem) if rng.random() < worked_share else snap_answer(problem, rng)
        rows.append(sums_row(problem, "train", index, answer))
    return rows


def _write_jsonl(path: str, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _write_parquet(path: str, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
