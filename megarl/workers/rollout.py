"""Implement the rollout role on one rank: a vLLM engine that samples with the actor's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.config.mesh import engine_mode
from megarl.config.reward_models import needs_ground_truth
from megarl.config.roles import tells_experts
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.flow.job_roles import Rollout
from megarl.invariants import digest
from megarl.packing import Sample
from megarl.reshard.atlas import Atlas
from megarl.rollout.draws import draw_key
from megarl.workers.actor import ActorRole
from megarl.workers.hosted_role import HostedRole
from megarl.workers.implements import implements
from megarl.workers.megatron_role import megatron_atlases
from megarl.workers.kv_cache import EngineKVCache, releases_here, with_kv_cache_bytes
from megarl.workers.offload_manager import KV_CACHE, needs
from megarl.workers.store import RolloutBlock, RolloutSample

if TYPE_CHECKING:
    from megarl.rollout.engine import Engine, RolloutEngine


@implements(Rollout)
class RolloutRole(HostedRole):
    """One vLLM engine, or this rank's part of it, and the data sets of its prompts."""

    actor: ActorRole | None = None
    """The actor in this process, if there is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mode = engine_mode(self.config, dist.get_world_size())
        self.engine: Engine | None = None
        """The engine. None on ranks that only lend their device to an out-of-process engine."""

    @needs("parameters", of="actor")
    def setup(self) -> None:
        """Load the data sets, start the engine, and plan how the actor's weights are copied into it.

        Collective over the world, after the actor's `setup`."""
        config = self.config
        self.tokenizer = load_tokenizer(config.model.tokenizer_model or config.model.model)
        column = "ground_truth" if needs_ground_truth(config) else None
        files = {"train": config.data.train_data, "eval": config.data.eval_data}
        self.datasets = {
            purpose: PromptDataset.load(paths, prompt_key=config.data.prompt_key, needs=column)
            for purpose, paths in files.items()
            if paths
        }
        self.encoders = {
            purpose: PromptEncoder(self.tokenizer, dataset) for purpose, dataset in self.datasets.items()
        }
        sources = megatron_atlases(self.shape, self.meshes[f"actor{self.suffix}"], config.actor)
        self.engine = self._start_engine(sources, self.actor.model.weights if self.actor else {})

    def _start_engine(self, sources: dict[int, Atlas], parameters: dict[str, torch.Tensor]) -> Engine | None:
        if self.mode == "in-process":
            return self._start_in_process(sources, parameters)
        if self.rank != self.owners[0]:
            return None
        from megarl.rollout.out_of_process import OutOfProcessEngine

        engine = OutOfProcessEngine(
            self.config, self.shape, self.mesh.peers(self.rank, "tp"), self.mesh.ranks, self.suffix
        )
        engine.connect(sources, parameters)
        return engine

    def _start_in_process(
        self, sources: dict[int, Atlas], parameters: dict[str, torch.Tensor]
    ) -> RolloutEngine:
        """Start an engine in this process.

        On a GPU the offload manager releases its KV cache while roles train."""
        from megarl.rollout.engine import RolloutEngine

        config, releases = self.config, releases_here(self.config)
        if releases:
            config = with_kv_cache_bytes(config, self.shape, sources, self.offload_manager)
        engine = RolloutEngine(config, self.shape, self.mesh.ranks, sources, parameters, self.suffix)
        if releases:
            self.offload_manager.add(
                self.name, EngineKVCache(engine, engine.inference.kv_cache.num_bytes), (KV_CACHE,)
            )
        return engine

    @property
    def replica(self) -> int:
        return self.mesh.coordinates(self.rank)["dp"]

    @property
    def owners(self) -> tuple[int, ...]:
        """Global ranks that hold the samples of this rank's engine after `generate`.

        These are all ranks of an in-process engine, and the first rank of an out-of-process one."""
        ranks = self.mesh.peers(self.rank, "tp")
        return ranks if self.mode == "in-process" else ranks[:1]

    @needs("parameters", of="actor")
    def sync(self, version: int) -> dict[str, float]:
        """Copy the actor's current weights into the engine as `version`. Returns the metric sync/bytes, or {}
        on a rank without an engine object.

        Collective over the rollout ranks and the other actor ranks, which call ActorRole.send_weights."""
        if self.engine is not None:
            if self.actor is not None:
                self.actor.model.merge_adapters()
            return {"sync/bytes": float(self.engine.sync(version))}
        if self.actor is not None:
            self.actor.send_weights_to(self.mesh, version)
        return {}

    @needs(KV_CACHE)
    def generate(self, purpose: str, visits: Mapping[int, int], greedy: bool = False) -> list[Sample]:
        """Sample responses to dataset rows. The first rank of each engine returns the engine's samples,
        ordered as `visits`; its other ranks return [].

        The samples of the last call for this purpose are released. Prompts are spread over the engines in
        contiguous blocks. Every sample draws by a unique key (run seed, purpose, visit, index). Its draws
        therefore do not depend on layout, batch or step.

        Args:
            visits: visit of each prompt -> its row. The visit is the group of its samples. A held-out row is
                its own visit, so it draws the same noise at every evaluation.

        Returns: the samples of this engine, on its first rank only."""
        rollouts = self.store.source(purpose + self.suffix)
        rollouts.release()  # before sampling, so that an aborted call leaves no samples behind
        if self.engine is None:
            return []
        config, n = self.config, self.config.batch.num_samples_per_prompt
        if purpose == "eval":
            n = 1 if greedy else config.run.eval_num_samples
        first = self.replica * len(visits) // self.mesh.dp
        mine = list(visits.items())[first : (self.replica + 1) * len(visits) // self.mesh.dp]
        answers = [(visit, row, index) for visit, row in mine for index in range(n)]
        prompts = self.encoders[purpose].prompts([row for _, row, _ in answers])
        keys = [draw_key(config.batch.seed, purpose, visit, index) for visit, _, index in answers]
        how = {"temperature": 0.0}
        if not greedy:
            sampling = config.sampling
            how = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        outputs = self.engine.generate(prompts, keys, **how)
        has_experts = tells_experts(config, self.shape)
        made = [
            RolloutSample(
                visit * n + index,
                row,
                group=visit,
                versions=output.versions,
                prompt=prompt,
                response=output.token_ids,
                log_probs=output.log_probs,
                experts=output.experts if has_experts else None,
                digest=digest(prompt, output.token_ids),
                position=first * n + place,
            )
            for place, ((visit, row, index), prompt, output) in enumerate(
                zip(answers, prompts, outputs, strict=True)
            )
        ]
        rollouts.add(RolloutBlock(made))
        if self.rank != self.owners[0]:
            return []
        return [
            rollout.record(self.owners, truncated=output.finish_reason == "length")
            for rollout, output in zip(made, outputs, strict=True)
        ]

    def shut_down(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
