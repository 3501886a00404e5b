"""Extend vLLM's scheduler with a fast path through the plain decode step.

On a small model vLLM spends more time on scheduling than on arithmetic. Each step checks every request for
encoder inputs, drafts, adapters, connectors and preemption, and reports every token to the front end. None of
this can concern a batch of plain requests between two admissions. Each request has exactly one new token and
a slot for this token in its last block. Its user wants the response only when it is complete. The fast path
therefore does this:

    schedule             one token for every running request, unless a request waits or one needs a new block
    update_from_output   append it, and report a request once, with all its tokens, when it stops

`take_unreported` reports what is known so far. The scheduler also counts the steps that computed something,
and stands still before the step `held_at`.

Everything else is vLLM's own code. The engine argument `scheduler_cls` names this class. The class changes
the base class's state, so it is used only with the vLLM version that it was written for
(plugin.SUPPORTED_VLLM)."""

from __future__ import annotations

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request


class _Decoding:
    """A running request and the tokens that have not been reported to the front end."""

    __slots__ = ("limit", "log_probs", "ranks", "request", "stops", "tokens")

    def __init__(self, request: Request, max_model_len: int) -> None:
        params = request.sampling_params
        self.request = request
        self.stops = frozenset([params.eos_token_id, *(params.stop_token_ids or ())])
        self.limit = min(request.num_prompt_tokens + request.max_tokens, max_model_len)
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.ranks: list[int] = []

    def new_logprobs(self) -> LogprobsLists | None:
        """Return the unreported log-probs in vLLM's form: [n, 1] token ids and log-probs, [n] ranks; None if
        there are none."""
        if not self.log_probs:
            return None
        return LogprobsLists(
            np.array(self.tokens, np.int32)[:, None],
            np.array(self.log_probs, np.float32)[:, None],
            np.array(self.ranks),
        )


