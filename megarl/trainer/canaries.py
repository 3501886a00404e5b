"""Compare trainer and engine by canaries, in asynchronous training. Canaries are samples that are scored but
not trained on.

Most tokens that a step trains on were sampled by older weights, so their log-probs differ from the trainer's
without a fault. Canaries are samples that only serve the comparison:

    sample   each engine samples the same prompts after each commit, beside the requests that run
    send     their tokens go to the actor's ranks, beside the batch that is trained on
    ask      the pass of `Actor.log_probs` has scored them, under the weights that sampled them
    check    each engine is judged by itself, by the limits of the log-prob gate"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megarl.config.mesh import MeshSpec, replicas
from megarl.flow import Actor, Data, Rollout
from megarl.futures import Future
from megarl.gate_limits import FP32_EXPERTS, GateLimits, gate_error
from megarl.invariants import InvariantError
from megarl.packing import Sample, plan_mini_batches, preferred_ranks
from megarl.runtime.executor import Executor
from megarl.trainer.gate import GateError
from megarl.trainer.state import TrainState

Token = Mapping[str, float]
"""Trainer's and engine's log-prob of one token, see `Actor.worst_tokens`."""


class Canaries:
    """Samples canaries, which are not trained on, has them scored, and compares the log-probs of trainer and
    engine.

    Args:
        meshes: role -> its mesh.
        shard_key_of: role -> shard key."""

    def __init__(
        self,
        executor: Executor,
        meshes: Mapping[str, MeshSpec],
        state: TrainState,
        shard_key_of: Mapping[str, str],
    ) -> None:
        self._executor, self._meshes, self._state = executor, meshes, state
        self._shard_key_of = shard_key_of
        self._sampled: dict[str, Future[list[Sample]]] = {}  # suffix of the actor -> call of its engines
        self._sent: dict[str, list[Sample]] = {}  # suffix -> canaries that its ranks have
        self._scored: dict[str, Future[list[dict[str, int | float]]]] = {}  # suffix -> their tokens

    def begin_step(self) -> None:
        """Forget the canaries of the last step."""
        self._sampled, self._sent, self._scored = {}, {}, {}

    def sample(self, rollout: str) -> None:
        """Let the engines of a rollout role sample their canaries, if the job has some."""
        actor = self._state.actor_of(rollout)
        if (count := self._count(actor.suffix)) and actor.suffix not in self._sampled:
            self._sampled[actor.suffix] = Rollout(self._executor, rollout).sample_canaries(count)

    def is_ready(self, rollout: str) -> bool:
        """Return whether all canaries of the role are sampled."""
        call = self._sampled.get(self._state.actor_of(rollout).suffix)
        return call is None or call.done()

    def distribute(self, rollout: str, step: int) -> None:
        """Check the sampled canaries, and send their tokens to the ranks of the actor.

        Raises: InvariantError, see `check_delivery`."""
        actor = self._state.actor_of(rollout)
        if actor.suffix not in self._sampled:
            return
        count, lost = self._count(actor.suffix), actor.buffer.closed_engines
        delivered = [sample for of_rank in self._sampled[actor.suffix].result() for sample in of_rank]
        samples = [sample for sample in delivered if _engine_of(sample.sample_id, count) not in lost]
        check_delivery(rollout, samples, self._meshes[rollout].dp, count, step - 1, lost)
        key = self._shard_key_of[actor.actor]
        mesh = self._meshes[actor.actor]
        mini_batches = plan_mini_batches(
            samples,
            len(samples),
            preferred_ranks(samples, replicas(mesh)),
            mesh.dp,
            actor.config.batch.max_tokens_per_micro_batch,
            actor.shape.hidden_size,
            seed=None,
        )
        ranks = sorted({*self._meshes[rollout].ranks, *mesh.ranks})
        Data(self._executor, "data", ranks).distribute(key, samples, mini_batches, f"canary{actor.suffix}")
        self._sent[actor.suffix] = samples

    def are_sent(self, suffix: str) -> bool:
        """Return whether the actor's ranks have canaries of this step."""
        return suffix in self._sent

    def ask(self, suffix: str) -> None:
        """Ask the actor's ranks for the log-probs of the canaries, after `Actor.log_probs` was called."""
        if suffix in self._sent:
            self._scored[suffix] = Actor(self._executor, f"actor{suffix}").canary_tokens()

    def metrics(self, suffix: str) -> dict[str, float]:
        """Return the metrics canary/* of the step; {} without canaries. Waits for the log-probs."""
        tokens = self._tokens(suffix)
        if not tokens:
            return {}
        gaps = [abs(token["trainer"] - token["engine"]) for token in tokens]
        return {
            "canary/max_abs": max(gaps),
            "canary/mean_abs": sum(gaps) / len(gaps),
            "canary/tokens": float(len(gaps)),
        }

    def check(self, suffix: str) -> None:
        """Raise GateError, with engine, version and the worst tokens, if the trainer gives an engine's
        canaries other log-probs than the engine. Does nothing without canaries.

        Raises: InvariantError for a canary that was not scored."""
        if suffix not in self._scored:
            return
        actor, tokens = self._state.actors[suffix], self._tokens(suffix)
        samples, count = self._sent[suffix], self._count(suffix)
        for engine in sorted({_engine_of(sample.sample_id, count) for sample in samples}):
            own = [token for token in tokens if _engine_of(int(token["sample_id"]), count) == engine]
            of_engine = [sample for sample in samples if _engine_of(sample.sample_id, count) == engine]
            wanted = sum(sample.response_length for sample in of_engine)
            where = f"engine {engine} of rollout{suffix}, weights of version {of_engine[0].version}"
            if len(own) != wanted:
                raise InvariantError(
                    f"{where}: {len(own)} of {wanted} tokens of its canaries were scored: all must be"
                )
            if (error := canary_error(own, actor.gate_limits)) is not None:
                raise GateError(f"{where}, canaries: {error}", own)

    def _count(self, suffix: str) -> int:
        streaming = self._state.actors[suffix].config.streaming
        return streaming.num_canaries if streaming.staleness else 0

    def _tokens(self, suffix: str) -> list[dict[str, int | float]]:
        call = self._scored.get(suffix)
        return [] if call is None else [token for of_rank in call.result() for token in of_rank]


