"""Sample with an inference engine in the trainer's process, and pull its weights from Megatron's shards.

    # every rank, after Megatron has built its groups
    engine = RolloutEngine(config, shape, ranks, atlases, parameters)
    engine.connect(atlases, parameters)      # only if the sources change later on
    engine.sync(version)                     # a transaction: only a committed version generates
    engine.generate(prompts, keys, temperature=1.0)
    engine.shutdown()                        # last: no collective works afterwards

Every method is collective: all ranks call all of them, in this order. The ranks of one tensor-parallel engine
pass the same prompts and keys. An atlas is the sharding spec of one rank. `out_of_process.py` runs the same
engines in separate processes. The engine that samples is behind the interface of interface.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl.collectives import all_gather_messages
from megarl.config.hf_config import ModelShape
from megarl.config.schema import TrainConfig
from megarl.reshard.alias import without
from megarl.reshard.atlas import Atlas
from megarl.reshard.destination import Arrival, Destination
from megarl.reshard.engine_atlas import engine_atlases
from megarl.reshard.plan import ReshardPlan, make_plan
from megarl.reshard.receiver import Pull, tensors_of
from megarl.reshard.sync import WeightSync
from megarl.reshard.transports.choose import ranks_per_node
from megarl.rollout.backends import EngineSetup, start_in_process
from megarl.rollout.interface import InferenceEngine, Output, Request
from megarl.rollout.offer import Offer
from megarl.runtime.abort import AbortableEngine, Aborted


class Response(NamedTuple):
    """One sampled response."""

    token_ids: list[int]
    """Sampled tokens, including the end-of-sequence or stop token that ended the response."""
    log_probs: list[float]
    """Log-prob log pi(token) of each token, at the sampling temperature."""
    versions: list[int]
    """Version of the weights that sampled each token."""
    finish_reason: str
    """Reason why the response ended: "stop" or "length"."""
    experts: torch.Tensor | None = None
    """Experts of each token with --moe-routing-replay engine, else None.

    [prompt and response tokens, layers, topk] uint8 or int16. Layers without experts hold arbitrary values.
    """


class Engine:
    """Base class of in-process and out-of-process engines, which generate only with weights that a sync has
    committed."""

    inference: InferenceEngine
    """The engine that samples."""

    def __init__(self, config: TrainConfig, shape: ModelShape, actor: str) -> None:
        self.config, self.shape, self.actor = config, shape, actor
        self._tp, self._sampling = config.rollout.tensor_parallel_size, config.sampling
        self.options = config.reshard
        self.shares_weights = False
        """Whether an update of the trainer's weights changes those of the engine at once."""
        self.is_pinned = False
        """Whether syncs leave the weights as they are, for an evaluation beside training."""
        self.bytes_per_sync = 0
        """Number of bytes that the last sync wrote in this engine."""
        self._weight_sync: WeightSync | None = None
        self._generation = 0
        self._outputs: dict[str, Output] = {}
        """Finished requests that nobody has taken, by id."""
        self._num_generated = 0
        """Number of requests of `generate`, for their ids."""
        self.committing: Callable[[int], AbstractContextManager[None]] = lambda version: nullcontext()
        """Returns the context in which a version is committed."""

    @property
    def version(self) -> int | None:
        """Version of the weights that generate; None before the first sync and after a failed sync."""
        return self.inference.version

    # What a weight sync asks of its receiver, with `begin`, `verify`, `commit` and `give_up`.

    @property
    def process(self) -> str | None:
        return self.inference.process

    @property
    def device(self) -> str:
        return self.inference.device

    @property
    def tensors(self) -> dict[int, dict[str, torch.Tensor]]:
        return self.inference.tensors

    def _join(self, plan: ReshardPlan, speakers: dict[int, int], parameters: dict[str, torch.Tensor]) -> None:
        self._weight_sync = WeightSync(
            plan, dist.get_rank(), speakers, parameters, self, self.options, self._generation, self.actor
        )
        self._generation += 1

    def sync(self, version: int) -> int:
        """Copy the training ranks' current weights into the engine, commit them as `version`, and return the
        bytes written.

        Collective over sources and engines.

        Returns: bytes written, without aliased weights.
        Raises: SyncError if some engine did not receive all weights. In that case no engine commits them."""
        self.begin_sync(version)
        return self.finish_sync()

    def begin_sync(self, version: int) -> None:
        """Start a sync, which `finish_sync` ends. An engine with two buffers may generate meanwhile, with the
        old weights."""
        if self._weight_sync is None:
            raise RuntimeError("no sources are connected: call connect first")
        self._weight_sync.begin(version)

    def finish_sync(self) -> int:
        self._weight_sync.finish()
        return self.bytes_per_sync

    def commit(self, version: int) -> None:
        how = self.config.streaming
        goes_on = how.staleness > 0 and how.weight_update != "wait"
        with self.committing(version):
            self.inference.commit(version, how.weight_update if goes_on else "refuse")

    def give_up(self) -> None:
        """Abandon the sync in progress. With two buffers the old version stays usable."""
        self.inference.give_up_weights()

    def generate(
        self,
        prompts: Sequence[list[int]],
        keys: Sequence[int],
        *,
        temperature: float,
        max_tokens: int | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        prefixes: Sequence[list[int]] | None = None,
        greedy: Sequence[bool] | None = None,
        adding: AbstractContextManager[None] = nullcontext(),
    ) -> list[Response]:
        """Return one sampled response to each prompt, in the order of the prompts.

        A response depends only on the weights, its prompt, its key and the sampling arguments. It does not
        depend on the other prompts or on the engine's number of ranks. `draws.py` explains what a key draws.

        Args:
            prompts: token ids, at least one per prompt.
            keys: one per prompt, see `draw_key`.
            temperature: 0 is greedy.
            max_tokens: limit of a whole response, default --max-response-length.
            prefixes: first tokens of each response, sampled before. The engine returns only the tokens after
                them. These are the tokens that an uninterrupted response would have had. A stop string that
                begins in a prefix is not found.
            greedy: which prompts are answered at temperature 0; default: none.
            adding: context in which the requests are queued.
        Raises: RuntimeError before the first sync. ValueError for prompts that are too long, and for keys or
        prefixes that do not pair up. ValueError also for prefixes that leave nothing to sample, and for an
        engine that cannot continue after a prefix. Aborted if the job shuts down; afterwards the engine
        cannot generate any more."""
        prefixes = [[]] * len(prompts) if prefixes is None else prefixes
        greedy = [False] * len(prompts) if greedy is None else greedy
        limit = max_tokens or self._sampling.max_response_length
        self._check(prompts, keys, prefixes, limit)
        first = self._num_generated
        self._num_generated += len(prompts)
        requests = [
            Request(
                id=f"call/{first + index}",
                prompt=[*prompt, *prefix],
                key=key,
                max_tokens=limit - len(prefix),
                temperature=0.0 if is_greedy else temperature,
                top_p=top_p,
                top_k=top_k,
            )
            for index, (prompt, key, prefix, is_greedy) in enumerate(
                zip(prompts, keys, prefixes, greedy, strict=True)
            )
        ]
        return [
            Response(
                output.token_ids, output.log_probs, output.versions, output.finish_reason, output.experts
            )
            for output in self.complete(requests, adding)
        ]

    def complete(
        self, requests: Sequence[Request], adding: AbstractContextManager[None] = nullcontext()
    ) -> list[Output]:
        """Queue requests, take steps until all of them are finished, and return their outputs in this order.
        Requests of `add` go on in the same steps.

        Collective and with the errors of `step`.

        Args:
            adding: context in which the requests are queued.
        Raises: RuntimeError before the first sync."""
        with adding:
            if requests:
                self.add(requests)
        ids = [request.id for request in requests]
        try:
            while not self._outputs.keys() >= {*ids}:
                self.step()
        except Aborted:  # requests of `add` remain, and are saved with the last checkpoint
            self.inference.abort(ids)
            for name in ids:
                self._outputs.pop(name, None)
            raise
        return [self._outputs.pop(name) for name in ids]

    # Requests that outlive a call.

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, whose prompts may end in tokens that were sampled before. Returns at once.

        Raises: RuntimeError before the first sync."""
        self._check_version()
        self.inference.add(requests)

    def has_unfinished(self) -> bool:
        """Return whether a request waits or runs."""
        return self.inference.has_unfinished()

    def step(self) -> None:
        """Take one step of the engine. Collective over the ranks of an in-process engine.

        Raises: Aborted if the job shuts down; afterwards the engine cannot generate any more."""
        self.inference.step()
        self._receive()

    def take(self) -> list[Output]:
        """Return the requests of `add` that have finished since the last call, in the order in which they
        finished."""
        self._receive()
        outputs, self._outputs = self._outputs, {}
        return [*outputs.values()]

    def _check(
        self,
        prompts: Sequence[list[int]],
        keys: Sequence[int],
        prefixes: Sequence[list[int]],
        limit: int,
    ) -> None:
        """Raise RuntimeError or ValueError, as `generate` says, before a request is queued."""
        self._check_version()
        if not len(prompts) == len(keys) == len(prefixes):
            raise ValueError(
                f"{len(prompts)} prompts, {len(keys)} keys and {len(prefixes)} prefixes must pair up."
            )
        longest = self._sampling.max_prompt_length
        for index, (prompt, prefix) in enumerate(zip(prompts, prefixes, strict=True)):
            if not 0 < len(prompt) <= longest:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens; 1 to --max-prompt-length ({longest}) "
                    "are possible."
                )
            if len(prefix) >= limit:
                raise ValueError(
                    f"prefix {index} has {len(prefix)} tokens; the whole response has at most {limit}."
                )
        if any(prefixes) and self.inference.cannot_continue is not None:
            raise ValueError(f"prefixes: {self.inference.cannot_continue}")

    def _receive(self) -> None:
        self._outputs |= {output.id: output for output in self.inference.take()}

    def _check_version(self) -> None:
        self.inference.check_alive()
        if self.version is None:
            raise RuntimeError(
                "generate was called before a sync was committed: the engine's weights are noise. "
                "Call sync(version) first."
            )


@dataclass(frozen=True)
class _EngineWeights:
    """Properties of one rank's engine that all ranks need to plan a sync."""

    aliases: dict[str, str]
    """Weights that share the trainer's memory: name in the engine -> the trainer's name."""
    atlas: Atlas | None
    """Sharding spec of the engine; None if a table knows the layout."""