class DecodeScheduler(Scheduler):
    def __init__(self, *args, **kwargs) -> None:
        self.num_steps = 0
        """Number of steps that computed something."""
        self.held_at: int | None = None
        """Number of the step, from 0, before which the engine stands still."""
        super().__init__(*args, **kwargs)
        self._known: dict[str, _Decoding] = {}  # every plain request that has been running
        self._decoding: dict[str, _Decoding] = {}  # requests of the current fast-path steps
        self._short_steps = 0  # number of further steps in which no running request needs a block
        self._short_output: SchedulerOutput | None = None  # scheduled by the fast path, not yet executed
        groups = self.kv_cache_config.kv_cache_groups
        self._is_plain_engine = (
            len(groups) == 1
            and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
            and not any(
                (
                    self.connector,
                    self.ec_connector,
                    self.aux_output_connector,
                    self.lora_config,
                    self.log_stats,
                    self.use_pp,
                    self.num_spec_tokens,
                    self.num_lookahead_tokens,
                    self.is_encoder_decoder,
                    self.enable_kv_cache_events,
                    self.defer_block_free,
                    self.use_v2_model_runner,
                    self.return_sampling_mask,
                    self.finished_req_ids_dict is not None,
                    self.scheduler_config.async_scheduling,
                    self.dcp_world_size > 1,
                )
            )
        )

    @property
    def _pause_state(self) -> PauseState:
        """vLLM's own attribute. An engine that is held behaves as one that is paused and keeps requests."""
        return PauseState.PAUSED_ALL if self.num_steps == self.held_at else self._wanted_pause_state

    @_pause_state.setter
    def _pause_state(self, state: PauseState) -> None:
        self._wanted_pause_state = state

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._short_steps and not self._interrupted():
            output = self._schedule_decode()
        else:
            for decoding in self._decoding.values():
                decoding.request.update_block_hashes()
            self._decoding = {}
            output = super().schedule(throttle_prefills)
        self.num_steps += output.total_num_scheduled_tokens > 0
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if scheduler_output is self._short_output:
            return self._update_decode(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for of_client in outputs.values():
            for output in of_client.outputs:
                self._prepend_unreported(output)
        self._short_steps = 0
        if scheduler_output.total_num_scheduled_tokens:  # else the workers have dropped their batch
            self._start_decoding()
        return outputs

    def take_unreported(self) -> list[EngineCoreOutput]:
        """Return what unfinished requests have sampled since the last call. A token is returned once."""
        outputs = []
        for request_id, decoding in self._known.items():
            if decoding.tokens and request_id in self.requests:
                outputs.append(
                    EngineCoreOutput(
                        request_id=request_id,
                        new_token_ids=decoding.tokens,
                        new_logprobs=decoding.new_logprobs(),
                    )
                )
                decoding.tokens, decoding.log_probs, decoding.ranks = [], [], []
        return outputs

    def _interrupted(self) -> bool:
        """Return whether a request can be admitted, one was aborted, or the engine is paused."""
        return (
            len(self.running) != len(self._decoding)
            or self._pause_state != PauseState.UNPAUSED
            or self._can_admit()
        )

    def _can_admit(self) -> bool:
        return bool(
            self.kv_holding_waiting
            or self.deferred_waiting
            or (self.waiting and len(self.running) < self.max_num_active_reqs)
        )

    def _start_decoding(self) -> None:
        """Set the number of coming steps that can take the fast path.

        The count is 0 unless all running requests are plain and past their prompts."""
        # Preempted requests are not running, but their unreported tokens must not be lost.
        self._known = {
            request_id: decoding
            for request_id, decoding in self._known.items()
            if request_id in self.requests
        }
        steps = self.block_size
        if not self._is_plain_engine or self._can_admit():
            return
        for request in self.running:
            if request.request_id not in self._known:
                if not _is_plain(request):
                    return
                self._known[request.request_id] = _Decoding(request, self.max_model_len)
            if request.num_computed_tokens != request.num_tokens - 1:
                return
            steps = min(steps, -request.num_computed_tokens % self.block_size)
        self._decoding = {request.request_id: self._known[request.request_id] for request in self.running}
        self._short_steps = steps

    def _schedule_decode(self) -> SchedulerOutput:
        self.current_step += 1
        self._short_steps -= 1
        self.kv_cache_manager.new_step_starts()
        computed, produced = [], []
        for decoding in self._decoding.values():
            request = decoding.request
            computed.append(request.num_computed_tokens)
            produced.append(request.num_output_tokens)
            request.num_computed_tokens += 1
        ids = list(self._decoding)
        cached = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(ids),
            num_computed_tokens=computed,
            num_output_tokens=produced,
        )
        self._short_output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
        )
        if self.finished_req_ids:
            self.prev_step_scheduled_req_ids.clear()
            self.prev_step_scheduled_req_ids.update(ids)
            self.finished_req_ids = set()
        return self._short_output

    def _update_decode(self, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        self._short_output = None
        if len(self.running) != len(self._decoding):  # some were aborted while the step ran
            self._decoding = {key: value for key, value in self._decoding.items() if key in self.requests}
        sampled, index, logprobs = (
            model_runner_output.sampled_token_ids,
            model_runner_output.req_id_to_index,
            model_runner_output.logprobs,
        )
        if logprobs is not None:
            log_probs, ranks = logprobs.logprobs[:, 0].tolist(), logprobs.sampled_token_ranks.tolist()
        stopped: list[_Decoding] = []
        for request_id, decoding in self._decoding.items():
            at = index[request_id]
            token = sampled[at][0]
            request = decoding.request
            request._output_token_ids.append(
                token
            )  # append_output_token_ids without the block hashes: see schedule
            request._all_token_ids.append(token)
            decoding.tokens.append(token)
            if logprobs is not None:
                decoding.log_probs.append(log_probs[at])
                decoding.ranks.append(ranks[at])
            if token in decoding.stops or len(request._all_token_ids) >= decoding.limit:
                stopped.append(decoding)
        if not stopped:
            return {}
        outputs = [self._finish(decoding) for decoding in stopped]
        self.running = remove_all(self.running, {decoding.request for decoding in stopped})
        return {0: EngineCoreOutputs(outputs=outputs)}

    def _finish(self, decoding: _Decoding) -> EngineCoreOutput:
        request = decoding.request
        assert check_stop(request, self.max_model_len)
        del self._decoding[request.request_id], self._known[request.request_id]
        prefill_stats = request.take_prefill_stats()
        self._free_request(request)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=decoding.tokens,
            new_logprobs=decoding.new_logprobs(),
            finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason,
            prefill_stats=prefill_stats,
        )

    def _prepend_unreported(self, output: EngineCoreOutput) -> None:
        """Put the tokens that were not reported yet, with their log-probs, before those of `output`, in
        place.

        vLLM's own path reports each token at once."""
        decoding = self._known.pop(output.request_id, None)
        if decoding is None or not decoding.tokens:
            return
        output.new_token_ids = decoding.tokens + output.new_token_ids
        if (held := decoding.new_logprobs()) is not None:
            output.new_logprobs = LogprobsLists(
                *(np.concatenate(pair) for pair in zip(held[:3], output.new_logprobs[:3], strict=True))
            )


def _is_plain(request: Request) -> bool:
    """Return whether the fast path supports the request.

    A plain request is reported when complete and stopped by token ids or length alone. It asks for no
    log-probs but those of the sampled tokens."""
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and params.num_logprobs in (None, 0)
        and not any(
            (
                params.stop,
                params.prompt_logprobs is not None,
                params.structured_outputs,
                params.repetition_detection,
                request.use_structured_output,
                request.resumable,
                request.has_encoder_inputs,
                request.lora_request,
            )
        )
    )
