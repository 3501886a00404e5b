"""What a user can get wrong, given to `megarl train` as he would: exit code 2, one message with the flag or
file, its value and a value that works, no traceback, and nothing written. All but broken rewards end before
torch is imported.

    pytest tests/e2e/test_bad_input.py"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.launch import preloaded_python
from tests.e2e.jobs import COMMON, replace_flags, snapshot

MEGARL = ["-m", "megarl.cli", "train"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "megarl.train"]


@pytest.fixture
def refused(sums_data, tmp_path):
    """refused("--flag", "value", ...) runs the job with these flags in place of its own -> what it says,
    after the common checks. A flag that is followed by None is left out.
    `starts`: the error is found after the line that says what starts."""

    def run(
        *flags: str | Path | None, program: list[str] = MEGARL, exit_code: int = 2, starts: bool = False
    ) -> str:
        left_out = [str(flag) for flag, value in zip(flags, flags[1:]) if value is None]
        job = [
            *COMMON,
            "--model",
            str(sums_data / "model"),
            "--train-data",
            str(sums_data / "train.jsonl"),
            "--save",
            str(tmp_path / "run"),
        ]
        job = [
            word
            for word in replace_flags(job, [str(f) for f in flags if f is not None])
            if word not in left_out
        ]
        before = snapshot(tmp_path)
        done = subprocess.run(
            [preloaded_python(), *program, *job],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env=dict(os.environ, PYTHONSAFEPATH="1", PYTHONDONTWRITEBYTECODE="1"),
        )
        told = [line.split()[0] for line in done.stdout.splitlines()]
        assert (done.returncode, told) == (exit_code, ["starting"] * starts), done.stderr
        assert snapshot(tmp_path) == before, "something was written"
        return done.stderr

    return run


def lines(message: str) -> list[str]:
    assert "Traceback" not in message
    return [line for line in message.splitlines() if not line.startswith("More is checked when ")]


# flags -> the whole message
AT_ONCE = {
    "missing data file": (
        ("--train-data", "nowhere.jsonl"),
        ["--train-data (nowhere.jsonl): there is no such file. Give one or more *.jsonl or *.parquet files."],
    ),
    "indivisible heads": (
        ("--nproc-per-node", "8", "--tensor-model-parallel-size", "8"),
        ["--tensor-model-parallel-size (8): must divide the model's attention heads (4). Try 2 or 4."],
    ),
    "indivisible batch": (
        ("--global-batch-size", "6"),
        [
            "--global-batch-size (6): must divide num_prompts (4) x num_samples_per_prompt (4) = "
            "16. Try 4 or 8."
        ],
    ),
    "too few ranks": (
        ("--nproc-per-node", "1", "--tensor-model-parallel-size", "2"),
        [
            "--tensor-model-parallel-size (2) x --pipeline-model-parallel-size (1) = 2: needs as "
            "many ranks, and the actor has 1. "
            "Try --nproc-per-node 2."
        ],
    ),
    "truncated sampling": (
        ("--top-p", "0.9", "--top-k", "50"),
        [
            "2 configuration errors:",
            "  - --top-p (0.9): must be 1 in training: the engine would draw from a truncated "
            "distribution, whose log-probs are not the "
            "policy's. Leave it out.",
            "  - --top-k (50): must be 0 (off) in training: the engine would draw from a truncated "
            "distribution, whose log-probs are not "
            "the policy's. Leave it out.",
        ],
    ),
    "unknown flag": (
        ("--global-batch-sizes", "8"),
        ["--global-batch-sizes (8): no such flag. Did you mean --global-batch-size? [command line]"],
    ),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_refused_at_once(refused, name):
    flags, expected = AT_ONCE[name]
    assert lines(refused(*flags)) == expected


def test_a_folder_that_holds_a_run_is_left_as_it_is(refused, tmp_path):
    for name in ("resolved.args", "metrics.jsonl", "hf/model.safetensors", "rollouts/step_000001.jsonl"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(f"precious {name}")
    (tmp_path / "run-2").mkdir()
    (line,) = lines(refused())
    assert (
        line == f"--save ({tmp_path}/run): holds another run (resolved.args), which would be "
        f"overwritten. Try --save {tmp_path}/run-3."
    )


def test_too_few_ranks_under_torchrun(refused):
    """torchrun chooses their number itself. Its own report about the process that ended follows ours."""
    message = refused("--tensor-model-parallel-size", "2", program=TORCHRUN, exit_code=1)
    ours = [line for line in message.splitlines() if "--tensor-model-parallel-size" in line]
    assert (
        message.startswith(ours[0])
        and len(ours) == 1
        and ours[0].endswith("the actor has 1. Try --nproc-per-node 2.")
    )
    assert "megarl/config/" not in message and "megarl/train.py" not in message  # no traceback of ours


# ------------------------------------------------------------------ needs the data, the tokenizer or the
# reward, which the driver says


def write_rows(path: Path, *changes: dict) -> Path:
    """Rows of the sums task; each change replaces columns, None removes one."""
    row = {
        "data_source": "megarl/sums",
        "prompt": [{"role": "user", "content": "23-5 ?"}],
        "reward_model": {"style": "rule", "ground_truth": "18"},
    }
    path.write_text(
        "".join(
            json.dumps({k: v for k, v in (row | change).items() if v is not None}) + "\n"
            for change in changes
        )
    )
    return path


def test_unusable_rows_and_empty_files_are_told_together(refused, tmp_path):
    bad = write_rows(tmp_path / "bad.jsonl", {}, {"prompt": None}, {"reward_model": {"style": "rule"}}, {})
    empty = write_rows(tmp_path / "empty.jsonl")
    message = lines(refused("--train-data", empty, bad, "--nproc-per-node", "1", "--reward-function", None))
    assert message == [
        f"--train-data: {empty} is empty: wanted at least one row.",
        "--train-data: 2 of 4 rows cannot be used. They are:",
        f"  {bad}:2: no column 'prompt' (there: data_source, reward_model), wanted a non-empty list of "
        '{"role": str, "content": str}, or a string (or GSM8K\'s own question and answer)',
        f"  {bad}:3: no column 'reward_model.ground_truth' (there: data_source, prompt, "
        "reward_model), wanted the right answer as a string",
    ]


def test_a_tokenizer_of_another_model(refused, sums_data, tmp_path):
    """On two ranks: the message comes once."""
    small = tmp_path / "small"
    small.mkdir()
    for file in (sums_data / "model").iterdir():
        (small / file.name).write_bytes(file.read_bytes())
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    (line,) = lines(refused("--model", small))
    size = config["vocab_size"]
    assert line == (
        f"--model ({small}): the tokenizer has ids up to {size - 1} ({small}), but the model's "
        f"vocab_size is 200 ({small}/config.json), so it has no "
        f"embedding for {size - 200} of them. Give --tokenizer-model the tokenizer the model was "
        "trained with."
    )


REWARDS = """
def raises(data_source, solution_str, ground_truth, extra_info):
    return 1 / len(solution_str)

