"""Implement the rollout role on one rank: a vLLM engine that samples with the actor's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.config.mesh import engine_mode, group_timeout
from megarl.config.reward_models import needs_ground_truth
from megarl.config.roles import tells_experts
from megarl.data.encoder import PromptEncoder, load_rows
from megarl.data.tokenizer import tokenizer_of
from megarl.flow.events import GROUPS_FINISHED, FinishedGroups
from megarl.flow.job_roles import Rollout
from megarl.packing import Sample
from megarl.reshard.atlas import Atlas
from megarl.rollout.canaries import canary_length, canary_prompts, num_response_tokens
from megarl.rollout.draws import draw_key
from megarl.rollout.engine_arguments import stopping_at
from megarl.rollout.replay_log import Admit, Canary, Checkpoint, Evaluate
from megarl.rollout.requests import Request
from megarl.workers.actor import ActorRole
from megarl.workers.answer import GREEDY, Answer
from megarl.workers.engine_recorder import EngineRecorder
from megarl.workers.engine_steps import EngineSteps
from megarl.workers.episode_stream import EpisodeStream
from megarl.workers.episodes import EpisodeSampler
from megarl.workers.implements import implements
from megarl.workers.megatron_role import megatron_atlases
from megarl.workers.leaving_engine import without_engine
from megarl.workers.kv_cache import EngineKVCache, releases_here, with_kv_cache_bytes
from megarl.workers.offload_manager import KV_CACHE, needs
from megarl.workers.pinned_engine import PinnedEngine
from megarl.workers.request_stream import RequestStream
from megarl.workers.shared_episodes import SharedEpisodes
from megarl.workers.store import RolloutBlock, RolloutSample, SampleTable

if TYPE_CHECKING:
    from megarl.rollout.engine import Engine, Response, RolloutEngine


@implements(Rollout)
class RolloutRole(PinnedEngine):
    """One vLLM engine, or this rank's part of it, and the data sets of its prompts."""

    actor: ActorRole | None = None
    """The actor in this process, if there is one."""
    on_finished: Callable[[list[RolloutSample]], None] | None = None
    """Gets the samples of finished groups, before the driver hears of them."""
    shared: SharedEpisodes | None = None
    """Plays the episodes of several actors together (--share-episodes)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mode = engine_mode(self.config, dist.get_world_size())
        self.episodes: EpisodeSampler | None = None
        """Samples multi-turn episodes; None without --env and without an engine."""
        self._kv_cache: EngineKVCache | None = None

    @needs("parameters", of="actor")
    def setup(self) -> None:
        """Load the data sets, start the engine, and plan how the actor's weights are copied into it.

        Collective over the world, after the actor's `setup`."""
        self.tokenizer = tokenizer_of(self.config.model)
        self.config = config = stopping_at(self.config, self.tokenizer.turn_end, self.tokenizer.end_ids)
        column = "ground_truth" if needs_ground_truth(config) else None
        files = {"train": config.data.train_data, "eval": config.data.eval_data}
        self.datasets = {
            purpose: load_rows(config, paths, column) for purpose, paths in files.items() if paths
        }
        self.encoders = {name: PromptEncoder(self.tokenizer, rows) for name, rows in self.datasets.items()}
        sources = megatron_atlases(self.shape, self.meshes[f"actor{self.suffix}"], config.actor)
        self.engine = self._start_engine(sources, self.actor.model.weights if self.actor else {})
        if self.engine is not None and config.episodes.has_turns:
            self.episodes = EpisodeSampler(config, self.shape, self.tokenizer, self.engine)
            if self.shared is not None:
                self.shared.join(self.suffix, self.episodes, self._first_turns, self.datasets)
        if self.config.streaming.staleness:
            self._start_stream()

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
            self._kv_cache = EngineKVCache(engine, engine.inference.kv_cache.num_bytes)
            self.offload_manager.add(self.name, self._kv_cache, (KV_CACHE,))
        return engine

    def _start_stream(self) -> None:
        """Let this rank take steps of the engine between calls. Collective over the world."""
        group, timeout = None, group_timeout(self.config.placement.call_timeout_s)
        if self.mode == "in-process" and self.mesh.tp > 1:
            for ranks in dict.fromkeys(self.mesh.peers(rank, "tp") for rank in self.mesh.ranks):
                # a rank waits here while another one is in a call
                made = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
                group = made if self.rank in ranks else group
        if self.engine is None:
            return
        table = self.store.source("train" + self.suffix)
        if self.episodes is None:
            self.stream = RequestStream(self.engine, table, self._report, self._has_experts)
        else:
            self.stream = EpisodeStream(self.engine, table, self._report, self.episodes, self._row)
        self.recorder = EngineRecorder(
            self.engine.inference,
            self.stream.step,
            f"{self.name}_{self.replica}",
            Path(self.config.run.save) if self.rank == self.owners[0] else None,
            Path(replay) if (replay := self.config.streaming.replay) is not None else None,
            timeout_s=self.config.placement.call_timeout_s / 2,  # before the driver gives the call up
        )
        if isinstance(self.stream, EpisodeStream):
            self.stream.recorder = self.recorder
        if self.context.idle_hook is None:
            self.context.idle_hook = EngineSteps(group)
        self.context.idle_hook.add(self)

    # What the idle hook asks of an engine.

    def has_unfinished(self) -> bool:
        return self.stream.has_unfinished()

    def is_held(self) -> bool:
        """Return whether the engine must not take a step now: its weights are being replaced, its KV cache is
        released, or --replay holds it."""
        is_updated = self.actor is not None and self.actor.has_new_weights and self.engine.shares_weights
        has_cache = self._kv_cache is None or self._kv_cache.is_resident
        return is_updated or not has_cache or self.engine.version is None or self.recorder.is_held()

    @without_engine(lambda: None)
    def step(self) -> None:
        self.stream.step()

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
            self.prepare_sync()
            if self.actor is not None:
                self.actor.model.merge_adapters()
            num_bytes = self.engine.sync(version)  # also without an engine, for the others' sake
            if self.actor is not None:
                self.actor.has_new_weights = False
            self.complete_sync(version)
            return {"sync/bytes": float(num_bytes)}
        if self.actor is not None:
            self.actor.send_weights_to(self.mesh, version)
        return {}

    @needs(KV_CACHE)
    @without_engine(list)
    def generate(
        self,
        purpose: str,
        visits: Mapping[int, int],
        greedy: bool = False,
        engines: Sequence[int] | None = None,
        wait: bool = True,
        due: Sequence[int] = (),
        keep: bool = False,
    ) -> list[Sample]:
        """Sample responses to dataset rows. The first rank of each engine returns the engine's samples,
        ordered as `visits`; its other ranks return [].

        The samples of the last call for this purpose are released, unless the call keeps them or does not
        wait. Every sample draws by a unique key (run seed, purpose, visit, index), so its draws do not depend
        on layout, batch or step.

        Args:
            visits: visit of each prompt -> its row. The visit is the group of its samples. A held-out row is
                its own visit, so it draws the same noise at every evaluation.
            engines: number of the engine of each visit. Default: the engines take contiguous blocks of equal
                size.
            wait: whether the call returns when all samples are finished. Otherwise it queues the requests and
                returns [] at once. Finished groups are then reported by events. Only with --staleness above
                0.
            due: groups that --max-tokens-per-step does not limit from now on. Only if the call does not wait.
            keep: whether the samples of the last call stay: a further round of --dynamic-sampling.

        Returns: the samples of this engine, on its first rank only."""
        rollouts = self.store.source(purpose + self.suffix)
        if wait and purpose == "train" and self.config.streaming.staleness:
            raise ValueError(
                f"generate: with --staleness {self.config.streaming.staleness} the samples of earlier calls "
                "wait for later steps. Call generate(..., wait=False), or let trainer.rollout() do it."
            )
        if (wait or purpose == "eval") and not keep:
            rollouts.release()  # before sampling, so that an aborted call leaves no samples behind
        if not self.has_engine:
            return []
        own = self._own(visits, engines)
        if self.shared is not None:
            made = self.shared.samples_of(self.suffix, purpose, own, greedy)
            rollouts.add(RolloutBlock(made))
            return self._records(made)
        recorded = self._recorded(purpose, own, greedy)
        answers, how = self._first_turns(purpose, own, greedy)
        if not wait and purpose == "eval":
            self.answer_beside(answers, greedy, recorded, **self._sampling("eval"))
            return []
        if not wait:
            with recorded:
                self.stream.go_on(due)
                self.stream.add(answers, **how)
            return []
        if isinstance(self.stream, EpisodeStream):
            made = self.stream.sample(answers, recorded, **how)
        elif self.episodes is not None:
            made = self.episodes.sample(answers, self.datasets[purpose], **how)
        else:
            outputs = self.engine.generate(
                [answer.prompt for answer in answers],
                [answer.key for answer in answers],
                max_tokens=self.config.sampling.of(purpose).max_response_length,
                greedy=[answer.greedy for answer in answers],
                adding=recorded,
                **how,
            )
            made = self._samples(answers, outputs)
        return self._keep(rollouts, made)

    @needs(KV_CACHE)
    @without_engine(list)
    def sample_canaries(self, count: int) -> list[Sample]:
        """Sample `count` canaries with this rank's engine, before all requests that wait. Requests that run
        go on in the same steps.

        The canaries of the last call are released. Prompts and draws are the same at every call and on every
        engine, so that only the weights and the KV cache can make a difference."""
        rollouts, config = self.store.source("canary" + self.suffix), self.config
        rollouts.release()
        if not self.has_engine or self.is_pinned:
            return []
        first, limit = -1 - self.replica * count, num_response_tokens(config)
        prompts = canary_prompts(
            lambda row: self.encoders["train"].prompts([row])[0],
            len(self.datasets["train"]),
            count,
            canary_length(config, self.engine.device == "cpu"),
        )
        answers = [
            Answer(first - index, row, first - index, prompt, draw_key(config.batch.seed, "canary", index))
            for index, (row, prompt) in enumerate(prompts)
        ]
        outputs = self.engine.complete(
            [
                Request(
                    f"canary/{answer.sample_id}",
                    answer.prompt,
                    answer.key,
                    max_tokens=limit,
                    is_first=True,
                    **self._sampling(),
                )
                for answer in answers
            ],
            self._recorded("canary", [(answer.group, answer.row) for answer in answers]),
        )
        made = self._samples(answers, outputs)
        return [replace(record, trained=False) for record in self._keep(rollouts, made)]

    def _own(self, visits: Mapping[int, int], engines: Sequence[int] | None) -> list[tuple[int, int]]:
        """Return (visit, row) of those visits that this rank's engine samples."""
        if engines is not None:
            return [
                one for one, engine in zip(visits.items(), engines, strict=True) if engine == self.replica
            ]
        num_engines = self.mesh.dp
        first, end = (number * len(visits) // num_engines for number in (self.replica, self.replica + 1))
        return list(visits.items())[first:end]

    def _recorded(
        self, purpose: str, own: list[tuple[int, int]], greedy: bool = False
    ) -> AbstractContextManager[None]:
        """Return the context in which the engine receives these prompts, with a record in the engine's
        log."""
        if self.recorder is None:
            return nullcontext()
        visits, version = tuple(visit for visit, _ in own), self.engine.version
        if purpose == "eval":
            return self.recorder.taking_effect(
                Evaluate(step=version, version=version, visits=visits, greedy=greedy)
            )
        kind = Canary if purpose == "canary" else Admit
        return self.recorder.taking_effect(kind(step=version + 1, version=version, visits=visits))

    def _first_turns(
        self, purpose: str, own: Sequence[tuple[int, int]], greedy: bool
    ) -> tuple[list[Answer], dict[str, float]]:
        """Return the responses to sample, none of them begun, and temperature, top_p and top_k."""
        how = GREEDY if greedy else self._sampling(purpose)
        return self._answers(purpose, own, greedy), how

    def _answers(self, purpose: str, visits: Sequence[tuple[int, int]], greedy: bool) -> list[Answer]:
        config, num_drawn = self.config, self.config.batch.num_samples_per_prompt
        drawn_for = purpose if self.shared is None else purpose + self.suffix  # actors of one seed differ
        n = num_drawn + config.algorithm.greedy_samples
        if purpose == "eval":
            n = num_drawn = 1 if greedy else config.run.eval_num_samples
        asked = [(visit, row, index) for visit, row in visits for index in range(n)]
        prompts = self.encoders[purpose].prompts([row for _, row, _ in asked])
        keys = [draw_key(config.batch.seed, drawn_for, visit, index) for visit, _, index in asked]
        return [
            Answer(visit * n + index, row, visit, prompt, key, purpose=purpose, greedy=index >= num_drawn)
            for (visit, row, index), prompt, key in zip(asked, prompts, keys, strict=True)
        ]

    def _row(self, answer: Answer) -> Mapping[str, object]:
        """Return the row of an answer, as an environment gets it."""
        return self.datasets[answer.purpose][answer.row].columns

    def _samples(self, answers: Sequence[Answer], outputs: Sequence[Response]) -> list[RolloutSample]:
        """Return the samples of answers by what an engine has sampled for them."""
        return [
            answer.after(output).sample(
                output.finish_reason, experts=output.experts if self._has_experts else None
            )
            for answer, output in zip(answers, outputs, strict=True)
        ]

    def _keep(self, rollouts: SampleTable[RolloutBlock], made: list[RolloutSample]) -> list[Sample]:
        """Store the samples of a call that has waited for them, and report what has finished meanwhile. Returns
        the driver's records of the samples."""
        rollouts.add(RolloutBlock(made))
        if self.stream is not None:
            self.stream.collect()
        return self._records(made)

    @cached_property
    def _has_experts(self) -> bool:
        return tells_experts(self.config, self.shape)

    def _records(self, made: Sequence[RolloutSample]) -> list[Sample]:
        """Return the driver's records of these samples, on the first rank of the engine only."""
        return [sample.record(self.owners) for sample in made] if self.rank == self.owners[0] else []

    def _report(self, finished: list[RolloutSample]) -> None:
        """Report groups that are finished to the driver, and have their samples scored meanwhile."""
        if self.on_finished is not None:
            self.on_finished(finished)
        if records := self._records(finished):
            self.context.emit(GROUPS_FINISHED, FinishedGroups(self.name, records))

    def save_requests(self, folder: str, visits: list[int]) -> dict[str, str]:
        """Write the engine's samples of these groups, finished or not, for a checkpoint. Returns file -> its
        SHA-256 on the first rank of the engine, and {} on others.

        Unfinished responses are computed anew from their prefixes, as they are after a resume."""
        if self.stream is None:
            return {}
        path = Path(folder) / f"{self.name}_engine_{self.replica}.msgpack"
        is_writer = self.rank == self.owners[0]
        digest_of_file = self._save(path if is_writer else None, visits) if self.has_engine else None
        if digest_of_file is None:
            digest_of_file = self.stream.save(path if is_writer else None, visits, has_engine=False)
        return {path.name: digest_of_file} if is_writer else {}

    @without_engine(lambda: None)
    def _save(self, path: Path | None, visits: list[int]) -> str:
        with self.recorder.taking_effect(Checkpoint(step=self.engine.version)):
            return self.stream.save(path, visits)

    @needs(KV_CACHE)
    @without_engine(lambda: None)
    def load_requests(self, folder: str, visits: Mapping[int, int], engines: Sequence[int]) -> None:
        """Queue groups as `generate` does without waiting, and go on where `save_requests` has left them,
        with any number of engines."""
        if self.stream is None or not self.has_engine:
            return
        answers = self._answers("train", self._own(visits, engines), greedy=False)
        files = sorted(Path(folder).glob(f"{self.name}_engine_*.msgpack"))
        self.stream.load(answers, files, **self._sampling())

    def _sampling(self, purpose: str = "train") -> dict[str, float]:
        return self.config.sampling.of(purpose).arguments

    @without_engine(lambda: None)
    def set_version(self, version: int) -> None:
        """Give the engine's weights, which have not changed, the number of a later version."""
        if self.has_engine and not self.is_pinned:
            with nullcontext() if self.recorder is None else self.recorder.committing(version):
                self.engine.inference.set_version(version)
            if self.stream is not None:
                self.stream.go_on()

    @needs(KV_CACHE)
    def catch_up(self) -> dict[str, float]:
        """With --replay, let an engine in this process take steps until its next planned switch of weights.
        Returns no metrics.

        Once an update has begun, an engine that shares the actor's weights cannot take a step."""
        if self.recorder is not None and self.mode == "in-process":
            self.recorder.catch_up()
        return {}

    def shut_down(self) -> None:
        try:
            if self.stream is not None and self.has_engine:
                self.forget_requests()
        finally:
            for part in (self.recorder, self.episodes):
                if part is not None:
                    part.close()
            if self.engine is not None:
                self.engine.shutdown()
