"""The router of a mixture of experts: Megatron's choice of experts, our balancing losses, statistics and
replay.

Megatron's own balancing losses are not used. With calculate_per_token_loss they are scaled by the tokens of
one rank (router.py:465 of 0.16.1), which is tp * cp too little where a sequence is split, their mean depends
on how samples are packed, and what they were worth piles up in one tracker of the process, whichever model it
was. Here each is a sum over tokens divided by a denominator of the whole mini-batch, as the policy's loss is,
so the numbers do not depend on the layout.

A forward pass carries a `RoutedTokens` in its PackedSeqParams. A hook hands it to a layer's router whenever
the layer runs, so that a layer which is computed again in the backward pass sees its own tokens, not those of
the latest micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.megatron.cpu_shim import cpu_megatron

with cpu_megatron():
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
    from megatron.core.transformer.moe.router import TopKRouter

STATISTICS = ("tokens", "entropy", "z", "z_squared", "balance", "changed")
"""Sums over a rank's tokens: what follows the tokens of each expert in `Router.statistics`."""


@dataclass(frozen=True)
class Balance:
    """What one layer adds to the loss: sum over its tokens t of p_t . c_g(t) * weight_g(t), and z_coeff *
    mean of (log sum exp logits)^2.

    p_t are the token's routing probabilities, c_g the tokens that each expert was chosen by in group g (no
    gradient). A group is the micro-batch, a sample or the mini-batch; see `MoEConfig`."""

    weights: torch.Tensor | None
    """[G] fp32, without the coefficient; None: no balancing."""
    coeff: float
    z_coeff: float
    num_tokens: int
    """Of the mini-batch, prompts included, all ranks."""
    counts: torch.Tensor | None = None
    """[layers of this chunk, 1, E] of the whole mini-batch, if the group is that; otherwise they are counted
    in the forward pass."""


@dataclass
class RoutedTokens:
    """What the routers of one forward pass know of this rank's T tokens."""

    is_real: torch.Tensor
    """[T] bool; false on padding, which counts nowhere."""
    groups: torch.Tensor
    """[T] int64 into Balance.weights; anything where not real."""
    balance: Balance | None = None
    counts: bool = False
    """A pass without gradients that adds to the statistics which experts the tokens favour."""
    choices: torch.Tensor | None = None
    """[T, layers of this chunk, topk] integers: the experts of each token, to be written, or read if
    `replays`."""
    replays: bool = False


class _AddToLoss(torch.autograd.Function):
    """`probs`, and a gradient of 1 for a scalar that is part of the loss."""

    @staticmethod
    def forward(ctx, probs: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, grad.new_ones(())


class Router(TopKRouter):
    """Chooses as TopKRouter does, unless the pass replays; then the given experts get the weights that the
    router gives them now."""

    index = 0
    """Among the routers of this chunk of the model."""
    routed: RoutedTokens | None = None
    """Of the forward pass that runs."""

    def __init__(self, config, pg_collection=None) -> None:
        super().__init__(config, pg_collection)
        self.router_replay = _Choices(self)
        self.num_changed: torch.Tensor | None = None
        """[T] int64, in a pass that replays: experts that each token would choose now and did not then."""
        self.statistics: torch.Tensor | None = None
        """[E + len(STATISTICS)] fp64, sums over the passes since it was None."""

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: [T, 1, E] fp32 -> weights [T, E], zero where not chosen, and choices [T, E] bool."""
        probs, chosen = super().routing(logits)
        # Recompute runs every layer without gradients first; only the pass with gradients counts, so each
        # token does once.
        if self.routed.counts or (self.routed.balance is not None and torch.is_grad_enabled()):
            probs = self._observe(logits.flatten(0, 1), probs, chosen)
        return probs, chosen

    def _observe(self, logits: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Add to the statistics, and to the loss if the pass has one."""
        real, balance = self.routed.is_real, self.routed.balance
        favoured, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
        z = torch.logsumexp(logits, dim=-1) * real
        spread = scores.new_zeros(())
        if balance is not None:
            spread, loss = self._losses(favoured, scores, z, balance)
            if loss is not None:
                probs = _AddToLoss.apply(probs, loss.to(probs.dtype))
        with torch.no_grad():
            entropy = torch.special.entr(scores).sum(-1) * real
            changed = self.num_changed * real if self.routed.replays else real * 0
            sums = torch.stack([x.sum().double() for x in (real, entropy, z, z.square(), spread, changed)])
            per_expert = ((favoured if self.routed.counts else chosen) & real[:, None]).sum(0).double()
            new = torch.cat([per_expert, sums])
            self.statistics = new if self.statistics is None else self.statistics + new
        return probs

    def _losses(
        self, favoured: torch.Tensor, scores: torch.Tensor, z: torch.Tensor, balance: Balance
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's part of the balancing loss without its coefficient, and of all that is added to the
        loss (None: nothing)."""
        loss, spread = None, scores.new_zeros(())
        if balance.weights is not None:
            real, groups, weights = self.routed.is_real[:, None], self.routed.groups, balance.weights[:, None]
            counts = (
                self._group_counts(favoured & real, groups, len(weights))
                if balance.counts is None
                else balance.counts[self.index]
            )
            price = (counts * weights)[groups] * real
            spread = (scores * price).sum()
            loss = balance.coeff * spread
        if balance.z_coeff:
            of_z = balance.z_coeff / balance.num_tokens * z.square().sum()
            loss = of_z if loss is None else loss + of_z
        return spread.detach(), loss

    @torch.no_grad()
    def _group_counts(self, favoured: torch.Tensor, groups: torch.Tensor, num_groups: int) -> torch.Tensor:
        """[G, E] tokens of each group that favour each expert. Collective over the ranks that share the
        sequences."""
        counts = torch.zeros(num_groups, favoured.shape[1], device=favoured.device).index_add_(
            0, groups, favoured.float()
        )
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        return counts


class _Choices:
    """Stands where Megatron has its RouterReplay, which keeps the routers of all models of the process in one
    list and finds the choices of a layer that is computed again by popping another."""

    def __init__(self, router: Router) -> None:
        self.router = (router,)  # hidden from torch.nn.Module

    def get_replay_topk(
        self, scores, topk, num_groups, group_topk, compute_topk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and indices [T, topk] of the experts."""
        (router,) = self.router
        routed = router.routed
        values, indices = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if routed.replays:
            given = routed.choices[:, router.index].long()
            router.num_changed = (indices[:, :, None] != given[:, None, :]).all(-1).sum(-1)
            return scores.gather(1, given), given
        if routed.choices is not None:
            routed.choices[:, router.index] = indices
        return values, indices


def connect_routers(model: torch.nn.Module) -> list[Router]:
    """Number the routers of a chunk of the model, in the order of its layers, and let each follow the forward
    passes of its layer."""
    routers: list[Router] = []
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.router.index = len(routers)
            routers.append(layer.mlp.router)
            layer.register_forward_pre_hook(_follow, with_kwargs=True)
    return routers


def _follow(layer: torch.nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
    layer.mlp.router.routed = kwargs["packed_seq_params"].routed
