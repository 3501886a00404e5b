"""Faults that raise nothing by themselves: the job would go on and train on something else than it should.

Each is a small function that changes one part of megarl after its module was imported, in the process named.
It acts from the step STEP on, as far as calls can be counted, and leaves the file SILENT_HIT when it first
does. Started by sitecustomize.py, chosen by SILENT_FAULT."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STEP = 2


@dataclass(frozen=True)
class Plant:
    """Where a fault is planted. process: "rank" (all of them), "driver" or "reward process"."""

    process: str
    module: str
    plant: Callable


PLANTS: dict[str, Plant] = {}


def planted(process: str, module: str):
    def add(function):
        PLANTS[function.__name__] = Plant(process, module, function)
        return function

    return add


def hit() -> None:
    Path(os.environ["SILENT_HIT"]).touch()


def wrap(
    owner, name: str, fault: Callable, from_call: int = STEP, counts: Callable = lambda *a, **k: True
) -> None:
    """Let `fault(original, *arguments)` take the place of owner.name, from that call on, of the calls that
    count."""
    original, calls = getattr(owner, name), []

    @functools.wraps(original)
    def replaced(*arguments, **keywords):
        if counts(*arguments, **keywords):
            calls.append(None)
            if len(calls) >= from_call:
                hit()
                return fault(original, *arguments, **keywords)
        return original(*arguments, **keywords)

    setattr(owner, name, replaced)


def pairs_of_equal_length(samples, lengths) -> list[tuple[int, int]]:
    """Positions of samples with equally many tokens, two and two."""
    waiting: dict[int, int] = {}
    pairs = []
    for position, length in enumerate(lengths):
        if length in waiting:
            pairs.append((waiting.pop(length), position))
        else:
            waiting[length] = position
    return pairs


def swap_rows(column, lengths):
    """The column with the rows of samples of equal length swapped."""
    import torch

    parts = list(column.split(list(lengths)))
    for a, b in pairs_of_equal_length(parts, lengths):
        parts[a], parts[b] = parts[b], parts[a]
    return torch.cat(parts) if parts else column


def shifted(values: list) -> list:
    return values[-1:] + values[:-1]


# Advantages and rewards.


@planted("rank", "megarl.workers.actor")
def advantages_reversed(module) -> None:
    """After they were computed and compared, the advantages of a rank's samples stand in reversed order."""

    def advantages(original, self, *arguments, **keywords):
        metrics, batch = original(self, *arguments, **keywords), self.shard.batch
        batch.advantages = batch.scatter(batch.advantages[batch.response_mask].flip(0))
        return metrics

    wrap(module.ActorRole, "advantages", advantages)


@planted("rank", "megarl.kernels.group_advantages")
def advantages_permuted_in_the_computation(module) -> None:
    """Each sample has the advantage of the one before it."""
    wrap(module, "group_advantages", lambda original, *arguments: original(*arguments).roll(1))


@planted("rank", "megarl.workers.reward")
def rewards_shifted_in_the_pool(module) -> None:
    """Each sample gets the verdict on the one before it."""

    def score(original, self, *arguments, **keywords):
        pool = self.pool.score
        self.pool.score = lambda samples: shifted(pool(samples))
        try:
            return original(self, *arguments, **keywords)
        finally:
            self.pool.score = pool

    wrap(module.RewardRole, "score", score)


@planted("driver", "megarl.trainer.scores")
def rewards_shifted_in_the_driver(module) -> None:
    """Each sample gets the reward of the one before it, when scores become rewards."""
    wrap(module, "combine_rewards", lambda original, *arguments: shifted(original(*arguments)))


@planted("rank", "megarl.workers.actor")
def rewards_shifted_on_the_way(module) -> None:
    """Each sample gets the reward of the one before it, between the driver and the rank."""

    def advantages(original, self, sample_ids, group_ids, rewards, *arguments, **keywords):
        return original(self, sample_ids, group_ids, shifted(rewards), *arguments, **keywords)

    wrap(module.ActorRole, "advantages", advantages)


# Tokens and columns.


