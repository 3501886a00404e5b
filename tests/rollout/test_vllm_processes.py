"""How long calls to vLLM in processes of its own may take, with a client that answers when the test says so.

pytest tests/rollout/test_vllm_processes.py"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from megarl.rollout import patience, vllm_processes
from megarl.rollout.engine_errors import EngineFailed
from megarl.rollout.patience import Patience
from megarl.rollout.processes import EngineHangs, EngineProcesses
from megarl.rollout.vllm_engine import VllmEngine
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


def test_an_engine_that_is_killed_while_it_starts_has_failed(monkeypatch):
    """vLLM raises a plain RuntimeError then, and its log has no error."""

    def start(**arguments) -> None:
        raise RuntimeError("Engine core initialization failed. Failed core proc(s): {'EngineCore': -9}")

    monkeypatch.setattr(vllm_processes, "starting_engine", lambda *_: contextlib.nullcontext(start))
    monkeypatch.setattr(vllm_processes, "engine_arguments", lambda *_: {})
    monkeypatch.setattr(vllm_processes.dist, "get_rank", lambda: 1)
    setup = SimpleNamespace(ranks=(1,), config=None, shape=None, num_engines=2)
    with pytest.raises(EngineFailed, match=r"^\[rank 1\] vLLM's engine did not start: Engine core init"):
        vllm_processes.start_process(setup, double_buffer=False)


PARENT = """
import subprocess
child = subprocess.Popen(['sleep', '300'])
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.timeout(60)
def test_processes_that_split_a_model_are_killed_with_their_engine():
    """They are children of the engine's process, and one that hangs would not notice its end."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    ended = os.pidfd_open(int(parent.stdout.readline()))
    parent.sentinel = os.pidfd_open(parent.pid)
    try:
        manager = SimpleNamespace(processes=[parent])
        client = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
        llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client))
        EngineProcesses(llm, lambda pid, how: how).kill()
        assert select.select([ended], [], [], 30)[0] and parent.wait(30) == -signal.SIGKILL
    finally:
        parent.kill()
        os.close(ended)
        os.close(parent.sentinel)


def test_the_engine_core_forgets_a_request_whose_stop_string_came_outside_a_step():
    forgotten, engine = [], VllmEngine.__new__(VllmEngine)
    done = SimpleNamespace(request_outputs=[], reqs_to_abort=["3-ab"])
    engine.llm = SimpleNamespace(
        llm_engine=SimpleNamespace(
            output_processor=SimpleNamespace(process_outputs=lambda *_, **__: done),
            engine_core=SimpleNamespace(abort_requests=forgotten.extend),
        )
    )
    engine._receive(SimpleNamespace(outputs=[], weight_version="1"))
    assert forgotten == ["3-ab"]
