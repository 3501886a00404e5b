"""Rewards: rules for GSM8K and mathematics, and the user's own function, judged by `score`, wherever that runs; and what reward models
need besides the models (judge_prompt.py, combine.py; classifier.py is one)."""

from megarl.rewards.base import RewardFunction, RewardSample, probe_reward, score
from megarl.rewards.custom import load_custom_reward
from megarl.rewards.routing import BUILT_IN, auto_reward

__all__ = ["RewardFunction", "RewardSample", "load_reward", "probe_reward", "score"]


def load_reward(reward: str | None = None, reward_function: str | None = None) -> RewardFunction:
    """The function that --reward (None: auto) and --reward-function ask for.

    Raises: ValueError if both choose one, --reward is unknown, or the user's function cannot be loaded.
    """
    reward = reward or "auto"
    if reward != "auto" and reward not in BUILT_IN:
        raise ValueError(f"--reward ({reward}) must be auto, {' or '.join(BUILT_IN)}; your own goes with --reward-function.")
    if reward_function is None:
        return BUILT_IN.get(reward, auto_reward)
    if reward != "auto":
        raise ValueError(f"--reward ({reward}) and --reward-function ({reward_function}) contradict each other. Give one of them.")
    return load_custom_reward(reward_function)
