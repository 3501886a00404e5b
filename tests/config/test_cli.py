"""The console script: exit codes, what is printed where, no traceback, and no torch before a device is
needed. Real processes, but for the two that only look at which function a command ends in.

    pytest tests/config/test_cli.py"""

import json
import os
import signal
import subprocess
import sys
import time
import types
from xml.etree import ElementTree

import pytest

import megarl
from megarl import cli
from tests.config.conftest import QWEN3

WITH_MODULES = """
import json, sys
from megarl.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as exited:  # --help of a subcommand
    code = exited.code
sys.stderr.write("\\n" + json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
sys.exit(code)
"""
HEAVY = {"torch", "numpy", "megatron", "vllm", "transformers", "triton"}


def run(*argv, script=None):
    command = [sys.executable, *(["-c", script] if script else ["-m", "megarl.cli"]), *argv]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


def test_version_and_usage():
    assert (run("--version").stdout, run("--version").returncode) == (f"megarl {megarl.__version__}\n", 0)
    usage = run("--help")
    assert (
        usage.returncode == 0
        and all(f"\n  {command} " in usage.stdout for command in cli.COMMANDS)
        and run().stdout == usage.stdout
    )
    unknown = run("trian")
    assert (
        unknown.returncode == 2
        and "megarl trian: no such command. Did you mean train?" in unknown.stderr
        and unknown.stdout == ""
    )


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["check"], ["graph"]])
def test_nothing_heavy_is_imported(argv, job):
    result = run(*argv, *([job] if argv[0] in ("check", "graph") else []), script=WITH_MODULES)
    assert result.returncode == 0, result.stderr
    assert not HEAVY & set(json.loads(result.stderr.splitlines()[-1]))


def test_check_says_ok_with_the_main_numbers(job):
    result = run(
        "check", job, "--nproc-per-node", "4", "--tensor-model-parallel-size", "2", "--num-epochs", "3"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(
        "ok: world size 4, data-parallel size 2, 3 steps, per step 128 samples and 6 updates\n"
    )
    assert "per step 64 samples and 1 update\n" in run("check", job, "--algorithm", "sft").stdout


@pytest.mark.parametrize("command", ["train", "check"])
def test_all_findings_exit_2_and_no_traceback(command, job, tmp_path):
    result = run(
        command, job, "--global-batch-size", "3", "--top-p", "0.5", "--model", str(tmp_path / "none")
    )
    assert (result.returncode, result.stdout) == (2, "") and "Traceback" not in result.stderr
    assert result.stderr.startswith("4 configuration errors:\n") and not (tmp_path / "run").exists()
    for flag in (
        "--model",
        "--global-batch-size (3): must divide",
        "--global-batch-size (3): must be a multiple",
        "--top-p (0.5)",
    ):
        assert f"  - {flag}" in result.stderr


def test_a_round_of_errors_says_whether_more_is_checked(job, tmp_path, capsys):
    """Flags hide layouts, layouts hide weights, and nothing is hidden by the last round."""
    last = "More is checked when this is corrected."
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.write_bytes(b"damaged")
    rounds = (
        "--temprature 1 --tensor-model-parallel-size 3",
        "--tensor-model-parallel-size 3 --lr 0",
        "--lr 0",
    )
    said = []
    for flags in rounds:
        assert cli.main(["check", job, *flags.split()]) == 2
        said.append(capsys.readouterr().err.splitlines())
    assert "--temprature" in said[0][0] and said[0][1:] == [last]
    assert "--tensor-model-parallel-size" in "".join(said[1]) and said[1][-1].startswith(
        "More is checked when "
    )
    assert "safetensors" in "".join(said[2]) and not said[2][-1].startswith("More is checked when ")


@pytest.mark.parametrize("command", ["train", "eval", "check"])
def test_wrong_flags_exit_2_and_no_traceback(command):
    result = run(command, "@none.args", "--lrr", "1")
    assert (result.returncode, result.stdout) == (2, "") and "Traceback" not in result.stderr
    assert result.stderr.splitlines() == [
        "2 configuration errors:",
        "  - @none.args: cannot read none.args: No such file or directory. Give a text file of flags. "
        "[command line]",
        "  - --lrr (1): no such flag. Did you mean --lr? [command line]",
        "More is checked when these are corrected.",
    ]


@pytest.mark.parametrize("size", ["inf", "1e300", "nan", "0", "-1", "80GB"])
def test_a_size_of_gpus_that_is_none(size, job, capsys):
    assert cli.main(["check", job, "--gpu-memory", size]) == 2
    rule = "must be a number of at least 0.001 and at most 100000. Try 80."
    assert f"--gpu-memory ({size}): {rule}" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "--lr '1", b"--save \xff"], ids=["missing", "quote", "encoding"])
def test_an_args_file_that_cannot_be_read_is_one_error(text, tmp_path):
    """Not one more for each required flag that the file would have set."""
    if text is not None:
        (tmp_path / "job.args").write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "jobs.args").write_text("--lr 1")
    result = run("train", f"@{tmp_path}/job.args", "--save", "run")
    first, last = result.stderr.splitlines()
    assert result.returncode == 2 and last == "More is checked when this is corrected."
    assert f"{tmp_path}/job.args" in first
    assert text is not None or f"Try {tmp_path}/jobs.args." in result.stderr


