"""Rewards: the rules on ordinary and nasty answers, the user's own function, and what happens when one
misbehaves."""

import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.config.schema import DataConfig
from megarl.rewards import RewardSample, base, load_reward
from megarl.rewards.pool import RewardPool, probe_reward
from megarl.rewards.routing import auto_reward, route


def judge(fn, solution, truth, source="x"):
    return base.judge(fn, RewardSample(source, solution, truth))


def settings(reward=None, reward_function=None) -> DataConfig:
    return DataConfig(train_data=("x",), reward=reward, reward_function=reward_function)


@pytest.mark.parametrize(
    ("solution", "truth", "reward"),
    [
        ("#### 17", "17", 1),
        ("23-5=18\n18-1=17\n#### 17", "17", 1),
        ("#### 17.", "17", 1),
        ("#### 17...", "17", 1),
        ("#### 17.0", "17", 1),
        ("#### 17.50", "17.5", 1),
        ("#### 1,234.", "1234", 1),
        ("#### 1234", "1,234", 1),
        ("#### 1,234,567.89", "1234567.89", 1),
        ("#### -5", "-5", 1),
        ("#### -5", "5", 0),
        ("#### 5", "-5", 0),
        ("#### 16 no, #### 17", "17", 1),
        ("#### 17 no, #### 16", "17", 0),
        ("#### 17 #### done", "17", 1),
        ("", "17", 0),
        ("17", "17", 0),
        ("####17", "17", 0),
        ("### 17", "17", 0),
        ("##### 17", "17", 1),
        ("#### seventeen", "17", 0),
        ("#### $17", "17", 0),
        ("#### \u2212 17", "17", 0),
        ("#### \u22125", "-5", 0),
        ("#### \uff11\uff17", "17", 0),
        ("#### \u0661\u0667", "17", 0),
        ("\U0001f600 #### 17\u2028", "17", 1),
        ("#### 170", "17", 0),
        ("#### 1.7", "17", 0),
        ("#### 1.7.0", "17", 0),
        ("#### ...", "17", 0),
        ("#### ,", "17", 0),
        ("#### -", "17", 0),
        ("#### 017", "17", 1),
        ("#### 17e0", "17", 1),
        ("#### 0.1", "0.10000000000000000001", 0),
        ("#### " + "9" * 100_000, "17", 0),
    ],
)
def test_gsm8k(solution, truth, reward):
    assert judge(load_reward(settings("gsm8k")), solution, truth) == reward


@pytest.mark.parametrize("truth", [None, "", "seventeen", "so it is 16+1\n#### 17", "1 7", ".", "-"])
def test_gsm8k_refuses_a_ground_truth_no_answer_can_match(truth):
    with pytest.raises(ValueError, match="the gsm8k reward wants the number alone"):
        judge(load_reward(settings("gsm8k")), "#### 17", truth)


MATH_CASES = [
    (r"so \boxed{0.5}", r"\frac{1}{2}", 1),
    (r"so \boxed{\frac12}", "0.5", 1),
    (r"\boxed{2}", r"\frac{1}{2}", 0),
    ("the answer is 17.", "17", 1),
    ("the answer is $17$.", r"\boxed{17}", 1),
    ("the answer is 18.", "$17$", 0),
    (r"$$\boxed{(x-1)(x+1)}$$", "x^2-1", 1),
    (r"\boxed{x^2+1}", "x^2-1", 0),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1),
    (r"\boxed{[0,1)}", "[0,1)", 1),
    (r"\boxed{[0,1]}", "[0,1)", 0),
    (r"\boxed{1{,}234}", "1234", 1),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
    (r"\boxed{\text{Monday}}", r"\text{Monday}", 1),
    (r"\boxed{\text{Sunday}}", r"\text{Monday}", 0),
    ("\\boxed{\u22125}", "-5", 1),
    (r"\boxed{17} and then a lot of talk about 18", "17", 1),
    ("", "17", 0),
    (r"\boxed{}", "17", 0),
    (r"\boxed{" * 50, "17", 0),
    ("\U0001f600" * 50, "17", 0),
]


@pytest.mark.parametrize(("solution", "truth", "reward"), MATH_CASES)
def test_math(solution, truth, reward):
    assert judge(load_reward(settings("math")), solution, truth) == reward


