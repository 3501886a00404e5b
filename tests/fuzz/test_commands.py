"""Whatever stands behind `megarl`, and whatever numbers a step has: an exit code and a message, and lines
that every reader can parse.

pytest tests/fuzz/test_commands.py"""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from megarl import cli
from megarl.convert import shard_bytes
from megarl.loggers import LoggerContext
from megarl.loggers.console import Progress
from megarl.loggers.json_lines import to_json_line
from megarl.loggers.tensorboard import TensorBoard
from tests.config.conftest import QWEN3
from tests.fuzz.cases import fuzz

words = st.one_of(
    st.text(max_size=10),
    st.integers(-2, 9).map(str),
    st.sampled_from(
        [
            "1e400",
            "9" * 5000,
            "1000000",
            "1000000000000",
            "nan",
            "",
            "-",
            "\x00",
            "\ud800",
            "/dev/null",
            ".",
            "\N{COMBINING ACUTE ACCENT}",
        ]
    ),
)
names = st.sampled_from(
    [
        "--model",
        "--load",
        "--save",
        "--to",
        "--dtype",
        "--max-shard-size",
        "--tensor-model-parallel-size",
        "--expert-model-parallel-size",
        "--svg",
        "--world-size",
        "--ranks-per-node",
        "--link-bandwidth",
        "--algorithm",
        "--train-iters",
        "--nproc-per-node",
        "--rollout-tensor-parallel-size",
        "--help",
        "-h",
        "--version",
        "--lr",
        "--num-actors",
        "--actor-ranks",
        "--rollout-ranks",
        "--pools",
        "--critic-model",
        "--reward-model",
    ]
)
argvs = st.lists(st.one_of(names, words, st.builds("{}={}".format, names, words)), max_size=6)


@fuzz(
    st.sampled_from(["check", "graph", "reshard-plan", "convert", "chekc", "--help", "--version", ""]),
    st.booleans(),
    argvs,
)
def test_every_command_ends_with_a_code(folder: Path, command: str, complete: bool, argv: list[str]) -> None:
    """train and eval read their flags as check does; drawn ones that pass would start a job."""
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        (model / "config.json").write_text(json.dumps(QWEN3))
        (folder / "train.jsonl").write_text("{}\n")
    flags = {
        "check": [
            "--algorithm",
            "grpo",
            "--model",
            str(model),
            "--random-init",
            "--train-data",
            str(folder / "train.jsonl"),
            "--save",
            str(folder / "run"),
            "--train-iters",
            "1",
        ],
        "convert": ["--model", str(model), "--save", str(folder / "out")],
    }
    flags |= {"graph": flags["check"][:5], "reshard-plan": flags["check"][:5]}
    with contextlib.chdir(folder):
        code, out, error = run([command, *(flags.get(command, []) if complete else []), *argv])
    assert code in (0, 1, 2), error
    assert "Traceback" not in out + error and (code == 0) <= bool(out) and (code == 0 or error.strip())


def run(argv: list[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr), both UTF-8 as a terminal's are."""
    out, error = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors, write_through=True)
        for errors in ("strict", "backslashreplace")
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = cli.main(argv)
        except SystemExit as exited:  # of argparse
            code = exited.code
    return code or 0, out.buffer.getvalue().decode(), error.buffer.getvalue().decode()


@fuzz(
    st.one_of(
        words,
        st.builds(
            "{}{}".format,
            st.floats().map(repr) | st.integers().map(str) | st.just("9" * 400),
            st.sampled_from(["KB", "mb", "GB", "TB", "", "B"]),
        ),
    )
)
def test_sizes_of_shards(folder: Path, text: str) -> None:
    assert (size := shard_bytes(text)) is None or size >= 1


metric_names = st.text(min_size=1, max_size=8) | st.sampled_from(
    ["reward/mean", "policy/loss", "eval/reward", "reward_2/mean", "time/step_s", "nonfinite", "step"]
)
numbers = st.floats() | st.integers(-(2**63), 2**64) | st.floats(width=32) | st.booleans()


@fuzz(st.dictionaries(metric_names, numbers, max_size=6))
def test_lines_of_metrics(folder: Path, metrics: dict[str, float | int]) -> None:
    """Strict JSON, from which every number comes back as it was."""
    line = to_json_line(metrics)
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert "\n" not in line
    row_of = {
        name: float(row["nonfinite"][name]) if row[name] is None else row[name]
        for name in metrics
        if name != "nonfinite"
    }
    assert all(
        value == metrics[name] or math.isnan(value) and math.isnan(metrics[name])
        for name, value in row_of.items()
    )


@fuzz(st.integers(0, 2**62), st.dictionaries(metric_names, numbers, max_size=6))
def test_events_of_tensorboard(folder: Path, step: int, metrics: dict[str, float | int]) -> None:
    """Read by TensorBoard's own loader, in fp32."""
    for old in (folder / "tensorboard").glob("*"):
        old.unlink()
    logger = TensorBoard(LoggerContext(folder=folder, project="", name=""))
    logger.log_metrics(step, metrics, 1.0)
    logger.close()
    [path] = (folder / "tensorboard").iterdir()
    _, *events = EventFileLoader(str(path)).Load()
    assert [event.step for event in events] == [step] * len(metrics)


shown_names = st.builds(
    "{}/{}".format, st.sampled_from(["reward", "eval", "policy_2", "response", "time_3"]), st.text(max_size=6)
)


@fuzz(
    st.lists(
        st.dictionaries(
            shown_names
            | st.sampled_from(["reward/mean", "policy/loss", "eval/reward", "reward_2/mean", "time/step_s"]),
            numbers,
            max_size=4,
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_what_is_shown_of_steps(folder: Path, steps: list[dict[str, float | int]], terminal: bool) -> None:
    stream = io.StringIO()
    progress = Progress(len(steps), stream, terminal)
    for number, metrics in enumerate(steps, 1):
        progress.update(number, metrics)
        progress.show_evaluation(number, metrics)
    progress.close()
    assert terminal or stream.getvalue().count("\n") >= 2 * len(steps)
