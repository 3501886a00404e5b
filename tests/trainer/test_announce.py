"""What a job says before its first step. `pytest tests/trainer/test_announce.py`"""

from __future__ import annotations

import subprocess
import sys
import time

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.files.checkpoints import write_job
from megarl.futures import Future
from megarl.trainer.announce import reminding, starting_text, wait_for_setups

NEEDED = "--model m --train-data d.jsonl --train-iters 9 --save run".split()


def text(*flags: str, world_size: int = 2) -> str:
    return starting_text(load_config([*NEEDED, *flags], REGISTRY), world_size)


def test_the_first_line_says_what_starts():
    libraries = "PyTorch, Megatron-Core and vLLM"
    assert text("--algorithm", "grpo") == f"starting 2 ranks: each imports {libraries} first"
    assert text("--algorithm", "grpo", world_size=1) == f"starting 1 rank: each imports {libraries} first"
    other = text("--algorithm", "grpo", "--rollout-backend", "transformers")
    assert other == "starting 2 ranks: each imports PyTorch, Megatron-Core and transformers first"
    assert text("--algorithm", "sft").endswith(": each imports PyTorch and Megatron-Core first")
    inline = text("--algorithm", "grpo", "--executor", "inline", world_size=1)
    assert inline == f"starting with --executor inline: this process imports {libraries} first"


def test_with_load_it_says_after_which_step(tmp_path):
    where = tmp_path / "a" / "checkpoints" / "step_000007"
    where.mkdir(parents=True)
    empty = {"roles": {}, "models": {}, "actors": {}, "random_states": [], "metrics": {}}
    write_job(where, {"step": 7, **empty})
    line = text("--algorithm", "grpo", "--load", str(tmp_path / "a"))
    assert line.startswith(f"starting 2 ranks, to continue after step 7 ({where}): each imports ")
    assert text("--algorithm", "grpo", "--load", str(tmp_path / "none")).startswith("starting 2 ranks: ")


def test_it_needs_no_torch():
    """Nor does what the driver imports before it says the line."""
    code = "import sys, megarl.trainer.launch, megarl.trainer.announce; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


class Done(Future[None]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def result(self) -> list[None]:
        return [None]


def test_a_line_for_every_role():
    lines: list[str] = []
    roles = ("actor", "critic_2", "rollout", "reward")
    wait_for_setups({role: Done(0.25 + number) for number, role in enumerate(roles)}, lines.append)
    assert lines == [
        "starting: the model of actor is ready (0.2 s)",
        "starting: the model of critic_2 is ready (1.2 s)",
        "starting: the engine of rollout is ready (2.2 s)",
        "starting: reward is ready (3.2 s)",
    ]


def test_a_long_wait_says_how_long_it_has_been():
    lines: list[str] = []
    with reminding(lines.append, "evaluating", every_s=0.05):
        deadline = time.monotonic() + 10
        while len(lines) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    count = len(lines)
    assert lines[0] == "evaluating" and {*lines[1:]} == {"evaluating: 0:00 so far"}
    time.sleep(0.2)
    assert len(lines) == count
