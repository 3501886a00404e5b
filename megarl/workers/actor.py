"""The actor (the policy being trained) and the reference (a frozen copy) on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.algorithms.base import Algorithm, LossInputs
from megarl.batch import MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import ParallelConfig, TrainConfig
from megarl.metrics import mean_over_updates
from megarl.packing import MiniBatch, Move, Sample
from megarl.reshard import megatron_atlas
from megarl.reshard.atlas import Atlas
from megarl.reshard.sync import WeightSync, sync_plan
from megarl.reshard.transfer import load_hf, save_hf
from megarl.workers.data_plane import DataPlane
from megarl.workers.exchange import exchange
from megarl.workers.process import peak_rss_bytes

if TYPE_CHECKING:
    from megarl.megatron.policy import Policy


def megatron_atlases(shape: ModelShape, mesh: MeshSpec, parallel: ParallelConfig) -> dict[int, Atlas]:
    """What each rank of the mesh holds."""
    from megarl.megatron.model import uses_transformer_engine

    return megatron_atlas.megatron_atlases(shape, mesh, uses_transformer_engine(), qkv_layout=parallel.qkv_layout)


class _MegatronRole:
    """A Megatron model on this rank, with the weights of --model."""

    trains: bool

    def __init__(self, config: TrainConfig, shape: ModelShape, mesh: MeshSpec, plane: DataPlane) -> None:
        self.config, self.shape, self.mesh, self.plane = config, shape, mesh, plane
        self.rank = dist.get_rank()
        self.policy: Policy | None = None
        self.sender: WeightSync | None = None

    def setup(self) -> None:
        """Build the model and load its weights. Collective over the mesh."""
        from megarl.megatron.initialize import random_weights
        from megarl.megatron.policy import Policy

        config = self.config
        self.policy = Policy(self.shape, self.mesh, config.model, config.actor, config.optimizer if self.trains else None,
                             config.batch.train_iters, config.transformer)
        self.atlases = megatron_atlases(self.shape, self.mesh, config.actor)
        atlas = self.atlases[self.rank]
        if config.model.random_init:
            random_weights(self.shape, atlas, self.policy.parameters, config.batch.seed)
        else:
            load_hf(config.model.model, atlas, self.policy.parameters, self.shape)
        self.policy.parameters_changed()

    @property
    def dp_rank(self) -> int:
        return self.policy.groups.dp.rank()

    def micro_batches(self, mini_batches: list[MiniBatch]) -> list[MicroBatch]:
        """This rank's forward passes over the mini-batches, from the step's batch."""
        return [MicroBatch.of(self.plane.batch.select_samples(ids)) for m in mini_batches for ids in m.micro_batches[self.dp_rank]]

    def _compute_log_probs(self) -> torch.Tensor | None:
        """[T] fp32 column for the step's batch; None before the last pipeline stage."""
        out = self.policy.log_probs(self.micro_batches(self.plane.mini_batches), self.config.sampling.temperature)
        return None if out is None else self.plane.batch.scatter(torch.cat(out))


class ReferenceRole(_MegatronRole):
    """Frozen at the weights that training starts from; shares the actor's mesh."""

    trains = False

    def log_probs(self) -> None:
        """Write the column ref_log_probs."""
        self.plane.batch.ref_log_probs = self._compute_log_probs()


