"""Ranks of one engine abort before the same step, whenever each of them hears of it. `pytest
tests/runtime/test_abort.py`"""

import random
import threading
import time

import pytest

from megarl.runtime.abort import AbortableEngine, AbortToken, Aborted

STEPS = 100_000
"""More than a loaded machine makes before it runs the thread that asks."""


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
def test_all_ranks_abort_before_the_same_step(seed):
    draw, size, board = random.Random(seed), 3, Board()
    barrier, tokens = threading.Barrier(size), [AbortToken() for _ in range(size)]
    engines = [Engine(barrier, 10 * seed + rank) for rank in range(size)]
    left = {}

    def generate(rank: int) -> None:
        engine = engines[rank]
        AbortableEngine(engine, "a", rank, size, tokens[rank])
        try:
            for _ in range(STEPS):
                engine.step()
        except Aborted:
            left[rank] = engine.begun

    def ask() -> None:
        """As the driver does: every rank hears of it at another time, and later that all have."""
        time.sleep(draw.random() * 0.02)
        for rank in draw.sample(range(size), size):
            tokens[rank].store, tokens[rank].is_requested = board, True
            time.sleep(draw.random() * 0.003)
        for rank in draw.sample(range(size), size):
            tokens[rank].all_ranks_know = True
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


def test_an_engine_alone_aborts_at_once():
    engine, token = Engine(threading.Barrier(1), 0), AbortToken()
    AbortableEngine(engine, token=token)
    engine.step()
    token.is_requested = True
    with pytest.raises(Aborted):
        engine.step()
    assert engine.begun == 1
