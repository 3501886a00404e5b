"""Implement the interface of an inference engine by vLLM in processes of its own.

vLLM runs the model by itself, and `step` receives what it reports. The process of the first rank talks to it.
A call is carried out between two steps of the engine (engine_core.py)."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from megarl.messages import decode, encode
from megarl.reshard.atlas import Atlas
from megarl.reshard.engine_atlas import engine_atlas
from megarl.rollout.backends import EngineSetup
from megarl.rollout.engine_arguments import engine_arguments
from megarl.rollout.engine_core import check_step
from megarl.rollout.engine_errors import EngineErrors, EngineFailed
from megarl.rollout.interface import InferenceEngine
from megarl.rollout.patience import Patience
from megarl.rollout.processes import UNIPROC, EngineHangs, EngineProcesses, starting_engine
from megarl.rollout.puller import Order, Outcome
from megarl.rollout.requests import Output, Request
from megarl.rollout.vllm_engine import VllmEngine

if TYPE_CHECKING:
    from vllm import LLM

T = TypeVar("T")
_EXTENSION = "megarl.rollout.extension.WorkerExtension"
_ANSWER_S = 10.0  # added to the time limit of the call itself
_REPORT_S = 0.01  # time that a step waits for a report
_REPORT_STEPS = 100  # such steps after which the engine reports the tokens of unfinished requests


def start_process(setup: EngineSetup, double_buffer: bool) -> InferenceEngine:
    """Start vLLM in processes of its own, which use the devices of the engine's ranks.

    Raises: ValueError for engine arguments that cannot work; EngineFailed if vLLM cannot start."""
    tp, errors = len(setup.ranks), EngineErrors()
    executor = "mp" if tp > 1 else UNIPROC
    with starting_engine(setup.ranks, "--rollout-tensor-parallel-size", errors.path) as LLM:
        on_cpu = not torch.cuda.is_available()
        arguments = engine_arguments(setup.config, setup.shape, on_cpu, setup.num_engines, executor)
        try:
            llm = LLM(**arguments, worker_extension_cls=_EXTENSION)
        except Exception as error:  # its cause is in the engine
            explained = errors.explained(error, dist.get_rank())
            if isinstance(explained, (EngineFailed, ValueError)):
                raise explained from None
            # an engine that is killed logs nothing
            raise EngineFailed(f"[rank {dist.get_rank()}] vLLM's engine did not start: {error}") from error
    return VllmProcesses(llm, setup, double_buffer, errors)


class VllmProcesses(VllmEngine):
    """vLLM in processes of its own. A call fails as soon as one of them has died or logged an error."""

    def __init__(self, llm: LLM, setup: EngineSetup, double_buffer: bool, errors: EngineErrors) -> None:
        self._double_buffer, self._errors, self._rank = double_buffer, errors, dist.get_rank()
        self.process = f"engine of rank {self._rank}"
        self._processes = EngineProcesses(
            llm, lambda pid, how: f"[rank {self._rank}] the process of vLLM's engine died ({how})"
        )
        self.patience, self._steps_to_report = Patience(), _REPORT_STEPS
        try:
            super().__init__(llm, setup)
        except BaseException:  # nobody else knows the processes
            self.shutdown()
            raise

    def _connect(self) -> None:
        """Tell vLLM's workers their ranks, and ask for the sizes and atlases (sharding specs) of their
        weights."""
        llm, ranks = self.llm, list(self._setup.ranks)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        llm.init_weight_transfer_engine({"init_info": {"ranks": ranks, "double_buffer": self._double_buffer}})
        self.tensors = {
            rank: {
                name: torch.empty(size, dtype=getattr(torch, dtype), device="meta")
                for name, (size, dtype) in weights.items()
            }
            for rank, weights in zip(ranks, llm.collective_rpc("megarl_weights"), strict=True)
        }
        if engine_atlas("vllm", self._setup.shape) is None:
            told = llm.collective_rpc("megarl_atlas")
            self.atlases = {rank: decode(data, Atlas) for rank, data in zip(ranks, told, strict=True)}

    def _core(self, method: str, *arguments: object):
        call = self.llm.llm_engine.engine_core.call_utility
        return self._ask(lambda: call(f"megarl_{method}", *arguments))

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests. The engine is paused meanwhile.

        Otherwise timing would decide which requests share a batch, and thus the last bits of their
        log-probs."""
        was_paused, add = self._is_paused, super().add
        if not was_paused:
            self.pause()
        self._explained(lambda: add(requests))
        if not was_paused:
            self.resume()

    def step(self) -> None:
        reports = self._reports
        with reports.not_empty:
            if not reports.queue:
                reports.not_empty.wait(_REPORT_S)
        self._collect()
        self._steps_to_report -= 1
        if self.patience.is_limited and self._steps_to_report <= 0 and not self._is_paused:
            self._steps_to_report = _REPORT_STEPS
            self._core("report")  # raises an error if the engine hangs

    @property
    def _reports(self) -> queue.Queue:
        return self.llm.llm_engine.engine_core.outputs_queue

    def _collect(self) -> None:
        """Take over all that the engine has reported."""
        try:
            while not self._reports.empty():
                self._take_step()
                self.patience.has_stepped = True
        except Exception as error:  # without a look at the processes if all is well, as there are many steps
            failure = error

            def fail() -> None:
                raise failure

            self._explained(fail)

    def _progress(self) -> list[Output]:
        self._collect()
        return super()._progress()

    def reported(self) -> list[Output]:
        with contextlib.suppress(Exception):  # the engine is gone; what it has reported counts
            self._collect()
        return super()._progress()

    def hold(self, step: int | None) -> None:
        check_step(step, self.num_steps)
        self._core("hold", step)

    def pause(self) -> None:
        # vLLM answers after the step under way, which may take long if the job ends with a hung engine anyway
        self._ask(super().pause, 0.0 if self.patience.is_limited else math.inf)
        self._collect()  # what vLLM has reported before it stood still

    def resume(self) -> None:
        self._ask(super().resume)

    def reset_cache(self) -> None:
        self._ask(super().reset_cache)

    def write_weights(self, copy: Callable[[], object]) -> None:
        raise TypeError("another process holds the weights: call pull_weights")

    def pull_weights(self, orders: Sequence[Order], timeout_s: float) -> None:
        if not self._double_buffer:  # the copies overwrite the weights in place
            self._stand_still()
            self.version = None
        self._ask(self.llm.start_weight_update)
        self._is_updating = True
        encoded = [{"order": encode(order)} for order in orders]
        self._ask(lambda: self.llm.update_weights({"update_info": encoded}), timeout_s)

    def wait_for_weights(self, timeout_s: float) -> list[Outcome]:
        wait = self.llm.collective_rpc
        outcomes = self._ask(lambda: wait("megarl_wait_for_weights", args=(timeout_s,)), timeout_s)
        return [Outcome(*outcome) for outcome in outcomes]

    def give_up_weights(self) -> None:
        if self._is_updating and not self._processes.have_died():
            self._is_updating = False
            self._ask(lambda: self.llm.collective_rpc("megarl_give_up_weights"))
            self._ask(self.llm.finish_weight_update)

    def release_kv_cache(self) -> bool:
        return False  # another rank of the engine may be sampling

    def restore_kv_cache(self) -> None:
        pass

    def check_alive(self) -> None:
        self._explained(lambda: None)

    def kill(self) -> None:
        self.version = None
        self._processes.kill()
        self._processes.shutdown()

    def shutdown(self) -> None:
        """End vLLM's processes."""
        self.version = None
        self._processes.shutdown()

    def _ask(self, call: Callable[[], object], timeout_s: float = 0.0) -> object:
        """Return the result of a call to vLLM's engine, or raise an error if it does not answer in time.

        Raises: EngineHangs if vLLM does not answer within timeout_s and the time that an answer may take.
        vLLM's own client would wait for ever."""
        answer: Future = Future()
        limit_s = timeout_s + (self.patience.limit_s if self.patience.is_limited else _ANSWER_S)

        def run() -> None:
            try:
                answer.set_result(call())
            except Exception as error:  # thread boundary
                answer.set_exception(error)

        def result() -> object:
            def poll(seconds: float) -> bool:
                return bool(wait([answer], seconds).done)

            is_there, waited_s = self.patience.wait(poll, limit_s)
            if not is_there:
                raise EngineHangs(f"[rank {self._rank}] vLLM's engine did not answer within {limit_s:.0f} s")
            if timeout_s == 0.0:  # a call is carried out between two steps of the engine
                self.patience.note_wait(waited_s)
            return answer.result()

        threading.Thread(target=run, name="ask_engine", daemon=True).start()
        return self._explained(result)

    def _explained(self, call: Callable[[], T]) -> T:
        """Return the result of a call to vLLM; its errors become those that the engine has logged.

        After the death of a process every call raises the same error."""
        try:
            return self._processes.call(call)
        except Exception as error:
            failure = error
        if self._processes.death is not None:
            self.version = None
        raise self._errors.explained(failure, self._rank)
