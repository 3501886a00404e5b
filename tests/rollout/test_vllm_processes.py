"""How long calls to vLLM in processes of its own may take, with a client that answers when the test says so.

pytest tests/rollout/test_vllm_processes.py"""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest

from megarl.rollout import patience, vllm_processes
from megarl.rollout.patience import Patience
from megarl.rollout.processes import EngineHangs
from megarl.rollout.vllm_processes import VllmProcesses


class Client:
    """The methods of vLLM's LLM that wait for its engine.

    Args:
        answer_s: seconds after which the engine answers by itself."""

    def __init__(self, answer_s: float) -> None:
        self.answers, self._answer_s = threading.Event(), answer_s
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(outputs_queue=queue.Queue()), step=self._take
        )

    def sleep(self, level: int, mode: str) -> None:
        self.answers.wait(self._answer_s)

    def wake_up(self, tags: list[str]) -> None:
        self.answers.wait(self._answer_s)

    def reset_prefix_cache(self) -> bool:
        self.answers.wait(self._answer_s)
        return True

    def _take(self) -> list:
        self.llm_engine.engine_core.outputs_queue.get_nowait()
        return []


def engine_of(client: Client, is_limited: bool) -> VllmProcesses:
    engine = VllmProcesses.__new__(VllmProcesses)
    engine.llm, engine._rank, engine.patience = client, 0, Patience(is_limited)
    engine._processes = SimpleNamespace(call=lambda function: function(), death=None)
    engine._errors = SimpleNamespace(explained=lambda error, rank: error)
    return engine


@pytest.mark.parametrize("method", ["pause", "resume", "reset_cache"])
def test_an_engine_that_hangs_is_noticed_by_every_call(method, monkeypatch):
    monkeypatch.setattr(patience, "_SHORTEST_S", 0.2)
    monkeypatch.setattr(patience, "_FIRST_STEP_S", 0.02)
    client = Client(answer_s=20.0)
    with pytest.raises(EngineHangs, match=r"^\[rank 0\] vLLM's engine did not answer within "):
        getattr(engine_of(client, is_limited=True), method)()
    client.answers.set()


def test_a_pause_waits_for_a_long_step_where_the_job_ends_with_its_engine(monkeypatch):
    monkeypatch.setattr(vllm_processes, "_ANSWER_S", 0.05)
    engine = engine_of(Client(answer_s=0.3), is_limited=False)
    engine.pause()
    assert engine._is_paused


def test_only_an_engine_that_has_ended_a_step_has_to_answer_in_ten_seconds():
    client = Client(answer_s=0.0)
    engine = engine_of(client, is_limited=True)
    engine.patience.wait = lambda poll, timeout_s: (poll(60.0), 0.001)
    engine._ask(lambda: None)
    engine.pause()
    assert engine.patience.limit_s == 60.0
    client.llm_engine.engine_core.outputs_queue.put("tokens")
    engine.pause()
    assert engine.patience.limit_s == 10.0
