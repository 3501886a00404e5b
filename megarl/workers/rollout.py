"""The rollout role on one rank: a vLLM engine that samples, and whose weights follow the actor's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.reward_models import needs_ground_truth
from megarl.config.roles import tells_experts
from megarl.config.schema import TrainConfig
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.flow.job_roles import Rollout
from megarl.invariants import digest
from megarl.packing import Sample
from megarl.reshard.atlas import Atlas
from megarl.rollout.draws import draw_key
from megarl.workers.actor import ActorRole
from megarl.workers.data_plane import DataPlane, Rollouts
from megarl.workers.implements import implements
from megarl.workers.megatron_role import megatron_atlases
from megarl.workers.residence import needs

if TYPE_CHECKING:
    from megarl.rollout.engine import Engine


@implements(Rollout)
class RolloutRole:
    def __init__(
        self,
        config: TrainConfig,
        shape: ModelShape,
        mesh: MeshSpec,
        plane: DataPlane,
        actor: ActorRole | None,
        actor_mesh: MeshSpec,
        mode: str,
        suffix: str = "",
    ) -> None:
        """actor: the actor in this process, if there is one. mode: of the engine, see `engine_mode`. suffix:
        of role and actor."""
        self.config, self.shape, self.mesh, self.plane, self.actor, self.actor_mesh = (
            config,
            shape,
            mesh,
            plane,
            actor,
            actor_mesh,
        )
        self.rank, self.mode, self.suffix = dist.get_rank(), mode, suffix
        self.engine: Engine | None = None
        """None on a rank whose device an out-of-process engine uses, but for the engine's first rank."""

    @needs("parameters", of="actor")
    def setup(self) -> None:
        """Start the engine and plan how the actor's shards become its shards. After the actor's set-up;
        collective."""
        config = self.config
        self.tokenizer = load_tokenizer(config.model.tokenizer_model or config.model.model)
        column = "ground_truth" if needs_ground_truth(config) else None
        self.datasets = {
            "train": PromptDataset.load(
                config.data.train_data, prompt_key=config.data.prompt_key, needs=column
            )
        }
        if config.data.eval_data:
            self.datasets["eval"] = PromptDataset.load(
                config.data.eval_data, prompt_key=config.data.prompt_key, needs=column
            )
        self.encoders = {
            purpose: PromptEncoder(self.tokenizer, dataset) for purpose, dataset in self.datasets.items()
        }
        sources = megatron_atlases(self.shape, self.actor_mesh, config.actor)
        self.engine = self._start_engine(sources, self.actor.model.weights if self.actor else {})

    def _start_engine(self, sources: dict[int, Atlas], parameters: dict[str, torch.Tensor]) -> Engine | None:
        if self.mode == "in-process":
            from megarl.rollout.engine import RolloutEngine

            return RolloutEngine(self.config, self.shape, self.mesh.ranks, sources, parameters, self.suffix)
        if self.rank != self.holders[0]:
            return None
        from megarl.rollout.out_of_process import OutOfProcessEngine

        engine = OutOfProcessEngine(
            self.config, self.shape, self.mesh.peers(self.rank, "tp"), self.mesh.ranks, self.suffix
        )
        engine.connect(sources, parameters)
        return engine

    @property
    def replica(self) -> int:
        return self.mesh.coordinates(self.rank)["dp"]

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks that hold the samples of this rank's engine: all of an in-process one, the first of an
        out-of-process one."""
        ranks = self.mesh.peers(self.rank, "tp")
        return ranks if self.mode == "in-process" else ranks[:1]

    @needs("parameters", of="actor")
    def sync(self, version: int) -> dict[str, float]:
        """Bring the actor's current weights into the engine as `version`. Collective over rollout ranks, and
        over those actor ranks that are no rollout ranks, which meanwhile call ActorRole.send_weights."""
        if self.engine is not None:
            if self.actor is not None:
                self.actor.model.merge_adapters()
            return {"sync/bytes": float(self.engine.sync(version))}
        if self.actor is not None:
            self.actor.send_weights_to(self.mesh, version)
        return {}

    @needs()
    def generate(self, purpose: str, visits: Mapping[int, int], greedy: bool = False) -> list[Sample]:
        """Sample responses to dataset rows ('train': num_samples_per_prompt each, 'eval': one each).

        Prompts are spread over the engines in contiguous blocks. Every sample draws by a key of its own (run
        seed, purpose, visit, index): neither layout nor batch composition nor step changes what it draws.

        Args:
            visits: visit of each prompt -> its row. A held-out row is its own visit, so it draws alike at
                every evaluation.

        Returns: the samples of this engine, from its first rank only."""
        self.plane.rollouts.pop(purpose + self.suffix, None)  # a call that is left leaves none
        if self.engine is None:
            self.plane.rollouts[purpose + self.suffix] = Rollouts([], [], [], [], [])
            return []
        sampling, n = (
            self.config.sampling,
            1 if purpose == "eval" else self.config.batch.num_samples_per_prompt,
        )
        first = self.replica * len(visits) // self.mesh.dp
        mine = list(visits.items())[first : (self.replica + 1) * len(visits) // self.mesh.dp]
        sample_ids = [visit * n + index for visit, _ in mine for index in range(n)]
        sample_rows = [row for _, row in mine for _ in range(n)]
        prompts = self.encoders[purpose].prompts(sample_rows)
        seed = self.config.batch.seed
        keys = [draw_key(seed, purpose, visit, index) for visit, _ in mine for index in range(n)]
        outputs = self.engine.generate(prompts, keys, temperature=0.0 if greedy else sampling.temperature)
        self.plane.rollouts[purpose + self.suffix] = Rollouts(
            sample_rows,
            sample_ids,
            prompts,
            [o.token_ids for o in outputs],
            [o.log_probs for o in outputs],
            [o.experts for o in outputs] if tells_experts(self.config, self.shape) else None,
            first * n,
        )
        if self.rank != self.holders[0]:
            return []
        return [
            Sample(
                s,
                len(p) + len(o.token_ids),
                len(o.token_ids),
                self.holders,
                truncated=o.finish_reason == "length",
                digest=digest(p, o.token_ids),
                group=s // n,
            )
            for s, p, o in zip(sample_ids, prompts, outputs, strict=True)
        ]

    def shut_down(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
