"""Implement the interface of an inference engine by the Hugging Face model itself, whole on one rank.

    waiting request     enters as soon as the KV cache has a free row
    step                computes the new tokens of each row (the prompt of a request that enters, else one
                        token), and samples one token per row
    finished request    leaves, and the last row moves into its place

The engine is exact and simple: no CUDA graphs, no shared prefixes, and no attention kernels but those of
transformers. transformers_model.py runs the model, and sampling.py draws. engine_process.py runs the engine
in a process of its own."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import hf_sizes
from megarl.reshard.transformers_atlas import transformers_atlas
from megarl.rollout.backends import EngineSetup
from megarl.rollout.engine_arguments import stop_tokenizer
from megarl.rollout.engine_core import check_step
from megarl.rollout.environment import undisturbed
from megarl.rollout.interface import InferenceEngine
from megarl.rollout.kv_cache import num_cache_rows, sequence_bytes
from megarl.rollout.offer import Offer, alias_weights
from megarl.rollout.puller import Order, Outcome, Puller
from megarl.rollout.requests import Output, Request, Running
from megarl.rollout.sampling import sample
from megarl.rollout.transformers_model import CachedModel, end_ids

_TOKENS_PER_STEP = 8192
"""Default of --rollout-max-num-batched-tokens: prompt tokens that enter in one step."""


@dataclass(frozen=True)
class EngineOptions:
    """The parts of a configuration from which a process builds the engine."""

    rank: int
    folder: str
    """Folder of the model; only its config.json, generation config and tokenizer are read."""
    dtype: str
    num_rows: int
    """Requests that run at the same time."""
    max_length: int
    """Tokens of prompt and response together."""
    tokens_per_step: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    tokenizer: str
    double_buffer: bool | None = None
    """Whether pulled weights are written beside those that sample; None if they are not pulled."""

    @classmethod
    def of(cls, setup: EngineSetup, double_buffer: bool | None = None) -> EngineOptions:
        config, shape = setup.config, setup.shape
        itemsize = getattr(torch, config.engine_dtype).itemsize
        weights = itemsize * sum(rows * cols for rows, cols in hf_sizes(shape).values())
        row = sequence_bytes(shape, 1, itemsize, config.sampling.max_engine_length, block_size=1)
        buffers = 2 if double_buffer else 1
        num_rows = num_cache_rows(config, row, setup.num_engines, _gpu_bytes(), weights * buffers)
        if num_rows == 0:
            raise ValueError(
                "the KV cache of the engine has no room for one sequence of "
                f"{config.sampling.max_engine_length} tokens ({row} bytes). Try --rollout-kv-cache-memory-bytes {row}."
            )
        return cls(
            setup.ranks[0],
            config.model.model,
            config.engine_dtype,
            num_rows,
            config.sampling.max_engine_length,
            config.rollout.max_num_batched_tokens or _TOKENS_PER_STEP,
            config.sampling.stop,
            config.sampling.stop_token_ids,
            stop_tokenizer(config) or config.model.model,
            double_buffer,
        )


def start_in_process(setup: EngineSetup, offer: Offer) -> InferenceEngine:
    """Build the model in this process. Not collective."""
    return TransformersEngine(EngineOptions.of(setup), offer)


@dataclass(eq=False)
class _Sequence:
    """A request and its tokens."""

    request: Request
    tokens: list[int]
    """Prompt and response."""
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_cached: int = 0
    """First tokens whose keys and values are in the cache."""

    @property
    def response(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    def output(self, finish_reason: str | None) -> Output:
        return Output(self.request.id, self.response, [*self.log_probs], [*self.versions], finish_reason)


class TransformersEngine(InferenceEngine):
    """The Hugging Face model on this process's device, with a scheduler for requests."""

    def __init__(self, options: EngineOptions, offer: Offer | None = None) -> None:
        self._options, self.dtype = options, getattr(torch, options.dtype)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self._device, self.device = torch.device(device), torch.device(device).type
        self._shape = ModelShape.load(options.folder)
        with undisturbed():
            self.model = CachedModel(
                options.folder, self.dtype, self._device, options.num_rows, options.max_length
            )
        self._stop_ids = frozenset(options.stop_token_ids) | end_ids(options.folder)
        if options.stop:
            self._stop_ids |= {self._tokenizer.eos_token_id} - {None}
        atlas = transformers_atlas(self._shape)
        if offer is not None:
            offer.taken = alias_weights(self.model.module, atlas, offer)
        self.atlases = {options.rank: atlas}
        self.tensors = {options.rank: self.model.weights()}
        self._puller = None
        if options.double_buffer is not None:
            self._puller = Puller(
                options.rank, self.model.module, self.tensors[options.rank], options.double_buffer
            )
        self._waiting: deque[_Sequence] = deque()
        self._rows: list[_Sequence] = []
        self._finished: list[Output] = []
        self._is_paused = False
        self._num_steps = 0
        self._held_at: int | None = None

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer with which stop strings are found."""
        return AutoTokenizer.from_pretrained(self._options.tokenizer)

    # ------------------------------------------------------------------ requests

    def add(self, requests: Sequence[Request]) -> None:
        sequences = [_Sequence(request, list(request.prompt)) for request in requests]
        self._waiting += [sequence for sequence in sequences if not sequence.request.is_first]
        self._waiting.extendleft(sequence for sequence in reversed(sequences) if sequence.request.is_first)

    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._rows)

    @torch.no_grad()
    def step(self) -> None:
        if self._is_paused or self._num_steps == self._held_at or self.version is None:
            return
        logits = [self._logits(0, self._rows)] if self._rows else []
        if entering := self._admit():
            self._rows += entering
            logits.append(self._logits(len(self._rows) - len(entering), entering))
        if not logits:
            return
        self._num_steps += 1
        positions = [len(sequence.tokens) for sequence in self._rows]
        tokens, log_probs = sample(torch.cat(logits), [s.request for s in self._rows], positions)
        for sequence, token, log_prob in zip(self._rows, tokens, log_probs, strict=True):
            sequence.tokens.append(token)
            sequence.log_probs.append(log_prob)
            sequence.versions.append(self.version)
        for row in reversed(range(len(self._rows))):
            if (reason := self._finish_reason(self._rows[row])) is not None:
                self._finished.append(self._remove(row).output(reason))

    def _admit(self) -> list[_Sequence]:
        """Return the waiting requests that enter in this step, and take them out of the queue.

        The cache has rows for them. Padded to the longest, they have at most the tokens of a step, unless one
        alone has more."""
        entering, longest = [], 0
        while self._waiting and len(self._rows) + len(entering) < self._options.num_rows:
            longest = max(longest, len(self._waiting[0].tokens))
            if entering and longest * (len(entering) + 1) > self._options.tokens_per_step:
                break
            entering.append(self._waiting.popleft())
        return entering

    def _logits(self, first: int, sequences: Sequence[_Sequence]) -> Tensor:
        """Compute the tokens of neighbouring rows that are not cached yet, and return the logits after them.

        Returns: [rows, V] float32."""
        new = [sequence.tokens[sequence.num_cached :] for sequence in sequences]
        logits = self.model.logits(first, new, [sequence.num_cached for sequence in sequences])
        for sequence in sequences:
            sequence.num_cached = len(sequence.tokens)
        return logits

    def _finish_reason(self, sequence: _Sequence) -> str | None:
        response = sequence.response
        if response[-1] in self._stop_ids:
            return "stop"
        if stops := (*self._options.stop, *sequence.request.stop):
            text = self._tokenizer.decode(response, skip_special_tokens=True)
            if any(stop in text for stop in stops):
                return "stop"
        is_full = len(sequence.tokens) >= self._options.max_length
        return "length" if is_full or len(response) >= sequence.request.max_tokens else None

    def _remove(self, row: int) -> _Sequence:
        """Take a sequence out of its row, and let the last row fill the gap."""
        sequence, last = self._rows[row], self._rows.pop()
        if sequence is not last:
            self.model.cache.move(len(self._rows), row)
            self._rows[row] = last
        return sequence

    def take(self) -> list[Output]:
        finished, self._finished = self._finished, []
        return finished

    def progress(self) -> list[Output]:
        return [sequence.output(None) for sequence in (*self._rows, *self._waiting)]

    def abort(self, ids: Sequence[str]) -> None:
        self._waiting = deque(sequence for sequence in self._waiting if sequence.request.id not in ids)
        for row in reversed(range(len(self._rows))):
            if self._rows[row].request.id in ids:
                self._remove(row)
        self._finished = [output for output in self._finished if output.id not in ids]

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def hold(self, step: int | None) -> None:
        check_step(step, self._num_steps)
        self._held_at = step

    def free_kv_tokens(self) -> int:
        return (self._options.num_rows - len(self._rows)) * self._options.max_length

    def reset_cache(self) -> None:
        """Let running requests compute their keys and values anew. The requests return to the front of the
        queue."""
        for sequence in self._rows:
            sequence.num_cached = 0
        self._waiting.extendleft(reversed(self._rows))
        self._rows = []

    def release_kv_cache(self) -> bool:
        self.reset_cache()
        self.model.cache.release()
        return True

    # ------------------------------------------------------------------ weights

    def write_weights(self, copy: Callable[[], object]) -> None:
        self.version = None
        copy()

    def pull_weights(self, orders: Sequence[Order], timeout_s: float) -> None:
        self._puller.begin(orders[0])

    def wait_for_weights(self, timeout_s: float) -> list[Outcome]:
        return [self._puller.wait(timeout_s)]

    def commit(self, version: int, running: Running = "refuse") -> None:
        if running == "refuse" and self.has_unfinished():
            raise RuntimeError(f"version {version} cannot be committed: requests are unfinished")
        if self._puller is not None and not self._puller.commit():
            raise RuntimeError(f"version {version} cannot be committed: {self._puller.outcome.problem}")
        if running == "recompute":
            self.reset_cache()
        self.version = version

    def set_version(self, version: int) -> None:
        self.version = version

    def give_up_weights(self) -> None:
        if self._puller is not None:
            self._puller.give_up()

    def shutdown(self) -> None:
        self.version = None
        self.model.cache.release()


def _gpu_bytes() -> int | None:
    """Return the memory of this rank's GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
