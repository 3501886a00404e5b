"""Implement the actor on one rank: the policy that is trained."""

from __future__ import annotations

import logging
import math

import torch
import torch.distributed as dist

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.algorithms.base import AdvantageInputs, LossInputs
from megarl.algorithms.promised_weight import promised_weight
from megarl.algorithms.proximal import behavior_weights
from megarl.batch import MicroBatch
from megarl.gate_limits import GateLimits
from megarl.config.mesh import MeshSpec
from megarl.batch_invariants import check_column
from megarl.invariants import check_reward_digests, check_reward_sizes
from megarl.packing import MiniBatch
from megarl.reshard.sync import WeightSync, sync_plan
from megarl.flow.job_roles import Actor
from megarl.workers.advantage_inputs import ADVANTAGE_COLUMNS, advantage_inputs, given_scores, given_turns
from megarl.workers.implements import implements
from megarl.workers.loss_probes import check_token_level, policy_weight
from megarl.workers.megatron_role import peak_memory_bytes
from megarl.workers.objective import Objective
from megarl.workers.offload_manager import needs
from megarl.workers.policy import PolicyRole
from megarl.workers.recompute import check_advantages
from megarl.workers.mismatch import log_probs_at, mismatch_metrics
from megarl.workers.reward_shaping import excluded, shaped, shaping_metrics
from megarl.workers.sft_stream import SftStream
from megarl.workers.store import BatchShard
from megarl.workers.teaching import teaching_of

if TYPE_CHECKING:
    from megarl.megatron.loss_check import EngineLossCheck, LossCheck, PassLimit
    from megarl.megatron.teacher import Teaching

logger = logging.getLogger(__name__)

_LOSS_COLUMNS = (
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "advantages",
    "correction_weights",
    "selected_tokens",
    "ce_weights",
    "behavior_weights",
)


