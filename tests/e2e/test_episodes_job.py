"""A whole job with multi-turn episodes: gate, rewards, metrics and logs.

pytest tests/e2e/test_episodes_job.py"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.data.quick_tokenizer import load_quickly
from tests.e2e.jobs import COMMON, Job, replace_flags, train
from tests.e2e.test_cli_jobs import processes, wait_until
from tests.launch import succeed

ROOT = Path(__file__).resolve().parents[2]

ENV = f"{Path(__file__).with_name('envs.py')}:LowerCase"
LIMITS = (
    *("--max-turns", "4", "--max-context-length", "72", "--max-response-length", "8"),
    *("--num-rollouts-to-log", "-1", "--reward-max-failed-share", "1", "--train-iters", "2"),
)
FLAGS = ("--env", ENV, *LIMITS)


def job_of(data: Path, save: Path, *flags: str) -> Job:
    done = train(data, save, *FLAGS, *flags)
    assert done.returncode == 0, done.output
    return done


def check_rows(job: Job, data: Path) -> None:
    """Each logged sample is its episode: tokens, turns, and the sum of the environment's rewards."""
    tokenizer = load_quickly(data / "model")
    for number, metrics in enumerate(job.steps, 1):
        text = (job.folder / "rollouts" / f"step_{number:06d}.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        failed = [row for row in rows if row["finish_reason"] == "env"]
        good = [row for row in rows if row["finish_reason"] != "env"]
        assert metrics["reward/failed"] == len(failed) == metrics.get("reward/failed_raised", 0.0)
        assert all("planted" in row["failure"] and row["reward"] is None for row in failed)
        assert metrics["turns/mean"] == pytest.approx(sum(row["num_turns"] for row in rows) / len(rows))
        assert metrics["turns/max"] == max(row["num_turns"] for row in rows)
        assert metrics["response/length_mean"] == pytest.approx(
            sum(row["response_length"] for row in rows) / len(rows)
        )
        assert sum(metrics[f"finish/{one}"] for one in ("stop", "turns", "context", "env")) == pytest.approx(
            1
        )
        assert metrics["mismatch/max_abs"] < 5e-5 and metrics["mismatch/tokens"] == sum(
            row["response_length"] for row in rows
        )
        for row in good:
            check_row(row, tokenizer)


def check_row(row: dict, tokenizer) -> None:
    answers = [one["content"] for one in row["turns"] if one["role"] == "assistant"]
    assert len(answers) == row["num_turns"]
    letters = [sum(c.islower() for c in text) / 20 for text in answers]
    assert row["reward"] == pytest.approx(sum(letters))
    assert row["prompt_ids"] == tokenizer.encode_prompt(row["prompt"])
    runs, end = [], 0
    for hole in [*row["holes"], [len(row["response_ids"])] * 2]:
        runs.append(row["response_ids"][end : hole[0]])
        end = hole[1]
    assert [tokenizer.decode(ids) for ids in runs] == answers
    assert sum(map(len, runs)) == row["response_length"] and math.isfinite(row["rollout_log_prob"])
    for hole, message in zip(
        row["holes"], (one for one in row["turns"] if one["role"] == "tool"), strict=False
    ):
        assert message["content"] in tokenizer.decode(row["response_ids"][hole[0] : hole[1]])


def test_episodes_of_several_turns_are_sampled_logged_and_trained_on(sums_data, tmp_path):
    """The gate holds over every sampled token of every turn; a failed reset is masked and counted."""
    job = job_of(sums_data, tmp_path / "run")
    check_rows(job, sums_data)
    assert max(row["turns/max"] for row in job.steps) > 1
    assert sum(row["reward/failed"] for row in job.steps) > 0
    assert all(row["policy/grad_norm"] > 0 for row in job.steps)


ONE_RANK = ("--nproc-per-node", "1")


@pytest.fixture(scope="module")
def one(sums_data, tmp_path_factory) -> Job:
    """The job on one rank."""
    return job_of(sums_data, tmp_path_factory.mktemp("one") / "run", *ONE_RANK)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--tensor-model-parallel-size", "2"),
        ("--context-parallel-size", "2"),
        ("--pipeline-model-parallel-size", "2"),
        (*ONE_RANK, "--max-tokens-per-micro-batch", "1"),
        (*ONE_RANK, "--max-tokens-per-micro-batch", "80"),
    ],
    ids=["dp2", "tp2", "cp2", "pp2", "each alone", "in small packs"],
)
def test_any_layout_and_packing_gives_the_loss_and_gradients_of_one_rank(flags, one, sums_data, tmp_path):
    """Over the two updates of a step. By default all samples of a mini-batch are one pack. The tolerance is that of
    fp32 sums in another order."""
    other = job_of(sums_data, tmp_path / "other", *flags)
    wanted, found = one.steps[0], other.steps[0]
    assert wanted["policy/grad_norm"] > 0 and wanted["turns/max"] > 1
    for name in ("policy/loss", "policy/entropy", "policy/grad_norm", "advantage/max_abs"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-7), name


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [
        ("--rollout-tensor-parallel-size", "2", "--rollout-engine", "out-of-process"),
        ("--rollout-backend", "transformers"),
        ("--context-parallel-size", "2"),
        ("--pipeline-model-parallel-size", "2"),
        ("--algorithm", "ppo", "--critic-lr", "1e-3", "--loss-aggregation", "seq-mean-token-mean"),
        ("--env-episodes-per-process", "1"),
        ("--turn-rewards",),
        ("--executor", "inline", "--nproc-per-node", "1"),
    ],
    ids=["tp2", "transformers", "cp2", "pp2", "ppo", "process each", "turn rewards", "inline"],
)
def test_other_layouts_sample_and_train_on_the_same_episodes(flags, one, sums_data, tmp_path):
    """The first step has the same episodes."""
    job, other = one, job_of(sums_data, tmp_path / "other", *flags)
    check_rows(other, sums_data)
    same = ("turns/mean", "reward/mean", "response/length_mean", "batch/tokens", "reward/failed")
    assert {name: other.steps[0][name] for name in same} == {name: job.steps[0][name] for name in same}


