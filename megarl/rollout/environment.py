"""Control the process around vLLM: environment variables and side effects."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import random
import threading
import time
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from megarl.reshard.transports.shared_memory import process_start
from megarl.runtime.process import without_rank
from megarl.rollout.engine_errors import ERRORS

_EVERYWHERE = {
    # the engine runs in this process: the external launcher requires it
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_ON_CPU = {
    "OMP_NUM_THREADS": "1",  # threads of several ranks on one machine wait for each other in busy loops
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" refuses two ranks on one NUMA node
    # the sampler compiles a C++ kernel for log-probs, 9 s at the first request, for no gain
    "TORCHDYNAMO_DISABLE": "1",
}


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads on import. Variables that the user has set stay.

    Raises: RuntimeError if our Triton kernels are importable under the name of OpenAI's package."""
    for name, value in (_EVERYWHERE if torch.cuda.is_available() else _EVERYWHERE | _ON_CPU).items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(
        os.environ["VLLM_LOGGING_LEVEL"]
    )  # vLLM logs before it configures its logging
    _check_no_triton_kernels()


ENGINE_OF = "MEGARL_ENGINE_OF"
"""Environment variable of an out-of-process engine: pid and start time of the process that started it."""


@contextlib.contextmanager
def engine_environment(visible_devices: str | None, errors: str | None = None) -> Iterator[None]:
    """Set the environment for processes that vLLM starts inside this context.

    The variables that would make these processes ranks of the job are removed.

    Args:
        visible_devices: CUDA_VISIBLE_DEVICES of the engine; None leaves the variable.
        errors: path of the engine's EngineErrors; None lets the engine print errors."""
    pid = os.getpid()
    new = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        ENGINE_OF: f"{pid}/{process_start(pid)}",
        ERRORS: errors,
        "CUDA_VISIBLE_DEVICES": visible_devices,
    }
    with patch.dict(os.environ, {name: value for name, value in new.items() if value is not None}):
        for name in os.environ.keys() - without_rank(os.environ).keys():
            del os.environ[name]
        yield


def end_with_owner() -> None:
    """Start a thread that ends this process as soon as the process that started the engine has ended in any
    way.

    Call this in a process of an out-of-process engine."""
    pid, started = map(int, os.environ.get(ENGINE_OF, "0/0").split("/"))
    if pid not in (0, os.getpid()):
        threading.Thread(target=_watch_owner, args=(pid, started), name="watch_owner", daemon=True).start()


def _watch_owner(pid: int, started: int) -> None:
    while process_start(pid) == started:
        time.sleep(0.5)
    os._exit(1)


def _check_no_triton_kernels() -> None:
    """Raise RuntimeError if vLLM would import our Triton kernels as OpenAI's package triton_kernels.

    vLLM uses a top-level package of this name for mixture-of-experts layers."""
    found, ours = importlib.util.find_spec("triton_kernels"), importlib.util.find_spec("megarl.kernels")
    same = _folders(found) & _folders(ours)
    if same:
        raise RuntimeError(
            f"Python finds megarl's kernels as the package triton_kernels ({min(same)}), which vLLM "
            "would take for "
            "OpenAI's. Start with PYTHONSAFEPATH=1, or from another folder than the checkout."
        )


def _folders(spec: ModuleSpec | None) -> set[Path]:
    return {Path(folder).resolve() for folder in (spec.submodule_search_locations or ())} if spec else set()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the random state and LD_PRELOAD, and suppress FutureWarnings, around the construction of an
    engine inside this context.

    vLLM seeds torch, numpy and random process-wide. It also touches every attribute of every module,
    which makes deprecated ones warn. On a CPU it sets LD_PRELOAD, for processes of its own. In others, such
    as those of rewards, the linker would complain of a path with blanks, each time."""
    preloaded = os.environ.get("LD_PRELOAD")
    with warnings.catch_warnings(), _preserved_random_state():
        warnings.simplefilter("ignore", FutureWarning)
        yield
    os.environ.pop("LD_PRELOAD", None)
    if preloaded is not None:
        os.environ["LD_PRELOAD"] = preloaded


@contextlib.contextmanager
def _preserved_random_state() -> Iterator[None]:
    numpy_state, python_state = np.random.get_state(), random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
