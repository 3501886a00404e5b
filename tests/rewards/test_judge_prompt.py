"""What a judge is asked, what its answer is worth, and how scores add up.

pytest tests/rewards/test_judge_prompt.py"""

from __future__ import annotations

import pytest

from megarl.config.schema import RewardModelConfig
from megarl.rewards.combine import combine_rewards
from megarl.rewards.judge_prompt import DEFAULT_TEMPLATE, JudgePrompt, conversation_text

DEFAULT = RewardModelConfig()
PROMPT = JudgePrompt.load(None, DEFAULT.judge_score_pattern, DEFAULT.judge_score_range)


@pytest.mark.parametrize(
    "answer, score",
    [
        ("Fine.\nScore: 7", 0.7),
        ("score = 10", 1.0),
        ("**Score:** 0", 0.0),
        ("**Score: 3**", 0.3),
        ("SCORE 2.5 of 10", 0.25),
        ("Score: 8/10", 0.8),
        ("I first thought Score: 2, but it is right. Score: 9.", 0.9),  # the last one counts
        ("Score: 11", None),
        ("Score: -1", None),  # outside: failed, not clipped
        ("Score: 9. In all, Score: 12", None),  # what it ended with is no score
        ("7", None),
        ("", None),
        ("Scores 7", None),
        ("Score: seven", None),
    ],
)
def test_answers_of_the_default_form(answer, score):
    assert PROMPT.parse(answer, True) == score


def test_a_number_that_the_cut_may_have_shortened_is_none():
    assert PROMPT.parse("Score: 1", False) is None
    assert PROMPT.parse("Score: 1.", False) == 0.1
    assert PROMPT.parse("Score: 1", True) == 0.1


@pytest.mark.parametrize(
    "pattern, bounds, answer, score",
    [
        (r"\[\[(\d+)\]\]", (1, 5), "so [[4]]", 0.75),
        (r"\[\[(\d+)\]\]", (1, 5), "so [[1]]", 0.0),
        (r"(?m)^(-?[\d.]+)$", (-1, 1), "-0.5\nend", 0.25),
        (r"(yes|\d)", (0, 1), "yes", None),
        (r"x|(\d)", (0, 9), "x", None),  # matches that hold no number
    ],
)
def test_patterns_and_ranges(pattern, bounds, answer, score):
    assert JudgePrompt.load(None, pattern, bounds).parse(answer, True) == score


def test_the_template_is_filled_in_one_pass(tmp_path):
    """What a response says is never taken for a placeholder, nor other braces for a mistake."""
    file = tmp_path / "judge.txt"
    file.write_text('{"q": "{prompt}", "a": "{response}", "truth": "{ground_truth}"} {other}')
    prompt = JudgePrompt.load(str(file), r"(\d)", (0, 9))
    assert (
        prompt.fill("1+1 ?", "{ground_truth} {prompt}", "2")
        == '{"q": "1+1 ?", "a": "{ground_truth} {prompt}", "truth": "2"} {other}'
    )
    assert prompt.fill("p", "r", None).endswith('"truth": "(none given)"} {other}')


def test_the_default_template_asks_what_the_default_pattern_finds():
    assert all(
        name in DEFAULT_TEMPLATE
        for name in ("{prompt}", "{response}", "{ground_truth}", "Score: N", "from 0", "to 10")
    )
    assert DEFAULT.judge_score_range == (0.0, 10.0) and PROMPT.parse(PROMPT.fill("p", "r", "g"), True) is None


def test_conversations_as_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation_text("as it is") == "as it is"
    assert conversation_text([{"role": "user", "content": parts}]) == "ab"
    assert (
        conversation_text([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
        == "system: be brief\n\nuser: hi"
    )


def test_rewards_are_weighted_sums_and_one_failure_fails_the_sample():
    parts = [[1.0, 0.5, None, 0.0], [2.0, -4.0, 1.0, None], [1.0, 1.0, 1.0, 1.0]]
    assert combine_rewards(parts, [1.0, 0.25, -1.0]) == [0.5, -1.5, None, None]
    assert combine_rewards([[None, 2.0]], [0.0]) == [None, 0.0]  # a weight of 0 hides no failure
    for bad in ([], [1.0, 2.0]):
        with pytest.raises(ValueError, match="one weight per list"):
            combine_rewards(parts[: 2 * len(bad) - 1 if bad else 0], bad)
    with pytest.raises(ValueError):
        combine_rewards([[1.0], [1.0, 2.0]], [1.0, 1.0])
