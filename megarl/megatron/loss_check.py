"""Check the loss of a step's first update on all ranks together, and raise InvariantError before a weight
changes.

    weights   the token weights of the loss, summed over micro-batches and ranks, must be the sum that the
              aggregation promises
    ratio     log-probs (values) must equal those of the pass before the updates

The checks hold for every algorithm. A weight is measured, not computed: it is the slope of the loss at a
token, times the factor that Megatron's schedule applies to the loss before the backward pass. `TrainedModel`
adds the sums to the one all-reduce that every update has."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from megarl.batch import MicroBatch
from megarl.collectives import all_gather_messages
from megarl.gate_limits import GateLimits, exceeded, gate_error
from megarl.invariants import InvariantError

_WEIGHT_TOLERANCE = 1e-5
"""Relative tolerance of a float64 sum of fp32 numbers that are right to 1e-7."""
_NAMED = 3  # maximum number of tokens in a message


@dataclass(frozen=True)
class PassLimit:
    """Limit of the difference between a token's log-prob (or value) before a step's updates and in its first
    update.

    Args:
        of_mean: compare the mean of the absolute differences with the limit, not the largest one.
        limit: largest difference that is accepted.
        reason: why this is the limit, for people."""

    of_mean: bool
    limit: float
    reason: str


class LossCheck:
    """Measures the loss of one update on this rank, to compare it with what the algorithm promises.

    Args:
        role: name of the role that is updated.
        kind: what the loss compares: log-prob or value.
        promised: expected sum of the weights, or None if the algorithm promises none.
        num_tokens, num_sequences: counts of the whole mini-batch, as the loss receives them.
        limit: None if the numbers from before the step are not this model's, so nothing is compared."""

    origin: ClassVar[str] = "before the step"
    """Where the numbers that the update is compared with come from, in words."""

    def __init__(
        self,
        role: str,
        kind: str,
        promised: float | None,
        num_tokens: int,
        num_sequences: int,
        limit: PassLimit | None,
    ) -> None:
        self.role, self.kind, self.promised, self.limit = role, kind, promised, limit
        self.num_tokens, self.num_sequences = num_tokens, num_sequences
        self.counts = False
        """True if this rank's sums count. Of the ranks that compute the same loss, one counts."""
        self._weight: torch.Tensor | float = 0.0
        self._pending: torch.Tensor | float = 0.0
        self._amounts: torch.Tensor | float = 0.0  # [2] number of tokens and of sequences
        self._gaps: torch.Tensor | float = 0.0  # [2] tokens above the limit, and the sum of differences
        self._seen: list[tuple[MicroBatch, torch.Tensor | None, torch.Tensor, torch.Tensor]] = []

    @property
    def compares(self) -> bool:
        """Whether the outputs of the update are compared with those of the pass before it, by
        `add_passes`."""
        return self.limit is not None

    def add_tokens(self, response_lengths: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Add the tokens of one loss call, and the sum of their weights, to this rank's sums.

        `response_lengths` are the response lengths of the tokens' samples, and `weight` is the sum of their
        weights."""
        lengths = response_lengths.double()
        self._amounts = self._amounts + torch.stack(
            [torch.ones_like(lengths).sum(), lengths.reciprocal().sum()]
        )
        if weight is not None:
            self._pending = self._pending + weight

    def add_passes(
        self, micro: MicroBatch, rows: torch.Tensor, now: torch.Tensor, before: torch.Tensor
    ) -> None:
        """Add the differences between the outputs of the update and of the pass before it, [C] numbers each,
        to this rank's sums. Nothing is raised yet.

        `rows` are the indices of the micro-batch's response tokens that the numbers belong to."""
        gap = (now.detach() - before).abs()
        self._gaps = self._gaps + torch.stack(
            [(~(gap <= self.limit.limit)).sum().double(), gap.sum().double()]
        )
        self._seen.append((micro, rows, now.detach(), before))

    def end_of_forward(self, loss: torch.Tensor) -> None:
        """Hook a micro-batch's loss, so that its backward pass adds its tokens' weights, times the scale of
        that pass."""
        weight, self._pending = self._pending, 0.0
        if loss.requires_grad and isinstance(weight, torch.Tensor):
            loss.register_hook(lambda scale: self._add_weight(scale.double() * weight))

    def _add_weight(self, weight: torch.Tensor) -> None:
        self._weight = self._weight + weight

    def sums(self, device: torch.device) -> torch.Tensor:
        """Return [5] fp64 sums of this rank: weights, tokens, sequences, tokens above the limit, and
        differences; zeros if another rank counts the same loss."""
        parts = torch.zeros(5, dtype=torch.float64, device=device)
        if self.counts:
            parts[0] += self._weight
            parts[1:3] += self._amounts
            parts[3:] += self._gaps
        return parts

    def judge(self, sums: torch.Tensor, factors: Collection[float], group: dist.ProcessGroup) -> None:
        """Raise InvariantError on all ranks with the same message if a check fails.

        The construction of this message is collective over the group.

        Args:
            sums: sums over all ranks of the group.
            factors: factors of gradients where ranks sum them."""
        weight, tokens, sequences, above, gap = sums.tolist()
        if (round(tokens), round(sequences)) != (self.num_tokens, self.num_sequences):
            raise InvariantError(
                f"{self.role}: the loss was computed for {tokens:.0f} tokens of {sequences:.6g} "
                "sequences, and "
                f"divided for {self.num_tokens} of {self.num_sequences}"
            )
        if wrong := [factor for factor in factors if factor != 1]:
            raise InvariantError(
                f"{self.role}: gradients are multiplied by {wrong[0]:.6g} where the ranks sum "
                "theirs. The loss is "
                "divided already, by counts of all ranks, so this must be 1."
            )
        if self.promised is not None and not abs(weight - self.promised) <= _WEIGHT_TOLERANCE * self.promised:
            raise InvariantError(
                f"{self.role}: the weights that the loss gave {tokens:.0f} tokens add up to "
                f"{weight:.6g} over all "
                f"ranks, and its aggregation promises {self.promised:.6g}. The gradient would be "
                "wrong by the factor "
                f"{weight / self.promised:.6g}. Was the loss divided by counts of one rank or "
                "micro-batch, or scaled "
                "after it was computed?"
            )
        if self.limit is not None and (
            not gap / tokens <= self.limit.limit if self.limit.of_mean else above > 0
        ):
            raise InvariantError(self._disagreement(tokens, group, gap / tokens))

    def _worst(self, group: dist.ProcessGroup) -> list[tuple[float, str]]:
        """Return the largest differences on all ranks, each with its token in words. Collective over the
        group."""
        mine: list[tuple[float, str]] = []
        for micro, rows, now, before in self._seen if self.counts else ():
            gaps = (now - before).abs().nan_to_num(nan=torch.inf)
            for at in gaps.topk(min(_NAMED, len(gaps))).indices.tolist():
                told = self._told(micro, int(rows[at]), float(now[at]), float(before[at]))
                mine.append((float(gaps[at]), told))
        ranks = all_gather_messages(mine, list[tuple[float, str]], group)
        return sorted((token for rank in ranks for token in rank), reverse=True)[:_NAMED]

    def _disagreement(self, tokens: float, group: dist.ProcessGroup, mean: float) -> str:
        worst = self._worst(group)
        if not self.limit.of_mean:
            worst = [token for token in worst if token[0] > self.limit.limit]
        name, value = ("mean", mean) if self.limit.of_mean else ("largest", worst[0][0])
        return "\n".join(
            [
                f"{self.role}: the first update of the step does not reproduce the {self.kind}s computed "
                f"before it: the {name} difference of {tokens:.0f} response tokens is {value:.3g}, and the "
                f"limit {self.limit.limit:g} "
                f"({self.limit.reason}). Weights and samples are the same, so training would be "
                "silently wrong. Do both "
                "passes have the same temperature and the same micro-batches, is dropout on, or "
                "were weights or the "
                "column written in between?",
                *(f"  {text}" for _, text in worst),
            ]
        )

    def _told(self, micro: MicroBatch, row: int, now: float, before: float) -> str:
        batch, position = micro.batch, int(micro.response_positions[row])
        sample = int(torch.searchsorted(batch.cu_seqlens, position, right=True)) - 1
        return (
            f"sample {int(batch.sample_ids[sample])}, token {int(batch.tokens[position])} at position "
            f"{position - int(batch.cu_seqlens[sample])}: {before:.8g} {self.origin}, "
            f"{now:.8g} in the update"
        )


class EngineLossCheck(LossCheck):
    """A `LossCheck` that is the log-prob gate as well, for --old-log-probs engine: the first update's own
    log-probs are compared with the engine's, before a weight changes.

    Args:
        role, promised, num_tokens, num_sequences: as for `LossCheck`.
        limits: limits of the gate."""

    origin: ClassVar[str] = "by the engine"

    def __init__(
        self, role: str, promised: float | None, num_tokens: int, num_sequences: int, limits: GateLimits
    ) -> None:
        super().__init__(role, "log-prob", promised, num_tokens, num_sequences, limit=None)
        self._limits = limits
        self._stats = torch.zeros(len(_STATISTICS), dtype=torch.float64)
        self._largest = 0.0

    @property
    def compares(self) -> bool:
        return True

    def add_passes(
        self, micro: MicroBatch, rows: torch.Tensor, now: torch.Tensor, before: torch.Tensor
    ) -> None:
        gap = (now.detach() - before).double()
        size, outlier = gap.abs(), self._limits.outlier
        self._stats = self._stats.to(gap.device) + torch.stack(
            [
                size.sum(),
                size.clamp(max=outlier).sum(),
                now.detach().double().abs().sum(),
                (~(size <= outlier)).sum().double(),
                (gap.expm1() - gap).sum(),
            ]
        )
        self._largest = max(self._largest, float(size.nan_to_num(nan=torch.inf).max()))
        self._seen.append((micro, rows, now.detach(), before))

    def metrics(self) -> dict[str, float]:
        """Return this rank's part of the metrics mismatch/*, over the tokens of the mini-batch."""
        if not self.counts:
            return {}
        return _mismatch(self._stats, self.num_tokens, self._largest) | {
            "mismatch/tokens": sum(len(now) for _, _, now, _ in self._seen)
        }

    def sums(self, device: torch.device) -> torch.Tensor:
        own = self._stats.to(device) if self.counts else torch.zeros(len(_STATISTICS), device=device)
        is_above = float(self.counts and not self._largest <= self._limits.largest)
        return torch.cat([super().sums(device), own.double(), own.new_tensor([is_above]).double()])

    def judge(self, sums: torch.Tensor, factors: Collection[float], group: dist.ProcessGroup) -> None:
        """Raise InvariantError on all ranks with the same message if a check fails, or trainer and engine
        disagree. Collective over the group where they do."""
        own = len(_STATISTICS) + 1
        super().judge(sums[:-own], factors, group)
        *stats, num_above = sums[-own:].cpu()
        largest = 0.0
        mismatch = _mismatch(torch.stack(stats), self.num_tokens, largest)
        mismatch["mismatch/tokens"] = self.num_tokens
        if not num_above and not exceeded(mismatch, self._limits):
            return
        worst = self._worst(group)
        mismatch["mismatch/max_abs"] = worst[0][0]
        error = gate_error(mismatch, self._limits)
        raise InvariantError("\n".join([f"{self.role}: {error}", *(f"  {text}" for _, text in worst)]))


_STATISTICS = ("mean_abs", "clipped_abs", "log_prob_abs", "outliers", "kl")


def _mismatch(sums: torch.Tensor, num_tokens: int, largest: float) -> dict[str, float]:
    """Return the metrics mismatch/*, given sums over tokens: the means, the number of outliers, and the
    maximum."""
    values = dict(zip(_STATISTICS, (sums / num_tokens).tolist(), strict=True))
    values["outliers"] *= num_tokens
    return {f"mismatch/{name}": value for name, value in values.items()} | {"mismatch/max_abs": largest}
