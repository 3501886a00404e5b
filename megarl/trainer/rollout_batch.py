"""Define the driver's record of a step's samples: ids, lengths, scores and rewards, without tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.flow.job_roles import Metrics, Record
from megarl.futures import Future
from megarl.invariants import digest_of_reward
from megarl.packing import Sample, by_episode
from megarl.role_names import kind_and_suffix
from megarl.trainer.groups import Group


@dataclass
class RolloutBatch:
    """The samples of a step as the driver knows them: ids, lengths, scores and rewards. The tokens are on the
    ranks.

    A sample has an id that is unique in the run, and a group. The group is the visit of the sample's prompt;
    see `DataCursor` for visits. An agent's episode may have several samples. It counts as one: `sample_ids`, rewards
    and all dicts by sample id have one entry per episode, under the id of its first sample.

    Example: subtract a small penalty for length from each reward, before the advantages are computed:
        for sample, length in batch.response_lengths.items():
            batch.rewards[sample] -= 0.01 * length
    """

    step: int
    visits: dict[int, int]
    """Visit of each prompt -> its row of the data set, in order."""
    samples: list[Sample] = field(default_factory=list)
    """All samples, sorted by sample id. Groups may have different numbers of samples."""
    records: dict[str, dict[int, Record]] = field(default_factory=dict)
    """Scoring role -> sample id -> the role's record of the sample."""
    rewards: dict[int, float | None] = field(default_factory=dict)
    """Weighted sum of the scores by sample id; None if a scoring role failed.

    The values at the time when the advantages are computed count."""
    transfers: list[Future[Metrics]] = field(default_factory=list)
    """Calls that bring samples and columns to the ranks that need them. Their results are metrics."""
    kl_coef: float = 0.0
    """KL coefficient of this step, from the actor's KL controller."""
    actors: dict[str, RolloutBatch] = field(default_factory=dict)
    """Batch of each actor by name. actors["actor"] is the first actor's, which `rollout` returns."""

    def take(self, groups: Sequence[Group]) -> None:
        """Replace the samples and visits (uses of prompts) of the batch by those of these groups, in the
        order of sample ids."""
        self.visits = {group.visit: group.row for group in groups}
        samples = (sample for group in groups for sample in group.samples.values())
        self.samples = sorted(samples, key=lambda sample: sample.sample_id)

    @property
    def trained_samples(self) -> list[Sample]:
        """Samples that are trained on. The others are only scored, and compared with those."""
        return [sample for sample in self.samples if sample.trained]

    @property
    def trained_episodes(self) -> list[Sample]:
        """The first sample of each episode that is trained on."""
        return [sample for sample in self.trained_samples if sample.branch == 0]

    @property
    def rows(self) -> list[int]:
        """Row of the data set of each prompt. A row appears twice if it is visited twice."""
        return list(self.visits.values())

    @property
    def episodes(self) -> dict[int, list[Sample]]:
        """Id of each episode -> its samples."""
        return by_episode(self.samples)

    @property
    def sample_ids(self) -> list[int]:
        return [s.sample_id for s in self.samples if s.branch == 0]

    @property
    def group_ids(self) -> list[int]:
        """Group of each sample, in the order of sample_ids. Samples have the same group if they answer the
        same use of a prompt."""
        return [s.group for s in self.samples if s.branch == 0]

    @property
    def row_of(self) -> dict[int, int]:
        """Row of the data set of each sample's prompt, by sample id."""
        return {s.sample_id: self.visits[s.group] for s in self.samples if s.branch == 0}

    @property
    def reward_digests(self) -> dict[int, int] | None:
        """Id of each of `samples` -> hash over its id, group, reward and tokens; None if some tokens have no
        digest."""
        digests = {}
        for s in self.samples:
            if s.digest is None:
                return None
            reward = self.rewards[s.episode]
            digests[s.sample_id] = digest_of_reward(s.sample_id, s.group, reward, s.digest)
        return digests

    @property
    def turns(self) -> tuple[list[list[float]], list[list[int]]] | tuple[()]:
        """With --turn-rewards the rewards and the sampled tokens of the answers of each sample, in the order of
        sample_ids; else ()."""
        rule = self._rule
        if not any("turn_lengths" in record for record in rule.values()):  # turn_rewards are logged anyway
            return ()
        of_samples = [rule[sample] for sample in self.sample_ids]
        return [one["turn_rewards"] for one in of_samples], [one["turn_lengths"] for one in of_samples]

    @property
    def _rule(self) -> dict[int, Record]:
        """Records of the rule or environment, by sample id; {} in a job without."""
        return next(
            (records for role, records in self.records.items() if kind_and_suffix(role)[0] == "reward"), {}
        )

    def scores(self, weight_of: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, Any]:
        """Return the scores of the step and their weights, as the arguments `scores` and `score_weights` of
        `Actor.advantages`.

        The single scores are those that the rule returned by name, its reward if it returned none, and the score
        of each reward model, by the name of its role.

        Args:
            weight_of: scoring role -> weight of its score.
            weights: name -> weight of a score of the rule, 1 by default."""
        found: dict[str, list[float | None]] = {}
        of_names: dict[str, float] = {}
        for role, weight in weight_of.items():
            names = dict.fromkeys(n for one in self.records[role].values() for n in one.get("scores") or ())
            for name in names:
                of_samples = [self.records[role][sample].get("scores") or {} for sample in self.sample_ids]
                found[name] = [one.get(name) for one in of_samples]
                of_names[name] = weight * weights.get(name, 1.0)
            if not names:
                found[role] = [self.score_of(role, sample) for sample in self.sample_ids]
                of_names[role] = weight
        return {"scores": found, "score_weights": of_names}

    @property
    def mean_rewards(self) -> dict[int, float]:
        """Row of each prompt -> mean reward of its responses that are trained on. Failed rewards do not count; a
        prompt without any is left out."""
        found: dict[int, list[float]] = {}
        for sample in self.trained_episodes:
            if (reward := self.rewards.get(sample.sample_id)) is not None:
                found.setdefault(self.visits[sample.group], []).append(reward)
        return {row: sum(rewards) / len(rewards) for row, rewards in found.items()}

    @property
    def groups_that_differ(self) -> set[int]:
        """Groups with samples of different rewards, or with --turn-rewards with a reward before the last answer.
        Failed rewards do not count."""
        first: dict[int, float] = {}
        differ: set[int] = set()
        sample_ids = self.sample_ids
        answers = self.turns[0] if self.turns else [()] * len(sample_ids)
        for sample, group, of_answers in zip(sample_ids, self.group_ids, answers, strict=True):
            reward = self.rewards[sample]
            if reward is None:
                continue
            if first.setdefault(group, reward) != reward or any(of_answers[:-1]):
                differ.add(group)
        return differ

    @property
    def texts(self) -> dict[int, dict[str, object]]:
        """Sample id -> prompt, response, ground_truth, ... of the samples that are logged.

        These are the first --num-rollouts-to-log samples (-1: all)."""
        return {sample: record for sample, record in self._rule.items() if "response" in record}

    @property
    def lengths(self) -> dict[int, int]:
        """Number of prompt and response tokens, by sample id."""
        return {episode: sum(s.length for s in of_one) for episode, of_one in self.episodes.items()}

    @property
    def response_lengths(self) -> dict[int, int]:
        """Number of response tokens, by sample id."""
        return {episode: sum(s.response_length for s in of_one) for episode, of_one in self.episodes.items()}

    def score_of(self, role: str, sample: int) -> float | None:
        """Return the unweighted score that a role gave a sample, or None if the role failed."""
        score: float | None = self.records[role][sample][score_field(role)]
        return score

    def __repr__(self) -> str:
        scored = [r for r in self.rewards.values() if r is not None]
        mean = f", mean reward {sum(scored) / len(scored):.3f}" if scored else ""
        return (
            f"RolloutBatch(step {self.step}, {len(self.sample_ids)} samples, "
            f"{sum(s.length for s in self.samples)} tokens{mean})"
        )


def score_field(role: str) -> str:
    """Return the field of a scoring role's records that holds the score."""
    return "reward" if kind_and_suffix(role)[0] == "reward" else "score"
