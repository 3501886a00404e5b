"""Implement the interface of an inference engine by vLLM, in this process or in processes of its own.

In this process the ranks of the world take the engine's steps together. In processes of its own vLLM runs the
model by itself, and `step` waits for what it reports. The process of the first rank talks to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from megarl.batch import expert_dtype
from megarl.config.hf_config import ModelShape
from megarl.config.roles import tells_experts
from megarl.messages import decode, encode
from megarl.reshard.atlas import Atlas
from megarl.reshard.engine_atlas import engine_atlas
from megarl.rollout.backends import EngineSetup
from megarl.rollout.draws import draw_arguments
from megarl.rollout.engine_arguments import engine_arguments
from megarl.rollout.engine_errors import EngineErrors
from megarl.rollout.environment import prepare_environment, sweep_shared_memory, undisturbed
from megarl.rollout.kv_memory import KVCacheMemory
from megarl.rollout.interface import InferenceEngine, Output, Request, Running
from megarl.rollout.offer import Offer
from megarl.rollout.plugin import register
from megarl.rollout.processes import UNIPROC, EngineProcesses, starting_engine
from megarl.rollout.puller import Order, Outcome

if TYPE_CHECKING:
    import numpy as np
    from vllm import LLM, SamplingParams

T = TypeVar("T")
_EXTENSION = "megarl.rollout.extension.WorkerExtension"
_ANSWER_S = 10.0  # added to the time limit of the call itself


def start_in_process(setup: EngineSetup, offer: Offer) -> InferenceEngine:
    """Start vLLM in this process, on all ranks of the world. Collective over the world.

    Raises: ValueError for engine arguments that cannot work."""
    prepare_environment()
    _be_launched_externally()
    arguments = engine_arguments(
        setup.config, setup.shape, on_cpu=not torch.cuda.is_available(), num_engines=setup.num_engines
    )
    if int(os.environ["LOCAL_RANK"]) == 0:
        sweep_shared_memory()
    with undisturbed():
        from vllm import LLM

        from megarl.rollout.weight_transfer import offering

        register()
        with offering(offer):
            llm = LLM(**arguments)
    return VllmEngine(llm, setup)


def start_process(setup: EngineSetup, double_buffer: bool) -> InferenceEngine:
    """Start vLLM in processes of its own, which use the devices of the engine's ranks.

    Raises: ValueError for engine arguments that cannot work; EngineFailed if vLLM cannot start."""
    tp, errors = len(setup.ranks), EngineErrors()
    executor = "mp" if tp > 1 else UNIPROC
    with starting_engine(tp, "--rollout-tensor-parallel-size", errors.path) as LLM:
        on_cpu = not torch.cuda.is_available()
        arguments = engine_arguments(setup.config, setup.shape, on_cpu, setup.num_engines, executor)
        try:
            llm = LLM(**arguments, worker_extension_cls=_EXTENSION)
        except Exception as error:  # its cause is in the engine
            raise errors.explained(error, dist.get_rank()) from None
    return VllmProcesses(llm, setup, double_buffer, errors)


class VllmEngine(InferenceEngine):
    """vLLM in this process. Its weights are overwritten in place."""

    def __init__(self, llm: LLM, setup: EngineSetup) -> None:
        self.llm, self._setup = llm, setup
        self._tells_experts = tells_experts(setup.config, setup.shape)
        self._is_updating = self._is_paused = False
        self._requests: dict[str, Request] = {}  # vLLM's external id -> unfinished request
        self._finished: list[Output] = []
        self.kv_cache = KVCacheMemory(llm, self._take_step)
        self.dtype = llm.llm_engine.model_config.dtype
        self.tensors, self.atlases = {}, {}
        self._connect()
        if self.device != "cpu" and not llm.llm_engine.vllm_config.use_v2_model_runner:
            self.cannot_continue = (
                "vLLM runs this model by its Model Runner V1, which on a GPU draws from a generator per "
                "request. Only Model Runner V2 draws by position."
            )

    def _connect(self) -> None:
        """Take over this rank's live weights and their atlas from vLLM's worker."""
        rank = dist.get_rank()

        def expose(atlas: Atlas, tensors: dict[str, torch.Tensor]) -> None:
            self.atlases[rank], self.tensors[rank] = atlas, tensors

        self.llm.init_weight_transfer_engine({"init_info": {"expose": expose}})
        self.device = next(iter(self.tensors[rank].values())).device.type

    # ------------------------------------------------------------------ requests

    def add(self, requests: Sequence[Request]) -> None:
        params = [self._sampling_params(request) for request in requests]
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        ids = self.llm.enqueue(prompts, params, use_tqdm=False)
        # vLLM returns its internal id: the external id, a dash and random characters.
        self._requests |= {
            internal.split("-")[0]: request for internal, request in zip(ids, requests, strict=True)
        }

    def _sampling_params(self, request: Request) -> SamplingParams:
        from vllm import SamplingParams

        sampling = self._setup.config.sampling
        stop = list(sampling.stop)
        return SamplingParams(
            **draw_arguments(request.key, self.device == "cpu"),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            max_tokens=request.max_tokens,
            stop=stop or None,
            include_stop_str_in_output=bool(stop),
            detokenize=bool(stop),
            stop_token_ids=list(sampling.stop_token_ids) or None,
            logprobs=0,
            flat_logprobs=True,
            skip_clone=True,
        )

    def has_unfinished(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def step(self) -> None:
        if not self._is_paused:
            self._take_step()

    def release_kv_cache(self) -> bool:
        self.kv_cache.release()
        return True

    def restore_kv_cache(self) -> None:
        self.kv_cache.restore()

    def _take_step(self) -> None:
        for output in self.llm.llm_engine.step():
            if output.finished:
                request, completion = self._requests.pop(output.request_id), output.outputs[0]
                self._finished.append(
                    self._output(
                        request,
                        list(completion.token_ids),
                        completion.logprobs.logprobs,
                        completion.finish_reason,
                        completion.routed_experts,
                    )
                )

    def _output(
        self,
        request: Request,
        token_ids: list[int],
        log_probs: list[float],
        finish_reason: str | None,
        rows: np.ndarray | None,
    ) -> Output:
        if len(token_ids) != len(log_probs):
            raise RuntimeError(f"vLLM returned {len(token_ids)} tokens with {len(log_probs)} log-probs")
        experts = None
        if self._tells_experts and finish_reason is not None:
            experts = routed_experts(rows, len(request.prompt) + len(token_ids), self._setup.shape)
        # `commit` refuses to change the weights of unfinished requests: one version sampled all tokens.
        versions = [self.version] * len(token_ids)
        return Output(request.id, token_ids, log_probs, versions, finish_reason, experts)

    def take(self) -> list[Output]:
        finished, self._finished = self._finished, []
        return finished

    def progress(self) -> list[Output]:
        states = self.llm.llm_engine.output_processor.request_states.values()
        return [
            self._output(
                self._requests[state.external_req_id],
                list(state.detokenizer.output_token_ids),
                list(state.logprobs_processor.logprobs.logprobs),
                None,
                None,
            )
            for state in states
        ]

    def abort(self, ids: Sequence[str]) -> None:
        theirs = [number for number, request in self._requests.items() if request.id in ids]
        self.llm.llm_engine.abort_request(theirs)
        for number in theirs:
            del self._requests[number]

    def pause(self) -> None:
        self.llm.sleep(level=0, mode="keep")
        self._is_paused = True

    def resume(self) -> None:
        self.llm.wake_up(tags=["scheduling"])
        self._is_paused = False

    def reset_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be cleared: requests are still running")

    # ------------------------------------------------------------------ weights

    def write_weights(self, copy: Callable[[], object]) -> None:
        self.version = None
        self.llm.start_weight_update()
        self._is_updating = True
        self.llm.update_weights({"update_info": {"copy": copy}})

    def pull_weights(self, orders: Sequence[Order], timeout_s: float) -> None:
        raise TypeError("this process holds the weights: call write_weights")

    def wait_for_weights(self, timeout_s: float) -> list[Outcome]:
        raise TypeError("this process holds the weights: call write_weights")

    def commit(self, version: int, running: Running = "refuse") -> None:
        if running != "refuse":
            raise RuntimeError(
                f"vLLM cannot {running} requests over a change of weights yet: its outputs do not say "
                "which version sampled which token"
            )
        self._is_updating, self.version = False, None
        self.llm.finish_weight_update(str(version))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                f"the prefix cache could not be cleared for version {version}: requests are still running"
            )
        self.version = version

    def give_up_weights(self) -> None:
        if self._is_updating:
            self._is_updating = False
            self.llm.finish_weight_update()

    def shutdown(self) -> None:
        """Stop vLLM, which destroys torch's default process group with its own."""
        self.version = None
        self.llm.llm_engine.engine_core.shutdown()


