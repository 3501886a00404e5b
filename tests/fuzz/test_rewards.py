"""Whatever a model writes: the built-in rules say 0 or 1, and no answer costs the run an error or its time.
And whatever stands in the column of the right answers: a rule, or a ValueError that shows it.

pytest tests/fuzz/test_rewards.py"""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import strategies as st

from megarl.config.schema import DataConfig, RewardModelConfig
from megarl.rewards.base import RewardSample, judge
from megarl.rewards.code import CodeReward, _equal, program_of, read_tests
from megarl.rewards.gsm8k import gsm8k_reward
from megarl.rewards.judge_prompt import JudgePrompt
from megarl.rewards.math import math_reward
from megarl.rewards.pool import RewardPool
from megarl.rewards.routing import auto_reward, route
from megarl.rewards.sandbox import missing
from tests.fuzz.cases import fuzz, may_refuse

anything = st.one_of(st.text(max_size=40), st.text(st.characters(codec=None), max_size=6))
digits = st.one_of(
    st.integers().map(str),
    st.floats().map(repr),
    st.integers(1, 20_000).map("9".__mul__),
    st.sampled_from(["1.2.3", "1,,2", "...", "-", ",", "٣", "１", "1e400", "-.", "1." + "0" * 9000]),
)
marks = st.sampled_from(
    [
        "#### ",
        "####",
        "\n",
        " ",
        "The answer is ",
        "Score: ",
        "score",
        "\\boxed{",
        "}",
        "{",
        "$",
        "\\(",
        "\\)",
        "```python\n",
        "```",
        "\r\n",
        "</think>",
        "-",
        "\x00",
    ]
)
responses = st.lists(st.one_of(anything, digits, marks), max_size=8).map("".join)
repeated = st.builds(
    str.__mul__,
    st.sampled_from(
        [
            "#### ",
            "#### 1",
            "```\n",
            "```a",
            "````",
            " ",
            "\\boxed{",
            "{",
            "$",
            "\\frac{1}",
            "(",
            "score:",
            "1,",
            "-",
            "\\left(",
            "^{9",
            "\\sqrt[",
            "a+",
        ]
    ),
    st.integers(1, 3000),
)


@fuzz(responses | repeated, digits | anything)
def test_gsm8k(folder: Path, response: str, truth: str) -> None:
    assert judge(gsm8k_reward, RewardSample("gsm8k", response, "17")) in (0.0, 1.0)
    with may_refuse(ValueError, naming="ground_truth"):
        assert judge(gsm8k_reward, RewardSample("gsm8k", f"{response}#### {truth}", truth)) in (0.0, 1.0)


latex = st.recursive(
    st.one_of(
        digits.filter(lambda text: len(text) < 500),
        st.sampled_from(
            [
                "x",
                "\\pi",
                "\\infty",
                "i",
                "\\text{no}",
                "\\emptyset",
                "\\%",
                "1/0",
                "9^{9^{9^9}}",
                "10^{10^{10}}",
                "\\sqrt{-1}",
                "5!",
                "((((9!)!)!)!)!",
                "x^{1000}",
            ]
        ),
    ),
    lambda inner: st.one_of(
        st.builds("\\frac{{{}}}{{{}}}".format, inner, inner),
        st.builds("{}^{{{}}}".format, inner, inner),
        st.builds("\\sqrt[{}]{{{}}}".format, inner, inner),
        st.builds(
            "({}{}{})".format,
            inner,
            st.sampled_from(["+", "-", "*", "/", "=", "<", ",", "\\cup", "\\pm", " "]),
            inner,
        ),
        st.builds("\\left[{},{}\\right)".format, inner, inner),
        st.builds("\\begin{{pmatrix}}{}&{}\\\\{}\\end{{pmatrix}}".format, inner, inner, inner),
        st.builds("\\{{{}\\}}".format, inner),
        st.builds("\\log_{{{}}}{}".format, inner, inner),
        st.builds(
            "\\{}{{{}}}".format,
            st.sampled_from(["sin", "sum", "int", "binom", "mathrm", "boxed", "overline"]),
            inner,
        ),
    ),
    max_leaves=6,
)
answers = st.one_of(
    st.builds("{}\\boxed{{{}}}{}".format, anything, latex, anything),
    st.builds("${}$".format, latex),
    responses,
    st.builds("\\boxed{{{}}}".format, repeated.filter(lambda text: len(text) < 2000)),
)


