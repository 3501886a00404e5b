"""The mixture-of-experts router for models whose routing follows DeepSeek."""

from __future__ import annotations

import torch

from megarl.megatron.router import Router


class ExpertRouter(Router):
    """A mixture-of-experts router with DeepSeek's constant score correction and group scores, each of them
    optional.

    Score correction (arXiv:2408.15664): the correction stays constant. With moe_router_enable_expert_bias
    Megatron would change it at every step. Here the correction is a buffer of the same name, [experts] fp32.

    Group score: the score of a group is the sum of its `group_best` best experts' scores. Megatron always
    sums the topk / group_topk best ones."""

    def __init__(self, config, *args, corrects_scores: bool = False, group_best: int = 0, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        if corrects_scores:
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts, dtype=torch.float32))
        if group_best:
            self.router_replay = GroupChoice(group_best, self.router_replay)


class GroupChoice:
    """Choose experts by group, through the hook that Megatron has for replayed routing.

    A real replay is passed through."""

    def __init__(self, best: int, replay: object) -> None:
        self.best, self.replay = best, replay

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, default_compute_topk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and indices, each [tokens, topk], of the experts chosen from the best groups, or of
        the replayed experts."""
        return self.replay.get_replay_topk(scores, topk, num_groups, group_topk, self._choose)

    def _choose(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        by_group = scores.unflatten(1, (num_groups, -1))  # [tokens, groups, experts of a group]
        of_group = by_group.topk(self.best, dim=-1).values.sum(dim=-1)
        chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter_(
            1, of_group.topk(group_topk, dim=-1).indices, True
        )
        return by_group.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1).topk(topk, dim=-1)