@pytest.mark.parametrize("rank", ["0", "3", ""])
@pytest.mark.parametrize("command", ["train", "check"])
def test_train_does_not_start_ranks_on_a_rank_and_check_says_so(job, monkeypatch, capsys, command, rank):
    monkeypatch.setenv("RANK", rank)
    assert cli.main([command, job]) == 2
    said = capsys.readouterr()
    assert said.out == "" and f"RANK ({rank}): " in said.err and "-m megarl.train" in said.err


def test_commands_end_where_they_should(job, monkeypatch, tmp_path):
    """Which module runs, on how many ranks, with which arguments; the modules themselves are tested with
    whole jobs."""
    calls = []

    def module(name, **functions):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**functions))

    module(
        "megarl.trainer.launch",
        launch=lambda config, *args, **kwargs: calls.append((config.run.save, *args, kwargs)) or 3,
    )
    module("megarl.trainer.__main__", train_job="the training")
    module("megarl.train", run_in_process=lambda config, argv: calls.append(config.placement.executor) or 4)
    module("megarl.evaluation.command", main=lambda argv: calls.append(argv) or 5)
    module("megarl.convert", main=lambda argv: calls.append(argv) or 6)
    save = str(tmp_path / "run")
    inline, held_out = (
        ["--executor", "inline", "--nproc-per-node", "1"],
        [job, "--eval-data", str(tmp_path / "train.jsonl")],
    )
    (tmp_path / "run").mkdir()
    commands = (
        ["train", job],
        ["train", job, *inline],
        ["eval", *held_out],
        ["convert", "--to", "x"],
    )
    assert [cli.main(argv) for argv in commands] == [3, 4, 5, 6]
    assert calls == [(save, [job], "the training", {"is_checked": False}), "inline", held_out, ["--to", "x"]]


def test_graph_prints_and_draws_the_flow_and_needs_config_json_alone(tmp_path, write_model, capsys):
    model = write_model(QWEN3)
    (model / "model.safetensors").unlink()
    job = [
        "--algorithm",
        "ppo",
        "--model",
        str(model),
        "--nproc-per-node",
        "3",
        "--actor-ranks",
        "0-1",
        "--critic-ranks",
        "2",
        "--rollout-ranks",
        "0-1",
    ]
    assert cli.main(["graph", *job, "--svg", str(tmp_path / "step.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in lines[1:-1]] == [
        ["rollout.generate", "0-1"],
        ["reward.score", "0-1"],
        ["actor.log_probs", "0-1"],
        ["critic.values", "2"],
        ["actor.advantages", "0-1"],
        ["critic.update", "2"],
        ["actor.update", "0-1"],
        ["rollout.sync", "0-1"],
    ]
    assert lines[-1].startswith("longest chain: rollout.generate -> ")
    texts = {element.text for element in ElementTree.parse(tmp_path / "step.svg").iter() if element.text}
    assert {"critic.values", "ranks 0-1", "ranks 2"} <= texts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "step.svg"]


def test_graph_draws_the_edge_of_asynchronous_rollouts(job, capsys):
    assert cli.main(["graph", job, "--staleness", "2"]) == 0
    assert "later steps: rollout.sync -> rollout.generate, staleness <= 2\n" in capsys.readouterr().out


def test_graph_draws_supervised_fine_tuning(job, capsys):
    assert cli.main(["graph", job, "--algorithm", "sft"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1:2] + line[3:] for line in lines[1:-1]] == [
        ["actor.receive_rows", "-", "tokens"],
        ["actor.update", "tokens", "weights:actor"],
    ]
    assert lines[-1][2:] == ["actor.receive_rows", "->", "actor.update"]


def test_graph_refuses(tmp_path, job, capsys):
    for flags, told in (
        (["--actor-ranks", "0-2"], "--actor-ranks (0-2): must be below"),
        (
            ["--svg", str(tmp_path / "no" / "a.svg")],
            f"--svg ({tmp_path}/no/a.svg): cannot be written: No such file",
        ),
    ):
        assert cli.main(["graph", job, *flags]) == 2
        result = capsys.readouterr()
        assert result.out == "" and told in result.err


def test_ctrl_c(tmp_path):
    """Reading an args file that never ends, then SIGINT: 130, and nothing printed."""
    pipe = tmp_path / "endless.args"
    os.mkfifo(pipe)
    # A shell's background job inherits an ignored SIGINT, and Python then never raises KeyboardInterrupt.
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from "
        "megarl.cli import main; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "check", f"@{pipe}"], stderr=subprocess.PIPE, text=True
    )
    try:
        deadline, writer = time.monotonic() + 30, None
        while writer is None and time.monotonic() < deadline:
            try:
                writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads yet
                time.sleep(0.02)
        time.sleep(0.5)  # until it waits: a signal just before read() is seen only when that returns
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        assert (process.returncode, stderr) == (130, "")
    finally:
        process.kill()
        process.wait()
        if writer is not None:
            os.close(writer)