@fuzz(answers, st.sampled_from(["17", "\\frac{1}{2}", "x^2-1", "[0,1)", "\\{1,2\\}"]), quick=10)
def test_mathematics(folder: Path, answer: str, truth: str) -> None:
    assert judge(math_reward, RewardSample("math", answer, truth)) in (0.0, 1.0)


@fuzz(latex | responses, quick=5, full=2000)
def test_right_answers_of_mathematics(folder: Path, truth: str) -> None:
    with may_refuse(ValueError, naming="ground_truth"):
        assert judge(math_reward, RewardSample("math", "\\boxed{17}", truth)) in (0.0, 1.0)


@fuzz(anything, responses)
def test_routes(folder: Path, source: str, response: str) -> None:
    with may_refuse(ValueError, naming="data_source"):
        if route(source) == "gsm8k":
            assert auto_reward(source, response, "17", {}) in (0.0, 1.0)


@fuzz(
    responses | repeated,
    st.sampled_from([RewardModelConfig().judge_score_pattern, r"(\d+)", r"Score: (\S+)", r"()", r"(x)?"]),
    st.booleans(),
    anything,
)
def test_scores_of_a_judge(folder: Path, answer: str, pattern: str, is_complete: bool, template: str) -> None:
    (folder / "template").write_text(template + "{response}{0}{{prompt}}", encoding="utf-8", errors="replace")
    prompt = JudgePrompt.load(str(folder / "template"), pattern, (-5, 10))
    score = prompt.parse(answer, is_complete)
    assert score is None or 0 <= score <= 1
    assert answer in prompt.fill(answer, answer, None)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | anything,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["inputs", "outputs", "fn_name", "asserts", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
truths = st.one_of(
    json_values.map(json.dumps),
    anything,
    st.sampled_from(
        [
            "[" * 100_000,
            '{"asserts": ' + "[" * 3000 + "]" * 3000 + "}",
            "9" * 5000,
            '{"inputs": ["\\ud800"], "outputs": ["\\ud800"]}',
            '{"fn_name": "f", "inputs": [[NaN]], "outputs": [NaN]}',
        ]
    ),
)


@fuzz(responses | repeated, truths, truths)
def test_programs_and_their_tests(folder: Path, response: str, truth: str, returned: str) -> None:
    """All but running them; the sandbox's own tests do that."""
    assert program_of(response) in response
    with may_refuse(ValueError, naming="ground_truth"):
        assert read_tests(truth)
    assert _equal(returned, [1]) in (False, True)


programs = st.one_of(
    responses.map("```python\n{}\n```".format),
    st.sampled_from(
        [
            "```python\ndef f(*a):\n import sys\n sys.setrecursionlimit(10**6)\n x = []\n for _ in "
            "range(3000): x = [x]\n return x\n```",
            "```python\ndef f(*a):\n import sys\n sys.set_int_max_str_digits(0)\n return 10**5000\n```",
            "```python\nprint('\\x00' * 9)\n```",
            "```python\n\x00\n```",
            "```python\n" + "(" * 3000 + "\n```",
            "```python\n" + "x = 1;" * 20_000 + "\n```",
            "```python\nprint(input(), end='\\udcff')\n```",
            "```python\ndef f(*a): return f\n```",
            "```python\ndef f(*a): raise SystemExit(0)\n```",
        ]
    ),
)


@fuzz(
    programs,
    st.sampled_from(
        [
            '{"inputs": ["a\\u0000\\ud800"], "outputs": ["a"]}',
            '{"fn_name": "f", "inputs": [[1]], "outputs": [[]]}',
            '{"asserts": ["assert f(1) is None"]}',
        ]
    ),
    quick=4,
    full=400,
)
def test_programs_in_the_sandbox(folder: Path, response: str, truth: str) -> None:
    """Each starts a process or two, so there are fewer cases."""
    reward = CodeReward(
        DataConfig(train_data=("x",), reward="code", code_timeout_s=5, allow_unsandboxed_code=bool(missing()))
    )
    assert judge(reward, RewardSample("code", response, truth)) in (0.0, 1.0)


@fuzz(st.lists(answers, min_size=8, max_size=8), quick=0, full=80)
def test_a_pool_answers_in_time(folder: Path, drawn: list[str]) -> None:
    """Eight at a time, through messages and pipes: what the C code under SymPy does not let go of is
    killed."""
    with RewardPool(DataConfig(train_data=("x",), reward="math", reward_timeout_s=20), num_workers=1) as pool:
        verdicts = pool.score([RewardSample("math", answer, "17") for answer in drawn])
    assert all(
        verdict.reward in (0.0, 1.0) or "took longer" in verdict.failure or "died of" in verdict.failure
        for verdict in verdicts
    )
