"""`megarl show` on run folders that the product's own writer has written."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
from rich.cells import cell_len

from megarl.loggers.json_lines import FAILED_STEP


def sample(step: int, index: int, reward: float | None, **more: object) -> dict[str, object]:
    """A row as megarl/trainer/step_report.py makes it."""
    return {
        "sample_id": 10 * step + index,
        "row": index % 2,
        "prompt": [{"role": "user", "content": f"{index % 2}+1 ?"}],
        "response": f"answer {step}.{index}",
        "ground_truth": "2",
        "response_length": 3,
        "rollout_log_prob": -1.5,
        "prompt_ids": [987654],
        "response_ids": [987654],
        "reward": reward,
        "finish_reason": "stop",
        **more,
    }


@pytest.fixture
def run(open_run, tmp_path):
    folder = tmp_path / "run"
    with open_run(folder) as run:
        for step in (1, 2, 3):
            run.begin_step()
            rewards = [step / 10 + index for index in range(4)]
            rows = [sample(step, index, reward) for index, reward in enumerate(rewards)]
            run.write_rollouts(step, [*rows, sample(step, 4, None, failure="Traceback: boom")])
            run.record_step(step, {"reward/mean": 0.5}, num_tokens=10)
    return folder


def shown(out: str) -> list[tuple[str, int]]:
    """(block, sample id) of every sample."""
    found = re.findall(
        r"-- (\w+) \d+ of \d+ \| step \d+ \|(?: actor_2 \|)? sample (\d+)", " ".join(out.split())
    )
    return [(block, int(sample_id)) for block, sample_id in found]


def test_the_newest_step_s_best_and_worst_are_the_default(run, megarl):
    code, out, err = megarl("show", run)
    assert (code, err) == (0, "")
    assert shown(out) == [("best", 33), ("best", 32), ("worst", 30), ("worst", 31)]
    header = (
        "step 3, 5 samples, of 2 prompts, 1 without a reward, reward 1.8 (0.3 to 3.3), 3.0 tokens a response"
    )
    assert f"{header} -- best" in " ".join(out.split())
    assert "  user: 1+1 ?\nresponse\n  answer 3.3\nground truth\n  2\n" in out and "987654" not in out


def test_best_and_worst_of_all_steps_and_of_a_range(run, megarl):
    assert shown(megarl("show", run, "--step", "all", "--best", 5)[1]) == [
        ("best", sample_id) for sample_id in (33, 23, 13, 32, 22)
    ]
    assert shown(megarl("show", run, "--step", "1-2", "--worst", 1)[1]) == [("worst", 10)]
    assert shown(megarl("show", run, "--step", 2, "--best", 1)[1]) == [("best", 23)]


def test_equal_rewards_show_the_newest_first(open_run, megarl, tmp_path):
    with open_run(tmp_path / "run") as run:
        for step in (1, 2):
            run.begin_step()
            run.write_rollouts(step, [sample(step, 0, 1.0), sample(step, 1, 1.0)])
            run.record_step(step, {}, num_tokens=1)
    assert [s for _, s in shown(megarl("show", tmp_path / "run", "--step", "all", "--best", 3)[1])] == [
        20,
        21,
        10,
    ]


def show_rows(
    open_run,
    megarl,
    folder,
    rows,
    *flags,
    arguments="--algorithm grpo\n--num-prompts 2\n--num-samples-per-prompt 4",
):
    """Return the output of `megarl show` for a run whose step 1 has logged these rows."""
    with open_run(folder, arguments) as run:
        run.begin_step()
        run.write_rollouts(1, rows)
        run.record_step(1, {}, num_tokens=1)
    return " ".join(megarl("show", folder, *flags)[1].split())


def test_the_header_says_how_many_samples_of_how_many_prompts_are_there(open_run, megarl, tmp_path):
    rows = [sample(1, index, 1.0) for index in (0, 2, 4)]
    out = show_rows(open_run, megarl, tmp_path / "some", rows)
    assert ": step 1, 3 of 8 samples, of 1 prompt, every reward 1, " in out
    assert "a response; --num-rollouts-to-log -1 logs all -- best" in out
    rows = [sample(1, index, 1.0) for index in range(8)]
    out = show_rows(open_run, megarl, tmp_path / "all", rows)
    assert ": step 1, 8 samples, of 2 prompts, every reward 1, " in out and "logs all" not in out
    out = show_rows(open_run, megarl, tmp_path / "unknown", rows, arguments="--num-prompts 2")
    assert ": step 1, 8 samples, of 2 prompts, " in out and "logs all" not in out


@pytest.mark.parametrize(
    "algorithm, count",
    [("remax", "3 of 10 samples"), ("rloo", "3 of 8 samples"), ("own.py:Own", "3 samples")],
)
def test_greedy_answers_that_are_logged_too_count_as_samples_of_the_step(
    open_run, megarl, tmp_path, algorithm, count
):
    """The class in a user's file is not run, so how many samples it draws is not known."""
    rows = [sample(1, index, 1.0) for index in (0, 2, 4)]
    arguments = f"--algorithm {algorithm}\n--num-prompts 2\n--num-samples-per-prompt 4"
    out = show_rows(open_run, megarl, tmp_path / "run", rows, arguments=arguments)
    assert f": step 1, {count}, of 1 prompt, " in out


