"""Implement the actor on one rank: the policy that is trained."""

from __future__ import annotations

import logging
import math

import torch
import torch.distributed as dist

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.algorithms.base import AdvantageInputs, LossInputs, promised_weight
from megarl.algorithms.several_scores import scores_of_step
from megarl.algorithms.turn_rewards import TurnRewards, turn_rewards_of
from megarl.batch import Batch, MicroBatch
from megarl.gate_limits import GateLimits
from megarl.config.mesh import MeshSpec
from megarl.batch_invariants import check_column
from megarl.invariants import check_reward_digests, check_reward_sizes
from megarl.packing import MiniBatch
from megarl.reshard.sync import WeightSync, sync_plan
from megarl.flow.columns import COMPUTED_COLUMNS
from megarl.flow.job_roles import Actor
from megarl.workers.implements import implements
from megarl.workers.loss_probes import check_token_level, policy_weight
from megarl.workers.megatron_role import peak_memory_bytes
from megarl.workers.objective import Objective
from megarl.workers.offload_manager import needs
from megarl.workers.policy import PolicyRole
from megarl.workers.recompute import check_advantages
from megarl.workers.reward_shaping import shaped, shaping_metrics
from megarl.workers.store import BatchShard

if TYPE_CHECKING:
    from megarl.megatron.loss_check import EngineLossCheck, LossCheck, PassLimit

logger = logging.getLogger(__name__)

