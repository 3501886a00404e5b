"""Load the user's own reward function: --reward-function path/to/file.py:function."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from types import ModuleType

from megarl.rewards.base import RewardFunction

_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
_WANTED = f"Wanted path/to/file.py:function, with def function({', '.join(_KEYWORDS)}) -> float."


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
    function = vars(_run_file(path, flag)).get(name)
    if function is None or not callable(function):
        found = (
            f"defines no {name}"
            if function is None
            else f"defines {name} as {type(function).__name__}, not as a function"
        )
        raise ValueError(f"{flag}: {path} {found}. {_WANTED}")
    _check_signature(function, flag)
    return function


def _run_file(path: str, flag: str) -> ModuleType:
    name = "megarl_reward_" + os.path.splitext(os.path.basename(path))[0]
    loader = importlib.machinery.SourceFileLoader(name, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    # Dataclasses and pickle look a class's module up here.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        del sys.modules[name]
        raise ValueError(
            f"{flag}: {path} fails: {type(error).__name__}: {error}{_advice(error, path)}\n"
            f"{traceback.format_exc()}"
        ) from None
    return module


def _advice(error: BaseException, path: str) -> str:
    """Return what to do about the import of a file that lies beside the reward function's."""
    folder = os.path.dirname(os.path.abspath(path))
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not os.path.exists(os.path.join(folder, f"{missing.partition('.')[0]}.py")):
        return ""
    return f". The folder of the file is not on Python's path. Try PYTHONPATH={folder}."


def _check_signature(function: RewardFunction, flag: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-ins have none; the probe before training tests them
        return
    try:
        signature.bind(**dict.fromkeys(_KEYWORDS))
    except TypeError as error:
        raise ValueError(
            f"{flag}: its signature is {signature}, which does not take our keywords: {error}. {_WANTED}"
        ) from error