@pytest.mark.nightly
def test_several_environments_train_and_are_evaluated_each(sums_data, tmp_path):
    """Rows go to the environment that their data_source names, in the shares of the files' weights."""
    files = {}
    for name in ("lower", "upper"):
        rows = [json.loads(line) for line in open(sums_data / "train.jsonl")][:12]
        files[name] = tmp_path / f"{name}.jsonl"
        lines = [json.dumps(row | {"data_source": name, "extra_info": {"index": 3}}) for row in rows]
        files[name].write_text("\n".join(lines) + "\n")
    both = [str(file) for file in files.values()]
    run = tmp_path / "run"
    done = train(
        *(sums_data, run, *LIMITS, "--env", f"lower={ENV}", f"upper={ENV.replace('LowerCase', 'UpperCase')}"),
        *("--train-data", *both, "--train-data-weights", "3", "1"),
        *("--eval-data", *both, "--eval-interval", "2", "--eval-num-prompts", "24"),
    )
    assert done.returncode == 0, done.output
    first = done.steps[0]
    assert (first["batch/lower/episodes"], first["batch/upper/episodes"]) == (
        12.0,
        4.0,
    )  # 3 : 1 of 4 prompts x 4
    rows = [json.loads(line) for line in open(run / "rollouts" / "step_000001.jsonl")]
    for name, kind in (("lower", str.islower), ("upper", str.isupper)):
        own = [row for row in rows if row["env"] == name]
        for row in own:
            answers = [one["content"] for one in row["turns"] if one["role"] == "assistant"]
            assert row["reward"] == pytest.approx(sum(map(kind, "".join(answers))) / 20)
        assert first[f"reward/{name}/mean"] == pytest.approx(sum(row["reward"] for row in own) / len(own))
        assert first[f"turns/{name}/mean"] == pytest.approx(sum(row["num_turns"] for row in own) / len(own))
        assert first[f"reward/{name}/failed"] == 0.0
        held_out = done.metrics[-1] if f"eval/reward/{name}" in done.metrics[-1] else done.metrics[0]
        assert held_out[f"eval/turns/{name}"] >= 1 and held_out[f"eval/failed/{name}"] == 0.0
    arguments = ("--model", run, "--eval-num-samples", "2", "--json")
    result = json.loads(
        succeed("-m", "megarl.cli", "eval", *arguments, timeout=200, preloaded=True, folder=tmp_path).stdout
    )
    assert {*result["sources"]} == {"lower", "upper"}
    assert (
        result["sources"]["upper"]["best_at_2"]["value"] >= result["sources"]["upper"]["best_at_1"]["value"]
    )
    bad = train(sums_data, tmp_path / "bad", *LIMITS, "--env", f"lower={ENV}", "--train-data", *both)
    assert bad.returncode == 2 and "no environment's name: 'upper' (12)" in bad.output, bad.output


@pytest.mark.nightly
def test_sigterm_ends_a_job_whose_episodes_wait_for_tools(sums_data, tmp_path):
    """The driver saves the last completed step, and no process is left, an environment's neither."""
    with started(sums_data, tmp_path, "Waiting", "--train-iters", "500") as job:
        job.wait_for_step(2)
        time.sleep(3)
        job.terminate(within_s=20)


