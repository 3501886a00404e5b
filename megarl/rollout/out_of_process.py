"""Run a vLLM engine in separate processes, on ranks that need not train.

    # on the first of the engine's ranks, not collective
    engine = OutOfProcessEngine(config, shape, ranks, rollout_ranks)
    engine.connect(atlases, parameters)
    engine.sync(version)                     # collective over sources and first ranks of engines
    engine.generate(prompts, keys, temperature=1.0)
    engine.shutdown()

vLLM starts an engine process and, with tensor parallelism, one process per rank of the engine. These
processes use the devices of the engine's ranks, while the ranks' own processes wait. They pull the weights
out of the memory that the trainers export (`reshard/sync.py`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from megarl.config.hf_config import ModelShape
from megarl.config.schema import TrainConfig
from megarl.messages import decode, encode
from megarl.runtime.abort import AbortableEngine
from megarl.reshard.atlas import Atlas
from megarl.reshard.destination import Arrival
from megarl.reshard.plan import ReshardPlan
from megarl.reshard.sync import Pull, publish_atlases, sync_plan
from megarl.reshard.vllm_atlas import TABLES
from megarl.rollout.engine import Engine, Response
from megarl.rollout.engine_arguments import engine_arguments
from megarl.rollout.engine_errors import EngineErrors
from megarl.rollout.processes import UNIPROC, EngineProcesses, starting_engine
from megarl.rollout.puller import Order

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

T = TypeVar("T")
_EXTENSION = "megarl.rollout.extension.WorkerExtension"
_ANSWER_S = 10.0  # added to the time limit of the call itself


class OutOfProcessEngine(Engine):
    def __init__(
        self,
        config: TrainConfig,
        shape: ModelShape,
        ranks: Sequence[int],
        rollout_ranks: Sequence[int],
        actor: str = "",
    ) -> None:
        """Start vLLM in processes of its own. Its weights are undefined until the first `sync`.

        Args:
            ranks: ranks of this engine; this process is the first.
            rollout_ranks: ranks of all engines, in consecutive blocks of tensor_parallel_size.
            actor: suffix of the actor that the engine samples for.
        Raises: ValueError for engine arguments that cannot work."""
        super().__init__(config, shape, actor)
        self.ranks, self.rollout_ranks, self.rank = tuple(ranks), tuple(rollout_ranks), dist.get_rank()
        self.process = f"engine of rank {self.rank}"
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._double_buffer = _double_buffer(config, self.device)
        executor = "mp" if self._tp > 1 else UNIPROC
        self._errors = EngineErrors()
        with starting_engine(self._tp, "--rollout-tensor-parallel-size", self._errors.path) as LLM:
            arguments = engine_arguments(
                config, shape, self.device == "cpu", len(self.rollout_ranks) // self._tp, executor
            )
            try:
                self.llm = LLM(**arguments, worker_extension_cls=_EXTENSION)
            except Exception as error:  # its cause is in the engine
                raise self._errors.explained(error, self.rank) from None
        AbortableEngine(self.llm.llm_engine)
        self.dtype: torch.dtype = self.llm.llm_engine.model_config.dtype
        self._plan: ReshardPlan | None = None
        self._is_updating = False
        self._processes = EngineProcesses(
            self.llm, lambda pid, how: f"[rank {self.rank}] the process of vLLM's engine died ({how})"
        )
        self.llm.init_weight_transfer_engine(
            {"init_info": {"ranks": list(self.ranks), "double_buffer": self._double_buffer}}
        )
        self.tensors = {
            rank: {
                name: torch.empty(size, dtype=getattr(torch, dtype), device="meta")
                for name, (size, dtype) in weights.items()
            }
            for rank, weights in zip(self.ranks, self.llm.collective_rpc("megarl_weights"), strict=True)
        }
        if shape.model_type not in TABLES:
            publish_atlases(
                {
                    rank: decode(data, Atlas)
                    for rank, data in zip(self.ranks, self.llm.collective_rpc("megarl_atlas"), strict=True)
                },
                actor,
            )

    def connect(self, sources: dict[int, Atlas], parameters: dict[str, torch.Tensor]) -> None:
        """Plan which weights come from which ranks in `sources`, for all later syncs.

        Ranks without an engine make a WeightSync from the same `sync_plan`."""
        self._plan, speakers = sync_plan(
            self.shape, sources, self.rollout_ranks, self._tp, self.options.reshard_timeout_s, self.actor
        )
        self._join(self._plan, speakers, parameters)

    def generate(self, *args, **kwargs) -> list[Response]:
        """Return one sampled response to each prompt, as `Engine.generate` does. Also raises EngineFailed and
        EngineDied."""
        generate = super().generate
        return self._explained(lambda: generate(*args, **kwargs))

    def _complete(self, prompts: list[dict], params: list[SamplingParams]) -> list[RequestOutput]:
        """Return vLLM's output of each prompt, in order; all requests are queued before the engine starts on
        the first.

        Otherwise timing would decide which requests share a batch, and thus the last bits of their log-probs.
        """
        self.llm.sleep(level=0, mode="keep")
        self.llm.enqueue(prompts, params, use_tqdm=False)
        self.llm.wake_up(tags=["scheduling"])
        return self.llm.wait_for_completion(use_tqdm=False)

    # Methods of a receiver of a weight sync.

    def begin(
        self,
        version: int,
        arrivals: dict[int, dict[int, Arrival]],
        pulls: dict[int, dict[int, Pull]],
        messages: Callable[[], object],
    ) -> None:
        if not self._double_buffer:
            self.version = None  # the sync overwrites the weights in place
        orders = [
            Order(arrivals[rank], pulls.get(rank, {}), self._plan and self._plan.copies_to(rank))
            for rank in self.ranks
        ]
        self._ask(self.llm.start_weight_update)
        self._is_updating = True
        self._ask(
            lambda: self.llm.update_weights({"update_info": [{"order": encode(order)} for order in orders]}),
            self.options.reshard_timeout_s,
        )
        self._plan = None

    def verify(self, timeout_s: float) -> str | None:
        outcomes = self._ask(
            lambda: self.llm.collective_rpc("megarl_wait_for_weights", args=(timeout_s,)), timeout_s
        )
        self.bytes_per_sync = sum(num_bytes for _, num_bytes in outcomes)
        return next((problem for problem, _ in outcomes if problem is not None), None)

    def commit(self, version: int) -> None:
        self._is_updating = False
        self._ask(lambda: self._commit(version))

    def give_up(self) -> None:
        """Abandon the sync in progress. With two buffers the old version stays usable."""
        if self._is_updating and not self._processes.have_died():
            self._is_updating = False
            self._ask(lambda: self.llm.collective_rpc("megarl_give_up_weights"))
            self._ask(self.llm.finish_weight_update)

    def shutdown(self) -> None:
        """End vLLM's processes."""
        self.version = None
        self._processes.shutdown()

    def _ask(self, call: Callable[[], object], timeout_s: float = 0.0) -> object:
        """Return the result of a call to vLLM.

        Raises: TimeoutError if vLLM does not answer within timeout_s + _ANSWER_S. vLLM's own client would
        wait for ever."""
        answer: Future = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except Exception as error:  # thread boundary
                answer.set_exception(error)

        def result() -> object:
            try:
                return answer.result(timeout_s + _ANSWER_S)
            except TimeoutError:
                if answer.done():
                    raise
                raise TimeoutError(
                    f"[rank {self.rank}] vLLM's engine did not answer within {timeout_s + _ANSWER_S:.0f} s"
                ) from None

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
        raise self._errors.explained(failure, self.rank)


def _double_buffer(config: TrainConfig, device: str) -> bool:
    eager = config.rollout.enforce_eager is True or (config.rollout.enforce_eager is None and device == "cpu")
    if config.reshard.reshard_double_buffer and not eager:
        raise ValueError(
            "--reshard-double-buffer: CUDA graphs and compiled code keep the addresses of the "
            "weights that they were made "
            "with, so the buffers cannot be switched. Leave it out, or add --rollout-enforce-eager."
        )
    return (
        device == "cpu" and eager
        if config.reshard.reshard_double_buffer is None
        else config.reshard.reshard_double_buffer
    )