def test_math_judges_alike_outside_the_main_thread():
    # There the library's own default, SIGALRM timeouts, raises.
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(judge(load_reward(settings("math")), s, t) for s, t, _ in MATH_CASES),
        daemon=True,
    )
    thread.start()
    thread.join(60)
    assert results == [reward for _, _, reward in MATH_CASES]


def test_math_ends_on_an_endless_expression(monkeypatch):
    monkeypatch.setattr("megarl.rewards.math.TIMEOUT_S", 1)
    start = time.monotonic()
    assert judge(load_reward(settings("math")), r"\boxed{9^{9^{9^{9}}}}", "17") == 0
    # One timeout for parsing, one for each of the two comparisons the library may try; without any it takes
    # minutes at least.
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("truth", [None, "", " "])
def test_math_refuses_an_empty_ground_truth(truth):
    with pytest.raises(ValueError, match="the math reward wants a mathematical expression"):
        judge(load_reward(settings("math")), "17", truth)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        *((s, "gsm8k") for s in ("openai/gsm8k", "gsm8k", "megarl/sums", "megarl/calc_tool")),
        *(
            (s, "math")
            for s in (
                "lighteval/MATH",
                "DigitalLearningGmbH/MATH-lighteval",
                "HuggingFaceH4/MATH-500",
                "math_dapo",
                "aime_2024",
            )
        ),
    ],
)
def test_auto_routes_by_data_source(source, name):
    assert route(source) == name
    solution = {"gsm8k": "#### 17", "math": r"\boxed{17}"}[name]
    wrong_format = {"gsm8k": r"\boxed{17}", "math": "#### nothing"}[name]
    assert [judge(load_reward(settings()), text, "17", source) for text in (solution, wrong_format)] == [1, 0]


@pytest.mark.parametrize("source", ["", "my/data", "codecontests"])
def test_unknown_data_source_names_the_known_ones_and_both_flags(source):
    with pytest.raises(ValueError) as error:
        judge(load_reward(settings()), "#### 17", "17", source)
    for words in (
        repr(source),
        "megarl/sums -> gsm8k",
        "*math* -> math",
        "--reward gsm8k or math",
        "--reward-function path/to/file.py:function",
    ):
        assert words in str(error.value)


# --- the user's own function


OWN = """
from dataclasses import dataclass
@dataclass
class Result:
    value: float
def length(data_source, solution_str, ground_truth, extra_info):
    return Result(len(solution_str) / extra_info["scale"]).value
def anything(**columns):
    return sorted(columns) == ["data_source", "extra_info", "ground_truth", "solution_str"]
def too_few(solution_str): return 1.0
def one_more(data_source, solution_str, ground_truth, extra_info, model): return 1.0
def verl_style(data_source, solution_str, ground_truth, extra_info=None): return ground_truth in solution_str
def raises(data_source, solution_str, ground_truth, extra_info): return {}[solution_str]
def exits(data_source, solution_str, ground_truth, extra_info): raise SystemExit(3)
def greedy(data_source, solution_str, ground_truth, extra_info): extra_info.clear(); return 1
def fails_on_right_answers(data_source, solution_str, ground_truth, extra_info):
    return float("nan") if ground_truth in solution_str else 0.0
number = 3
"""


@pytest.fixture
def own_path(tmp_path):
    path = tmp_path / "own:reward.py"  # a colon in the path: the last one separates
    path.write_text(OWN)
    return path


@pytest.fixture
def own(own_path):
    return lambda name: load_reward(settings(reward_function=f"{own_path}:{name}"))


def test_own_function_is_called_by_verls_convention(own):
    rows = [RewardSample("x", "abcd", "bc", {"scale": 2}), RewardSample("x", "", "bc", {"scale": 2})]
    assert [base.judge(own("length"), row) for row in rows] == [2.0, 0.0]
    assert [base.judge(own("verl_style"), row) for row in rows] == [1.0, 0.0]
    assert [base.judge(own("anything"), row) for row in rows] == [1.0, 1.0]


def test_own_function_cannot_change_the_dataset(own):
    row = RewardSample("x", "a", "b", {"scale": 2})
    assert base.judge(own("greedy"), row) == 1.0 and row.extra_info == {"scale": 2}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "defines no missing"),
        ("number", "defines number as int, not as a function"),
        ("too_few", r"signature is \(solution_str\).*unexpected keyword argument 'data_source'"),
        ("one_more", "missing a required argument: 'model'"),
    ],
)
def test_own_function_that_cannot_be_used_is_refused(own, name, words):
    with pytest.raises(ValueError, match=words) as error:
        own(name)
    assert str(error.value).startswith(
        "--reward-function ("
    ) and "def function(data_source, solution_str" in str(error.value)