NUM_EPISODES = 1000


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_sigterm_ends_a_job_with_a_thousand_episodes_within_seconds_and_it_can_be_resumed(
    sums_data, tmp_path, monkeypatch
):
    """Their tools take 0.1 to 5 s. No process is left: no rank, engine or environment."""
    sizes = (
        "--num-prompts",
        "125",
        "--num-samples-per-prompt",
        "8",
        "--global-batch-size",
        str(NUM_EPISODES),
    )
    flags = (*sizes, "--max-turns", "4", "--max-context-length", "72", "--max-response-length", "8")
    run = tmp_path / "run"
    with started(sums_data, tmp_path, "Tools", *flags, "--train-iters", "3") as job:
        job.wait_for_step(1)
        wait_until(lambda: job.num_calls("begun") >= NUM_EPISODES // 2, 200)
        num_waiting, num_over = job.num_calls("begun") - job.num_calls("ended"), job.num_calls("over")
        num_processes = len(processes(job.mark))
        seconds = job.terminate(within_s=20)
        print(f"{num_waiting} calls waited, {num_processes} processes ended within {seconds:.1f} s")
        assert num_waiting > 0 and num_over < NUM_EPISODES / 10 and num_processes > NUM_EPISODES / 16
    assert [row["step"] for row in Job(143, "", run).steps] == [1]
    env = ("--env", ENV.replace("LowerCase", "Tools"))
    monkeypatch.setenv("MEGARL_TEST_SLOW", str(tmp_path / "never"))
    again = train(sums_data, run, *env, *flags, "--train-iters", "2", "--load", str(run))
    assert again.returncode == 0, again.output
    assert [(row["step"], row["reward/failed"], row["turns/mean"]) for row in again.steps] == [
        *((step, 0, 1.0) for step in (1, 2))
    ]


@dataclass
class Started:
    """A job in the background, whose environments become slow after a step."""

    process: subprocess.Popen
    folder: Path
    mark: str

    def output(self) -> str:
        return (self.folder / "out").read_text()

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: f"step={step}/" in self.output() or self.process.poll() is not None, 300)
        (self.folder / "slow").touch()

    def num_calls(self, what: str) -> int:
        """Number of calls of all environments that have begun or ended."""
        return sum(path.stat().st_size for path in self.folder.glob(f"slow.{what}.*"))

    def terminate(self, within_s: float) -> float:
        """Send SIGTERM. Returns the seconds until no process of the job was left."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 143, self.output()
        wait_until(lambda: not processes(self.mark), 5)
        seconds = time.monotonic() - begun
        assert "its checkpoint is" in self.output() and seconds < within_s, (seconds, self.output())
        return seconds


@contextlib.contextmanager
def started(data: Path, folder: Path, env: str, *flags: str) -> Iterator[Started]:
    """Start a job in `folder`, and kill what is left of it at the end."""
    mark = f"MEGARL_TEST_JOB={folder}"
    arguments = [*COMMON, "--model", str(data / "model"), "--train-data", str(data / "train.jsonl")]
    arguments += ["--save", str(folder / "run")]
    arguments = replace_flags(arguments, ["--env", ENV.replace("LowerCase", env), *flags])
    variables = dict([mark.split("=")], MEGARL_TEST_SLOW=str(folder / "slow"), PYTHONSAFEPATH="1")
    with open(folder / "out", "w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl.cli", "train", *arguments],
            stdout=out,
            stderr=out,
            env=os.environ | variables,
            start_new_session=True,
        )
    try:
        yield Started(process, folder, mark)
    finally:
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.nightly
def test_the_calculator_example_learns_to_use_its_tool(tmp_path):
    """The three jobs of configs/calculator_*.args: short warm-ups, and some steps over several turns."""
    data = tmp_path / "data"
    succeed(ROOT / "examples" / "calculator_env.py", data, timeout=60, folder=ROOT)

    def stage(name: str, model: Path, rows: str, *flags: str) -> Job:
        arguments = (f"@configs/calculator_{name}.args", "--model", model, "--train-data", data / rows)
        save = ("--save", tmp_path / name)
        succeed(
            *("-m", "megarl.cli", "train", *arguments, *save, *flags),
            timeout=500,
            preloaded=True,
            folder=ROOT,
        )
        return Job(0, "", tmp_path / name)

    stage("sft", data / "model", "sft_tool.jsonl", "--train-iters", "200", "--log-interval", "50")
    stage("sft_mixed", tmp_path / "sft" / "hf", "sft_mixed.jsonl", "--train-iters", "20", "--lr", "1e-4")
    job = stage(
        *("grpo", tmp_path / "sft_mixed" / "hf", "train.jsonl", "--train-iters", "3"),
        *("--eval-data", str(data / "test.jsonl"), "--eval-num-prompts", "20", "--eval-interval", "3"),
    )
    assert all(row["mismatch/max_abs"] < 5e-5 and row["reward/failed"] == 0 for row in job.steps)
    assert (
        max(row["turns/max"] for row in job.steps) >= 3
    )  # calls the calculator, and goes on with its result
    rows = [json.loads(line) for line in open(tmp_path / "grpo" / "rollouts" / "step_000001.jsonl")]
    tools = [one["content"] for row in rows for one in row["turns"] if one["role"] == "tool"]
    assert any(text.lstrip("-").isdigit() for text in tools)
