"""Define the section of the configuration tree about asynchronous rollouts.

Each field is one flag, see schema.py."""

from __future__ import annotations

from typing import Literal

from megarl.config.errors import Count, Natural, Section, section


@section
class StreamingConfig(Section):
    """asynchronous rollouts"""

    staleness: Natural = 0
    """Training steps by which the weights that sampled a token may be older than the weights that are trained
    on it. 0: synchronous training. Above 0 generation goes on during updates, and --tis-clip is on by
    default. Not run on a GPU yet."""
    rollout_order: Literal["in-order", "windowed"] = "windowed"
    """Groups of samples that a step with --staleness trains on. in-order: those of the oldest prompts.
    windowed: those of the oldest prompts that are complete, and all that would be too old at the next
    step."""
    weight_update: Literal["keep", "recompute", "wait"] = "recompute"
    """With --staleness: what unfinished responses do when their engine gets new weights. keep: go on with the
    KV cache of the old weights. recompute: go on, and compute the KV cache anew with the new weights. wait:
    end first."""
    num_canaries: Natural = 4
    """With --staleness: prompts that each engine answers after each new version of its weights, only to
    compare its log-probs with the trainer's. Nothing is trained on them. 0 is off."""
    replay: str | None = None
    """With --staleness: run folder whose order of samples, weights and updates is repeated. Default: none,
    the order follows from what is ready first."""
    max_tokens_per_step: Count | None = None
    """With --staleness: tokens that one response gets from one version of the weights, at most. It goes on
    after the next weight sync, or at once if the next step needs it. Default: no limit."""
    min_engines: Count | None = None
    """With --staleness and engines in processes of their own: number of engines that each actor needs. As long
    as that many are left, the prompts of an engine that ends or hangs go to the others. Default: all engines,
    so that the job ends with the first one. Not run on a GPU yet."""
    eval_engines: Natural = 0
    """With --staleness and engines in processes of their own: engines of each actor that answer the held-out
    rows while training goes on. They keep their weights until then, and get no prompts to train on. 0: all
    engines answer them, and training waits. Not run on a GPU yet."""
