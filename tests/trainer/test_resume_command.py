"""The command that resumes a job, for every state of its run folder, read back by a shell and by the checks.
`pytest tests/trainer/test_resume_command.py`"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.trainer.resume_command import how_to_resume, torchrun_command, with_flags

NEEDED = "--algorithm grpo --model m --train-data d.jsonl --train-iters 9".split()


def advice(*flags: str, has_begun: bool = True) -> tuple[str, list[str]]:
    """Return the first line, and the words after `megarl train` as a shell reads them."""
    argv = [*NEEDED, *flags]
    head, command = how_to_resume(load_config(argv, REGISTRY), ["megarl", "train"], argv, has_begun).split(
        "\n"
    )
    assert shlex.split(command)[:2] == ["megarl", "train"]
    return head, shlex.split(command)[2:]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "resolved.args").touch()
    return folder


def checkpoint(run: Path, step: int) -> None:
    (run / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)


def test_a_job_goes_on_from_the_newest_checkpoint_of_its_own_folder(run):
    checkpoint(run, 10)
    checkpoint(run, 20)
    for load in ((), ("--load", "elsewhere"), ("--load=elsewhere",), ("--load", "a run")):
        head, words = advice("--save", "a run", *load, "--lr", "1")
        assert head == "To go on after step 20:"
        assert words == [*NEEDED, "--save", "a run", "--lr", "1", "--load", "a run"]
        assert load_config(words, REGISTRY).checkpoint.load == "a run"


def test_without_a_checkpoint_it_starts_anew(run):
    head, words = advice("--save", "a run")
    assert head == "There is no checkpoint yet (--save-interval writes them). To start anew:"
    assert words == [*NEEDED, "--save", "a run", "--load", "a run"]
    head, words = advice("--save", "a run", "--load", "elsewhere")
    assert head.endswith(" To start again from elsewhere:")  # into a free folder
    assert words == [*NEEDED, "--load", "elsewhere", "--save", "a run-2"]
    head, words = advice("--save", "new", "--load", "elsewhere")
    assert words == [*NEEDED, "--save", "new", "--load", "elsewhere"]
    head, words = advice("--save", "a run", "--optimizer-cpu-offload")
    assert head.startswith("The state of --optimizer-cpu-offload cannot be saved")
    assert words == [*NEEDED, "--optimizer-cpu-offload", "--save", "a run-2"]


def test_before_the_first_step_it_is_the_same_command(run):
    """An older checkpoint that --load names stays the one that is loaded."""
    checkpoint(run, 10)
    checkpoint(run, 20)
    flags = ("--save", "a run", "--load", "a run/checkpoints/step_000010")
    assert advice(*flags, has_begun=False) == ("No step has begun. To start again:", [*NEEDED, *flags])


def test_flags_are_replaced_wherever_they_stand():
    argv = ["--load", "a", "b", "@x.args", "--load=c", "--stop", "-1", "--lr", "-1"]
    assert with_flags(argv, {"load": "n"}) == ["@x.args", "--stop", "-1", "--lr", "-1", "--load", "n"]
    for odd in ("@folder", "--folder", "none"):
        assert with_flags([], {"load": odd}) == [f"--load={odd}"]


def test_the_flags_of_torchrun_are_kept(tmp_path):
    """Rank 0 starts the driver, and torchrun has started rank 0."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    child = 'import sys; from megarl.trainer.resume_command import *; '\n"
        "    child += 'print(shlex.join(torchrun_command(sys.argv[1:])))'\n"
        "    subprocess.run([sys.executable, '-c', child, *sys.argv[1:]], check=True)\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["@a b.args", "--save", "run"]
    done = subprocess.run([*launcher, script, *arguments], capture_output=True, text=True, timeout=120)
    assert shlex.split(done.stdout) == [*launcher, str(script)], done.stderr


def test_a_program_between_torchrun_and_the_rank_is_started_again_with_it(tmp_path):
    """As tools/nsys_train.sh starts ranks: the profiler's own command line would start no ranks."""
    (tmp_path / "profile.sh").write_text('"$@"\nexit $?\n')
    child = "import shlex, sys; from megarl.trainer.resume_command import torchrun_command; "
    child += "print(shlex.join(torchrun_command(sys.argv[1:])))"
    rank = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True)"
    wrapper = ["bash", str(tmp_path / "profile.sh"), sys.executable, "-c", rank, child]
    agent = (
        "import os, subprocess, sys\n"
        "env = os.environ | {'RANK': '0', 'TORCHELASTIC_RUN_ID': 'some'}\n"
        "subprocess.run(sys.argv[1:], env=env, check=True)\n"
    )
    launcher = [sys.executable, "-c", agent, *wrapper]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "TORCHELASTIC_RUN_ID")}
    command = [*launcher, "--save", "run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert shlex.split(done.stdout) == launcher, done.stderr


def test_without_torchrun_above_it_the_command_is_a_plain_one(monkeypatch):
    monkeypatch.setenv("MEGARL_WORLD_SIZE", "4")
    assert os.environ["MEGARL_WORLD_SIZE"] == "4"
    assert torchrun_command(["--no-such", "flag"]) == "torchrun --nproc-per-node 4 -m megarl.train".split()
