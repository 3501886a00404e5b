"""The batch of a step as the driver knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.runtime.executor import Future
from megarl.invariants import digest_of_reward
from megarl.packing import Sample
from megarl.role_names import kind_and_suffix
from megarl.trainer.buffer import Group


@dataclass
class RolloutBatch:
    """What the driver knows of the step that is running. The tokens are on the ranks.

    A sample is (visit of its prompt, index within the group). Its id, visit * num_samples_per_prompt + index,
    is unique in the run. A group has the id of the visit. See `DataCursor` for visits.

    Example: rewards less a little for each response's length, before the advantages are computed:
        for sample, length in batch.response_lengths.items():
            batch.rewards[sample] -= 0.01 * length
    """

    step: int
    visits: dict[int, int]
    """Visit of each prompt -> its row of the data set, in order."""
    num_samples_per_prompt: int
    samples: list[Sample] = field(default_factory=list)
    """By sample id: num_samples_per_prompt of the first visit, then of the second, ..."""
    records: dict[str, dict[int, dict]] = field(default_factory=dict)
    """Role that scored -> sample id -> what it says of the sample."""
    rewards: dict[int, float | None] = field(default_factory=dict)
    """By sample id: what those who score say, weighted; None: one of them failed. What it holds when the
    advantages are computed counts."""
    transfers: list[Future] = field(default_factory=list)
    """Calls that bring its samples and columns to the ranks that need them; their answers are metrics."""
    kl_coef: float = 0.0
    """What the actor's KL controller says in this step."""
    actors: dict[str, RolloutBatch] = field(default_factory=dict)
    """What each actor has sampled: actors["actor_2"]; actors["actor"] is the first's, which `rollout`
    returns."""

    def take(self, groups: Sequence[Group]) -> None:
        """Make the samples of these groups the batch, in the order of their ids."""
        self.visits = {group.visit: group.row for group in groups}
        samples = (sample for group in groups for sample in group.samples.values())
        self.samples = sorted(samples, key=lambda sample: sample.sample_id)

    @property
    def rows(self) -> list[int]:
        """Row of the data set of each prompt; a row comes twice if it is visited twice."""
        return list(self.visits.values())

    @property
    def sample_ids(self) -> list[int]:
        return [s.sample_id for s in self.samples]

    @property
    def group_ids(self) -> list[int]:
        """Visit of the prompt that each sample answers, in the order of sample_ids."""
        return [s.group for s in self.samples]

    @property
    def row_of(self) -> dict[int, int]:
        """Sample id -> row of the data set."""
        visits = zip(self.sample_ids, self.group_ids, strict=True)
        return {sample: self.visits[visit] for sample, visit in visits}

    @property
    def reward_digests(self) -> list[int] | None:
        """What binds each reward to its sample's tokens on the ranks, in the order of sample_ids; None: not
        all tokens have a digest."""
        if any(s.digest is None for s in self.samples):
            return None
        return [
            digest_of_reward(s.sample_id, group, self.rewards[s.sample_id], s.digest)
            for s, group in zip(self.samples, self.group_ids, strict=True)
        ]

    @property
    def texts(self) -> dict[int, dict[str, object]]:
        """Sample id -> prompt, response, ground_truth, ... of the first --num-rollouts-to-log samples (-1: of
        all)."""
        rule = next(
            (records for role, records in self.records.items() if kind_and_suffix(role)[0] == "reward"), {}
        )
        return {sample: record for sample, record in rule.items() if "response" in record}

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of prompt and response, by sample id."""
        return {s.sample_id: s.length for s in self.samples}

    @property
    def response_lengths(self) -> dict[int, int]:
        """Tokens of the response, by sample id."""
        return {s.sample_id: s.response_length for s in self.samples}

    def score_of(self, role: str, sample: int) -> float | None:
        """What a role that scores has given a sample, before its weight; None: it failed."""
        return self.records[role][sample]["reward" if kind_and_suffix(role)[0] == "reward" else "score"]

    def __repr__(self) -> str:
        scored = [r for r in self.rewards.values() if r is not None]
        mean = f", mean reward {sum(scored) / len(scored):.3f}" if scored else ""
        return (
            f"RolloutBatch(step {self.step}, {len(self.samples)} samples, "
            f"{sum(s.length for s in self.samples)} tokens{mean})"
        )
