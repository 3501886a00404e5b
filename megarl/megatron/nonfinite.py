"""Explain an update whose loss or gradient is not finite, with the same message on all ranks of the role."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megarl.batch import MicroBatch
from megarl.collectives import all_gather_messages

_NAMED = 3  # maximum number of samples and weights in a message


class NonFiniteStep(FloatingPointError):
    """Error of an update whose gradient or loss is not finite on some rank.

    `grad_norm` is the norm on this rank, which may be finite."""

    def __init__(self, grad_norm: float) -> None:
        super().__init__(f"the gradient norm is {grad_norm}")
        self.grad_norm = grad_norm


class ExplainedModel(Protocol):
    """The attributes of a trained model that `explain` reads; `TrainedModel` has them all."""

    groups: object
    """Process groups of the mesh; `intra_dist_opt` contains all of its ranks."""
    token_values: tuple[str, str]
    """Name of the compared number, for people, and the batch column with its value before the step."""

    @property
    def reports(self) -> bool: ...

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]: ...

    def gradients(self) -> Iterable[tuple[str, torch.Tensor]]: ...


@dataclass(frozen=True)
class _NonFinite:
    """The non-finite tensors that one rank of the role found.

    Args:
        weights, gradients: names of weights and gradients that are not finite.
        losses: value and sample ids of each micro-batch whose loss is not finite.
        samples: for each sample: whether the loss of its micro-batch is not finite, the largest difference of
            a token from its value before the step (infinite if not finite), the sample id, and a text for
            people."""

    rank: int
    grad_norm: float
    weights: list[str]
    gradients: list[str]
    losses: list[tuple[float, list[int]]]
    samples: list[tuple[bool, float, int, str]]


def explain(
    model: ExplainedModel,
    grad_norm: float,
    micro_batches: list[MicroBatch],
    losses: list[torch.Tensor],
    values: list[torch.Tensor] | None,
) -> str:
    """Return a message that names the non-finite weights, gradients, losses and samples.

    Collective over the mesh.

    Args:
        losses: the loss of each micro-batch, on the last stage.
        values: [N] log-probs or values of the response tokens of each micro-batch. None before the last
            stage."""
    mine = _NonFinite(
        rank=dist.get_rank(),
        grad_norm=grad_norm,
        weights=_not_finite(model.parameters.items()),
        gradients=_not_finite(model.gradients()),
        losses=[
            (loss.item(), micro.batch.sample_ids.tolist())
            for loss, micro in zip(losses, micro_batches)
            if not loss.isfinite()
        ],
        samples=_samples(*model.token_values, micro_batches, losses, values)
        if values is not None and model.reports
        else [],
    )
    ranks = all_gather_messages(mine, _NonFinite, model.groups.intra_dist_opt)
    return _message(model.token_values[0], ranks)


def _not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    return [name for name, tensor in tensors if not tensor.isfinite().all()]


def _samples(
    kind: str,
    column: str,
    micro_batches: list[MicroBatch],
    losses: list[torch.Tensor],
    values: list[torch.Tensor],
) -> list[tuple[bool, float, int, str]]:
    """Return one tuple for each sample of this rank, as `_NonFinite.samples` describes it."""
    found = []
    for micro, loss, of_micro in zip(
        micro_batches, losses, values
    ):  # an interleaved pipeline has losses of empty micro-batches too
        before, lengths = micro.column(column), micro.batch.response_lengths.tolist()
        gap = (of_micro - (0.0 if before is None else before)).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        rows = zip(micro.batch.sample_ids.tolist(), of_micro.split(lengths), gap.split(lengths), strict=True)
        for row, (sample, now, gaps) in enumerate(rows):
            at = int(gaps.argmax())  # a response has at least one token
            was = "" if before is None else f", {before.split(lengths)[row][at]:.4g} before the step"
            text = f"sample {sample} ({kind} {now[at]:.4g} at response token {at}{was})"
            found.append((not loss.isfinite().item(), float(gaps[at]), sample, text))
    return found


def _message(kind: str, ranks: Sequence[_NonFinite]) -> str:
    grad_norm = min((rank.grad_norm for rank in ranks), key=math.isfinite)
    found = []
    if weights := _of_ranks((rank.rank, rank.weights) for rank in ranks):
        found.append(f"weights were not finite before it: {weights}")
    samples = sorted((sample for rank in ranks for sample in rank.samples), reverse=True)
    if unsound := [sample for _, gap, sample, _ in samples if not math.isfinite(gap)]:
        found.append(f"{kind}s of {_listed('sample', unsound)} are not finite")
    of_loss = {tuple(ids): (value, rank.rank) for rank in reversed(ranks) for value, ids in rank.losses}
    found += [
        f"the loss of the micro-batch of {_listed('sample', ids)} is {value} (rank {rank})"
        for ids, (value, rank) in [*of_loss.items()][:_NAMED]
    ]
    if gradients := _of_ranks((rank.rank, rank.gradients) for rank in ranks):
        found.append(f"gradients are not finite: {gradients}")
    worst = "; ".join(text for *_, text in samples[:_NAMED])
    found = found or ["every gradient is finite, the sum of their squares is not"]
    return f"the gradient norm is {grad_norm:.4g}: {'; '.join(found)}. Worst: {worst}"


def _of_ranks(names: Iterable[tuple[int, list[str]]]) -> str:
    """Return names with their ranks, e.g. "a (rank 0, 1), b (rank 1) and 4 more"."""
    ranks_of: dict[str, list[int]] = {}
    for rank, of_rank in names:
        for name in of_rank:
            ranks_of.setdefault(name, []).append(rank)
    first = [f"{name} (rank {', '.join(map(str, ranks))})" for name, ranks in [*ranks_of.items()][:_NAMED]]
    return ", ".join(first) + (f" and {len(ranks_of) - _NAMED} more" if len(ranks_of) > _NAMED else "")


def _listed(what: str, numbers: Sequence[int]) -> str:
    """Return numbers in words, e.g. "sample 4" or "samples 4, 7, 9 and 3 more"."""
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:_NAMED]))}{more}"
