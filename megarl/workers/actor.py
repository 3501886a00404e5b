"""The actor (the policy being trained) and the reference (a frozen copy) on one rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.algorithms.base import AdvantageInputs, Algorithm, LossInputs, promised_weight
from megarl.batch import MicroBatch
from megarl.batch_invariants import check_column
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import OptimizerConfig, TrainConfig
from megarl.gate_limits import GateLimits
from megarl.invariants import check_reward_digests, check_reward_sizes
from megarl.packing import MiniBatch
from megarl.reshard.sync import WeightSync, sync_plan
from megarl.reshard.transfer import save_hf
from megarl.flow.job_roles import Actor, Reference
from megarl.workers.data_plane import DataPlane
from megarl.workers.implements import implements
from megarl.workers.loss_probes import check_token_level, policy_weight
from megarl.workers.megatron_role import MegatronRole, peak_memory_bytes, with_target
from megarl.workers.recompute import check_advantages
from megarl.workers.residence import needs

if TYPE_CHECKING:
    from megarl.megatron.loss_check import LossCheck

logger = logging.getLogger(__name__)


class PolicyRole(MegatronRole):
    """A policy that starts from --model."""

    def __init__(
        self,
        name: str,
        config: TrainConfig,
        shape: ModelShape,
        meshes: Mapping[str, MeshSpec],
        plane: DataPlane,
        optimizer: OptimizerConfig | None,
    ) -> None:
        super().__init__(
            name,
            config,
            config.model.model,
            shape,
            meshes,
            plane,
            optimizer,
            config.lora if optimizer else None,
        )

    def build(self):
        from megarl.megatron.policy import Policy

        config = self.config
        return Policy(
            self.shape,
            self.mesh,
            config.model,
            self.parallel,
            self.optimizer,
            config.batch.train_iters,
            config.transformer,
            config.experts,
            self.lora,
        )

    def write_log_probs(self, column: str) -> None:
        share = self.share
        micro_batches = self.micro_batches(share.mini_batches)
        log_probs = self.model.log_probs(micro_batches, self.config.sampling.temperature)
        self.write_column(column, log_probs, largest=0.0)


@implements(Reference)
class ReferenceRole(PolicyRole):
    """Frozen at the weights that training starts from."""

    @needs("parameters")
    def log_probs(self) -> dict[str, float]:
        """Write the column ref_log_probs. Returns metrics of the memory."""
        self.write_log_probs("ref_log_probs")
        return self.memory_metrics()


@implements(Reference)
class AdapterlessReferenceRole:
    """The reference of an actor that trains adapters on the same ranks: the actor's model without them. It
    has no weights of its own."""

    def __init__(self, actor: ActorRole) -> None:
        self.actor, self.plane = actor, actor.plane

    def setup(self) -> None:
        """The actor's has done it."""

    @needs("parameters", of="actor")
    def log_probs(self) -> dict[str, float]:
        """Write the column ref_log_probs."""
        with self.actor.model.adapters.off():
            self.actor.write_log_probs("ref_log_probs")
        return {}

    @needs("parameters", of="actor")
    def export_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder. Collective over the mesh."""
        actor = self.actor
        save_hf(folder, actor.folder, actor.shape, actor.atlases, actor.model.parameters)


@implements(Actor)
class ActorRole(PolicyRole):
    _is_token_level = False
    """The loss has been found to be a sum over tokens."""
    _has_said_unchecked = False
    rollout_mesh: MeshSpec | None = None
    """Of the engines, if none is on this rank."""
    sender: WeightSync | None = None

    @needs("parameters")
    def send_weights(self, version: int) -> None:
        """The part of RolloutRole.sync that is a source's. Where there is a rollout role too, that one does
        it."""
        if self.rollout_mesh is not None:
            self.send_weights_to(self.rollout_mesh, version)

    def send_weights_to(self, rollout_mesh: MeshSpec, version: int) -> None:
        """Let the out-of-process engines of other ranks have this rank's weights as `version`."""
        if self.sender is None:
            plan, speakers = sync_plan(
                self.shape,
                self.atlases,
                rollout_mesh.ranks,
                rollout_mesh.tp,
                self.config.reshard.reshard_timeout_s,
                self.suffix,
            )
            self.sender = WeightSync(
                plan, self.rank, speakers, self.model.weights, None, self.config.reshard, actor=self.suffix
            )
        self.model.merge_adapters()
        self.sender.begin(version)
        self.sender.finish()

    @property
    def algorithm(self) -> Algorithm:
        return self.config.algorithm

    @needs("parameters")
    def log_probs(self) -> dict[str, float]:
        """Write the column old_log_probs and compare it with what the engine reported when it sampled.

        Returns: this rank's part of the metrics mismatch/*: what megarl/config/gate_limits.py judges, and kl
            (k3 of KL(engine || trainer), whose samples these are)."""
        self.write_log_probs("old_log_probs")
        if not self.model.reports:
            return {}
        batch = self.share.batch
        log_probs = batch.old_log_probs[batch.response_mask].double()
        gap = log_probs - batch.rollout_log_probs[batch.response_mask].double()
        num_tokens = sum(m.num_tokens for m in self.share.mini_batches)
        outlier = GateLimits.of(self.config, self.shape).outlier
        return {
            "mismatch/mean_abs": gap.abs().sum().item() / num_tokens,
            "mismatch/clipped_abs": gap.abs().clamp(max=outlier).sum().item() / num_tokens,
            "mismatch/log_prob_abs": log_probs.abs().sum().item() / num_tokens,
            "mismatch/max_abs": gap.abs().max().item() if len(gap) else 0.0,
            "mismatch/outliers": (gap.abs() > outlier).sum().item(),
            "mismatch/tokens": len(gap),
            "mismatch/kl": (gap.expm1() - gap).sum().item() / num_tokens,
        }

    def worst_tokens(self, count: int) -> list[dict[str, float]]:
        """The tokens of this rank where trainer and engine differ most, for the report of a failed gate."""
        if not self.model.reports:
            return []
        batch = self.share.batch
        gap = (batch.old_log_probs - batch.rollout_log_probs).abs()
        rows = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
        return [
            {
                "sample_id": int(batch.sample_ids[rows[i]]),
                "position": int(i - batch.cu_seqlens[rows[i]]),
                "token": int(batch.tokens[i]),
                "trainer": float(batch.old_log_probs[i]),
                "engine": float(batch.rollout_log_probs[i]),
            }
            for i in gap.topk(min(count, len(gap))).indices.tolist()
        ]

    def advantages(
        self,
        sample_ids: list[int],
        group_ids: list[int],
        rewards: list[float | None],
        kl_coef: float,
        digests: list[int] | None = None,
    ) -> dict[str, float]:
        """Write the columns that the algorithm makes of rewards: advantages, and returns where there is a
        critic. Both are NaN on the tokens of a sample whose reward failed.

        Args:
            sample_ids, group_ids, rewards: of the whole step, so that group statistics do not depend on the
                split. None: the reward failed.
            kl_coef: what the KL controller says.
            digests: `digest_of_reward` of each sample; None: rewards are taken as they come.
        Raises: InvariantError for an advantage that is not finite, for a reward of another sample, and for
            advantages that the algorithm's reference does not make of the sample's reward. ValueError for a
            reward that is not finite in float32."""
        check_reward_sizes(dict(zip(sample_ids, rewards, strict=True)))
        if not self.model.is_last_stage:
            return {}
        self.require_columns(
            "advantages", [name for name in self.algorithm.advantage_reads if name in ADVANTAGE_COLUMNS]
        )
        share = self.share
        batch, tokens = share.batch, share.digests["tokens"]
        if digests is not None:
            check_reward_digests(sample_ids, group_ids, rewards, digests, tokens)
        row_of = {sample: row for row, sample in enumerate(sample_ids)}
        # Without a dtype the rows of no samples would be floats.
        rows = torch.tensor([row_of[s] for s in batch.sample_ids.tolist()], dtype=torch.int64)
        columns, metrics = self.algorithm.compute_advantages(
            AdvantageInputs(
                rewards=torch.tensor([math.nan if r is None else r for r in rewards]),
                group_ids=torch.tensor(group_ids),
                rows=rows,
                response_lengths=batch.response_lengths,
                kl_coef=kl_coef,
                sum_over_ranks=self._sum_over_replicas,
                **{
                    name: column[batch.response_mask]
                    for name, column in batch.columns.items()
                    if name in ADVANTAGE_COLUMNS
                },
            )
        )
        for name, values in columns.items():
            share.set_column(name, batch.scatter(values))
            check_column(batch, name, may_be_nan=name == "returns")
        check_advantages(
            self.algorithm,
            batch,
            {s: float("nan") if r is None else r for s, r in zip(sample_ids, rewards, strict=True)},
            dict(zip(sample_ids, group_ids, strict=True)),
            kl_coef,
            f"{self.config.batch.seed}/{self.rank}/{sorted(tokens.values())}",
            self._sum_over_replicas,
        )
        if None in rewards:  # by NaN whoever learns from the column, on whatever mesh, knows what is left out
            failed = torch.tensor([reward is None for reward in rewards])[rows]
            share.set_column(
                "advantages", batch.advantages.masked_fill(batch.spread(failed).bool(), math.nan)
            )
        return metrics if self.model.reports else {}

    def _sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        total = values.to(self.model.device)
        dist.all_reduce(total, group=self.model.groups.dp)
        return total.to(values.device)

    @needs("parameters", "gradients", "optimizer")
    def update(self, kl_coef: float = 0.0) -> dict[str, float]:
        """All optimizer updates of the step. Returns and raises as `update_over_epochs`."""
        self.require_columns("update", self.algorithm.loss_reads)

        def once(mini_batch: MiniBatch, check: LossCheck | None) -> dict[str, float]:
            return self._update_once(mini_batch, check, kl_coef)

        metrics = self.update_over_epochs(once, target="advantages")
        return metrics | {"memory/peak_bytes": peak_memory_bytes()} | self.memory_metrics()

    def loss_check(self, mini_batch: MiniBatch) -> LossCheck:
        from megarl.megatron.loss_check import LossCheck
        from megarl.workers.pass_limit import log_prob_limit

        counts = mini_batch.num_tokens, mini_batch.num_sequences
        limit = None
        if self.has_own("old_log_probs"):
            limit = log_prob_limit(self.config, self.shape, self.model.device)
        elif self.algorithm.needs_rollout and self.model.reports_steps and not self._has_said_unchecked:
            self._has_said_unchecked = True
            logger.warning(
                "%s has not computed old_log_probs in this step itself, so the ratios of its first "
                "update are "
                "not checked",
                self.name,
            )
        promised = promised_weight(self.algorithm, "loss", *counts, self.config.sampling.max_response_length)
        return LossCheck(self.name, "log-prob", promised, *counts, limit)

    def _tell(self, check: LossCheck, micro: MicroBatch, rows: torch.Tensor, inputs: LossInputs) -> None:
        """Let the check know what the loss is called with. rows: which of the micro-batch's response
        tokens."""
        if not len(rows):
            return
        if self.algorithm.token_level and not self._is_token_level:
            is_whole = len(rows) == len(micro.response_positions)
            self._is_token_level = check_token_level(self.algorithm, inputs, is_whole)
        weight = None if check.promised is None else policy_weight(self.algorithm, inputs)
        check.add_tokens(inputs.response_lengths, weight)
        if check.limit is not None:
            check.add_passes(micro, rows, inputs.log_probs, inputs.old_log_probs)

    def _update_once(
        self, mini_batch: MiniBatch, check: LossCheck | None, kl_coef: float
    ) -> dict[str, float]:
        def loss(micro: MicroBatch, log_probs: torch.Tensor, entropy: torch.Tensor | None, rows: slice):
            device = log_probs.device
            columns = {
                name: c if (c := micro.column(name)) is None else c[rows].to(device)
                for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
            }
            response_lengths = micro.response_length_of_token[rows].to(device)
            columns |= {"log_probs": log_probs, "entropy": entropy, "response_lengths": response_lengths}
            if check is not None:
                columns["rows"] = torch.arange(len(micro.response_positions), device=device)[rows]
            if self.has_failed_samples:
                columns = with_target(columns, columns["advantages"])
            of_micro = columns.pop("rows", None)
            inputs = LossInputs(
                num_tokens=mini_batch.num_tokens,
                num_sequences=mini_batch.num_sequences,
                kl_coef=kl_coef,
                max_response_length=self.config.sampling.max_response_length,
                **columns,
            )
            if check is not None:
                self._tell(check, micro, of_micro, inputs)
            return self.algorithm.loss(inputs)

        return self.model.update(
            self.micro_batches([mini_batch]),
            loss,
            self.config.sampling.temperature,
            self.algorithm.needs_entropy,
            self.algorithm.token_level,
            check,
        )


ADVANTAGE_COLUMNS = ("old_log_probs", "ref_log_probs", "values")
"""What an algorithm may make advantages of."""
