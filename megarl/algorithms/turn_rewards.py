"""Define the inputs of an algorithm that uses the rewards of the single answers of an episode
(--turn-rewards)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """The rewards and lengths of the answers of one episode.

    Example: TurnRewards([0.0, 1.0], [7, 5]) is an episode whose second answer, of 5 tokens, earned 1."""

    rewards: Sequence[float]
    """Reward of each answer."""
    lengths: Sequence[int]
    """Sampled tokens of each answer."""

    @property
    def returns(self) -> list[float]:
        """For each answer, the sum of its reward and of all later rewards of the episode."""
        sums = [0.0]
        for reward in reversed(self.rewards):
            sums.append(reward + sums[-1])
        return sums[:0:-1]


def turn_rewards_of(
    sample_ids: Sequence[int],
    rewards: Sequence[float | None],
    lengths: Sequence[int],
    turn_rewards: Sequence[Sequence[float]],
    turn_lengths: Sequence[Sequence[int]],
) -> list[TurnRewards | None]:
    """Return the answers of each episode of a step; None where the reward failed.

    Args:
        rewards, lengths: reward and sampled tokens of the whole episodes.
        turn_rewards, turn_lengths: of their answers, in the same order.
    Raises: ValueError for an episode whose answers do not add up to its reward or its tokens."""
    found: list[TurnRewards | None] = []
    for sample, reward, length, of_turns, tokens in zip(
        sample_ids, rewards, lengths, turn_rewards, turn_lengths, strict=True
    ):
        if reward is None:
            found.append(None)
            continue
        total = 0.0
        for of_turn in of_turns:  # as the episode added them up; `sum` would round otherwise
            total += of_turn
        if len(of_turns) != len(tokens) or total != reward or sum(tokens) != length:
            raise ValueError(
                f"--turn-rewards: sample {sample} has the reward {reward:g} and {length} sampled tokens, and its "
                f"answers have the rewards {[*of_turns]} and {[*tokens]} tokens. They must add up. A loop that "
                "changes batch.rewards cannot use --turn-rewards."
            )
        found.append(TurnRewards(of_turns, tokens))
    return found
