"""Faults of growing size between trainer and engine, and the smallest of each kind that the log-prob gate
catches in one step.

    python tests/faults/graded_faults.py graded|few MODEL TRAIN_DATA OUT.jsonl [--flags of megarl train ...]

One process holds a real trainer and a real engine. The engine samples once. Each fault is then planted in the
trainer, which computes the log-probs of the same responses again, and the gate judges them: planted in the
engine, it would make the same differences."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

SIZES = tuple(10.0**exponent for exponent in range(0, -7, -1))
FLAGS = """--algorithm grpo --executor inline --nproc-per-node 1 --train-iters 3 --num-prompts 16 --num-samples-per-prompt 8
    --global-batch-size 64 --lr 1e-4 --max-prompt-length 32 --max-response-length 48 --num-rollouts-to-log 0"""


@dataclass(frozen=True)
class Verdict:
    """What the gate says of one planted fault. by: the statistics above their limits, [] if it is not
    caught."""

    fault: str
    size: float
    by: list[str]
    mean: float
    outliers: int
    maximum: float


class Bench:
    """Trainer and engine after one update, and 128 responses that the engine has sampled since.

    Args:
        trainer: megarl.Trainer of an inline job; reward: any."""

    def __init__(self, trainer) -> None:
        import megarl
        from megarl.gate_limits import exceeded

        actor, reward = megarl.symbolic_roles("actor reward")
        self.role = trainer.executor.roles["actor"]
        self.parameters = self.role.model.parameters
        self.stale = {name: value.clone() for name, value in self.parameters.items()}
        trainer.update(trainer.rollout())
        trainer.rollout(actor.rollout().join(reward.score))
        self.limits = trainer.state.first.gate_limits
        self.exceeded = exceeded

    def judge(self, fault: str, size: float, planted: contextlib.AbstractContextManager) -> Verdict:
        """Compute the log-probs with the fault in place, and remove it."""
        with planted:
            found = self.role.log_probs()
        return Verdict(
            fault,
            size,
            self.exceeded(found, self.limits),
            found["mismatch/mean_abs"],
            found["mismatch/outliers"],
            found["mismatch/max_abs"],
        )

    def names(self, pattern: str = "") -> list[str]:
        """Parameters whose name has a part that matches."""
        return [name for name in self.parameters if re.search(pattern, name)]

    @contextlib.contextmanager
    def changed(self, change: Callable[[dict[str, torch.Tensor]], None], *names: str) -> Iterator[None]:
        """Change parameters in place for a while."""
        kept = {name: self.parameters[name].clone() for name in names}
        change(self.parameters)
        yield
        for name, value in kept.items():
            self.parameters[name].copy_(value)

    # The faults. `size` is relative.

    @contextlib.contextmanager
    def temperature(self, size: float) -> Iterator[None]:
        """The trainer divides its logits by a temperature that is too high."""
        config = self.role.config
        self.role.config = replace(
            config, sampling=replace(config.sampling, temperature=config.sampling.temperature * (1 + size))
        )
        yield
        self.role.config = config

    @contextlib.contextmanager
    def rotary_base(self, size: float) -> Iterator[None]:
        """The rotary embedding's base is too large."""
        rotary, shape = self.role.model.chunks[0].rotary_pos_emb, self.role.shape
        kept = rotary.inv_freq
        rotary.inv_freq = (shape.rope_theta * (1 + size)) ** -(
            torch.arange(0, shape.head_dim, 2) / shape.head_dim
        )
        rotary.forward.cache_clear()
        yield
        rotary.inv_freq = kept
        rotary.forward.cache_clear()

    def stale_tensor(self, name: str, size: float, rows: slice = slice(None)):
        """One tensor, or some of its rows, lack this part of the last update."""
        return self.changed(lambda p: p[name][rows].lerp_(self.stale[name][rows], size), name)

    def stale_shard(self, name: str, size: float):
        """Likewise the half of a tensor that one of two ranks holds."""
        return self.stale_tensor(name, size, slice(len(self.parameters[name]) // 2, None))

    def swapped_rows(self, name: str, first: int, second: int):
        """Two rows of a matrix have changed places."""

        def swap(parameters: Mapping[str, torch.Tensor]) -> None:
            parameters[name][[first, second]] = parameters[name][[second, first]]

        return self.changed(swap, name)

    def swapped_experts(self, layer: int, first: int, second: int):
        """Two experts of a layer have changed places."""
        of_first = [name for name in self.names(rf"layers\.{layer}\.") if f"local_experts.{first}." in name]
        of_second = [name.replace(f"local_experts.{first}.", f"local_experts.{second}.") for name in of_first]

        def swap(parameters: Mapping[str, torch.Tensor]) -> None:
            for one, other in zip(of_first, of_second, strict=True):
                kept = parameters[one].clone()
                parameters[one].copy_(parameters[other])
                parameters[other].copy_(kept)

        return self.changed(swap, *of_first, *of_second)


def graded(bench: Bench) -> Iterator[Verdict]:
    """Plant every fault, those with a size in smaller and smaller ones until the gate does not see it."""
    yield bench.judge("none", 0.0, contextlib.nullcontext())
    yield from shrink(bench, "temperature", bench.temperature)
    yield from shrink(bench, "rotary base", bench.rotary_base)
    for name in bench.names():
        kind = "vector" if bench.parameters[name].shape[1] == 1 else "matrix"
        yield from shrink(bench, f"stale {kind} {name}", functools.partial(bench.stale_tensor, name))
        if kind == "matrix":
            yield from shrink(bench, f"stale shard {name}", functools.partial(bench.stale_shard, name))
    used = sorted({*bench.role.shard.batch.tokens.tolist()})
    pairs = list(zip(used[2::2], used[3::2], strict=False))
    for name in bench.names():
        if bench.parameters[name].shape[1] > 1 and not re.search("experts|router", name):
            for first, second in (
                pairs if re.search("embedding|output_layer", name) else ((0, 1), (2, 3), (4, 5))
            ):
                yield bench.judge(f"swapped rows {name}", 1.0, bench.swapped_rows(name, first, second))
    num_experts = bench.role.shape.num_moe_experts
    for layer in range(bench.role.shape.num_layers if num_experts else 0):
        for second in range(1, num_experts):
            yield bench.judge(f"swapped experts layer {layer}", 1.0, bench.swapped_experts(layer, 0, second))


def shrink(
    bench: Bench, fault: str, plant: Callable[[float], contextlib.AbstractContextManager]
) -> Iterator[Verdict]:
    """Plant a fault in smaller and smaller sizes, down to the first that is not caught."""
    for size in SIZES:
        yield (verdict := bench.judge(fault, size, plant(size)))
        if not verdict.by:
            return


def few(bench: Bench) -> Iterator[Verdict]:
    """Plant one fault of each kind that is a little larger than the smallest ones that are caught."""
    yield bench.judge("none", 0.0, contextlib.nullcontext())
    yield bench.judge("temperature", 1e-2, bench.temperature(1e-2))
    yield bench.judge("rotary base", 1e-2, bench.rotary_base(1e-2))
    fc1 = "decoder.layers.0.mlp.linear_fc1.weight"
    yield bench.judge(f"stale matrix {fc1}", 1.0, bench.stale_tensor(fc1, 1.0))
    yield bench.judge(f"stale shard {fc1}", 1.0, bench.stale_shard(fc1, 1.0))
    yield bench.judge(f"swapped rows {fc1}", 1.0, bench.swapped_rows(fc1, 0, 1))


def measure(
    model: str | Path, data: str | Path, faults: Callable[[Bench], Iterator[Verdict]], *flags: str
) -> Iterator[Verdict]:
    """Yield what the gate says of faults in a job that trains `model` on the rows of `data`."""
    import megarl

    with tempfile.TemporaryDirectory() as folder:
        words = [
            *FLAGS.split(),
            "--model",
            str(model),
            "--train-data",
            str(data),
            "--save",
            f"{folder}/run",
            *flags,
        ]
        with megarl.Trainer(megarl.load_config(*words)) as training:
            yield from faults(Bench(training))


if __name__ == "__main__":
    _, which, model, data, out, *flags = sys.argv
    with open(out, "w", buffering=1) as file:
        for verdict in measure(model, data, {"graded": graded, "few": few}[which], *flags):
            print(json.dumps(vars(verdict)), file=file)
