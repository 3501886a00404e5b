"""Load the user's own advantages: --advantage path/to/file.py:function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.config.user_algorithm import is_in_file
from megarl.files.user_code import check_call, load_from_file

if TYPE_CHECKING:
    from torch import Tensor

_WANTED = "Wanted path/to/file.py:function, with def function(rewards, group_ids, lengths) -> advantages."
AdvantageFunction = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]


@functools.cache
def load_user_advantage(name: str) -> AdvantageFunction:
    """Run the user's file and return the function that it defines, wrapped in a check of its results. Later
    calls return the same function.

    The function gets the samples of the whole step, on every rank the same: rewards [S] fp32, NaN where the
    reward failed; group_ids [S] int64, equal for samples of one prompt; lengths [S] int64, response tokens.
    It returns [S] advantages. That of a failed sample is set to 0.
    Raises: ValueError if there is no such file or function, the file fails, or the function cannot be called
        so.
    """
    if not is_in_file(name):
        raise ValueError(f"there is no file {name.rpartition(':')[0] or name}. {_WANTED}")
    function = load_from_file(name, "--advantage", "megarl_advantage_", _WANTED)
    path, _, own_name = name.rpartition(":")
    if not callable(function):
        raise ValueError(f"{path} defines {type(function).__name__} as {own_name}. {_WANTED}")
    check_call(function, own_name, 3, _WANTED)

    def checked(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
        advantages = function(rewards.clone(), group_ids.clone(), lengths.clone())
        if tuple(getattr(advantages, "shape", ())) != tuple(rewards.shape):
            shape = tuple(getattr(advantages, "shape", ()))
            raise TypeError(
                f"--advantage ({name}) returned shape {shape}; must be {tuple(rewards.shape)}, a number for each sample "
                "of the step. Try `return rewards - rewards.nanmean()`."
            )
        is_valid = ~rewards.isnan()
        wrong = (~advantages.isfinite() & is_valid).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(
                f"--advantage ({name}) gave {float(advantages[at])} to a sample of reward {float(rewards[at]):g}; must "
                "be finite. Rewards that failed are NaN: leave them out of means (nanmean)."
            )
        return advantages.where(is_valid, advantages.new_zeros(())).to(rewards.dtype)

    return checked