def test_own_file_that_cannot_be_used_is_refused(tmp_path):
    for value in ("reward.py", ":f", "reward.py:"):
        with pytest.raises(
            ValueError, match=rf"--reward-function \({value}\) does not name a file and a function"
        ):
            load_reward(settings(reward_function=value))
    with pytest.raises(ValueError, match="there is no file nowhere.py"):
        load_reward(settings(reward_function="nowhere.py:f"))
    for name, text, words in (
        ("a", "def f(:", "SyntaxError"),
        ("b", "import nothing_of_that_name", "ModuleNotFoundError"),
        ("c", "exit(1)", "SystemExit"),
        ("d", "import c", f"ModuleNotFoundError: No module named 'c'.*Try PYTHONPATH={tmp_path}\\."),
    ):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        with pytest.raises(
            ValueError, match=f"(?s)--reward-function .* fails: {words}.*Traceback.*(Error|Exit)"
        ):
            load_reward(settings(reward_function=f"{path}:f"))


def test_contradictory_and_unknown_flags_are_refused():
    with pytest.raises(ValueError, match=r"--reward \(math\) and --reward-function \(a.py:f\) contradict"):
        load_reward(settings("math", "a.py:f"))


# --- misbehaviour


@pytest.mark.parametrize(
    ("name", "words"), [("raises", "KeyError: 'the answer'"), ("exits", "SystemExit: 3")]
)
def test_raising_function_is_reported_with_sample_and_traceback(own, name, words):
    with pytest.raises(ValueError) as error:
        base.judge(own(name), RewardSample("my/data", "the answer", "17", sample_id=41))
    for part in (
        f"the reward function {name}",
        "sample 41",
        "'my/data'",
        "'the answer'",
        words,
        "Traceback",
        f"in {name}",
        "own:reward.py",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        float("-inf"),
        None,
        "1.0",
        [1.0],
        {"reward": 1.0},
        {"score": "1.0"},
        1j,
        np.ones(2),
        np.float32("nan"),
        10**400,
    ],
)
def test_value_that_is_no_finite_number_is_refused(value):
    with pytest.raises(
        ValueError, match=r"(?s)data_source 'x'.* returned .*; wanted a finite number"
    ) as error:
        judge(lambda **columns: value, "", "17")
    assert repr(value) in str(error.value) and type(value).__name__ in str(error.value)


@pytest.mark.parametrize("value", [1e39, -3.5e38, np.float64(1e300), 10**300])
def test_value_that_float32_cannot_hold_is_refused(value):
    """As an infinity it would count as failed, without a reason."""
    with pytest.raises(
        ValueError,
        match=r"(?s)sample 7, data_source 'x'.* returned -?\S+, and advantages are computed in float32",
    ):
        base.judge(lambda **columns: value, base.RewardSample("x", "", "17", sample_id=7))
    for largest in (3.4028234663852886e38, -3.4028234663852886e38):
        assert judge(lambda **columns: largest, "", "17") == largest


@pytest.mark.parametrize(
    "value", [1, 0.25, True, np.float32(0.25), np.bool_(True), np.int64(-3), np.array(2.0)]
)
def test_every_kind_of_number_is_taken(value):
    reward = judge(lambda **columns: value, "", "17")
    assert type(reward) is float and reward == value


# --- before training


def rows_of(*sources):
    return [
        SimpleNamespace(data_source=source, ground_truth="17", extra_info={"scale": 1}) for source in sources
    ]


def probe(reward_function, rows, **options):
    with RewardPool(settings(reward_function=reward_function), num_workers=1) as pool:
        probe_reward(pool, rows, **options)


def test_probe_accepts_what_works(own_path):
    probe(None, rows_of("megarl/sums", "openai/gsm8k", "lighteval/MATH", "megarl/sums"))
    probe(f"{own_path}:length", rows_of("anything"))