class VllmProcesses(VllmEngine):
    """vLLM in processes of its own. A call fails as soon as one of them has died or logged an error."""

    def __init__(self, llm: LLM, setup: EngineSetup, double_buffer: bool, errors: EngineErrors) -> None:
        self._double_buffer, self._errors, self._rank = double_buffer, errors, dist.get_rank()
        self.process = f"engine of rank {self._rank}"
        self._processes = EngineProcesses(
            llm, lambda pid, how: f"[rank {self._rank}] the process of vLLM's engine died ({how})"
        )
        super().__init__(llm, setup)

    def _connect(self) -> None:
        """Tell vLLM's workers their ranks, and ask for the sizes and atlases of their weights."""
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
        try:
            super().step()
        except Exception as error:  # without a look at the processes if all is well, as there are many steps
            failure = error

            def fail() -> None:
                raise failure

            self._explained(fail)

    def pause(self) -> None:
        self._explained(super().pause)

    def resume(self) -> None:
        self._explained(super().resume)

    def write_weights(self, copy: Callable[[], object]) -> None:
        raise TypeError("another process holds the weights: call pull_weights")

    def pull_weights(self, orders: Sequence[Order], timeout_s: float) -> None:
        if not self._double_buffer:
            self.version = None  # the copies overwrite the weights in place
        self._ask(self.llm.start_weight_update)
        self._is_updating = True
        encoded = [{"order": encode(order)} for order in orders]
        self._ask(lambda: self.llm.update_weights({"update_info": encoded}), timeout_s)

    def wait_for_weights(self, timeout_s: float) -> list[Outcome]:
        wait = self.llm.collective_rpc
        outcomes = self._ask(lambda: wait("megarl_wait_for_weights", args=(timeout_s,)), timeout_s)
        return [Outcome(*outcome) for outcome in outcomes]

    def commit(self, version: int, running: Running = "refuse") -> None:
        commit = super().commit
        self._ask(lambda: commit(version, running))

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
                    f"[rank {self._rank}] vLLM's engine did not answer within {timeout_s + _ANSWER_S:.0f} s"
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
        raise self._errors.explained(failure, self._rank)


def routed_experts(rows: np.ndarray | None, num_tokens: int, shape: ModelShape) -> torch.Tensor:
    """Return the experts that vLLM chose for each token of one sample, as `Output.experts` holds them.

    The last token was sampled but not fed to the model, so vLLM has no row for it. The row before stands in,
    because nothing is predicted from the last token.

    Returns: [tokens, layers, topk] uint8 or int16. Layers without experts hold arbitrary values.
    Raises: RuntimeError if rows are missing, for example because the engine does not return experts."""
    wanted = (num_tokens - 1, shape.num_layers, shape.moe_router_topk)
    if rows is None or rows.shape != wanted:
        raise RuntimeError(
            "--moe-routing-replay engine: vLLM returned experts of "
            f"{'no token' if rows is None else rows.shape}, not of {wanted} "
            "(tokens, layers, experts per token)"
        )
    experts = torch.from_numpy(rows.astype("int32")).to(expert_dtype(shape.num_moe_experts))
    return torch.cat([experts, experts[-1:]])


def _be_launched_externally() -> None:
    """Set the environment variables of torchrun that vLLM's external launcher reads, unless they are set.

    A single process that was started by hand has none."""
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