class ActorRole(_MegatronRole):
    trains = True
    rollout_mesh: MeshSpec | None = None
    """Of the engines, if none is on this rank."""

    def send_weights(self, version: int) -> None:
        """The part of RolloutRole.sync that is a source's. Where there is a rollout role too, that one does it."""
        if self.rollout_mesh is not None:
            self.send_weights_to(self.rollout_mesh, version)

    def send_weights_to(self, rollout_mesh: MeshSpec, version: int) -> None:
        """Let the out-of-process engines of other ranks have this rank's weights as `version`."""
        if self.sender is None:
            plan, speakers = sync_plan(self.shape, self.atlases, rollout_mesh.ranks, rollout_mesh.tp, self.config.reshard.reshard_timeout_s)
            self.sender = WeightSync(plan, self.rank, speakers, self.policy.parameters, None, self.config.reshard)
        self.sender.begin(version)
        self.sender.finish()

    @property
    def algorithm(self) -> Algorithm:
        return self.config.algorithm

    def receive(self, samples: list[Sample], moves: list[Move], mini_batches: list[MiniBatch]) -> None:
        """Take over the step's samples: pack what this process rolled out, fetch the rest from the ranks that have it."""
        wanted = [s for mini_batch in mini_batches for s in mini_batch.samples_of(self.dp_rank)]
        self.plane.batch = exchange(self.plane.pack("train"), moves, samples, wanted)
        self.plane.mini_batches = mini_batches

    def log_probs(self) -> dict[str, float]:
        """Write the column old_log_probs and compare it with what the engine reported when it sampled.

        Returns: this rank's share of mismatch/mean_abs, mismatch/max_abs and mismatch/kl (k3 of KL(engine || trainer), whose samples these are)."""
        batch = self.plane.batch
        batch.old_log_probs = self._compute_log_probs()
        if not self.policy.reports:
            return {}
        gap = (batch.old_log_probs - batch.rollout_log_probs)[batch.response_mask].double()
        num_tokens = sum(m.num_tokens for m in self.plane.mini_batches)
        return {
            "mismatch/mean_abs": gap.abs().sum().item() / num_tokens,
            "mismatch/max_abs": gap.abs().max().item() if len(gap) else 0.0,
            "mismatch/kl": (gap.expm1() - gap).sum().item() / num_tokens,
        }

    def worst_tokens(self, count: int) -> list[dict[str, float]]:
        """The tokens of this rank where trainer and engine differ most, for the report of a failed gate."""
        if not self.policy.reports:
            return []
        batch = self.plane.batch
        gap = (batch.old_log_probs - batch.rollout_log_probs).abs()
        rows = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
        return [{"sample_id": int(batch.sample_ids[rows[i]]), "position": int(i - batch.cu_seqlens[rows[i]]), "token": int(batch.tokens[i]),
                 "trainer": float(batch.old_log_probs[i]), "engine": float(batch.rollout_log_probs[i])}
                for i in gap.topk(min(count, len(gap))).indices.tolist()]  # fmt: skip

    def advantages(self, sample_ids: list[int], group_ids: list[int], rewards: list[float | None]) -> dict[str, float]:
        """Write the column advantages. Takes the rewards of the whole step, so group statistics do not depend on the split."""
        values = torch.tensor([float("nan") if r is None else r for r in rewards])
        per_sample = self.algorithm.compute_advantages(values, torch.tensor(group_ids), self._kl_per_sample(sample_ids))
        row_of = {sample: row for row, sample in enumerate(sample_ids)}
        batch = self.plane.batch
        batch.advantages = batch.spread(per_sample[[row_of[s] for s in batch.sample_ids.tolist()]])
        if self.policy.reports and self.dp_rank == 0:
            return {"advantage/max_abs": per_sample.abs().max().item(), "reward/failed": float(values.isnan().sum())}
        return {}

    def _kl_per_sample(self, sample_ids: list[int]) -> torch.Tensor | None:
        """[len(sample_ids)]: the KL that the algorithm takes off each reward, gathered over the data-parallel ranks; None: nothing.

        Only the last pipeline stage has log-probs; the others pass zeros, and their advantages are never used."""
        batch = self.plane.batch
        nothing = torch.zeros(len(batch.tokens))
        old, ref = (nothing if c is None else c for c in (batch.old_log_probs, batch.ref_log_probs))
        per_token = self.algorithm.reward_kl(old[batch.response_mask], ref[batch.response_mask])
        if per_token is None:
            return None
        row_of = {sample: row for row, sample in enumerate(sample_ids)}
        rows = torch.tensor([row_of[s] for s in batch.sample_ids.tolist()], dtype=torch.int64)  # of no samples it would be a float
        total = torch.zeros(len(sample_ids)).index_add_(0, rows.repeat_interleave(batch.response_lengths), per_token)
        total = total.to(self.policy.device)
        dist.all_reduce(total, group=self.policy.groups.dp)
        return total.cpu()

    def update(self) -> dict[str, float]:
        """All optimizer updates of the step. Returns the mean over updates of this rank's share of every metric."""
        self.policy.advance_schedule()
        per_update = [self._update_once(mini_batch) for _ in range(self.config.batch.num_epochs) for mini_batch in self.plane.mini_batches]
        metrics = mean_over_updates(per_update)
        return metrics | {"memory/peak_bytes": peak_memory_bytes()}

    def _update_once(self, mini_batch: MiniBatch) -> dict[str, float]:
        def loss(micro: MicroBatch, log_probs: torch.Tensor, entropy: torch.Tensor | None, rows: slice):
            device = log_probs.device
            columns = {name: c if (c := micro.column(name)) is None else c[rows].to(device)
                       for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")}  # fmt: skip
            return self.algorithm.loss(LossInputs(
                log_probs=log_probs, entropy=entropy, response_lengths=micro.response_length_of_token[rows].to(device),
                num_tokens=mini_batch.num_tokens, num_sequences=mini_batch.num_sequences,
                max_response_length=self.config.sampling.max_response_length, **columns))

        return self.policy.update(self.micro_batches([mini_batch]), loss, self.config.sampling.temperature,
                                  self.algorithm.needs_entropy, self.algorithm.token_level)

    def export_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder. Collective over the mesh."""
        save_hf(folder, self.config.model.model, self.shape, self.atlases, self.policy.parameters)


def peak_memory_bytes() -> int:
    """Most memory this process has held: on the GPU if there is one, else resident."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_rss_bytes()
