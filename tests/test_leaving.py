"""Ranks of one engine leave it before the same step, whenever each of them hears of it. `pytest
tests/test_leaving.py`"""

import random
import threading
import time

import pytest

from megarl.leaving import LeavableEngine, Leaving, Left

STEPS = 60


class Engine:
    """A step is a collective: it begins when all ranks are there."""

    def __init__(self, barrier: threading.Barrier, seed: int):
        self.barrier, self.random, self.begun = barrier, random.Random(seed), 0

    def step(self):
        self.begun += 1
        self.barrier.wait(5)
        time.sleep(self.random.random() * 1e-3)


class Board(dict):
    def set(self, key, value):
        self[key] = value.encode()

    get = dict.__getitem__

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_leave_before_the_same_step(seed):
    draw, size, board = random.Random(seed), 3, Board()
    barrier, leavings = threading.Barrier(size), [Leaving() for _ in range(size)]
    engines = [Engine(barrier, 10 * seed + rank) for rank in range(size)]
    left = {}

    def generate(rank: int) -> None:
        engine = engines[rank]
        LeavableEngine(engine, "a", rank, size, leavings[rank])
        try:
            for _ in range(STEPS):
                engine.step()
        except Left:
            left[rank] = engine.begun

    def ask() -> None:
        """As the driver does: every rank hears of it at another time, and later that all have."""
        time.sleep(draw.random() * 0.02)
        for rank in draw.sample(range(size), size):
            leavings[rank].board, leavings[rank].is_asked = board, True
            time.sleep(draw.random() * 0.003)
        for rank in draw.sample(range(size), size):
            leavings[rank].are_all_asked = True
            time.sleep(draw.random() * 0.003)

    threads = [threading.Thread(target=generate, args=(rank,)) for rank in range(size)] + [
        threading.Thread(target=ask)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(left) == size and len(set(left.values())) == 1, left
    assert left[0] < STEPS


def test_an_engine_alone_leaves_at_once():
    engine, leaving = Engine(threading.Barrier(1), 0), Leaving()
    LeavableEngine(engine, leaving=leaving)
    engine.step()
    leaving.is_asked = True
    with pytest.raises(Left):
        engine.step()
    assert engine.begun == 1