def test_no_sample_is_both_best_and_worst(open_run, megarl, tmp_path):
    rows = [sample(1, index, 1.0) for index in range(3)]
    assert shown(show_rows(open_run, megarl, tmp_path / "a", rows)) == [
        ("best", 10),
        ("best", 11),
        ("worst", 12),
    ]
    rows = [sample(1, index, float(index)) for index in range(2)]
    assert shown(show_rows(open_run, megarl, tmp_path / "b", rows)) == [("best", 11), ("worst", 10)]
    out = megarl("show", tmp_path / "b", "--best", 2)[1]
    assert shown(out) == [("best", 11), ("best", 10)]


def test_of_equal_rewards_other_prompts_and_texts_come_first(open_run, megarl, tmp_path):
    rows = [sample(1, index, 1.0, row=index // 3) for index in range(6)]
    out = show_rows(open_run, megarl, tmp_path / "prompts", rows, "--best", 3)
    assert shown(out) == [("best", 10), ("best", 13), ("best", 11)]
    rows = [sample(1, index, 1.0, row=0, response="same") for index in range(5)]
    rows += [sample(1, 5, 0.0, row=0, response="same"), sample(1, 6, 1.0, row=0, response="other")]
    out = show_rows(open_run, megarl, tmp_path / "texts", rows)
    assert shown(out) == [("best", 10), ("best", 16), ("worst", 15)]
    assert out.count("5 samples are equal") == out.count("samples are equal") == 1
    assert "samples are equal" not in megarl("show", tmp_path / "texts", "--random", 5)[1]


def test_random_samples_follow_the_seed(run, megarl):
    first, again, other = (
        shown(megarl("show", run, "--step", "all", "--random", 4, "--seed", seed)[1]) for seed in (0, 0, 1)
    )
    assert first == again != other and len(set(first)) == 4
    assert len(shown(megarl("show", run, "--random", 99)[1])) == 5


def test_one_prompt_over_the_steps(run, megarl):
    by_row = megarl("show", run, "--prompt", 1)[1]
    assert [sample_id for _, sample_id in shown(by_row)] == [11, 13, 21, 23, 31, 33]
    assert megarl("show", run, "--prompt", "1+1 ?")[1] == by_row
    assert shown(megarl("show", run, "--prompt", 1, "--best", 1)[1]) == [("best", 33)]
    assert shown(megarl("show", run, "--prompt", 1, "--step", 2)[1]) == [("all", 21), ("all", 23)]


def test_parts_of_the_reward_finish_reason_and_failures_are_shown(open_run, megarl, tmp_path):
    row = sample(1, 0, 0.75, rule_reward=1.0, reward_model={"score": -0.5, "answer": "so\nso"})
    row |= {"finish_reason": "length", "actor": "actor_2"}
    with open_run(tmp_path / "run") as run:
        run.begin_step()
        run.write_rollouts(1, [row, sample(1, 1, None, failure="Traceback: boom")])
        run.record_step(1, {}, num_tokens=1)
    out = megarl("show", tmp_path / "run", "--prompt", "0")[1]
    for part in (
        "finish length",
        "actor_2",
        "rule_reward: 1",
        "reward_model.score: -0.5",
        "reward_model.answer: so",
    ):
        assert part in out
    out = megarl("show", tmp_path / "run", "--prompt", "1")[1]
    assert "no reward" in out and "failure: Traceback: boom" in out


def test_text_fits_the_terminal_and_cannot_control_it(open_run, megarl, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    text = "\x1b[2J\x07tab\there \u202e漢字漢字漢字漢字漢字漢字漢字 " + "x" * 70 + "\r\n  indented\u2028"
    with open_run(tmp_path / "run") as run:
        run.begin_step()
        run.write_rollouts(1, [sample(1, 0, 1.0, response=text)])
        run.record_step(1, {}, num_tokens=1)
    out = megarl("show", tmp_path / "run")[1]
    assert max(map(cell_len, out.split("\n"))) == 30
    assert not set(out) & {"\x1b", "\x07", "\t", "\r", "\u202e", "\u2028"}
    joined = out.replace("\n  ", "")
    assert r"\x1b[2J\x07tab\there \u202e漢字漢字漢字漢字漢字漢字漢字 " + "x" * 70 + r"\r" in joined
    assert "\n    indented\\u2028\n" in out


def test_a_line_that_is_being_written_is_left_out(run, megarl):
    file = run / "rollouts" / "step_000003.jsonl"
    complete = file.read_bytes()
    before = megarl("show", run)[1]
    file.write_bytes(complete + b'{"sample_id": 35, "reward": 9')
    assert megarl("show", run)[1] == before
    file.write_bytes(b'{"sample_id"\n' + complete)
    code, out, err = megarl("show", run)
    assert (code, out) == (2, "") and f"{file}:1: is not a JSON object" in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--step", "9"], ["--step (9): must be a step, a range or all", "steps 1 to 3. Try 3."]),
        (["--step", "new"], ["--step (new): must be", "Try 3."]),
        (["--best", "0"], ["--best (0): must be a whole number of at least 1. Try 5."]),
        (["--random", "x"], ["--random (x): must be a whole number"]),
        (["--bset", "3"], ["--bset: no such flag of megarl show. Did you mean --best?"]),
        (["--prompt", "moon"], ["--prompt (moon): is neither a row nor in a prompt", "Try --prompt 0."]),
        (["--prompt", "+1"], ["--prompt (+1): is in the prompts of 2 rows: 0, 1. Try --prompt 0."]),
    ],
)
def test_errors_name_flag_value_rule_and_advice(arguments, words, run, megarl):
    code, out, err = megarl("show", run, *arguments)
    assert (code, out) == (2, "") and all(word in err for word in words), err


def test_folders_without_samples_are_refused_with_advice(run, open_run, megarl, tmp_path):
    code, _, err = megarl("show", tmp_path / "rum")
    assert code == 2 and f"RUN ({tmp_path / 'rum'}): there is no such folder. Try {run}." in err
    with open_run(tmp_path / "sft") as sft:
        sft.begin_step()
        sft.record_step(1, {"policy/loss": 1.0}, num_tokens=1)
    code, _, err = megarl("show", tmp_path / "sft")
    assert code == 2 and "has no samples in rollouts/" in err


def test_a_failed_step_is_shown_when_asked_for_and_not_otherwise(run, megarl):
    rows = [sample(4, 0, None, failure="Traceback: no digits"), sample(4, 1, 0.5), sample(4, 2, 0.25)]
    error = {"step": 4, "error": "RewardsFailed: 1 of 3 rewards have failed"}
    (run / FAILED_STEP).write_text("".join(json.dumps({**error, **row}) + "\n" for row in rows))
    code, out, err = megarl("show", run, "--failed")
    text = " ".join(out.split())
    assert (code, err) == (0, "") and "-- without a reward 1 of 1 | step 4 | sample 40" in text
    assert shown(out) == [("best", 41), ("worst", 42)] and "failure: Traceback: no digits" in text
    assert re.search(r"step 4, 3 samples, .* The step failed \(.*\): RewardsFailed: 1 of 3 rewards", text)
    assert "error:" not in out and "step 3, 5 samples" in " ".join(megarl("show", run)[1].split())
    assert shown(megarl("show", run, "--failed", "--best", 1)[1]) == [("best", 41)]
    assert megarl("show", run, "--failed", "--step", 3)[0] == 2
    (run / FAILED_STEP).unlink()
    code, _, err = megarl("show", run, "--failed")
    assert code == 2 and "holds no failed_step.jsonl" in err and "Leave --failed out." in err


def test_the_header_counts_the_samples_that_failed(open_run, megarl, tmp_path):
    rows = [sample(1, 0, None, failure="x"), sample(1, 1, 1.0), sample(1, 2, None, failure="x")]
    out = show_rows(open_run, megarl, tmp_path / "run", rows)
    assert ": step 1, 3 of 8 samples, of 2 prompts, 2 without a reward, every other reward 1, " in out
    failed = "".join(json.dumps({"step": 2, "error": "E", **row}) + "\n" for row in rows)
    (tmp_path / "run" / FAILED_STEP).write_text(failed)
    out = " ".join(megarl("show", tmp_path / "run", "--failed")[1].split())
    assert ": step 2, 3 of 8 samples, of 2 prompts, 2 without a reward, every other reward 1, " in out


def test_a_prompt_s_equal_samples_are_shown_once_a_step(open_run, megarl, tmp_path):
    with open_run(tmp_path / "run") as run:
        for step in (1, 2):
            run.begin_step()
            rows = [sample(step, index, 1.0, row=0, response="same") for index in range(3)]
            run.write_rollouts(step, [*rows, sample(step, 3, 0.0, row=0, response="other")])
            run.record_step(step, {}, num_tokens=1)
    out = megarl("show", tmp_path / "run", "--prompt", 0)[1]
    assert shown(out) == [("all", 10), ("all", 13), ("all", 20), ("all", 23)]
    assert "-- all 1 of 4" in out and out.count("3 samples are equal") == out.count("are equal") == 2


def test_a_missing_folder_is_called_missing_with_failed_too(run, megarl):
    missing = run.with_name("rum")
    code, _, err = megarl("show", missing, "--failed")
    assert code == 2 and f"RUN ({missing}): there is no such folder." in err and f"Try {run}." in err
    assert FAILED_STEP not in err


def test_lines_are_wrapped_for_a_terminal_alone(open_run, megarl, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())  # no terminal
    with open_run(tmp_path / "run") as run:
        run.begin_step()
        run.write_rollouts(1, [sample(1, 0, 1.0, response="word " * 100)])
        run.record_step(1, {}, num_tokens=1)
    assert "  " + "word " * 100 + "\n" in megarl("show", tmp_path / "run")[1]