@planted("rank", "megarl.workers.data")
def columns_swapped_between_meshes(module) -> None:
    """Values of samples of equal length change places on their way from the critic to the actor."""

    def move_rows(original, held, columns, route, wanted, lengths, *arguments, **keywords):
        moved = original(held, columns, route, wanted, lengths, *arguments, **keywords)
        sizes = [lengths[sample] for sample in wanted]
        return moved._replace(
            columns={name: swap_rows(column, sizes) for name, column in moved.columns.items()}
        )

    wrap(
        module,
        "move_rows",
        move_rows,
        counts=lambda held, columns, *arguments, **keywords: "values" in columns,
    )


@planted("rank", "megarl.workers.exchange")
def columns_swapped_where_they_leave(module) -> None:
    """The critic's rank sends values of samples of equal length under each other's number."""

    def rows_of(original, held, name, *arguments):
        rows = original(held, name, *arguments)
        parts = list(rows.values())
        for a, b in pairs_of_equal_length(parts, [len(part) for part in parts]):
            parts[a], parts[b] = parts[b], parts[a]
        return dict(zip(rows, parts))

    wrap(
        module,
        "_rows_of",
        rows_of,
        counts=lambda held, name, *arguments: held is not None and name == "values",
    )


@planted("rank", "megarl.workers.actor")
def old_log_probs_of_another_sample(module) -> None:
    """After they were compared with the engine's, old log-probs of samples of equal length change places."""

    def log_probs(original, self):
        metrics, batch = original(self), self.shard.batch
        batch.old_log_probs = swap_rows(batch.old_log_probs, batch.lengths.tolist())
        return metrics

    wrap(module.ActorRole, "log_probs", log_probs)


@planted("rank", "megarl.workers.data")
def a_token_changed_on_the_way(module) -> None:
    """One token of a response is another one when it arrives where it is trained on."""

    def collect_samples(original, *arguments, **keywords):
        batch, *digests = original(*arguments, **keywords)
        at = int(batch.response_mask.nonzero()[3])
        batch.tokens[at] = (batch.tokens[at] + 1) % 100
        return (batch, *digests)

    wrap(module, "collect_samples", collect_samples)


@planted("rank", "megarl.batch")
def response_mask_shifted_by_one(module) -> None:
    """Where samples are packed, the mask of every response begins and ends a token too early."""

    def from_samples(original, *arguments):
        batch = original(*arguments)
        batch.response_mask = batch.response_mask.roll(-1)
        return batch

    wrap(module.Batch, "from_samples", from_samples)
    module.Batch.from_samples = staticmethod(module.Batch.from_samples)


# Samples and the plan.


@planted("driver", "megarl.trainer.step_runner")
def a_sample_dropped_from_the_plan(module) -> None:
    """No rank trains on one sample; the counts that the loss is divided by do without it."""
    from dataclasses import replace

    def plan_mini_batches(original, samples, *arguments, **keywords):
        first, *others = original(samples, *arguments, **keywords)
        lost = next(sample for micro in first.micro_batches[0] for sample in micro)
        length = next(s.response_length for s in samples if s.sample_id == lost)
        kept = tuple(
            tuple(tuple(s for s in micro if s != lost) for micro in rank) for rank in first.micro_batches
        )
        return [
            replace(
                first,
                micro_batches=kept,
                num_tokens=first.num_tokens - length,
                num_sequences=first.num_sequences - 1,
            ),
            *others,
        ]

    wrap(module, "plan_mini_batches", plan_mini_batches)


@planted("rank", "megarl.workers.store")
def a_sample_dropped_on_a_rank(module) -> None:
    """The forward passes of updates lack the last sample of each micro-batch. As the wrapped method is called
    for each micro-batch of the pass before the updates too, and this fault is of the updates alone, the calls
    are told apart by the column of advantages."""

    def micro_batch(original, self, sample_ids):
        return original(self, sample_ids[:-1])

    seen = []

    def counts(self, sample_ids) -> bool:
        if self.batch.advantages is not None and not any(self is shard for shard in seen):
            seen.append(self)  # a batch shard is of one step
        return self.batch.advantages is not None and len(seen) >= STEP and len(sample_ids) > 1

    wrap(module.BatchShard, "micro_batch", micro_batch, from_call=1, counts=counts)


# The model and the loss.

FIRST_UPDATE = 2 * (STEP - 1) + 1  # of the step; two a step


@planted("rank", "megarl.megatron.policy")
def another_temperature_in_the_update(module) -> None:
    """The update's log-probs are of another temperature than those before it."""

    def update(original, self, micro_batches, loss, temperature, *arguments, **keywords):
        return original(self, micro_batches, loss, 1.2 * temperature, *arguments, **keywords)

    wrap(module.Policy, "update", update, FIRST_UPDATE)


