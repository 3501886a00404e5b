"""Implement the interface of an inference engine by vLLM in this process.

The ranks of the world take the engine's steps together. vllm_processes.py runs vLLM in processes of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.batch import expert_dtype
from megarl.config.hf_config import ModelShape
from megarl.config.roles import tells_experts
from megarl.reshard.atlas import Atlas
from megarl.rollout.backends import EngineSetup
from megarl.rollout.draws import draw_arguments
from megarl.rollout.engine_arguments import engine_arguments
from megarl.rollout.engine_core import check_step
from megarl.rollout.engine_memory import sweep_shared_memory
from megarl.rollout.environment import prepare_environment, undisturbed
from megarl.rollout.kv_memory import KVCacheMemory
from megarl.rollout.interface import InferenceEngine
from megarl.rollout.offer import Offer
from megarl.rollout.plugin import register
from megarl.rollout.puller import Order, Outcome
from megarl.rollout.requests import Output, Request, Running

if TYPE_CHECKING:
    import numpy as np
    from vllm import LLM, SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreOutputs


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


class VllmEngine(InferenceEngine):
    """vLLM in this process. Its weights are overwritten in place."""

    def __init__(self, llm: LLM, setup: EngineSetup) -> None:
        self.llm, self._setup = llm, setup
        self._tells_experts = tells_experts(setup.config, setup.shape)
        self._is_updating = self._is_paused = False
        self._is_still = False  # whether the engine is paused until a version is committed
        self._held_at: int | None = None
        self._salt: str | None = None  # keeps new requests from prefixes that earlier weights computed
        self._num_commits = 0
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
        """Take over this rank's live weights and their atlas (sharding spec) from vLLM's worker."""
        rank = dist.get_rank()

        def expose(atlas: Atlas, tensors: dict[str, torch.Tensor]) -> None:
            self.atlases[rank], self.tensors[rank] = atlas, tensors

        self.llm.init_weight_transfer_engine({"init_info": {"expose": expose}})
        self.llm.llm_engine.engine_core.engine_core.megarl_deliver = self._receive
        self.device = next(iter(self.tensors[rank].values())).device.type

    def _core(self, method: str, *arguments: object):
        """Return the result of a method of engine_core.py, called between two engine steps."""
        return getattr(self.llm.llm_engine.engine_core.engine_core, f"megarl_{method}")(*arguments)

    # ------------------------------------------------------------------ requests

    def add(self, requests: Sequence[Request]) -> None:
        params = [self._sampling_params(request) for request in requests]
        salt = {} if self._salt is None else {"cache_salt": self._salt}
        prompts = [{"prompt_token_ids": request.prompt} | salt for request in requests]
        ids = self.llm.enqueue(prompts, params, use_tqdm=False)
        if first := [internal for internal, request in zip(ids, requests, strict=True) if request.is_first]:
            self._core("put_first", first)
        # vLLM returns its internal id: the external id, a dash and random characters.
        self._requests |= {
            internal.split("-")[0]: request for internal, request in zip(ids, requests, strict=True)
        }

    def _sampling_params(self, request: Request) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        sampling = self._setup.config.sampling
        stop, schema = [*sampling.stop, *request.stop], request.schema
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
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        )

    def has_unfinished(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def step(self) -> None:
        is_held = self._held_at is not None and self.num_steps == self._held_at
        if not (self._is_paused or is_held or self.version is None):
            self._take_step()

    def release_kv_cache(self) -> bool:
        self.kv_cache.release()
        return True

    def restore_kv_cache(self) -> None:
        self.kv_cache.restore()

    def _take_step(self) -> None:
        self._note(self.llm.llm_engine.step())

    def _receive(self, outputs: EngineCoreOutputs) -> None:
        """Take over tokens that the engine core reports outside a step."""
        processor = self.llm.llm_engine.output_processor
        done = processor.process_outputs(outputs.outputs, weight_version=outputs.weight_version)
        if done.reqs_to_abort:  # a stop string was found, which the engine core does not know
            self.llm.llm_engine.engine_core.abort_requests(done.reqs_to_abort)
        self._note(done.request_outputs)

    def _note(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                request, completion = self._requests.pop(output.request_id), output.outputs[0]
                starts = [(span.version, span.start) for span in completion.weight_versions]
                self._finished.append(
                    self._output(
                        request,
                        list(completion.token_ids),
                        completion.logprobs.logprobs,
                        starts,
                        completion.finish_reason,
                        completion.routed_experts,
                    )
                )

    def _output(
        self,
        request: Request,
        token_ids: list[int],
        log_probs: list[float],
        starts: Sequence[tuple[str, int]],
        finish_reason: str | None = None,
        rows: np.ndarray | None = None,
    ) -> Output:
        """Return the tokens of a request with the version that sampled each.

        Args:
            starts: each version that sampled tokens, and the index of its first token."""
        if len(token_ids) != len(log_probs):
            raise RuntimeError(f"vLLM returned {len(token_ids)} tokens with {len(log_probs)} log-probs")
        experts = None
        if self._tells_experts and finish_reason is not None:
            experts = routed_experts(rows, len(request.prompt) + len(token_ids), self._setup.shape)
        versions = []
        for version, start in starts:
            versions[start:] = [int(version)] * (len(token_ids) - start)
        return Output(request.id, token_ids, log_probs, versions, finish_reason, experts)

    def take(self) -> list[Output]:
        finished, self._finished = self._finished, []
        return finished

    def progress(self) -> list[Output]:
        self._core("report")
        return self._progress()

    def _progress(self) -> list[Output]:
        """Return the tokens of unfinished requests that this process knows of."""
        states = self.llm.llm_engine.output_processor.request_states.values()
        return [
            self._output(
                self._requests[state.external_req_id],
                list(state.detokenizer.output_token_ids),
                list(state.logprobs_processor.logprobs.logprobs),
                state.weight_version_starts,
            )
            for state in states
        ]

    def abort(self, ids: Sequence[str]) -> None:
        theirs = [number for number, request in self._requests.items() if request.id in ids]
        self.llm.llm_engine.abort_request(theirs)
        for number in theirs:
            del self._requests[number]
        self._finished = [output for output in self._finished if output.id not in ids]

    def pause(self) -> None:
        self.llm.sleep(level=0, mode="keep")
        self._is_paused = True

    def resume(self) -> None:
        self.llm.wake_up(tags=["scheduling"])
        self._is_paused = False

    @property
    def num_steps(self) -> int:
        return self._core("num_steps")

    def hold(self, step: int | None) -> None:
        check_step(step, self.num_steps)
        self._held_at = step

    def free_kv_tokens(self) -> int:
        return self._core("free_kv_tokens")

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
        is_idle = not self.has_unfinished()
        if running == "refuse" and not is_idle:
            raise RuntimeError(f"version {version} cannot be committed: requests are unfinished")
        self._is_updating, self.version = False, None
        self._num_commits += 1
        if not is_idle:
            self._stand_still()
        salt = f"commit {self._num_commits}"
        self._salt = self._core("switch", str(version), running == "recompute", salt)
        self.version = version
        self._go_on()

    def _stand_still(self) -> None:
        """Pause the engine until a version is committed, unless it is paused already."""
        if not self._is_paused:
            self._is_still = True
            self.pause()

    def _go_on(self) -> None:
        if self._is_still:
            self._is_still = False
            self.resume()

    def set_version(self, version: int) -> None:
        self._core("label", str(version))
        self.version = version

    def give_up_weights(self) -> None:
        if self._is_updating:
            self._is_updating = False
            self.llm.finish_weight_update()

    def shutdown(self) -> None:
        """Stop vLLM, which destroys torch's default process group with its own."""
        self.version = None
        self.llm.llm_engine.engine_core.shutdown()


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
