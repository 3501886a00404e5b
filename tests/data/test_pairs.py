"""Rows with a chosen and a rejected answer: every form that is read, and every mistake named with file, row and
column.

pytest tests/data/test_pairs.py"""

import json

import pyarrow
import pyarrow.parquet
import pytest

from megarl.data.columns import Prompt
from megarl.data.prompts import PromptDataset

USER = [{"role": "user", "content": "23-5-1 ?"}]
GOOD = {"prompt": USER, "chosen": "#### 17", "rejected": "#### 18"}


def said(text):
    return [{"role": "assistant", "content": text}]


def load(folder, *rows, needs="pair"):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset.load(path, needs=needs)


WANTED = Prompt(0, "", tuple(USER), chosen=said("#### 17")[0], rejected=said("#### 18")[0])
FORMS = {
    "strings": GOOD,
    "messages": GOOD | {"chosen": said("#### 17"), "rejected": said("#### 18")},
    "one of each": GOOD | {"rejected": said("#### 18")},
    "whole conversations": {"chosen": [*USER, *said("#### 17")], "rejected": [*USER, *said("#### 18")]},
    "the prompt twice": GOOD | {"chosen": [*USER, *said("#### 17")], "rejected": [*USER, *said("#### 18")]},
    "the prompt as text too": {
        "prompt": USER[0]["content"],
        "chosen": [*USER, *said("#### 17")],
        "rejected": [*USER, *said("#### 18")],
    },
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_every_form_is_the_same_pair_in_jsonl_and_parquet(tmp_path, row):
    parquet = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), parquet)
    assert list(load(tmp_path, row)) == [WANTED] == list(PromptDataset.load(parquet, needs="pair"))
    assert list(load(tmp_path, row, needs=None)) == [WANTED], "`megarl data` without a job shows pairs too"


def test_scores(tmp_path):
    scores = {"score_chosen": 7, "score_rejected": -1.5}
    (row,) = load(tmp_path, GOOD | scores, needs="scored_pair")
    assert (row.score_chosen, row.score_rejected) == (7.0, -1.5)


def test_a_job_without_pairs_does_not_mind_other_columns_of_these_names(tmp_path):
    odd = {"chosen": 3, "rejected": ["x"], "score_chosen": "high"}
    for needs in (None, "ground_truth"):
        (row,) = load(tmp_path, odd | {"prompt": USER, "reward_model": {"ground_truth": "17"}}, needs=needs)
        assert row.chosen is None and row.ground_truth == "17"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"chosen": None},
            r"no column 'chosen' \(there: prompt, rejected\), wanted a string that is not empty",
        ),
        ({"rejected": None}, r"no column 'rejected' \(there: prompt, chosen\)"),
        (
            {"rejected": ""},
            r"column 'rejected' is '' \(str\), wanted a string that is not empty, or messages",
        ),
        ({"chosen": 7}, r"column 'chosen' is 7 \(int\)"),
        ({"chosen": []}, r"column 'chosen' is \[\] \(list\)"),
        ({"chosen": ["x"]}, r"column 'chosen.0' is 'x' \(str\), wanted \{\"role\": str"),
        ({"chosen": USER}, r"column 'chosen.0' is .* wanted the assistant's turn, with a text, at the end"),
        ({"rejected": said("")}, r"column 'rejected.0' is .* wanted the assistant's turn"),
        ({"chosen": [*USER, *said("x")]}, r"column 'rejected' continues another prompt than column 'chosen'"),
        (
            {"chosen": [*USER, *USER, *said("x")], "rejected": [*USER, *USER, *said("y")]},
            r"column 'chosen' begins with other messages than column 'prompt'",
        ),
        ({"prompt": None}, r"no column 'prompt' \(there: chosen, rejected\), wanted"),
        ({"prompt": None, "chosen": said("x"), "rejected": said("y")}, r"no column 'prompt'"),
        ({"chosen": "caf\ud83d"}, r"column 'chosen' holds '\\ud83d', half of a character"),
        ({"score_chosen": 1.0}, r"column 'score_chosen' and 'score_rejected' must both be there, or neither"),
        (
            {"score_chosen": "a", "score_rejected": 1},
            r"column 'score_chosen' is 'a' \(str\), wanted a finite",
        ),
        ({"score_chosen": True, "score_rejected": 1}, r"column 'score_chosen' is True \(bool\)"),
        ({"score_chosen": float("nan"), "score_rejected": 1}, r"column 'score_chosen' is nan \(float\)"),
    ],
)
def test_bad_row_is_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, GOOD, GOOD | change)
    assert f"{tmp_path}/rows.jsonl:2: " in str(error.value)
    assert "1 of 2 rows cannot be used" in str(error.value)
    assert str(error.value).count("column '") <= 2, "one mistake must be reported once"


def test_scores_that_an_algorithm_reads_must_be_there(tmp_path):
    with pytest.raises(
        ValueError, match=r"no column 'score_chosen' \(there: prompt, chosen, rejected\), wanted num"
    ):
        load(tmp_path, GOOD, needs="scored_pair")


LABELLED = {"prompt": USER, "completion": "#### 17", "label": True}


def test_labelled_completions(tmp_path):
    said_before = {"completion": [*USER, *said("#### 18")], "label": False}
    rows = [*load(tmp_path, LABELLED, said_before, needs="labelled")]
    assert rows == [
        Prompt(0, "", tuple(USER), response=said("#### 17")[0], label=True),
        Prompt(1, "", tuple(USER), response=said("#### 18")[0], label=False),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": None}, r"no column 'label' \(there: prompt, completion\), wanted true for a desirable"),
        ({"label": 1}, r"column 'label' is 1 \(int\), wanted true or false"),
        ({"completion": None}, r"no column 'completion' \(there: prompt, label\)"),
        ({"prompt": None}, r"no column 'prompt' \(there: completion, label\)"),
        ({"completion": [*USER, *USER, *said("x")]}, r"column 'completion' begins with other messages"),
    ],
)
def test_bad_labelled_row_is_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, LABELLED, LABELLED | change, needs="labelled")
    assert f"{tmp_path}/rows.jsonl:2: " in str(error.value)
    assert str(error.value).count("column '") == 1 + ("than column" in str(error.value))
