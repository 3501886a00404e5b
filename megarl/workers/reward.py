"""Implement the reward role on one rank, which scores the samples of this rank's engine by a rule.

With --staleness above 0 the rule scores the samples of a group as soon as the engine has finished them. The
call of a step returns these rewards, and waits for those that are missing."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

from megarl.config.environments import environments, names
from megarl.config.reward_models import rule_judges_agents, uses_rule_reward
from megarl.data.prompts import Prompt, PromptDataset
from megarl.episodes.episode import EpisodeResult
from megarl.flow.job_roles import Record, Reward
from megarl.invariants import InvariantError, digest
from megarl.packing import branch_id
from megarl.rewards.background import BackgroundPool
from megarl.rewards.base import RewardSample
from megarl.rewards.pool import RewardPool, Verdict
from megarl.workers.hosted_role import HostedRole
from megarl.workers.implements import implements
from megarl.workers.rollout import RolloutRole
from megarl.workers.store import RolloutSample


@implements(Reward)
class RewardRole(HostedRole):
    """Scores the samples of this rank's engine by a rule, e.g. the comparison of a number with the ground
    truth."""

    pool: RewardPool | BackgroundPool | None = None
    """Processes that run the rule; None if the job has no rule, or if another rank calls the rule."""

    rollout: RolloutRole
    """The engine whose samples are scored."""

    def setup(self) -> None:
        """Start the worker processes that run the rule. Only the engine's first rank has some, and only in a
        job with a rule."""
        if self.config.episodes.has_turns and not rule_judges_agents(self.config):
            return  # the environments or agents give the rewards
        if uses_rule_reward(self.config) and self.mesh.coordinates(self.rank)["tp"] == 0:
            data, number = self.config.data, num_workers(self.config.data.reward_num_workers)
            if self.config.streaming.staleness and number:
                self.pool, self.rollout.on_finished = BackgroundPool(data, number), self._begin
            else:  # without processes the rule runs in this call, for pdb
                self.pool = RewardPool(data, number)

    @functools.cached_property
    def _is_named(self) -> bool:
        """Whether the job has environments by name."""
        return bool(names(environments(self.config.episodes)))

    def shut_down(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def score(self, purpose: str, sample_ids: Sequence[int], num_logged: int | None = None) -> list[Record]:
        """Score those of the samples that this engine has made. Its first rank returns one record per sample,
        in the order of `sample_ids`; its other ranks return [].

        Args:
            sample_ids: samples of all engines; of an episode the first one.
            num_logged: number of samples of the step, counted from its first, whose records carry their texts
                for the rollouts/ files. Default: --num-rollouts-to-log. In training the first sample of
                this engine whose reward failed has them too, unless the number is 0.
        Returns: records with sample_id, digest and reward. The reward is None if the job has no rule or if
        the reward failed. In the second case `failure` holds the reason. In an evaluation `answer` holds
            the answer that the rule found, if it names answers.
        Raises: InvariantError if the pool returned the verdict of another sample."""
        if self.mesh.coordinates(self.rank)["tp"] != 0:
            return []
        source = purpose + self.suffix
        mine = [sample for sample in sample_ids if sample in self.store.source(source)]
        if not mine:
            return []
        rollouts = self.store.rollouts(source, mine)
        dataset = self.rollout.datasets[purpose]
        texts = self._texts(rollouts)
        limit = self.config.run.num_rollouts_to_log if num_logged is None else num_logged
        logged = {*(sample_ids if limit < 0 else sample_ids[:limit])}
        records, has_failed = [], False
        for rollout, text, verdict in zip(
            rollouts, texts, self._verdicts(purpose, rollouts, texts), strict=True
        ):
            record: dict[str, object] = {
                "sample_id": rollout.sample_id,
                "reward": verdict.reward,
                "digest": digest(rollout.prompt, rollout.response, rollout.holes),
            }
            if verdict.failure is not None:
                record["failure"] = verdict.failure
            if verdict.scores is not None:
                record["scores"] = verdict.scores
            if rollout.episode is not None:
                record |= _of_episode(rollout.episode)
                if self._is_named:
                    record["env"] = dataset[rollout.row].data_source
                if self.config.episodes.has_agent:
                    record["num_branches"] = rollout.num_branches
                    record["num_unreadable"] = rollout.episode.num_unreadable
                    record["num_constrained"] = rollout.episode.num_constrained
                if self.config.episodes.turn_rewards:
                    record["turn_rewards"] = rollout.episode.turn_rewards
                    record["turn_lengths"] = rollout.episode.turn_lengths
            if purpose == "eval" and verdict.answer is not None:
                record["answer"] = verdict.answer
            is_first_failure = verdict.failure is not None and not has_failed
            has_failed = has_failed or is_first_failure
            if rollout.sample_id in logged or purpose == "train" and limit and is_first_failure:
                further = [branch_id(rollout.sample_id, number) for number in range(1, rollout.num_branches)]
                branches = self.store.rollouts(source, further)
                record |= _logged(rollout, text, dataset[rollout.row], branches)
            records.append(record)
        return records

    def _texts(self, rollouts: Sequence[RolloutSample]) -> list[str]:
        """Return the text of each response; of an episode the model's answers, one after another."""
        if self.config.episodes.has_turns:
            return ["\n".join(rollout.episode.answers) for rollout in rollouts]
        return self.rollout.tokenizer.decode_batch([rollout.response for rollout in rollouts])

    def _begin(self, rollouts: list[RolloutSample]) -> None:
        """Let the rule score samples of training before a step asks for their rewards."""
        if self.config.episodes.has_turns:
            ended = [one for one in rollouts if one.episode is not None and one.episode.failure is None]
            lasts = [one.episode.answers[-1] for one in ended]
            self.pool.begin(_reward_samples(ended, lasts, self.rollout.datasets["train"]))
            return
        texts = self.rollout.tokenizer.decode_batch([rollout.response for rollout in rollouts])
        self.pool.begin(_reward_samples(rollouts, texts, self.rollout.datasets["train"]))

    def _verdicts(
        self, purpose: str, rollouts: Sequence[RolloutSample], texts: Sequence[str]
    ) -> list[Verdict]:
        """Return the rule's, the environment's or the agent's verdict on each rollout in order, or empty
        verdicts in a job without either. Of an agent's episode a rule judges the last answer."""
        if self.config.episodes.has_turns:
            given = [Verdict(rollout.episode.reward, rollout.episode.failure) for rollout in rollouts]
            if self.pool is None:
                return given
            judged = [at for at, verdict in enumerate(given) if verdict.failure is None]
            last = [rollouts[at].episode.answers[-1] for at in judged]
            found = self._of_rule(purpose, [rollouts[at] for at in judged], last)
            return [dict(zip(judged, found)).get(at, verdict) for at, verdict in enumerate(given)]
        if self.pool is None:
            return [Verdict(None)] * len(rollouts)
        return self._of_rule(purpose, rollouts, texts)

    def _of_rule(
        self, purpose: str, rollouts: Sequence[RolloutSample], texts: Sequence[str]
    ) -> list[Verdict]:
        """Return the rule's verdict on each rollout in order. `texts`: the texts that the rule judges."""
        assert self.pool is not None
        samples = _reward_samples(rollouts, texts, self.rollout.datasets[purpose])
        if isinstance(self.pool, BackgroundPool) and purpose == "train":
            verdicts = self.pool.finish(samples)
        else:
            verdicts = self.pool.score(samples)
        for sample, verdict in zip(samples, verdicts, strict=True):
            if (verdict.sample_id, verdict.digest) != (sample.sample_id, sample.digest):
                raise InvariantError(
                    f"the reward of sample {sample.sample_id} ({verdict.reward}) is that of sample "
                    f"{verdict.sample_id}, or of another response"
                )
        return verdicts


