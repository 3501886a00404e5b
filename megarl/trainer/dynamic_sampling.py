"""Fill a step with prompts that can be learnt from: dynamic sampling, as in DAPO (arXiv:2503.14476).

A group whose samples all have the same reward has no advantage. It is dropped, and further prompts are sampled,
round by round, until the step has enough. What is kept depends on the rewards alone, never on which sample was
finished first, so long responses are not underrepresented. Every row that was sampled is trained on, dropped, or
left over because the step was full; the rows that are left over come first in the next step. So each pass over
the data trains on or drops each of its rows exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.failures import ExplainedError
from megarl.packing import Sample
from megarl.trainer.actor_state import ActorState
from megarl.trainer.rollout_batch import RolloutBatch


class DynamicSamplingError(ExplainedError, RuntimeError):
    """The rounds of --max-sampling-rounds did not give a step enough prompts that can be learnt from."""

    read_on = "docs/algorithms.md, section Dynamic sampling"


class Refill:
    """The result of a step's rounds of sampling: the groups that are kept, and counts of all others.

    Args:
        num_prompts: number of groups that the step trains on.
        max_rounds: number of rounds, at most."""

    def __init__(self, num_prompts: int, max_rounds: int) -> None:
        self.num_prompts, self.max_rounds = num_prompts, max_rounds
        self._rounds: list[RolloutBatch] = []
        self._kept: list[int] = []
        """Visits of the groups that can be learnt from, in the order of their prompts."""
        self._row_of: dict[int, int] = {}

    def next_round(self, step: int) -> int:
        """Return how many prompts to sample next, 0 if the step is full.

        The first round has `num_prompts`. A further one has twice as many as it is expected to need by the share
        of groups that were kept so far, as a round of few prompts takes nearly as long as one of many; but at
        most `num_prompts`.

        Raises: DynamicSamplingError if there is no further round."""
        missing, kept, generated = self.num_prompts - len(self._kept), len(self._kept), len(self._row_of)
        if missing <= 0:
            return 0
        if len(self._rounds) == self.max_rounds:
            rewards = [reward for reward in self._rewards if reward is not None]
            mean = f", their mean reward {sum(rewards) / len(rewards):.3g}" if rewards else ""
            raise DynamicSamplingError(
                f"--max-sampling-rounds ({self.max_rounds}): step {step} needs {self.num_prompts} prompts whose "
                f"samples have different rewards, and after these rounds has {kept}. {generated} prompts were "
                f"sampled{mean}. Are they too easy or too hard? Does the reward tell good answers from bad ones? "
                f"Try other prompts, a larger --num-samples-per-prompt, or --max-sampling-rounds "
                f"{2 * self.max_rounds}"
            )
        if not kept:
            return self.num_prompts
        return min(self.num_prompts, -(-2 * missing * generated // kept))

    def add(self, batch: RolloutBatch) -> None:
        """Add a round of sampling: whole groups of samples with their rewards."""
        differ = batch.groups_that_differ
        self._rounds.append(batch)
        self._row_of |= batch.visits
        self._kept += [visit for visit in batch.visits if visit in differ]

    @property
    def rounds(self) -> Sequence[RolloutBatch]:
        """Every round, with the groups that were dropped or left over."""
        return self._rounds

    @property
    def num_rounds(self) -> int:
        """Number of rounds of sampling so far."""
        return len(self._rounds)

    @property
    def left_over_rows(self) -> list[int]:
        """Rows of the groups that can be learnt from, but are more than the step needs."""
        return [self._row_of[visit] for visit in self._kept[self.num_prompts :]]

    @property
    def unused(self) -> list[int]:
        """Samples of the groups that the step does not train on."""
        used = {*self._kept[: self.num_prompts]}
        return [sample.sample_id for sample in self._samples if sample.group not in used]

    def fill(self, batch: RolloutBatch) -> None:
        """Give a step's batch the groups that are kept, with their records and rewards."""
        batch.visits = {visit: self._row_of[visit] for visit in self._kept[: self.num_prompts]}
        samples = [sample for sample in self._samples if sample.group in batch.visits]
        batch.samples = sorted(samples, key=lambda sample: sample.sample_id)
        rewards = {sample: reward for one in self._rounds for sample, reward in one.rewards.items()}
        batch.rewards = {sample: rewards[sample] for sample in batch.sample_ids}
        for role in self._rounds[0].records:
            records = {sample: found for one in self._rounds for sample, found in one.records[role].items()}
            batch.records[role] = {sample: records[sample] for sample in batch.sample_ids}

    def metrics(self) -> dict[str, float]:
        """Return counts of rounds and groups, and the mean reward of all samples, kept or not."""
        rewards = [reward for reward in self._rewards if reward is not None]
        return {
            "dynamic_sampling/rounds": float(len(self._rounds)),
            "dynamic_sampling/groups": float(len(self._row_of)),
            "dynamic_sampling/dropped": float(len(self._row_of) - len(self._kept)),
            "dynamic_sampling/left_over": float(len(self.left_over_rows)),
            "dynamic_sampling/reward_mean": sum(rewards) / max(len(rewards), 1),
        }

    @property
    def _samples(self) -> Sequence[Sample]:
        return [sample for batch in self._rounds for sample in batch.samples]

    @property
    def _rewards(self) -> Sequence[float | None]:
        return [reward for batch in self._rounds for reward in batch.rewards.values()]


def fill_step(actor: ActorState, step: int, sample_round: Callable[[bool], RolloutBatch]) -> Refill:
    """Sample rounds of prompts until a step has enough groups that can be learnt from, and give the rows that
    are left over back to the actor.

    Args:
        sample_round: samples and scores the prompts that wait in the actor's buffer. Its argument: whether the
            samples of earlier rounds must stay.
    Raises: DynamicSamplingError if --max-sampling-rounds are not enough."""
    batch = actor.config.batch
    refill = Refill(batch.num_prompts, batch.max_sampling_rounds)
    while count := refill.next_round(step):
        actor.admit_next(count, step)
        refill.add(sample_round(refill.num_rounds > 0))
    actor.return_rows(refill.left_over_rows)
    return refill
