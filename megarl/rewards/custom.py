"""Load the user's own reward function: --reward-function path/to/file.py:function."""

from __future__ import annotations

import inspect
import os

from megarl.files.user_code import run_file
from megarl.rewards.base import RewardFunction

_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
_WANTED = (
    f"Wanted path/to/file.py:function, with def or async def function({', '.join(_KEYWORDS)}) -> float, or a "
    "class with such a __call__."
)


def load_custom_reward(reward_function: str) -> RewardFunction:
    """Run the user's file and return the reward function that it defines.

    Raises: ValueError if there is no such file or function, the file fails, or the function cannot be called
    as we call it.
    """
    flag = f"--reward-function ({reward_function})"
    path, colon, name = reward_function.rpartition(":")
    if not colon or not path or not name:
        raise ValueError(f"{flag} does not name a file and a function. {_WANTED}")
    if not os.path.isfile(path):
        raise ValueError(f"{flag}: there is no file {path}. {_WANTED}")
    function = vars(run_file(path, flag, "megarl_reward_")).get(name)
    if inspect.isclass(function) and "__call__" in dir(function):
        function = function()
    if function is None or not callable(function):
        found = (
            f"defines no {name}"
            if function is None
            else f"defines {name} as {type(function).__name__}, not as a function"
        )
        raise ValueError(f"{flag}: {path} {found}. {_WANTED}")
    _check_signature(function, flag)
    return function


def _check_signature(function: RewardFunction, flag: str) -> None:
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some built-ins have none; the probe before training tests them
        return
    try:
        signature.bind(**dict.fromkeys(_KEYWORDS))
    except TypeError as error:
        raise ValueError(
            f"{flag}: its signature is {signature}, which does not take our keywords: {error}. {_WANTED}"
        ) from error
