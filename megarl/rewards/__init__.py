"""Score responses by rules or the user's own function, called in processes that can be killed (pool.py), and
by reward models (judge_prompt.py, classifier.py, combine.py)."""

from megarl.config.schema import DataConfig
from megarl.rewards.base import RewardFunction, RewardSample
from megarl.rewards.code import CodeReward
from megarl.rewards.custom import load_custom_reward
from megarl.rewards.routing import BUILT_IN, auto_reward

__all__ = ["RewardFunction", "RewardSample", "load_reward"]


def load_reward(data: DataConfig) -> RewardFunction:
    """Return the function that --reward (None: auto) and --reward-function ask for.

    Raises: ValueError if both choose one, the user's function cannot be loaded, or programs cannot be
    confined here.
    """
    reward = data.reward or "auto"
    if data.reward_function is None:
        return CodeReward(data) if reward == "code" else BUILT_IN.get(reward, auto_reward)
    if reward != "auto":
        raise ValueError(
            f"--reward ({reward}) and --reward-function ({data.reward_function}) contradict each "
            "other. Give one of them."
        )
    return load_custom_reward(data.reward_function)