@planted("rank", "megarl.workers.actor")
def loss_divided_by_local_counts(module) -> None:
    """The loss is divided by the tokens that it is called for, not by those of the whole mini-batch."""
    from dataclasses import replace

    from megarl.algorithms.policy_gradient import PolicyGradient

    loss, state = PolicyGradient.loss, []

    def local(self, inputs):
        return loss(self, replace(inputs, num_tokens=max(len(inputs.log_probs), 1)) if state else inputs)

    PolicyGradient.loss = local
    wrap(
        module.ActorRole,
        "_update_once",
        lambda original, *arguments, **keywords: (state.append(None), original(*arguments, **keywords))[1],
        FIRST_UPDATE,
    )


@planted("rank", "megarl.rollout.weight_transfer")
def one_tensor_stays_stale(module) -> None:
    """One weight of the engine is not written by the sync at the end of the step (--no-reshard-alias: a
    shared one cannot be stale)."""

    def receive_weights(original, self, update_info):
        weight = next(tensor for name, tensor in self.tensors.items() if "down_proj" in name)
        before = weight.clone()
        original(self, update_info)
        weight.copy_(before)

    wrap(
        module.MegarlWeightTransferEngine, "receive_weights", receive_weights, STEP + 1
    )  # the first is before step 1


# Asynchronous rollouts. The first commit is before step 1.


@planted("rank", "megarl.rollout.vllm_engine")
def prefix_cache_stays_stale(module) -> None:
    """A commit neither empties the prefix cache nor gives later requests a salt."""

    def commit(original, self, version, running="refuse"):
        core = self.llm.llm_engine.engine_core.engine_core
        core.reset_prefix_cache = lambda *arguments: True
        original(self, version, running)
        self._salt = None

    wrap(module.VllmEngine, "commit", commit)


@planted("rank", "megarl.rollout.vllm_engine")
def version_stays_the_old_one(module) -> None:
    """The engine samples with new weights under the version of the old ones."""

    def commit(original, self, version, running="refuse"):
        original(self, version, running)
        self.set_version(version - 1)

    wrap(module.VllmEngine, "commit", commit)


@planted("rank", "megarl.rollout.vllm_engine")
def one_engine_stays_stale(module) -> None:
    """The engine of rank 1 has the new weights until the sync has verified them, and then the old ones
    (--no-reshard-alias: shared weights cannot be stale)."""
    kept = []

    def commit(original, self, version, running="refuse"):
        original(self, version, running)
        for tensor, before in zip(weights(self), kept, strict=True):
            tensor.copy_(before)

    def weights(engine):
        return [tensor for of_rank in engine.tensors.values() for tensor in of_rank.values()]

    def counts(self, *arguments):
        if not kept:
            kept.extend(tensor.clone() for tensor in weights(self))
        return os.environ["RANK"] == "1"

    wrap(module.VllmEngine, "commit", commit, counts=counts)


@planted("rank", "megarl.workers.rollout")
def a_canary_skipped(module) -> None:
    """The engine of rank 1 delivers all canaries but the last."""
    wrap(
        module.RolloutRole,
        "sample_canaries",
        lambda original, self, count: original(self, count)[:-1],
        counts=lambda *arguments: os.environ["RANK"] == "1",
    )


@planted("rank", "megarl.workers.answer")
def a_token_of_another_version(module) -> None:
    """The first token of a response has the version after that of the others."""

    def sample(original, self, *arguments, **keywords):
        made = original(self, *arguments, **keywords)
        made.versions[0] += 1
        return made

    wrap(
        module.Answer,
        "sample",
        sample,
        from_call=1,
        counts=lambda self, *arguments, **keywords: len(self.versions) > 1 and self.group == 5,
    )


@planted("rank", "megarl.workers.rollout")
def a_group_reported_twice(module) -> None:
    """With the groups of a later step an engine reports a group of the first one again."""
    seen = []

    def report(original, self, finished):
        original(self, finished + seen[:1])

    def counts(self, finished):
        seen.extend(finished)
        return any(sample.group >= 8 for sample in finished)  # admitted after step 1

    wrap(module.RolloutRole, "_report", report, from_call=1, counts=counts)