@implements(Actor)
class ActorRole(PolicyRole):
    """The policy that is trained, on one rank, and the source of the engines' weights."""

    objective = Objective(
        loss="loss",
        inputs=LossInputs,
        columns={name: name for name in _LOSS_COLUMNS},
        target="advantages",
        output="log_probs",
        before="old_log_probs",
        what="log-prob",
        token_weight=policy_weight,
    )
    optimizer = property(lambda self: self.config.optimizer if self.is_trained else None)
    is_trained = True
    """Whether the model gets an optimizer. An evaluation needs none."""
    adapter_options = property(lambda self: self.config.lora)
    _is_token_level = False
    """Whether the loss has been found to be a sum over tokens."""
    _has_warned_unchecked = False
    has_new_weights = False
    """Whether an update has begun since the weights were last copied into the engine of this process."""
    _is_compared: torch.Tensor | None = None
    """[T] bool: tokens of the batch that the last `log_probs` compared in mismatch/*; None: all."""
    _engine_check: EngineLossCheck | None = None
    """The gate of the step, with --old-log-probs engine."""
    _version = 0
    """Version of the weights before the step, with --old-log-probs interpolated."""
    _canaries: BatchShard | None = None
    """Canaries that the last `log_probs` scored."""
    _sft: SftStream | None = None
    """Rows of --sft-data; None without."""
    rollout_mesh: MeshSpec | None = None
    """Mesh of the engines, if none is on this rank."""
    sender: WeightSync | None = None
    teaching: Teaching | None = None
    """The teacher that the policy is compared with at each token; None without."""

    def setup(self, is_trained: bool = True) -> None:
        """Build the model and load its weights, with an optimizer if the model `is_trained`. Collective over
        the mesh."""
        self.is_trained = is_trained
        super().setup()
        self.teaching = teaching_of(self)

    def load_sft_rows(self) -> list[tuple[int, int]] | None:
        """Tokenize the rows of --sft-data. The mesh's first rank returns (length, response length) of every
        row; other ranks return None."""
        self._sft = SftStream(self.config, self.shape.max_position_embeddings)
        return self._sft.sizes if self.mesh.ranks[0] == self.rank else None

    @needs("parameters")
    def send_weights(self, version: int) -> None:
        """Send this rank's weights to the engines of other ranks as `version`, while those ranks call
        RolloutRole.sync.

        A rank with a rollout role does nothing here: RolloutRole.sync sends its weights too."""
        if self.rollout_mesh is not None:
            self.send_weights_to(self.rollout_mesh, version)

    def send_weights_to(self, rollout_mesh: MeshSpec, version: int) -> None:
        """Send this rank's weights to the out-of-process engines of other ranks as `version`."""
        if self.sender is None:
            plan, speakers = sync_plan(
                self.shape,
                self.atlases,
                rollout_mesh.ranks,
                rollout_mesh.tp,
                self.config.reshard.reshard_timeout_s,
                self.suffix,
                self.config.rollout.backend,
            )
            self.sender = WeightSync(
                plan, self.rank, speakers, self.model.weights, None, self.config.reshard, actor=self.suffix
            )
        self.model.merge_adapters()
        self.sender.begin(version)
        self.sender.finish()

    @needs("parameters")
    def log_probs(self, version: int | None = None, canaries: bool = False) -> dict[str, float]:
        """Write the column old_log_probs, and return metrics (mismatch/*) that compare it with the engine's
        log-probs.

        Args:
            version: version of the weights now. Tokens that older weights sampled are compared in
                off_policy/*, see `_is_current`. None, or a batch without versions, compares all tokens in
                mismatch/*.
            canaries: whether the pass also scores the canaries that were distributed, for `canary_tokens`.
        Returns: this rank's part of the metrics mismatch/*, whose limits are in megarl/gate_limits.py, and of
            off_policy/*. Of a kind of which the step has no token on any rank there is no metric but
            mismatch/tokens. The metric kl is the estimate k3 of KL(engine || trainer)."""
        self._canaries = self.store.batch(self.store.canaries_of(self.shard_key)) if canaries else None
        self._is_compared = None
        if self.algorithm.interpolates_old:
            return self._interpolate(version)
        self.write_log_probs("old_log_probs", self._canaries)
        if not self.model.reports:
            return {}
        batch = self.shard.batch
        log_probs = batch.old_log_probs[batch.response_mask].double()
        gap = log_probs - batch.rollout_log_probs[batch.response_mask].double()
        num_tokens = sum(m.num_tokens for m in self.shard.mini_batches)
        outlier = GateLimits.of(self.config, self.shape).outlier
        if version is None or batch.weight_versions is None:
            return mismatch_metrics(log_probs, gap, num_tokens, outlier)
        self._is_compared = self._is_current(version)
        compared = self._is_compared[batch.response_mask]
        num_compared = self._num_current(version)
        metrics = {"mismatch/tokens": 0}
        if num_compared:
            metrics = mismatch_metrics(log_probs[compared], gap[compared], num_compared, outlier)
        if num_stale := num_tokens - num_compared:
            stale = gap[~compared]
            metrics |= {
                "off_policy/mean_abs": stale.abs().sum().item() / num_stale,
                "off_policy/max_abs": stale.abs().max().item() if len(stale) else 0.0,
                "off_policy/kl": (stale.expm1() - stale).sum().item() / num_stale,
                "off_policy/tokens": len(stale),
            }
        return metrics

    def _interpolate(self, version: int | None) -> dict[str, float]:
        """Score the canaries alone, and write the column old_log_probs, which are the engine's. Returns the
        metric mismatch/tokens, 0: only canaries are compared.

        Args:
            version: version of the weights now."""
        if self._canaries is not None:
            self.write_canary_log_probs("old_log_probs", self._canaries)
        batch = self.shard.batch
        if version is None or batch.weight_versions is None:
            raise ValueError("--old-log-probs (interpolated): log_probs needs the version of the weights.")
        self.shard.set_column("old_log_probs", batch.rollout_log_probs.clone())
        self._version = version
        return {"mismatch/tokens": 0} if self.model.reports else {}

    @property
    def _recomputes(self) -> bool:
        """Whether unfinished responses get a KV cache of the new weights at a weight sync."""
        return self.config.streaming.weight_update == "recompute"

    def _is_current(self, version: int) -> torch.Tensor:
        """Return [T] bool: whether trainer and engine must agree on a response token, because it was sampled
        by these weights over a KV cache of these weights.

        With --weight-update recompute these are all tokens of the version. Otherwise the KV cache of a
        response that older weights began is theirs, so only samples wholly of the version count."""
        batch = self.shard.batch
        is_current = batch.response_mask & (batch.weight_versions == version)
        if self._recomputes:
            return is_current
        is_whole = batch.tokens_per_sample(is_current) == batch.response_lengths
        return is_current & batch.spread(is_whole).bool()

    def _num_current(self, version: int) -> int:
        """Return the number of tokens, on all ranks together, on whose log-probs trainer and engine must
        agree (`_is_current`)."""
        counts = ((sample.tokens_of(version), sample.response_length) for sample in self.layout.planned)
        return sum(count for count, length in counts if self._recomputes or count == length)

    def worst_tokens(self, count: int) -> list[dict[str, int | float]]:
        """Return the `count` tokens of this rank where the log-probs of trainer and engine differ most, with
        both values, of those that the gate judges. Only one rank of each data-parallel replica returns
        some."""
        if not self.model.reports:
            return []
        batch = self.shard.batch
        gap = (batch.old_log_probs - batch.rollout_log_probs).abs()
        if self._is_compared is not None:
            gap = gap.where(self._is_compared, 0.0)
        return log_probs_at(batch, gap.topk(min(count, len(gap))).indices.tolist())

    def canary_tokens(self) -> list[dict[str, int | float]]:
        """Return trainer's and engine's log-prob of each response token of the canaries of this rank's
        replica. Only one rank of each data-parallel replica returns some."""
        if not self.model.reports or self._canaries is None:
            return []
        batch = self._canaries.batch
        return log_probs_at(batch, batch.response_mask.nonzero().flatten().tolist())

    def advantages(
        self,
        sample_ids: list[int],
        group_ids: list[int],
        rewards: list[float | None],
        kl_coef: float,
        digests: dict[int, int] | None = None,
        turn_rewards: list[list[float]] | None = None,
        turn_lengths: list[list[int]] | None = None,
        scores: dict[str, list[float | None]] | None = None,
        score_weights: dict[str, float] | None = None,
        multiplier: float | None = None,
    ) -> dict[str, float]:
        """Write the column advantages and, with a critic, returns, which the algorithm computes from the
        rewards. Both are NaN on the tokens of a sample whose reward failed. Returns metrics.

        Args:
            sample_ids, group_ids, rewards: of all episodes of the step, each by the id of its first sample,
                so that group statistics do not depend on the split. Groups may have any sizes. None is a
                reward that failed.
            kl_coef: coefficient of the KL penalty in this step.
            digests: sample id -> `digest_of_reward`; None leaves the rewards unchecked.
            turn_rewards, turn_lengths: with --turn-rewards reward and sampled tokens of each answer.
            scores, score_weights: if the algorithm takes scores, name -> score of each sample, and weight.
            multiplier: factor of the cost, if the algorithm has one.
        Raises: InvariantError for an advantage that is not finite, for a reward of another sample, and for
        advantages that differ from the algorithm's reference. ValueError for a reward that is not finite in
        float32."""
        check_reward_sizes(dict(zip(sample_ids, rewards, strict=True)))
        if not self.model.is_last_stage:
            return {}
        self._take_engine_log_probs()
        self.require_columns(
            "advantages", [name for name in self.algorithm.advantage_reads if name in ADVANTAGE_COLUMNS]
        )
        shard = self.shard
        batch, tokens = shard.batch, shard.digests["tokens"]
        if digests is not None:
            check_reward_digests(sample_ids, group_ids, rewards, digests, tokens, self.layout.episode_of)
        samples = [self.layout.samples[sample] for sample in sample_ids]
        lengths = [self.layout.episode_lengths[sample] for sample in sample_ids]
        given, rewards = rewards, shaped(self.algorithm, lengths, rewards, self.config)
        turns = given_turns(self.config, sample_ids, given, lengths, turn_rewards, turn_lengths)
        inputs = advantage_inputs(
            shard, self.layout, sample_ids, group_ids, given, rewards, kl_coef, turns, self._sum_over_replicas
        )
        of_names = scores or {}, score_weights or {}
        single = given_scores(self.config, sample_ids, group_ids, given, *of_names, multiplier)
        inputs = replace(inputs, scores=single)
        columns, metrics = self.algorithm.compute_advantages(inputs)
        corrections, of_corrections = self.algorithm.compute_corrections(inputs)
        selected, of_selection = self.algorithm.select_tokens(inputs, columns["advantages"])
        columns, metrics = columns | corrections | selected, metrics | of_corrections | of_selection
        for name, values in columns.items():
            shard.set_column(name, batch.scatter(values))
            check_column(batch, name, may_be_nan=name in ("returns", "cost_returns"))
        check_advantages(
            self.algorithm,
            batch,
            {s: float("nan") if r is None else r for s, r in zip(sample_ids, rewards, strict=True)},
            dict(zip(sample_ids, group_ids, strict=True)),
            kl_coef,
            dict(zip(sample_ids, lengths, strict=True)),
            f"{self.config.batch.seed}/{self.rank}/{sorted(tokens.values())}",
            self._sum_over_replicas,
            None if turns is None else dict(zip(sample_ids, turns, strict=True)),
            inputs.scores,
            frozenset(sample.sample_id for sample in samples if not sample.trained),
            {s: e for s in batch.sample_ids.tolist() if (e := self.layout.episode_of[s]) != s},
        )
        filtered, left_out = excluded(self.algorithm, inputs, samples, rewards)
        self._write_loss_columns(inputs, given, left_out)
        if any(left_out):  # NaN marks a token on every mesh as excluded from training
            is_excluded = batch.spread(torch.tensor(left_out)[inputs.rows]).bool()
            shard.set_column("advantages", batch.advantages.masked_fill(is_excluded, math.nan))
        metrics |= shaping_metrics(given, rewards, filtered, samples, inputs.counted_rows.tolist())
        return metrics if self.model.reports else {}

    def _write_loss_columns(
        self, inputs: AdvantageInputs, given: Sequence[float | None], left_out: Sequence[bool]
    ) -> None:
        """Write the columns of the loss's further terms, which depend on what the policy's loss leaves
        out."""
        batch = self.shard.batch
        rewards = torch.tensor([math.nan if reward is None else reward for reward in given])
        columns = self.algorithm.cross_entropy_weights(inputs, rewards, torch.tensor(left_out))
        if self.algorithm.interpolates_old:
            versions = batch.weight_versions[batch.response_mask]
            columns["behavior_weights"] = behavior_weights(versions, self._version)
        for name, values in columns.items():
            self.shard.set_column(name, batch.scatter(values))

    def _sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        total = values.to(self.model.device)
        dist.all_reduce(total, group=self.model.groups.dp)
        return total.to(values.device)

    @needs("parameters", "gradients", "optimizer")
    def update(
        self,
        kl_coef: float = 0.0,
        sft_visits: Mapping[int, int] | None = None,
        sft_mini_batches: list[MiniBatch] | None = None,
    ) -> dict[str, float]:
        """Make all optimizer updates of the step, and return this rank's part of their mean metrics. Raises
        NonFiniteUpdate as --on-nonfinite says.

        Args:
            sft_visits, sft_mini_batches: visit -> row of --sft-data, and the rows of each update, if there
                are any.
        Raises: ValueError if the job has --sft-data, and no rows are given."""
        self.require_columns("update", self.algorithm.loss_reads)
        if self._sft is not None:
            if sft_visits is None or sft_mini_batches is None:
                raise ValueError(
                    "update: the job has --sft-data, and gets no rows of it. Call trainer.update(batch), which gives "
                    "them, or leave --sft-data out."
                )
            dp_rank = self.model.groups.dp.rank()
            self._sft.begin_step(sft_visits, sft_mini_batches, self.shard.mini_batches, dp_rank)
        self._take_engine_log_probs()
        self._engine_check = None
        self.has_new_weights = True

        def once(mini_batch: MiniBatch, check: LossCheck | None) -> dict[str, float]:
            return self._update_once(mini_batch, check, kl_coef)

        stops_early = self.algorithm.early_stop_kl is not None
        metrics = self.update_over_epochs(once, self._has_moved_enough if stops_early else None)
        if self._engine_check is not None:
            metrics |= self._engine_check.metrics()
        return metrics | {"memory/peak_bytes": peak_memory_bytes()} | self.memory_metrics()

    def _take_engine_log_probs(self) -> None:
        """With --old-log-probs engine, copy the engine's log-probs into the column old_log_probs, unless a
        pass has computed it."""
        batch = self.shard.batch
        takes = self.algorithm.takes_engine_log_probs and self.model.is_last_stage
        if takes and batch.old_log_probs is None:
            self.shard.set_column("old_log_probs", batch.rollout_log_probs.clone())

    def loss_check(self, mini_batch: MiniBatch) -> LossCheck:
        if not self.algorithm.takes_engine_log_probs or self.has_own("old_log_probs"):
            return super().loss_check(mini_batch)
        from megarl.megatron.loss_check import EngineLossCheck

        counts = mini_batch.num_tokens, mini_batch.num_sequences
        promised = promised_weight(self.algorithm, "loss", *counts, self.config.max_sampled_length)
        limits = GateLimits.of(self.config, self.shape)
        self._engine_check = EngineLossCheck(self.name, promised, *counts, limits)
        return self._engine_check

    def _has_moved_enough(self, metrics: dict[str, float]) -> bool:
        """Return whether the mean policy/kl of an epoch is above --early-stop-kl, given this rank's part of
        its metrics. Collective over the mesh."""
        kl = torch.tensor(metrics.get("policy/kl", 0.0), dtype=torch.float64, device=self.model.device)
        dist.all_reduce(kl, group=self.model.groups.intra_dist_opt)
        return kl.item() > self.algorithm.early_stop_kl

    def _update_once(
        self, mini_batch: MiniBatch, check: LossCheck | None, kl_coef: float
    ) -> dict[str, float]:
        loss = self.loss_of_update(mini_batch, check, kl_coef=kl_coef)
        of_rows: list[MicroBatch] = []
        if self._sft is not None:
            of_rows, loss = self._sft.mixed(mini_batch, loss, self.model.groups.dp.rank())
        name = "entropy" if self.teaching is None else "divergence"
        return self.model.update(
            self.micro_batches([mini_batch]) + of_rows,
            lambda micro, log_probs, second, rows: loss(micro, rows, log_probs=log_probs, **{name: second}),
            self.config.sampling.temperature,
            self.algorithm.needs_entropy,
            self.algorithm.token_level,
            check,
            self.teaching,
        )

    def pass_limit(self) -> PassLimit | None:
        from megarl.workers.pass_limit import log_prob_limit

        if self.algorithm.interpolates_old:  # no pass to compare with
            return None
        if self.has_own("old_log_probs"):
            return log_prob_limit(self.config, self.shape, self.model.device)
        if self.algorithm.needs_rollout and self.model.reports_steps and not self._has_warned_unchecked:
            self._has_warned_unchecked = True
            logger.warning(
                "%s has not computed old_log_probs in this step itself, so the ratios of its first update are "
                "not checked",
                self.name,
            )
        return None

    def check_inputs(
        self, check: LossCheck, micro: MicroBatch, rows: torch.Tensor, inputs: LossInputs
    ) -> None:
        """Record the inputs of the loss in `check`, and raise ValueError if a loss that is declared as a sum
        over tokens is not such a sum."""
        if self.algorithm.token_level and not self._is_token_level:
            is_whole = len(rows) == len(micro.response_positions)
            self._is_token_level = check_token_level(self.algorithm, inputs, is_whole)
        super().check_inputs(check, micro, rows, inputs)
