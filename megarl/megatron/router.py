"""The router of a mixture of experts, with balancing losses, statistics and replay of recorded choices.

Megatron's router chooses the experts.
Megatron's own balancing losses are not used, for two reasons. Their mean depends on how samples are packed.
Their values accumulate in one tracker of the process for all models. Here each balancing loss is a sum over
tokens divided by a denominator of the whole mini-batch, like the policy's loss, so the numbers do not depend
on the layout.

A forward pass carries a `RoutedTokens` in its PackedSeqParams. A hook passes the `RoutedTokens` to a layer's
router whenever the layer runs. A layer that is recomputed in the backward pass therefore sees the tokens of
its own micro-batch, not those of the latest one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.megatron.cpu_shim import cpu_megatron

with cpu_megatron():
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import (
        MoEAuxLossAutoScaler,
        compute_routing_scores_for_aux_loss,
    )
    from megatron.core.transformer.moe.router import TopKRouter

STATISTICS = ("tokens", "entropy", "z", "z_squared", "balance", "changed")
"""Names of the sums over a rank's tokens that follow the token counts of experts in `Router.statistics`."""


@dataclass(frozen=True)
class Balance:
    """Weights and coefficients of the load-balancing loss that each mixture-of-experts layer adds to the
    loss.

    The loss is the sum over tokens t of p_t . c_g(t) * weight_g(t), plus z_coeff * mean of (log sum exp
    logits)^2. p_t are the token's routing probabilities. c_g counts the tokens of group g for which each
    expert was chosen (no gradient). A group is the micro-batch, a sample or the mini-batch; see
    `MoEConfig`."""

    weights: torch.Tensor | None
    """[G] fp32 weights without the coefficient, or None for no balancing."""
    coeff: float
    z_coeff: float
    num_tokens: int
    """Number of tokens in the mini-batch on all ranks, with prompts."""
    counts: torch.Tensor | None = None
    """[layers of this chunk, 1, E] counts of the whole mini-batch, if the group is the mini-batch.

    Otherwise the forward pass counts them."""


@dataclass
class RoutedTokens:
    """The information about this rank's T tokens that the routers of one forward pass need."""

    is_real: torch.Tensor
    """[T] bool: false on padding, which is never counted."""
    groups: torch.Tensor
    """[T] int64: index of each token's group in Balance.weights. Entries of padding are arbitrary."""
    balance: Balance | None = None
    counts: bool = False
    """True in a pass without gradients that counts the experts that the tokens favour."""
    choices: torch.Tensor | None = None
    """[T, layers of this chunk, topk] integers: the experts of each token.

    The pass reads them if `replays`, and writes them otherwise."""
    replays: bool = False


class Router(TopKRouter):
    """A TopKRouter that can replay a given choice of experts.

    In a replay the given experts receive the weights that the router computes now."""

    index = 0
    """Index of this router in its chunk of the model."""
    routed: RoutedTokens | None = None
    """Tokens of the forward pass that runs."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = _Choices(self)
        self.num_changed: torch.Tensor | None = None
        """[T] int64, in a replay: how many of the experts that a token would choose now are not replayed."""
        self.statistics: torch.Tensor | None = None
        """[E + len(STATISTICS)] fp64: sums over the passes since it was None."""

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route logits [T, 1, E] fp32 to weights [T, E], zero where not chosen, and choices [T, E] bool."""
        probs, chosen = super().routing(logits)
        # Recompute first runs every layer without gradients. Only the pass with gradients counts, so each
        # token is counted once.
        if self.routed.counts or (self.routed.balance is not None and torch.is_grad_enabled()):
            probs = self._observe(logits.flatten(0, 1), probs, chosen)
        return probs, chosen

    def _observe(self, logits: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Add this pass to the statistics, and return `probs`, with the gradient of the balancing loss
        attached if the pass has one."""
        real, balance = self.routed.is_real, self.routed.balance
        favoured, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
        z = torch.logsumexp(logits, dim=-1) * real
        spread = scores.new_zeros(())
        if balance is not None:
            spread, loss = self._losses(favoured, scores, z, balance)
            if loss is not None:
                # Megatron scales the gradient by 1, because the loss is divided by global denominators.
                probs = MoEAuxLossAutoScaler.apply(probs, loss.to(probs.dtype))
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
        """Return this rank's balancing loss without its coefficient, for metrics, and the terms to add to the
        loss, or None for no terms."""
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
        """Return [G, E] numbers of tokens of each group that favour each expert.

        Collective over the ranks that share the sequences."""
        counts = torch.zeros(num_groups, favoured.shape[1], device=favoured.device).index_add_(
            0, groups, favoured.float()
        )
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        return counts


class _Choices:
    """A replacement of Megatron's RouterReplay that records or replays the choices of one router.

    RouterReplay keeps the routers of all models of the process in one list, and finds the choices of a
    recomputed layer by popping another list."""

    def __init__(self, router: Router) -> None:
        self.router = (router,)  # hidden from torch.nn.Module

    def get_replay_topk(
        self, scores, topk, num_groups, group_topk, compute_topk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the router's scores and the indices, both [T, topk], of the recorded experts while a replay is
        active, else of the experts that it chooses now."""
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
    """Return the routers of a model chunk, numbered in the order of its layers and connected to its forward
    passes.

    A hook passes the tokens of each forward pass to the layer's router."""
    routers: list[Router] = []
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.router.index = len(routers)
            routers.append(layer.mlp.router)
            layer.register_forward_pre_hook(_follow, with_kwargs=True)
    return routers


def _follow(layer: torch.nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
    layer.mlp.router.routed = kwargs["packed_seq_params"].routed
