"""Ranks of one engine agree on its steps between calls; see test_engine_steps.py.

python run_engine_steps.py FOLDER RANK"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch.distributed as dist

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.runtime.hosting import step_until
from megarl.workers.engine_steps import EngineSteps
from tests.workers.test_engine_steps import CountedEngine


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    report = []

    hook, engine = EngineSteps(dist.group.WORLD), CountedEngine(4)
    hook.add(engine)
    assert hook.agree(rank == 1), "a command that one rank has seen"
    assert not hook.agree(False) and hook.step()

    other = CountedEngine(3, is_held=rank == 1)  # as far as one rank knows
    hook.add(other)
    assert not hook.agree(False) and hook.step()
    assert (engine.num_steps, other.num_steps) == (2, 0)
    engine.held = rank == 0
    assert hook.agree(False), "each engine is held on one rank"
    engine.held = other.held = False
    assert not hook.agree(False) and hook.step()
    assert (engine.num_steps, other.num_steps) == (3, 1)

    rng = random.Random(rank)  # ranks are not equally fast, and see a command at different times
    hook, engine = EngineSteps(dist.group.WORLD), CountedEngine(10**6)
    hook.add(engine)
    for _ in range(20):
        end = time.monotonic() + 0.01 * rng.random()
        step_until(hook, lambda end=end: time.monotonic() > end, "step 1")
        report.append(engine.num_steps)
        dist.barrier()
    assert report[-1] > 20

    engine.aborted_at = engine.num_steps + 3  # AbortableEngine aborts before the same step on all ranks
    step_until(hook, lambda: False, "step 2")
    report.append(engine.num_steps)
    assert hook.agree(False) and engine.num_steps == engine.aborted_at
    (folder / f"report_{rank}").write_text(str(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