def _of_episode(episode: EpisodeResult) -> dict[str, object]:
    """Return the facts about an episode that the driver's metrics need."""
    facts: dict[str, object] = {"num_turns": episode.num_turns, "finish_reason": episode.finish_reason}
    return facts | ({"cause": episode.cause} if episode.cause is not None else {})


def _reward_samples(
    rollouts: Sequence[RolloutSample], texts: Sequence[str], dataset: PromptDataset
) -> list[RewardSample]:
    """Return the arguments of the reward function for each sample."""
    samples = []
    for rollout, text in zip(rollouts, texts, strict=True):
        row = dataset[rollout.row]
        samples.append(
            RewardSample(row.data_source, text, row.ground_truth, row.extra_info, rollout.sample_id)
        )
    return samples


def _logged(
    rollout: RolloutSample, text: str, prompt: Prompt, further: Sequence[RolloutSample]
) -> dict[str, object]:
    """Return texts, token ids and lengths of a sample, which are added to its record for the rollouts/
    files.

    Args:
        further: the other samples of its episode."""
    shown = {"prompt": prompt.messages, "response": text}
    if rollout.episode is not None:
        first = rollout.episode.prompt or prompt.messages  # none if the environment has failed at once
        shown = {"prompt": first, "response": text, "turns": rollout.episode.turns}
        shown["turn_rewards"] = rollout.episode.turn_rewards
        shown["holes"] = [list(hole) for hole in rollout.holes]
        if further:
            shown["branches"] = [
                {
                    "turns": messages,
                    "prompt_ids": one.prompt,
                    "response_ids": one.response,
                    "holes": [list(hole) for hole in one.holes],
                }
                for one, messages in zip(further, rollout.episode.further, strict=True)
            ]
    return {
        "row": rollout.row,
        **shown,
        "ground_truth": prompt.ground_truth,
        "response_length": sum(one.num_sampled for one in (rollout, *further)),
        "rollout_log_prob": sum(log_prob for one in (rollout, *further) for log_prob in one.log_probs),
        "prompt_ids": rollout.prompt,
        "response_ids": rollout.response,
    }


def num_workers(asked: int | None) -> int:
    """Return how many processes run the rule on one rank.

    The number is --reward-num-workers if given, else the node's cores divided by its ranks, at most 8."""
    return (
        asked
        if asked is not None
        else max(1, min(8, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    )