ADVANTAGE_COLUMNS = tuple(name for name in Actor.advantages.reads if name in COMPUTED_COLUMNS)
"""Token columns that an algorithm may compute advantages from."""
_LOSS_COLUMNS = (
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "advantages",
    "correction_weights",
    "selected_tokens",
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
    _canaries: BatchShard | None = None
    """Canaries that the last `log_probs` scored."""
    rollout_mesh: MeshSpec | None = None
    """Mesh of the engines, if none is on this rank."""
    sender: WeightSync | None = None

    def setup(self, is_trained: bool = True) -> None:
        """Build the model and load its weights, with an optimizer if the model `is_trained`. Collective over
        the mesh."""
        self.is_trained = is_trained
        super().setup()

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
        self.write_log_probs("old_log_probs", self._canaries)
        self._is_compared = None
        if not self.model.reports:
            return {}
        batch = self.shard.batch
        log_probs = batch.old_log_probs[batch.response_mask].double()
        gap = log_probs - batch.rollout_log_probs[batch.response_mask].double()
        num_tokens = sum(m.num_tokens for m in self.shard.mini_batches)
        if version is None or batch.weight_versions is None:
            return self._mismatch(log_probs, gap, num_tokens)
        self._is_compared = self._is_current(version)
        compared = self._is_compared[batch.response_mask]
        num_compared = self._num_current(version)
        metrics = {"mismatch/tokens": 0}
        if num_compared:
            metrics = self._mismatch(log_probs[compared], gap[compared], num_compared)
        if num_stale := num_tokens - num_compared:
            stale = gap[~compared]
            metrics |= {
                "off_policy/mean_abs": stale.abs().sum().item() / num_stale,
                "off_policy/max_abs": stale.abs().max().item() if len(stale) else 0.0,
                "off_policy/kl": (stale.expm1() - stale).sum().item() / num_stale,
                "off_policy/tokens": len(stale),
            }
        return metrics

    def _mismatch(self, log_probs: torch.Tensor, gap: torch.Tensor, num_tokens: int) -> dict[str, float]:
        """Return this rank's part of the metrics mismatch/* of tokens.

        Args:
            gap: trainer's log-probs - engine's.
            num_tokens: number of the tokens on all ranks."""
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

    @property
    def _recomputes(self) -> bool:
        """Whether unfinished responses get a KV cache of the new weights at a weight sync."""
        return self.config.streaming.weight_update == "recompute"

    def _is_current(self, version: int) -> torch.Tensor:
        """Return [T] bool: whether trainer and engine must agree on a response token, because it was sampled by
        these weights over a KV cache of these weights.

        With --weight-update recompute these are all tokens of the version. Otherwise the KV cache of a
        response that older weights began is theirs, so only samples wholly of the version count."""
        batch = self.shard.batch
        is_current = batch.response_mask & (batch.weight_versions == version)
        if self._recomputes:
            return is_current
        is_whole = batch.tokens_per_sample(is_current) == batch.response_lengths
        return is_current & batch.spread(is_whole).bool()

    def _num_current(self, version: int) -> int:
        """Return the number of tokens for which `_is_current` is true on all ranks together."""
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
        return _log_probs_at(batch, gap.topk(min(count, len(gap))).indices.tolist())

    def canary_tokens(self) -> list[dict[str, int | float]]:
        """Return trainer's and engine's log-prob of each response token of the canaries of this rank's
        replica. Only one rank of each data-parallel replica returns some."""
        if not self.model.reports or self._canaries is None:
            return []
        batch = self._canaries.batch
        return _log_probs_at(batch, batch.response_mask.nonzero().flatten().tolist())

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
    ) -> dict[str, float]:
        """Write the column advantages and, with a critic, returns, which the algorithm computes from the
        rewards. Returns metrics.

        Both columns are NaN on the tokens of a sample whose reward failed.

        Args:
            sample_ids, group_ids, rewards: of all episodes of the step, each by the id of its first sample, so
                that group statistics do not depend on the split. Groups may have any sizes. None is a reward that
                failed.
            kl_coef: coefficient of the KL penalty in this step.
            digests: sample id -> `digest_of_reward`; None leaves the rewards unchecked.
            turn_rewards, turn_lengths: with --turn-rewards reward and sampled tokens of each answer.
            scores, score_weights: if the algorithm takes scores, name -> score of each sample, and weight.
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
        lengths = [self.layout.episode_lengths[sample] for sample in sample_ids]
        given, rewards = rewards, shaped(self.algorithm, lengths, rewards, self.config.sampling)
        turns = None
        if turn_rewards is not None:
            turns = turn_rewards_of(sample_ids, given, lengths, turn_rewards, turn_lengths)
        inputs = self._advantage_inputs(sample_ids, lengths, group_ids, rewards, kl_coef, turns)
        if self.algorithm.takes_scores:
            single = scores_of_step(sample_ids, group_ids, given, scores or {}, score_weights or {})
            inputs = replace(inputs, scores=single)
        columns, metrics = self.algorithm.compute_advantages(inputs)
        corrections, of_corrections = self.algorithm.compute_corrections(inputs)
        selected, of_selection = self.algorithm.select_tokens(inputs, columns["advantages"])
        columns, metrics = columns | corrections | selected, metrics | of_corrections | of_selection
        for name, values in columns.items():
            shard.set_column(name, batch.scatter(values))
            check_column(batch, name, may_be_nan=name == "returns")
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
            {s: e for s in batch.sample_ids.tolist() if (e := self.layout.episode_of[s]) != s},
        )
        by_rewards = self.algorithm.left_out(inputs)
        are_worse = [False] * len(lengths) if by_rewards is None else by_rewards.tolist()
        is_cut = [self.layout.samples[sample].truncated for sample in sample_ids]
        pairs = zip(is_cut, rewards, strict=True)
        filtered = [reward is None or self.algorithm.is_left_out(cut) for cut, reward in pairs]
        left_out = [one or other for one, other in zip(filtered, are_worse, strict=True)]
        if any(left_out):  # NaN marks a token on every mesh as excluded from training
            excluded = batch.spread(torch.tensor(left_out)[inputs.rows]).bool()
            shard.set_column("advantages", batch.advantages.masked_fill(excluded, math.nan))
        metrics |= shaping_metrics(given, rewards, filtered, inputs.counted_rows.tolist())
        return metrics if self.model.reports else {}

    def _advantage_inputs(
        self,
        sample_ids: Sequence[int],
        lengths: Sequence[int],
        group_ids: list[int],
        rewards: list[float | None],
        kl_coef: float,
        turns: Sequence[TurnRewards | None] | None,
    ) -> AdvantageInputs:
        """Return the inputs of `compute_advantages` on this rank, given ids and lengths of all episodes of the
        step."""
        batch, row_of = self.shard.batch, {sample: row for row, sample in enumerate(sample_ids)}
        here = [self.layout.samples[sample] for sample in batch.sample_ids.tolist()]
        return AdvantageInputs(
            rewards=torch.tensor([math.nan if r is None else r for r in rewards]),
            group_ids=torch.tensor(group_ids),
            # A rank without samples would otherwise get a float tensor.
            rows=torch.tensor([row_of[sample.episode] for sample in here], dtype=torch.int64),
            branches=torch.tensor([sample.branch for sample in here], dtype=torch.int64)
            if self.layout.has_branches
            else None,
            response_lengths=batch.response_lengths,
            kl_coef=kl_coef,
            sum_over_ranks=self._sum_over_replicas,
            sample_lengths=torch.tensor(lengths),
            turns=turns,
            **{
                name: column[batch.response_mask]
                for name, column in batch.columns.items()
                if name in (*ADVANTAGE_COLUMNS, "rollout_log_probs")
            },
        )

    def _sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        total = values.to(self.model.device)
        dist.all_reduce(total, group=self.model.groups.dp)
        return total.to(values.device)

    @needs("parameters", "gradients", "optimizer")
    def update(self, kl_coef: float = 0.0) -> dict[str, float]:
        """Make all optimizer updates of the step, and return this rank's part of their mean metrics. Raises
        NonFiniteUpdate as --on-nonfinite says."""
        self.require_columns("update", self.algorithm.loss_reads)
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
        """With --old-log-probs engine let the engine's log-probs stand for those of before the step, unless a
        pass has computed these."""
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
        return self.model.update(
            self.micro_batches([mini_batch]),
            lambda micro, log_probs, entropy, rows: loss(micro, rows, log_probs=log_probs, entropy=entropy),
            self.config.sampling.temperature,
            self.algorithm.needs_entropy,
            self.algorithm.token_level,
            check,
        )

    def pass_limit(self) -> PassLimit | None:
        from megarl.workers.pass_limit import log_prob_limit

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
        """Record the inputs of the loss in `check`, and raise ValueError if a loss declared as a sum over
        tokens is none."""
        if self.algorithm.token_level and not self._is_token_level:
            is_whole = len(rows) == len(micro.response_positions)
            self._is_token_level = check_token_level(self.algorithm, inputs, is_whole)
        super().check_inputs(check, micro, rows, inputs)


def _log_probs_at(batch: Batch, tokens: list[int]) -> list[dict[str, int | float]]:
    """Return trainer's and engine's log-prob of these tokens of a batch, and where the tokens are."""
    rows = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    return [
        {
            "sample_id": int(batch.sample_ids[rows[i]]),
            "position": int(i - batch.cu_seqlens[rows[i]]),
            "token": int(batch.tokens[i]),
            "trainer": float(batch.old_log_probs[i]),
            "engine": float(batch.rollout_log_probs[i]),
        }
        for i in tokens
    ]