def check_delivery(
    rollout: str,
    samples: Sequence[Sample],
    num_engines: int,
    count: int,
    version: int,
    lost: Collection[int] = (),
) -> None:
    """Raise InvariantError, naming engine and version, if an engine has not sampled each of its canaries once
    and by the weights of `version` alone.

    Args:
        count: number of canaries of each engine.
        lost: engines that are gone."""
    for engine in range(num_engines):
        if engine in lost:
            continue
        own = [sample for sample in samples if _engine_of(sample.sample_id, count) == engine]
        where = f"engine {engine} of {rollout}"
        if len({sample.sample_id for sample in own}) != count or len(own) != count:
            raise InvariantError(
                f"{where} has delivered {len(own)} of {count} canaries of version {version}: every engine "
                "must deliver each one once after every commit"
            )
        versions = sorted({one for sample in own for one, _ in sample.runs})
        if versions != [version]:
            found = " and ".join(map(str, versions))
            raise InvariantError(
                f"{where} has sampled its canaries by version {found} of the weights, and the trainer's "
                f"weights are version {version}. The last commit did not reach the engine, or did not change "
                "its version. A loop of your own must call sync in every step, or set --num-canaries 0"
            )


def canary_error(tokens: Sequence[Token], limits: GateLimits) -> str | None:
    """Return the error message if trainer and engine disagree on an engine's canaries, else None.

    Where two experts are a rounding error apart, trainer and engine may choose differently, and then disagree
    on the whole response. So mixtures of experts in fp32 are judged without the worst one of several
    canaries."""
    if limits.multiples is FP32_EXPERTS:
        worst = max(tokens, key=lambda token: abs(token["trainer"] - token["engine"]))["sample_id"]
        tokens = [token for token in tokens if token["sample_id"] != worst] or tokens
    gaps = [token["trainer"] - token["engine"] for token in tokens]
    mismatch = {
        "mismatch/mean_abs": sum(map(abs, gaps)) / len(gaps),
        "mismatch/clipped_abs": sum(min(abs(gap), limits.outlier) for gap in gaps) / len(gaps),
        "mismatch/log_prob_abs": sum(abs(token["trainer"]) for token in tokens) / len(gaps),
        "mismatch/max_abs": max(map(abs, gaps)),
        "mismatch/outliers": float(sum(abs(gap) > limits.outlier for gap in gaps)),
        "mismatch/tokens": float(len(gaps)),
    }
    error = gate_error(mismatch, limits)
    return None if error is None else error.replace("mismatch/", "canary/")


def _engine_of(sample_id: int, count: int) -> int:
    """Return the engine of a canary: engine e has the `count` ids from -1 - e * count downwards."""
    return (-1 - sample_id) // count
