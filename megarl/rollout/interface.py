"""Define the interface of an inference engine: requests enter, and tokens come out step by step.

    engine.write_weights(copy)
    engine.commit(0)
    engine.add([Request("a", prompt, key=17, max_tokens=100)])
    while engine.has_unfinished():
        engine.step()
        for output in engine.take():
            print(output.id, output.token_ids, output.versions)

vllm_engine.py, vllm_processes.py, transformers_engine.py and engine_process.py implement it; backends.py
starts them by --rollout-backend. requests.py defines what enters and leaves an engine.
engine.py and out_of_process.py connect an engine to the weight syncs and know this interface only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from megarl.rollout.patience import Patience
from megarl.rollout.requests import Output, Request, Running

if TYPE_CHECKING:
    from megarl.reshard.atlas import Atlas
    from megarl.rollout.puller import Order, Outcome


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
    patience: Patience
    """How long the engine may take to answer. Only out of process."""

    @abstractmethod
    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, those with `is_first` before all others. None starts before all are queued."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Return whether a request waits or runs, as far as this process knows."""

    @abstractmethod
    def step(self) -> None:
        """Take one step. Out of process: receive what the engine reports, and wait for it some 10 ms at most.

        Collective over the ranks of an in-process engine. Does nothing while the engine is paused or held,
        and in process while its weights are being overwritten."""

    @abstractmethod
    def take(self) -> list[Output]:
        """Return the requests that have finished since the last call, and forget them."""

    @abstractmethod
    def progress(self) -> list[Output]:
        """Return all tokens so far of every unfinished request. The requests go on undisturbed."""

    def reported(self) -> list[Output]:
        """Return the known tokens of unfinished requests, even of a dead engine. Only out of process."""
        return []

    @abstractmethod
    def abort(self, ids: Sequence[str]) -> None:
        """Forget requests that are unfinished or not taken yet. `take` does not return them."""

    @abstractmethod
    def pause(self) -> None:
        """Let steps do nothing until `resume`. Requests keep their KV cache, and more can be added. `take` returns
        everything that has finished before."""

    @abstractmethod
    def resume(self) -> None: ...

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Number of engine steps since the start that computed something."""

    @abstractmethod
    def hold(self, step: int | None) -> None:
        """Let the engine take steps only as far as step number `step`, counted from 0, which it does not
        take; None removes the limit.

        Requests can be added and weights committed meanwhile. Raises: ValueError if that step is past."""

    @abstractmethod
    def free_kv_tokens(self) -> int:
        """Return for how many tokens the KV cache has room now, beside the running requests."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Drop the KV cache of earlier prefixes. Raises RuntimeError if unfinished requests prevent this."""

    def release_kv_cache(self) -> bool:
        """Free the KV cache's memory until `restore_kv_cache`. Returns False if the engine cannot do that."""
        return False

    def restore_kv_cache(self) -> None:
        """Take the KV cache's memory back, if it was released. Unfinished requests compute their KV cache
        anew in any case."""

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
        """Sample with the written weights, as `version`, from the next step on.

        Requests that start later, or were preempted, find no cached prefix of earlier weights. Those that run
        keep their KV cache or compute it anew, as `running` says.
        Raises: RuntimeError for unfinished requests unless `running` allows them."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Label the weights with another version, which tokens get from the next step on. Nothing else
        changes."""

    @abstractmethod
    def give_up_weights(self) -> None:
        """Abandon the version that is being written. With two buffers the old version stays usable."""

    def check_alive(self) -> None:
        """Raise EngineDied if a process of the engine has ended."""

    def kill(self) -> None:
        """End the engine's processes at once, whatever they do. Only out of process."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine and its processes."""
