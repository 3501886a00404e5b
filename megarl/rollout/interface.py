"""Define the interface of an inference engine: requests enter, and tokens come out step by step.

    engine.write_weights(copy)
    engine.commit(0)
    engine.add([Request("a", prompt, key=17, max_tokens=100)])
    while engine.has_unfinished():
        engine.step()
        for output in engine.take():
            print(output.id, output.token_ids, output.versions)

vllm_engine.py and transformers_engine.py implement it; backends.py starts them by --rollout-backend.
engine.py and out_of_process.py connect an engine to the weight syncs and know this interface only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from megarl.reshard.atlas import Atlas
    from megarl.rollout.puller import Order, Outcome

Running = Literal["refuse", "keep", "recompute"]
"""What a commit does with unfinished requests: refuse them, keep their KV cache, or compute it anew."""


@dataclass(frozen=True)
class Request:
    """One response to sample. Stop tokens and stop strings are those of the job."""

    id: str
    """Unique among the engine's unfinished requests."""
    prompt: list[int]
    key: int
    """Key of the random draws, see draws.py."""
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0  # off


@dataclass(frozen=True)
class Output:
    """The tokens of one request."""

    id: str
    token_ids: list[int]
    """Sampled tokens, including the token that ended the response."""
    log_probs: list[float]
    """Log-prob of each token in the distribution that it was sampled from."""
    versions: list[int]
    """Version of the weights that sampled each token."""
    finish_reason: str | None
    """"stop" or "length"; None while the request is unfinished."""
    experts: torch.Tensor | None = None
    """Experts of each token of prompt and response with --moe-routing-replay engine, else None."""


class InferenceEngine(ABC):
    """One engine that samples. Its weights are undefined until the first `commit`."""

    process: str | None = None
    """Unique name of the process that holds the weights; None means this process."""
    device: str
    """Device of the weights: "cpu" or "cuda"."""
    dtype: torch.dtype
    tensors: dict[int, dict[str, torch.Tensor]]
    """Rank of the engine -> name -> [rows, cols]: live weights, or of the meta device out of process."""
    atlases: dict[int, Atlas]
    """Rank of the engine -> what its weights hold; may be {} if engine_atlas.py of reshard knows."""
    cannot_continue: str | None = None
    """Reason why a response cannot be continued after a prefix with the tokens that it would have had."""
    version: int | None = None
    """Version of the weights; None before the first commit and while the weights are overwritten."""

    @abstractmethod
    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests. The engine starts on none of them before all are queued."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Return whether a request waits or runs."""

    @abstractmethod
    def step(self) -> None:
        """Take one step, unless the engine is paused. Collective over the ranks of an in-process engine."""

    @abstractmethod
    def take(self) -> list[Output]:
        """Return the requests that have finished since the last call, and forget them."""

    @abstractmethod
    def progress(self) -> list[Output]:
        """Return the tokens of every unfinished request, as far as the engine has reported them."""

    @abstractmethod
    def abort(self, ids: Sequence[str]) -> None:
        """Forget unfinished requests. `take` does not return them."""

    @abstractmethod
    def pause(self) -> None:
        """Let steps do nothing until `resume`. Requests keep their KV cache, and more can be added."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def reset_cache(self) -> None:
        """Drop the KV cache of earlier prefixes. Raises RuntimeError if unfinished requests prevent this."""

    def release_kv_cache(self) -> bool:
        """Free the KV cache's memory until `restore_kv_cache`. Returns False if the engine cannot do that."""
        return False

    def restore_kv_cache(self) -> None:
        """Take the memory back, released or not. Unfinished requests compute their KV cache anew."""

    @abstractmethod
    def write_weights(self, copy: Callable[[], object]) -> None:
        """Write a version by calling `copy`, which fills `tensors`. Only in process."""

    @abstractmethod
    def pull_weights(self, orders: Sequence[Order], timeout_s: float) -> None:
        """Start to copy a version, by one order per rank of the engine. Only out of process."""

    @abstractmethod
    def wait_for_weights(self, timeout_s: float) -> list[Outcome]:
        """Wait for the copies of `pull_weights`, and return one outcome per rank of the engine."""

    @abstractmethod
    def commit(self, version: int, running: Running = "refuse") -> None:
        """Sample with the written weights, as `version`, from the next step on, without earlier prefixes.

        Raises: RuntimeError if the unfinished requests do not allow what `running` says."""

    @abstractmethod
    def give_up_weights(self) -> None:
        """Abandon the version that is being written. With two buffers the old version stays usable."""

    def check_alive(self) -> None:
        """Raise EngineDied if a process of the engine has ended."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine and its processes."""
