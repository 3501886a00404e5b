"""Prepare the routers of one model for forward passes, and collect their statistics after an update.

`router.py` describes what the routers do.

    routing = Routing(chunks, options, groups, device)      collective over the mesh
    packed.routed = routing.of_pass(chunk, micro, own)      call before every forward pass
    routing.end_pass(chunk, micro, packed.routed)           call after every forward pass
    with routing.choices("record"):                         forward passes inside record the chosen experts
    with routing.choices("replay"):                         forward passes inside replay the recorded experts
    routing.begin_update(micro_batches)                     collective over the mesh; later passes with
                                                            gradients are part of the update
    routing.end_update(prefix)                              collective over the mesh; returns its metrics"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.distributed as dist

from megarl.batch import MicroBatch, expert_dtype
from megarl.config.schema import MoEConfig
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.router import STATISTICS, Balance, RoutedTokens, connect_routers

with cpu_megatron():
    from megatron.core.process_groups_config import ProcessGroupCollection


class Routing:
    def __init__(
        self,
        chunks: list[torch.nn.Module],
        options: MoEConfig,
        groups: ProcessGroupCollection,
        device: torch.device,
    ) -> None:
        self.options, self.groups, self.device = options, groups, device
        self.routers = {id(chunk): connect_routers(chunk) for chunk in chunks}
        self._all = [router for routers in self.routers.values() for router in routers]
        num_layers = torch.tensor(len(self._all), device=device)
        dist.all_reduce(num_layers, group=groups.pp)
        self.num_layers = int(num_layers)
        self._amounts: tuple[int, int] | None = (
            None  # tokens and samples of the mini-batch that is trained on
        )
        # counts of each chunk, if the whole mini-batch was counted
        self._counts: dict[int, torch.Tensor] = {}
        self._counting = False
        self._choosing: Literal["record", "replay"] | None = None
        self._kept: dict[
            tuple[int, ...], torch.Tensor
        ] = {}  # chunk and samples of a forward pass -> choices, on the CPU

    def of_pass(
        self, chunk: torch.nn.Module, micro: MicroBatch, own: Callable[[torch.Tensor], torch.Tensor]
    ) -> RoutedTokens:
        """Return the information that the routers of `chunk` need in the next forward pass.

        Args:
            own: maps a tensor with a row per token of the micro-batch to the rows of the T tokens that this
                rank's layers see, on this rank's device. Rows of padding are -1."""
        samples, by_sample = (
            own(micro.batch.sample_of_token),
            self.options.moe_router_load_balancing_type == "seq_aux_loss",
        )
        routed = RoutedTokens(
            is_real=samples >= 0, groups=samples.clamp(min=0) if by_sample else torch.zeros_like(samples)
        )
        if self._counting:
            routed.counts = True
        elif self._amounts is not None:
            routed.balance = self._balance(chunk, micro, *self._amounts)
        if self._choosing is not None and self.routers[id(chunk)] and len(micro.batch):
            routed.choices, routed.replays = self._choices(chunk, micro, own), self._choosing == "replay"
        return routed

    def end_pass(self, chunk: torch.nn.Module, micro: MicroBatch, routed: RoutedTokens) -> None:
        if routed.choices is not None and not routed.replays:
            self._kept[_key(chunk, micro)] = routed.choices.cpu()

    def _choices(
        self, chunk: torch.nn.Module, micro: MicroBatch, own: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the chosen experts [T, layers, topk] of this rank's tokens.

        While recording, this is an empty tensor to write. In a replay, it holds the choices of the
        rollout engine or the recorded choices."""
        routers = self.routers[id(chunk)]
        if self._choosing == "record":
            num_tokens = len(own(micro.batch.sample_of_token))
            return torch.empty(
                num_tokens,
                len(routers),
                routers[0].topk,
                dtype=expert_dtype(routers[0].num_experts),
                device=self.device,
            )
        if micro.batch.routed_experts is None:
            return self._kept[_key(chunk, micro)].to(self.device)
        layers = [router.layer_number - 1 for router in routers]
        choices = own(micro.batch.routed_experts[:, layers].int())
        return torch.where(
            choices < 0, torch.arange(routers[0].topk, dtype=torch.int32, device=self.device), choices
        )

    @contextlib.contextmanager
    def choices(self, what: Literal["record", "replay"]) -> Iterator[None]:
        """Keep the experts that the forward passes inside this context choose, or make them use kept ones.

        A recording replaces the previous recording. A replay uses the batch's column routed_experts if it
        exists, otherwise the recording. A replay must run the recorded passes with the same samples in
        each."""
        if what == "record":
            self._kept.clear()
        self._choosing = what
        try:
            yield
        finally:
            self._choosing = None

    def _balance(
        self, chunk: torch.nn.Module, micro: MicroBatch, num_tokens: int, num_samples: int
    ) -> Balance:
        options, routers = self.options, self.routers[id(chunk)]
        weights = None
        if routers and options.moe_router_load_balancing_type != "none":
            tokens = micro.batch.lengths.sum().clamp(min=1)[None].double()
            weights = {
                "aux_loss": 1 / (tokens * num_tokens),
                "seq_aux_loss": 1 / (micro.batch.lengths.double().square() * num_samples)
                if len(micro.batch)
                else torch.zeros(1),
                "global_aux_loss": torch.tensor([1 / num_tokens**2], dtype=torch.float64),
            }[options.moe_router_load_balancing_type]
            weights = (weights * routers[0].num_experts / routers[0].topk).float().to(self.device)
        return Balance(
            weights,
            options.moe_aux_loss_coeff,
            options.moe_z_loss_coeff,
            num_tokens,
            self._counts.get(id(chunk)),
        )

    @property
    def needs_counts(self) -> bool:
        """True if a forward pass inside `counting` must precede an update over its micro-batches."""
        return self.options.moe_router_load_balancing_type == "global_aux_loss"

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count, in the forward passes inside this context, the tokens that favour each expert, for the
        balancing loss of the next update.

        Collective over the mesh."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False
        for chunk, routers in self.routers.items():
            if routers:
                self._counts[chunk] = self._take(routers)[:, None, : routers[0].num_experts].float()

    def begin_update(self, micro_batches: list[MicroBatch]) -> None:
        """Prepare the routers for the update of a mini-batch.

        Until `end_update`, passes with gradients add this mini-batch's balancing losses and are counted."""
        amounts = torch.tensor(
            [[len(m.batch.tokens), len(m.batch)] for m in micro_batches], device=self.device
        ).sum(0)
        dist.all_reduce(amounts, group=self.groups.dp)
        self._amounts = tuple(amounts.tolist())

    def end_update(self, prefix: str) -> dict[str, float]:
        """Return the routers' metrics of the update on one rank of each pipeline stage, and {} on the other
        ranks.

        The metrics are parts that add up over stages, and maxima."""
        self._amounts, self._counts = None, {}
        if not self._all:
            return {}
        statistics = self._take(self._all)
        if self.groups.tp_dp_cp.rank() != 0:
            return {}
        loads, sums = statistics.split([self._all[0].num_experts, len(STATISTICS)], dim=1)
        of = dict(zip(STATISTICS, sums.t(), strict=True))
        shares = loads.amax(1) / loads.sum(1)
        per_layer = {
            "load_ratio": shares * loads.shape[1],
            "entropy": of["entropy"] / of["tokens"],
            "z": of["z"] / of["tokens"],
            **(
                {"balance_loss": of["balance"]}
                if self.options.moe_router_load_balancing_type != "none"
                else {}
            ),
            **({"z_loss": of["z_squared"] / of["tokens"]} if self.options.moe_z_loss_coeff else {}),
            **({"replay_changed": of["changed"] / loads.sum(1)} if self._choosing == "replay" else {}),
        }
        metrics = {name: float(value.sum()) / self.num_layers for name, value in per_layer.items()}
        metrics |= {"max_share": float(shares.max()), "dead_experts": float((loads == 0).sum())}
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    def _take(self, routers: list) -> torch.Tensor:
        """Return and reset the routers' statistics, summed over all ranks of this pipeline stage.

        The result is [layers, E + len(STATISTICS)] fp64."""
        taken = torch.stack([router.statistics for router in routers])
        for router in routers:
            router.statistics = None
        dist.all_reduce(taken, group=self.groups.tp_dp_cp)
        return taken


def _key(chunk: torch.nn.Module, micro: MicroBatch) -> tuple[int, ...]:
    return id(chunk), *micro.batch.sample_ids.tolist()
