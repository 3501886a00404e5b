"""Run a vLLM engine in the trainer's process and pull its weights from Megatron's shards.

    # every rank, after Megatron has built its groups
    engine = RolloutEngine(config, shape, ranks, atlases, parameters)
    engine.connect(atlases, parameters)      # only if the sources change later on
    engine.sync(version)                     # a transaction: only a committed version generates
    engine.generate(prompts, keys, temperature=1.0)
    engine.shutdown()                        # last: no collective works afterwards

Every method is collective: all ranks call all of them, in this order. The ranks of one tensor-parallel engine
pass the same prompts and keys. An atlas is the sharding spec of one rank. `out_of_process.py` runs the same
engine in separate processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from megarl.batch import expert_dtype
from megarl.collectives import all_gather_messages
from megarl.config.hf_config import ModelShape
from megarl.config.roles import tells_experts
from megarl.config.schema import TrainConfig
from megarl.runtime.abort import AbortableEngine
from megarl.reshard.alias import without
from megarl.reshard.atlas import Atlas
from megarl.reshard.destination import Arrival, Destination
from megarl.reshard.plan import ReshardPlan, make_plan
from megarl.reshard.sync import Pull, WeightSync, tensors_of
from megarl.reshard.transports.choose import ranks_per_node
from megarl.reshard.vllm_atlas import TABLES, vllm_atlases
from megarl.rollout.draws import draw_arguments
from megarl.rollout.engine_arguments import engine_arguments
from megarl.rollout.environment import prepare_environment, sweep_shared_memory, undisturbed
from megarl.rollout.kv_memory import KVCacheMemory
from megarl.rollout.plugin import register

if TYPE_CHECKING:
    import numpy as np
    from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams


class Response(NamedTuple):
    """One sampled response."""

    token_ids: list[int]
    """Sampled tokens, including the end-of-sequence or stop token that ended the response."""
    log_probs: list[float]
    """Log-prob log pi(token) of each token, at the sampling temperature."""
    finish_reason: str
    """Reason why the response ended: "stop" or "length"."""
    experts: torch.Tensor | None = None
    """Experts of each token with --moe-routing-replay engine, else None.

    [prompt and response tokens, layers, topk] uint8 or int16. Layers without experts hold arbitrary values.
    """


class Engine:
    """Base class of in-process and out-of-process vLLM engines, which generate only with weights that a sync
    has committed."""

    llm: LLM
    device: str
    """Device of the weights: "cpu" or "cuda"."""

    def __init__(self, config: TrainConfig, shape: ModelShape, actor: str) -> None:
        self.shape, self.actor, self._tp = shape, actor, config.rollout.tensor_parallel_size
        self._sampling, self.options = config.sampling, config.reshard
        self._tells_experts = tells_experts(config, shape)
        self.version: int | None = None
        """Version of the weights that generate; None before the first sync and after a failed sync."""
        self.bytes_per_sync = 0
        """Number of bytes that the last sync wrote in this engine."""
        self._weight_sync: WeightSync | None = None
        self._generation = 0

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

    def _commit(self, version: int) -> None:
        self.version = None
        self.llm.finish_weight_update(str(version))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                f"the prefix cache could not be cleared for version {version}: requests are still running"
            )
        self.version = version

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
        Raises: RuntimeError before the first sync. ValueError for prompts that are too long, and for keys or
        prefixes that do not pair up. ValueError also for prefixes that leave nothing to sample, and for an
        engine that cannot continue after a prefix. Aborted if the job shuts down; afterwards the engine
        cannot generate any more."""
        prefixes = [[]] * len(prompts) if prefixes is None else prefixes
        limit = max_tokens or self._sampling.max_response_length
        self._check(prompts, keys, prefixes, limit)
        if not prompts:
            return []
        from vllm import SamplingParams

        stop = list(self._sampling.stop)
        params = [
            SamplingParams(
                **draw_arguments(key, self.device == "cpu"),
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_tokens=limit - len(prefix),
                stop=stop or None,
                include_stop_str_in_output=bool(stop),
                detokenize=bool(stop),
                stop_token_ids=list(self._sampling.stop_token_ids) or None,
                logprobs=0,
                flat_logprobs=True,
                skip_clone=True,
            )
            for key, prefix in zip(keys, prefixes, strict=True)
        ]
        prompts = [[*prompt, *prefix] for prompt, prefix in zip(prompts, prefixes, strict=True)]
        outputs = self._complete([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [
            self._response(len(prompt), output.outputs[0])
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def _check(
        self,
        prompts: Sequence[list[int]],
        keys: Sequence[int],
        prefixes: Sequence[list[int]],
        limit: int,
    ) -> None:
        """Raise RuntimeError or ValueError, as `generate` says, before a request is queued."""
        if self.version is None:
            raise RuntimeError(
                "generate was called before a sync was committed: the engine's weights are noise. "
                "Call sync(version) first."
            )
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
        if any(prefixes) and not self._draws_by_position:
            raise ValueError(
                "prefixes: vLLM runs this model by its Model Runner V1, which on a GPU draws from a "
                "generator per request. Only Model Runner V2 draws by position."
            )

    def _response(self, num_prompt_tokens: int, completion: CompletionOutput) -> Response:
        token_ids, log_probs = list(completion.token_ids), completion.logprobs.logprobs
        if len(token_ids) != len(log_probs):
            raise RuntimeError(f"vLLM returned {len(token_ids)} tokens with {len(log_probs)} log-probs")
        experts = None
        if self._tells_experts:
            num_tokens = num_prompt_tokens + len(token_ids)
            experts = routed_experts(completion.routed_experts, num_tokens, self.shape)
        return Response(token_ids, log_probs, completion.finish_reason, experts)

    @property
    def _draws_by_position(self) -> bool:
        return self.device == "cpu" or self.llm.llm_engine.vllm_config.use_v2_model_runner

    def _complete(self, prompts: list[dict], params: list[SamplingParams]) -> list[RequestOutput]:
        return self.llm.generate(prompts, params, use_tqdm=False)


@dataclass(frozen=True)
class _EngineWeights:
    """Properties of one rank's engine that all ranks need to plan a sync."""

    aliases: dict[str, str]
    """Weights that share the trainer's memory: name in the engine -> the trainer's name."""
    atlas: Atlas | None
    """Sharding spec of the engine; None if a table knows the layout."""


class RolloutEngine(Engine):
    process = None
    """Name of the process that holds the weights, for the sync; None means this process."""

    def __init__(
        self,
        config: TrainConfig,
        shape: ModelShape,
        ranks: Sequence[int],
        sources: dict[int, Atlas],
        parameters: dict[str, torch.Tensor],
        actor: str = "",
    ) -> None:
        """Start vLLM on this rank and plan how its weights come from the ranks in `sources`.

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
        # vLLM on a CPU changes torchrun's variables, so they are read before.
        self.ranks, self._ranks_per_node = tuple(ranks), ranks_per_node()
        prepare_environment()
        _be_launched_externally()
        arguments = engine_arguments(
            config, shape, on_cpu=not torch.cuda.is_available(), num_engines=len(self.ranks) // self._tp
        )
        if int(os.environ["LOCAL_RANK"]) == 0:
            sweep_shared_memory()
        with undisturbed():
            from vllm import LLM

            from megarl.rollout.weight_transfer import offering

            register()
            offered = sources.get(dist.get_rank(), {}) if config.reshard.reshard_alias else {}
            with offering(offered, parameters) as offer:
                self.llm = LLM(**arguments)
        self.kv_cache = KVCacheMemory(self.llm, self.llm.llm_engine.step)
        AbortableEngine(
            self.llm.llm_engine,
            f"{actor}/{dist.get_rank() // self._tp}",
            dist.get_rank() % self._tp,
            self._tp,
        )
        self._aliases = offer.taken
        self.dtype: torch.dtype = self.llm.llm_engine.model_config.dtype
        self.tensors: dict[int, dict[str, torch.Tensor]] = {}
        """Live weights: this rank -> name -> view."""
        self.llm.init_weight_transfer_engine({"init_info": {"expose": self._take}})
        self._is_updating = False
        self.device = next(iter(self.tensors[dist.get_rank()].values())).device.type
        self.connect(sources, parameters)

    def _take(self, atlas: Atlas, tensors: dict[str, torch.Tensor]) -> None:
        """Receive this rank's live weights, and which Hugging Face tensors they hold (its atlas), from the
        vLLM worker."""
        self._atlas, self.tensors[dist.get_rank()] = atlas, tensors

    def connect(self, sources: dict[int, Atlas], parameters: dict[str, torch.Tensor]) -> None:
        """Plan which weights come from which ranks in `sources`. Weights that share the trainer's memory are
        left out.

        Arguments and errors are those of the constructor."""
        rank = dist.get_rank()
        has_table = self.shape.model_type in TABLES
        told = all_gather_messages(
            _EngineWeights(self._aliases, None if has_table else self._atlas), _EngineWeights
        )
        wanted = (
            vllm_atlases(self.shape, self.ranks, self._tp)
            if has_table
            else {rank: told[rank].atlas for rank in self.ranks}
        )
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
        self.version, self._arrivals = None, arrivals.get(rank, {})
        for source, pull in pulls.get(rank, {}).items():
            self.destination.pull_from(source, tensors_of(pull), pull[1])

        def copy() -> None:
            messages()
            self.destination.pull()

        self.llm.start_weight_update()
        self._is_updating = True
        self.llm.update_weights({"update_info": {"copy": copy}})
        self.bytes_per_sync = self.destination.bytes

    def verify(self, timeout_s: float) -> str | None:
        return self.destination.difference(self._arrivals)

    def commit(self, version: int) -> None:
        self._is_updating = False
        self._commit(version)

    def give_up(self) -> None:
        if self._is_updating:
            self._is_updating = False
            self.llm.finish_weight_update()

    def release_kv_cache(self) -> None:
        """Give the GPU memory of the KV cache back until `restore_kv_cache`. The weights stay.

        Not collective."""
        self.kv_cache.release()

    def restore_kv_cache(self) -> None:
        """Take the GPU memory of the KV cache back, without content. Every rank of the engine calls this."""
        self.kv_cache.restore()

    def shutdown(self) -> None:
        """Stop vLLM.

        vLLM destroys torch's default process group with its own, so this is the last collective of the
        process."""
        dist.barrier()
        self.version = None
        self.llm.llm_engine.engine_core.shutdown()


def routed_experts(rows: np.ndarray | None, num_tokens: int, shape: ModelShape) -> torch.Tensor:
    """Return the experts that vLLM chose for each token of one sample, as `Response.experts` holds them.

    The last token was sampled but not fed to the model, so vLLM has no row for it. The row before stands in,
    because nothing is predicted from the last token.

    Raises: RuntimeError if rows are missing, for example because the engine does not return experts."""
    wanted = (num_tokens - 1, shape.num_layers, shape.moe_router_topk)
    if rows is None or rows.shape != wanted:
        raise RuntimeError(
            "--moe-routing-replay engine: vLLM returned experts of "
            f"{'no token' if rows is None else rows.shape}, not of {wanted} "
            "(tokens, layers, experts per token)"
        )
    experts = torch.from_numpy(rows.astype("int32")).to(expert_dtype(shape.num_moe_experts))
    return torch.cat([experts, experts[-1:]])


def _be_launched_externally() -> None:
    """Set the environment variables of torchrun that vLLM's external launcher reads, unless they are set.

    A single process that was started by hand has none."""
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
