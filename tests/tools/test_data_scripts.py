"""tools/data/*.py on files with the published columns; what they write is read as training reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.data.columns import text_of
from megarl.data.prompts import PromptDataset
from megarl.rewards.routing import auto_reward
from tests.tools.published import DAPO_PROMPT, write_published

SCRIPTS = Path(__file__).resolve().parents[2] / "tools" / "data"


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write_published(folder)
    return folder


def prepare(script: str, *arguments: object) -> tuple[int, str]:
    """Exit code and output of tools/data/SCRIPT.py."""
    done = subprocess.run(
        [sys.executable, "-P", SCRIPTS / f"{script}.py", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def prepared(script: str, out: Path, *files: Path, needs=None) -> tuple[str, PromptDataset]:
    code, told = prepare(script, *files, "--out", out)
    assert code == 0, told
    return told, PromptDataset.load(out, needs=needs)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_gsm8k_is_what_training_makes_of_the_published_file(suffix, published, tmp_path):
    file = published / "gsm8k" / "train-00000-of-00001.parquet"
    told, rows = prepared("gsm8k", tmp_path / f"out{suffix}", file, needs="response")
    assert told == f"{tmp_path / f'out{suffix}'}: 2 rows\n"
    direct = PromptDataset.load(file)
    for row, other in zip(rows, direct, strict=True):
        assert (row.data_source, row.messages, row.ground_truth, row.response) == (
            other.data_source,
            other.messages,
            other.ground_truth,
            other.response,
        )
    assert rows[0].ground_truth == "1203" and rows[1].extra_info["index"] == 1
    assert auto_reward(rows[0].data_source, text_of(rows[0].response), "1203", {}) == 1.0


def test_math_takes_the_last_boxed_answer(published, tmp_path):
    file = published / "math" / "train-00000-of-00001.parquet"
    told, rows = prepared("hendrycks_math", tmp_path / "out.parquet", file, needs="ground_truth")
    assert "left out: 1 rows: the solution has no answer in \\boxed{}" in told
    assert [row.ground_truth for row in rows] == ["\\frac{1}{2}", "5", "\\{1\\}"]
    assert rows[0].messages[0]["content"].endswith("$. Let's think step by step and output the final answer "
                                                   "within \\boxed{}.")  # fmt: skip
    assert [row.extra_info["subject"] for row in rows] == ["Prealgebra", "Algebra", "Algebra"]
    assert all(
        auto_reward(row.data_source, text_of(row.response), row.ground_truth, {}) == 1.0 for row in rows[:2]
    )


def test_the_answer_column_of_math_500_comes_first(published, tmp_path):
    _, rows = prepared("hendrycks_math", tmp_path / "out.jsonl", published / "math-500" / "test.jsonl")
    assert rows[0].ground_truth == "\\left( 3, \\frac{\\pi}{2} \\right)"
    assert rows[0].extra_info == {"index": 0, "level": "2", "subject": "Precalculus"}
    assert auto_reward(rows[0].data_source, "$\\boxed{(3,\\frac{\\pi}{2})}$", rows[0].ground_truth, {}) == 1.0


def test_dapo_keeps_each_problem_once(published, tmp_path):
    file = published / "dapo-math-17k.parquet"
    told, rows = prepared("dapo_math", tmp_path / "out.parquet", file, needs="ground_truth")
    assert "left out: 4 rows: the same problem again" in told
    assert [(row.messages[0]["content"], row.ground_truth) for row in rows] == [
        (DAPO_PROMPT.format("What is 1+1?"), "2"),
        (DAPO_PROMPT.format("What is 5*5?"), "25"),
    ]
    assert auto_reward(rows[1].data_source, "5*5 is 25\nAnswer: 25", "25", {}) == 1.0
    assert auto_reward(rows[1].data_source, "5*5 is 25\nAnswer: 24", "25", {}) == 0.0
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"prompt": "What is 1+1?", "reward_model": {"ground_truth": "2"}}\n')
    _, again = prepared("dapo_math", tmp_path / "again.jsonl", bare)
    assert again[0].messages == rows[0].messages


def test_hh_rlhf_becomes_conversations(published, tmp_path):
    file = published / "hh-rlhf" / "helpful-base" / "train.jsonl"
    told, rows = prepared("hh_rlhf", tmp_path / "out.parquet", file, file, needs="response")
    assert "left out: 2 rows: the chosen transcript does not end with an answer" in told and len(rows) == 4
    assert [(turn["role"], turn["content"]) for turn in rows[0].messages] == [
        ("user", "How do I bake?"),
        ("assistant", "What?"),
        ("user", "Bread: how?"),
    ]
    assert text_of(rows[0].response) == "Flour." and rows[0].extra_info["rejected"] == "No."
    assert [turn["content"] for turn in rows[1].messages] == ["Hi\n\nAre you there?"]
    assert rows[1].extra_info["rejected"] is None, "the rejected answer belongs to another prompt"
    assert [row.extra_info["index"] for row in rows] == [0, 1, 2, 3]


def test_both_forms_of_ultrafeedback_give_the_same_row(published, tmp_path):
    binarized = published / "ultrafeedback_binarized" / "train_prefs-00000-of-00001.parquet"
    told, rows = prepared("ultrafeedback", tmp_path / "a.parquet", binarized, needs="response")
    assert "left out: 1 rows: the best answer is empty" in told
    original = published / "ultrafeedback" / "evol_instruct.jsonl"
    _, others = prepared("ultrafeedback", tmp_path / "b.jsonl", original, needs="response")
    assert text_of(rows[0].response) == "Oak." and rows[0].extra_info == {
        "index": 0,
        "rejected": "Cat.",
        "score_chosen": 8.5,
        "score_rejected": 2.0,
    }
    assert list(rows) == list(others)


@pytest.mark.parametrize("script", ["gsm8k", "hendrycks_math", "dapo_math", "hh_rlhf", "ultrafeedback"])
def test_rows_of_another_data_set_are_refused(script, tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text('{"text": "no columns of ours"}\n')
    code, told = prepare(script, file, "--out", tmp_path / "out.parquet")
    assert code == 2 and told.startswith(f"{file}:1: wanted ") and told.endswith("There: text.\n")
    assert not (tmp_path / "out.parquet").exists()


def test_files_that_cannot_be_read_or_written_are_refused(published, tmp_path):
    file = published / "gsm8k" / "train-00000-of-00001.parquet"
    out = tmp_path / "out.jsonl"
    assert prepare("gsm8k", tmp_path / "no.jsonl", "--out", out)[0] == 2
    assert (
        "--out (x.csv): must end in .jsonl or .parquet. Try x.parquet."
        in prepare("gsm8k", file, "--out", "x.csv")[1]
    )
    out.write_text("mine")
    assert f"--out ({out}): exists." in prepare("gsm8k", file, "--out", out)[1] and out.read_text() == "mine"
