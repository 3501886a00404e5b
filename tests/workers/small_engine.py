"""An engine without a model, whose tokens follow from the key and the tokens before them, and a request
stream around it.

A response is therefore the same in any company, at any time and after any interruption, as in a real engine
whose weights do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megarl.algorithms import REGISTRY
from megarl.config.schema import BatchConfig, DataConfig, ModelConfig, RunConfig, SamplingConfig, TrainConfig
from megarl.rollout.engine import Engine
from megarl.rollout.interface import InferenceEngine, Output, Request, Running
from megarl.workers.request_stream import RequestStream
from megarl.workers.store import RolloutBlock, RolloutSample, SampleTable

MAX_RESPONSE = 12
STOP_TOKEN = 1


def next_token(key: int, tokens: Sequence[int]) -> int:
    if (key + 3 * len(tokens)) % 11 == 0:
        return STOP_TOKEN
    return 2 + (31 * key + 17 * len(tokens) + sum(tokens)) % 50


def whole_response(key: int, prompt: Sequence[int]) -> list[int]:
    """Return the response that an uninterrupted request has."""
    tokens = [*prompt]
    while len(tokens) - len(prompt) < MAX_RESPONSE and (tokens == [*prompt] or tokens[-1] != STOP_TOKEN):
        tokens.append(next_token(key, tokens))
    return tokens[len(prompt) :]


def experts_of(tokens: Sequence[int]) -> torch.Tensor:
    """Return experts of two layers and one expert per token."""
    return torch.tensor([[[token % 7], [token % 5]] for token in tokens], dtype=torch.uint8)


@dataclass
class _Running:
    request: Request
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class SmallEngine(InferenceEngine):
    """Samples one token of each of the first `max_running` requests per step."""

    device, dtype, tensors, atlases = "cpu", torch.float32, {}, {}
    computing = "step"
    """Name of the method that computes a step."""

    def __init__(
        self,
        max_running: int = 3,
        has_experts: bool = False,
        next_token: Callable[[int, Sequence[int]], int] = next_token,
        cannot_continue: str | None = None,
    ) -> None:
        self.max_running, self.has_experts, self.version = max_running, has_experts, 0
        self.next_token, self.cannot_continue = next_token, cannot_continue
        self.requests: list[_Running] = []
        self.num_resets, self._num_steps = 0, 0
        self._finished: list[Output] = []
        self._reported: list[Output] = []
        self._is_paused = False

    def add(self, requests: Sequence[Request]) -> None:
        known = {one.request.id for one in self.requests}
        assert not known & {request.id for request in requests}
        assert all(request.max_tokens > 0 for request in requests)
        self.requests += [_Running(request) for request in requests]

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> None:
        if self._is_paused or not self.requests:
            return
        self._num_steps += 1
        for one in self.requests[: self.max_running]:
            one.tokens.append(self.next_token(one.request.key, [*one.request.prompt, *one.tokens]))
            one.versions.append(self.version)
        self._finished += [self._output(one) for one in self.requests if self._reason(one) is not None]
        self.requests = [one for one in self.requests if self._reason(one) is None]

    def _reason(self, one: _Running) -> str | None:
        if one.tokens and one.tokens[-1] == STOP_TOKEN:
            return "stop"
        return "length" if len(one.tokens) == one.request.max_tokens else None

    def _output(self, one: _Running) -> Output:
        experts = experts_of([*one.request.prompt, *one.tokens]) if self.has_experts else None
        log_probs = [-token / 8 for token in one.tokens]
        return Output(one.request.id, one.tokens, log_probs, one.versions, self._reason(one), experts)

    def take(self) -> list[Output]:
        finished, self._finished = self._finished, []
        return finished

    def progress(self) -> list[Output]:
        return [self._output(one) for one in self.requests]

    def reported(self) -> list[Output]:
        """Tokens of the last report, which may lie some steps back."""
        known = {one.request.id for one in self.requests} | {output.id for output in self._finished}
        return [output for output in self._reported if output.id in known]

    def report(self) -> None:
        self._reported = [
            replace(output, token_ids=[*output.token_ids], versions=[*output.versions])
            for output in self.progress()
        ]

    def abort(self, ids: Sequence[str]) -> None:
        self.requests = [one for one in self.requests if one.request.id not in ids]
        self._finished = [output for output in self._finished if output.id not in ids]

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def hold(self, step: int | None) -> None:
        raise NotImplementedError

    def free_kv_tokens(self) -> int:
        return 1000

    def reset_cache(self) -> None:
        if self.requests:
            raise RuntimeError("requests are unfinished")
        self.num_resets += 1

    def write_weights(self, copy: Callable[[], object]) -> None:
        copy()

    def pull_weights(self, orders, timeout_s: float) -> None:
        raise NotImplementedError

    def wait_for_weights(self, timeout_s: float) -> list:
        raise NotImplementedError

    def commit(self, version: int, running: Running = "refuse") -> None:
        if self.requests and running == "refuse":
            raise RuntimeError("requests are unfinished")
        self.version = version

    def set_version(self, version: int) -> None:
        self.version = version

    def give_up_weights(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        self.requests.clear()


def config(folder: Path, max_response_length: int = MAX_RESPONSE, **sampling: object) -> TrainConfig:
    return TrainConfig(
        algorithm=REGISTRY["grpo"](),
        model=ModelConfig(model=str(folder)),
        batch=BatchConfig(train_iters=1, num_prompts=2, num_samples_per_prompt=2, global_batch_size=4),
        data=DataConfig(train_data=("rows",)),
        run=RunConfig(save="unused"),
        sampling=SamplingConfig(max_prompt_length=8, max_response_length=max_response_length, **sampling),
    )


class Stream:
    """A request stream around a new SmallEngine, without weight syncs, and what it has reported.

    Args:
        options: those of SmallEngine."""

    def __init__(self, job: TrainConfig, **options: object) -> None:
        self.engine = Engine(job, None, "")
        self.engine.inference = SmallEngine(**options)
        self.table: SampleTable[RolloutBlock] = SampleTable("train")
        self.reports: list[list[RolloutSample]] = []
        """One list of samples per report."""
        has_experts = self.inference.has_experts
        self.stream = RequestStream(self.engine, self.table, self.reports.append, has_experts)

    @property
    def inference(self) -> SmallEngine:
        return self.engine.inference

    @property
    def samples(self) -> list[RolloutSample]:
        return [sample for report in self.reports for sample in report]

    def step(self, count: int) -> None:
        for _ in range(count):
            if self.stream.has_unfinished():
                self.stream.step()