class RolloutEngine(Engine):
    def __init__(
        self,
        config: TrainConfig,
        shape: ModelShape,
        ranks: Sequence[int],
        sources: dict[int, Atlas],
        parameters: dict[str, torch.Tensor],
        actor: str = "",
    ) -> None:
        """Start an engine on this rank and plan how its weights come from the ranks in `sources`.

        Collective over the world. The weights are undefined until the first `sync`. With --reshard-alias the
        engine uses the trainer's memory for weights that this rank's trainer holds in the same layout and
        dtype. An update changes these weights at once, and `sync` makes them a version.

        Args:
            ranks: ranks of the role. Consecutive blocks of tensor_parallel_size form engines. vLLM joins the
                existing world, so these are all ranks; the rules of the configuration refuse others.
            sources: atlas of every source rank, the same on all ranks.
            parameters: this rank's live source tensors, [rows, cols], by the names of its atlas; {} if the
                rank is no source.
            actor: suffix of the actor that the engine samples for.
        Raises: ValueError for engine arguments that cannot work; PlanError if the sources do not
        hold every weight."""
        super().__init__(config, shape, actor)
        rank = dist.get_rank()
        # vLLM on a CPU changes torchrun's variables, so they are read before.
        self.ranks, self._ranks_per_node = tuple(ranks), ranks_per_node()
        # requests that end before a commit are still sampled when the trainer's weights have changed
        ends_first = config.streaming.staleness > 0 and config.streaming.weight_update == "wait"
        may_share = config.reshard.reshard_alias and not ends_first
        offer = Offer(sources.get(rank, {}) if may_share else {}, parameters)
        first = self.ranks.index(rank) // self._tp * self._tp
        self._engine_ranks = self.ranks[first : first + self._tp]
        setup = EngineSetup(config, shape, self._engine_ranks, num_engines=len(self.ranks) // self._tp)
        self.inference = start_in_process(setup, offer)
        AbortableEngine(self.inference, f"{actor}/{rank // self._tp}", rank % self._tp, self._tp)
        self._aliases = offer.taken
        self.connect(sources, parameters)

    def connect(self, sources: dict[int, Atlas], parameters: dict[str, torch.Tensor]) -> None:
        """Plan which weights come from which ranks in `sources`. Weights that share the trainer's memory are
        left out.

        Arguments and errors are those of the constructor."""
        rank, backend = dist.get_rank(), self.config.rollout.backend
        atlases = engine_atlases(backend, self.shape, self.ranks, self._tp)
        own = self.inference.atlases[rank] if atlases is None else None
        told = all_gather_messages(_EngineWeights(self._aliases, own), _EngineWeights)
        wanted = atlases or {rank: told[rank].atlas for rank in self.ranks}
        self.shares_weights = any(told[rank].aliases for rank in self._engine_ranks)
        plan = make_plan(
            sources,
            {rank: without(atlas, told[rank].aliases) for rank, atlas in wanted.items()},
            self._ranks_per_node,
        )
        self.destination = Destination(rank, plan.copies_to(rank), self.tensors[rank])
        self._join(plan, {rank: rank for rank in self.ranks}, parameters)

    # Methods of a receiver of a weight sync. The weights are overwritten in place, so a sync that fails
    # half-way leaves no usable weights.

    def begin(
        self,
        version: int,
        arrivals: dict[int, dict[int, Arrival]],
        pulls: dict[int, dict[int, Pull]],
        messages: Callable[[], object],
    ) -> None:
        rank = dist.get_rank()
        self.inference.version, self._arrivals = None, arrivals.get(rank, {})
        for source, pull in pulls.get(rank, {}).items():
            self.destination.pull_from(source, tensors_of(pull), pull[1])

        def copy() -> None:
            messages()
            self.destination.pull()

        self.inference.write_weights(copy)
        self.bytes_per_sync = self.destination.bytes

    def verify(self, timeout_s: float) -> str | None:
        return self.destination.difference(self._arrivals)

    def release_kv_cache(self) -> None:
        """Give the GPU memory of the KV cache back until `restore_kv_cache`. The weights stay.

        Not collective."""
        self.inference.release_kv_cache()

    def restore_kv_cache(self) -> None:
        """Take the GPU memory of the KV cache back, without content. Every rank of the engine calls this."""
        self.inference.restore_kv_cache()

    def shutdown(self) -> None:
        """Stop the engine.

        vLLM destroys torch's default process group with its own, so this is the last collective of the
        process."""
        dist.barrier()
        self.inference.shutdown()