def not_a_number(data_source, solution_str, ground_truth, extra_info):
    return float("nan")
"""


def test_a_reward_function_that_raises(refused, tmp_path):
    """Called before training starts, with an empty response. Its own traceback is what helps, so that one is
    shown."""
    (tmp_path / "mine.py").write_text(REWARDS)
    message = refused("--reward-function", "mine.py:raises", "--nproc-per-node", "1", starts=True)
    first = message.splitlines()[0]
    assert first.startswith(
        "before training, on row 0 (from 0) of --train-data: the reward function raises "
        "(data_source 'megarl/sums'"
    )
    assert first.endswith("solution_str '') raised ZeroDivisionError: division by zero")
    assert (
        message.count("Traceback (most recent call last)") == 1 and 'mine.py", line 3, in raises' in message
    )


def test_a_reward_function_that_returns_nan(refused, tmp_path):
    """With everything in one process, which reads the same inputs."""
    (tmp_path / "mine.py").write_text(REWARDS)
    (line,) = lines(
        refused(
            "--reward-function",
            "mine.py:not_a_number",
            "--nproc-per-node",
            "1",
            "--executor",
            "inline",
            starts=True,
        )
    )
    wanted = "wanted a finite number, e.g. 0.0 or 1.0, or a dict with one as `score`."
    assert line.endswith(f"returned nan (float); {wanted}")


# ------------------------------------------------------------------ weights, and what fails when the roles
# are set up


def copied(sums_data: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in (sums_data / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("program", (MEGARL, TORCHRUN), ids=("megarl", "torchrun"))
def test_weights_that_are_cut_short(refused, sums_data, tmp_path, program):
    """Found from the file's header and length, before a rank loads it."""
    file = copied(sums_data, tmp_path / "cut") / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    message = refused(
        "--model",
        tmp_path / "cut",
        "--nproc-per-node",
        "1",
        program=program,
        exit_code=2 if program is MEGARL else 1,
    )
    assert (
        message.startswith(f"--model ({tmp_path}/cut): {file} is cut short or damaged: ")
        and "safe_open" not in message
    )


def test_a_failure_while_roles_are_set_up_leaves_no_folder(refused):
    """It would refuse the next attempt its --save. fp8 without a GPU is found where the model is built."""
    for _ in range(2):
        message = refused("--bf16", "--fp8", "hybrid", "--nproc-per-node", "1", exit_code=1, starts=True)
        assert "--fp8 (hybrid): needs an NVIDIA GPU and Transformer Engine" in message


def test_a_restart_under_torchrun_does_not_continue_the_run_that_it_was_refused(sums_data, tmp_path):
    """Before, the second attempt took what lay in --save for its own, and cut its records."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "resolved.args").write_text("--algorithm grpo\n")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    before = snapshot(run)
    files = ["--model", str(sums_data / "model"), "--train-data", str(sums_data / "train.jsonl")]
    flags = [*files, "--save", str(run), "--load", str(tmp_path / "elsewhere"), "--nproc-per-node", "1"]
    command = [preloaded_python(), *TORCHRUN[:3], "--max-restarts", "1", *TORCHRUN[3:]]
    done = subprocess.run(
        [*command, *replace_flags(COMMON, flags)], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert done.returncode == 1 and done.stderr.count(f"--save ({run}): ") >= 2, done.stderr
    assert snapshot(run) == before
