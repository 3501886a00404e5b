"""The mismatched answers of KTO belong to other prompts, however the rows are laid out.

pytest tests/workers/test_preference_rows.py"""

from __future__ import annotations

import json
import random

import pytest

from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.workers.preference import _labelled, rows_of_other_prompts


def searched(prompts, row):
    """The same by looking at one row after the other."""
    count = len(prompts)
    for step in range(count):
        other = (row + count // 2 + step) % count
        if prompts[other] != prompts[row]:
            return other
    return row


@pytest.mark.parametrize(
    "prompts",
    ["a", "aa", "aaa", "ab", "abab", "abcabc", "aabbcc", "aaab", "baaa", "aabaa", "abba", "abcdabcdab"],
)
def test_the_other_row_is_the_first_with_another_prompt(prompts):
    rows = [[ord(one), 1] for one in prompts]
    found = rows_of_other_prompts(rows)
    assert found == [searched(rows, row) for row in range(len(rows))]
    is_single = len({*prompts}) == 1
    assert all((prompts[other] == one) == is_single for one, other in zip(prompts, found))


def test_random_layouts():
    rng = random.Random(0)
    for _ in range(200):
        rows = [[rng.randrange(3)] for _ in range(rng.randint(1, 12))]
        assert rows_of_other_prompts(rows) == [searched(rows, row) for row in range(len(rows))]


def test_rows_in_two_halves_get_no_answer_to_their_own_prompt(sums_data, tmp_path):
    """A data set of pairs that is written as all good answers, then all bad ones."""
    rows = [
        {"prompt": f"{n}+{n}=", "completion": f"{n if label else n + 6}", "label": label}
        for label in (True, False)
        for n in range(3)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = PromptDataset.load(tmp_path / "rows.jsonl", needs="labelled")
    tokenizer = load_tokenizer(sums_data / "model")
    found = _labelled(dataset, PromptEncoder(tokenizer, dataset))
    texts = [[tokenizer.decode(one.response[:-1]).strip() for one in pair] for pair in found]
    assert texts == [["0", "7"], ["1", "8"], ["2", "0"], ["6", "1"], ["7", "2"], ["8", "6"]]
    assert [[one.reward for one in pair] for pair in found] == [[1.0, 1.0]] * 3 + [[0.0, 0.0]] * 3
