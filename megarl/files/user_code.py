"""Run a Python file of the user's and return what it defines."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType


def be_script(path: str) -> None:
    """Let this process look like one that runs a file of the user's: the file's folder and the current one
    are on Python's path, and processes that multiprocessing spawns find what the file defines.

    Call this before `run_file`, in a process that runs the user's code only."""
    import multiprocessing  # noqa: F401 - a later import would put __main__ in the place of __mp_main__

    main = sys.modules["__main__"]
    main.__spec__, main.__file__ = None, os.path.abspath(path)
    sys.path[:0] = [os.path.dirname(main.__file__), os.getcwd()]


def run_file(path: str, flag: str, prefix: str) -> ModuleType:
    """Run a file as a module of its own and return the module.

    Args:
        flag: the flag that named the file, for errors.
        prefix: beginning of the module's name, before the name of the file.
    Raises: ValueError with the traceback if the file fails."""
    name = prefix + os.path.splitext(os.path.basename(path))[0]
    if getattr(sys.modules["__main__"], "__file__", None) == os.path.abspath(path):
        name = "__mp_main__"  # as which multiprocessing runs the file in processes that it spawns
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


def load_from_file(name: str, flag: str, prefix: str, wanted: str) -> object:
    """Run the file of path/to/file.py:name and return what it defines under the name.

    Args:
        flag, prefix: as for `run_file`, the flag without its value.
        wanted: sentence that ends the errors and says what the flag takes.
    Raises: ValueError if there is no such file or name, or the file fails."""
    path, _, own_name = name.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path or name}. {wanted}")
    found = vars(run_file(path, f"{flag} ({name})", prefix)).get(own_name)
    if found is None:
        raise ValueError(f"{path} defines no {own_name}. {wanted}")
    return found


def check_call(function: Callable[..., object], name: str, num_arguments: int, wanted: str) -> None:
    """Raise ValueError if a user's function cannot be called with so many arguments by position."""
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError as error:
        raise ValueError(f"{name}{inspect.signature(function)}: {error}. {wanted}") from None


def _advice(error: BaseException, path: str) -> str:
    """Return the advice for a failed import of a file that lies beside the user's file."""
    folder = os.path.dirname(os.path.abspath(path))
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not os.path.exists(os.path.join(folder, f"{missing.partition('.')[0]}.py")):
        return ""
    return f". The folder of the file is not on Python's path. Try PYTHONPATH={folder}."
