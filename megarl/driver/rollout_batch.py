"""The batch of a step as the driver knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.driver.executor import Future
from megarl.packing import Sample
from megarl.role_names import kind_and_suffix


@dataclass
class RolloutBatch:
    """What the driver knows of the step that is running. The tokens are on the ranks.

    Example: sample 0's reward less a little for its length, before the advantages are computed:
        batch.rewards[0] -= 0.01 * batch.response_lengths[0]
    """

    step: int
    rows: list[int]
    """Of the data set, one per prompt."""
    num_samples_per_prompt: int
    samples: list[Sample] = field(default_factory=list)
    """By sample id: num_samples_per_prompt of the first row, then of the second, ..."""
    records: dict[str, dict[int, dict]] = field(default_factory=dict)
    """Role that scored -> sample id -> what it says of the sample."""
    rewards: dict[int, float | None] = field(default_factory=dict)
    """By sample id: what those who score say, weighted; None: one of them failed. What it holds when the advantages are computed counts."""
    moved: list[Future] = field(default_factory=list)
    """Calls that bring its samples and columns to where they are needed; their answers are metrics."""
    kl_coef: float = 0.0
    """What the actor's KL controller says in this step."""
    actors: dict[str, RolloutBatch] = field(default_factory=dict)
    """What each actor has sampled: actors["actor_2"]; actors["actor"] is the first's, which `rollout` returns."""

    @property
    def sample_ids(self) -> list[int]:
        return [s.sample_id for s in self.samples]

    @property
    def group_ids(self) -> list[int]:
        """Which of `rows` each sample answers, in the order of sample_ids."""
        return [s.sample_id // self.num_samples_per_prompt for s in self.samples]

    @property
    def texts(self) -> dict[int, dict[str, object]]:
        """Sample id -> prompt, response, ground_truth, ... of the first --num-rollouts-to-log samples (-1: of all)."""
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
        return f"RolloutBatch(step {self.step}, {len(self.samples)} samples, {sum(s.length for s in self.samples)} tokens{mean})"