def test_probe_finds_a_broken_function_and_a_source_without_a_reward(own_path):
    with pytest.raises(
        ValueError,
        match=r"(?s)before training, on row 0 \(from 0\) of --eval-data: .*raises.*KeyError: ''.*Traceback",
    ):
        probe(f"{own_path}:raises", rows_of("x"), flag="--eval-data")
    with pytest.raises(
        ValueError,
        match=r"(?s)on row 2 \(from 0\) of --train-data: .*no reward is known for data_source \('other'\)",
    ):
        probe(None, rows_of("megarl/sums", "megarl/sums", "other"))


def test_probe_also_tries_the_right_answer(own_path):
    with pytest.raises(ValueError, match="returned nan"):
        probe(f"{own_path}:fails_on_right_answers", rows_of("x"))


@pytest.mark.parametrize(
    ("source", "response", "answer"),
    [
        ("gsm8k", "18-1=17\n#### 17", "17"),
        ("gsm8k", "#### 3\n#### 1,017.50", "1017.5"),
        ("gsm8k", "#### -0.0", "0"),
        ("gsm8k", "#### 1.2.3", "1.2.3"),
        ("gsm8k", "seventeen", ""),
        ("math", "so \\boxed{ x + 1 }", "x+1"),
        ("math", "no idea", ""),
    ],
)
def test_built_in_rules_name_the_answer_that_they_judge(source, response, answer):
    """Equal numbers are equal votes."""
    score = base.judge(auto_reward, RewardSample(source, response, "17"))
    assert isinstance(score, base.Score) and score.answer == answer
    assert score == (1.0 if answer == "17" else 0.0)


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ({"score": 0.5, "pred": 17}, "17"),
        ({"score": 0.5, "pred": None, "acc": 1}, None),
        ({"score": 0.5}, None),
    ],
)
def test_a_dict_in_verl_s_form_is_taken(value, answer):
    score = base.judge(lambda **_: value, RewardSample("x", "y"))
    assert score == 0.5 and getattr(score, "answer", None) == answer


SCORES = {"scores": {"correct": 1, "short": np.float32(0.5)}, "pred": "17"}


def scored(value, weights=None):
    return base.judge(lambda **_: value, RewardSample("x", "#### 17", "17"), weights)


def test_several_scores_add_up_to_the_reward():
    plain, weighed = scored(SCORES), scored(SCORES, {"correct": 2.0, "short": -1.0})
    assert (plain, weighed) == (1.5, 1.5) and scored(SCORES, {"correct": 1.0, "short": 0.0}) == 1.0
    assert plain.scores == weighed.scores == {"correct": 1.0, "short": 0.5} and plain.answer == "17"
    assert scored({"scores": {"a": 2.0}}).answer is None


@pytest.mark.parametrize(
    ("value", "weights", "told"),
    [
        ({"score": 1.0, "scores": {"a": 1.0}}, None, "both `score` and `scores`"),
        ({"scores": {}}, None, "wanted numbers by name"),
        ({"scores": [1.0]}, None, "wanted numbers by name"),
        ({"scores": {"a": None}}, None, "the score a must be a number"),
        ({"scores": {"a": float("nan")}}, None, "the score a must be a number"),
        ({"scores": {"a": 1e39}}, None, "the score a must be a number"),
        ({"scores": {"a-b": 1.0}}, None, "'a-b' does. Try correct"),
        ({"scores": {"reward_model": 1.0}}, None, "'reward_model' does"),
        ({"scores": {3: 1.0}}, None, "and 3 does"),
        ({"scores": {"a": 3e38, "b": 3e38}}, None, "float32"),
        ({"scores": {"a": 1.0, "b": 1.0}}, {"a": 1.0}, "no weight for b. Add b=1"),
        (1.0, {"a": 1.0}, "which --score-weights cannot weigh"),
    ],
)
def test_what_is_no_score_is_an_error(value, weights, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        scored(value, weights)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_pool_returns_the_scores(tmp_path, num_workers):
    file = tmp_path / "two.py"
    file.write_text(
        "def f(**row): return {'scores': {'a': len(row['solution_str']), 'b': 1}, 'pred': None}\n"
    )
    data = DataConfig(train_data=("x",), reward_function=f"{file}:f", score_weights=("a=0.5", "b=2"))
    with RewardPool(data, num_workers) as pool:
        (verdict,) = pool.score([RewardSample("x", "four", None)])
    assert (verdict.reward, verdict.scores, verdict.answer) == (4.0, {"a": 4.0, "b": 1.0}, None)
