"""Configure a process of a job on Linux: its environment, signals, exit, libraries and memory."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

WRITES_CHECKPOINT = "write_checkpoint"
"""Name of the thread that writes checkpoints."""
_GRACE_S = 3.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


DRIVER_PID = "MEGARL_DRIVER_PID"
"""Environment variable of ranks that torchrun has not started: id of the process that has, which is the driver
or, under Ray, the actor of the node."""
ON_WORKER = "MEGARL_ON_WORKER"
"""Environment variable of a check that runs on a node of a Ray cluster for a driver without GPUs."""
NUM_NODES = "MEGARL_NUM_NODES"
"""Environment variable of the driver beside rank 0: number of nodes on which torchrun runs."""
ATTEMPT = "MEGARL_ATTEMPT"
"""Environment variable of ranks under torchrun_agent.py: number of the attempt, from 0."""
LAUNCHER = "MEGARL_LAUNCHER"
"""Environment variable of ranks and driver: name of the one start of torchrun whose attempt this is."""
# torch/distributed/elastic/agent/server/local_elastic_agent.py sets these, and others that begin with
# TORCHELASTIC_. Their beginnings are not reserved: a user's LOCAL_JUDGE_URL or MASTER_KEY must stay.
_RANK_VARIABLES = {
    *(ATTEMPT, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
}


def without_rank(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that torchrun sets for a rank (RANK, MASTER_ADDR, ...)."""
    return {
        name: value
        for name, value in env.items()
        if name not in _RANK_VARIABLES and not name.startswith("TORCHELASTIC_")
    }


def rank_command(module: str, argv: Sequence[str]) -> list[str]:
    """Return the command line of a rank's process, `python -m module argv`."""
    return [sys.executable, "-u", "-P", "-m", module, *argv]


def world_size_from_env() -> int:
    """Return the number of ranks of the job, in the driver process that rank 0 has started."""
    return int(os.environ["MEGARL_WORLD_SIZE"])


def store_prefix(env: Mapping[str, str] = os.environ) -> str:
    """Return the prefix of this attempt's keys in the c10d store: "megarl/<run id>/attempt_<number>".

    Args:
        env: environment of a rank."""
    return f"megarl/{env.get('TORCHELASTIC_RUN_ID', 'none')}/attempt_{attempt_number(env)}"


def attempt_number(env: Mapping[str, str]) -> int:
    """Return how often the job has been started before, in the environment of a rank.

    torchrun counts for each node how often it has started ranks there, so a node that has taken the place of
    another counts from 0. ATTEMPT is the same on all nodes."""
    return int(env.get(ATTEMPT) or env.get("TORCHELASTIC_RESTART_COUNT", "0"))


def end_with_parent(parent: int, death_signal: signal.Signals = signal.SIGTERM) -> None:
    """Make this process end when its parent ends: it gets `death_signal` then, and is ended 3 seconds later
    in any case.

    The kernel sends the signal when the *thread* that started this process ends, so start children from the
    main thread.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch_parent, args=(parent,), name="watch_parent", daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(_GRACE_S)
    os._exit(1)


def process_name(pid: int | None = None) -> str:
    """Return a name for a process that no other process of any machine ever has: "boot id and
    namespace/pid/start".

    A process that has ended has no start. The default is this process."""
    pid = os.getpid() if pid is None else pid
    with open("/proc/sys/kernel/random/boot_id") as boot:
        name = f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}/{pid}/"
    try:
        with open(f"/proc/{pid}/stat") as stat:
            state, *fields = stat.read().rpartition(")")[2].split()
        return name if state in "ZX" else name + fields[18]
    except FileNotFoundError:
        return name


def has_died(name: str) -> bool:
    """Return whether the process that `process_name` named has ended; False if it cannot be seen, e.g. on
    another machine."""
    seen_by, pid, _ = name.split("/")
    now = process_name(int(pid))
    return now.startswith(f"{seen_by}/") and now != name


def end_on_signals() -> None:
    """Let SIGINT and SIGTERM end this process at once and silently, even inside a collective.

    No Python handler would run there. torchrun sends these signals to every worker when the job is
    interrupted or a peer died; the driver reports the cause.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def exit_on_signals(*signums: int) -> None:
    """Make each of these signals end this process at once with exit code 128 + n.

    Do not use this for a process that must clean up."""
    for signum in signums:
        signal.signal(signum, lambda signum, frame: os._exit(128 + signum))


def ignore_signals_for_good() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP from now on, also while the interpreter shuts down.

    The interpreter restores the default action of a signal with a Python handler, but not of an ignored
    signal."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # In this order: Python complains on stderr about a pending signal that no longer has a handler.
        # `signal.signal` runs the handlers of pending signals, and after the first two lines no new ones
        # arrive.
        signal.signal(signum, lambda signum, frame: None)
        libc.signal(signum, int(signal.SIG_IGN))
        signal.signal(signum, signal.SIG_IGN)
    # Another thread may have been in the middle of noting one: it completes that after the last line.
    sys.unraisablehook = functools.partial(_tell_but_signals, sys.unraisablehook)


def _tell_but_signals(tell: Callable[[Any], object], unraisable: Any) -> None:
    error = unraisable.exc_value
    if not (isinstance(error, OSError) and "ignored due to race condition" in str(error)):
        tell(unraisable)


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that was closed (`>&-`), for this process and those that it
    starts."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    null = open(descriptor, "r+")
    sys.stdin = sys.stdin or null
    sys.stdout = sys.stdout or null
    sys.stderr = sys.stderr or null


def end_process(code: int) -> NoReturn:
    """Wait for threads, run the exit handlers and end this process with the exit code, without unloading
    Python's modules.

    With PyTorch, Megatron-Core and vLLM loaded, unloading takes seconds, and the user waits for it after the
    last line of a job."""
    # As the interpreter does; a thread pool cannot be joined otherwise.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def listen_on_loopback() -> None:
    """Restrict gloo and NCCL to the loopback interface by environment variables, unless the user has set
    these.

    Both accept connections from anybody who reaches them."""
    if os.path.exists("/sys/class/net/lo"):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MiB of freed memory instead of returning it to the kernel.

    The kernel would hand the memory out again page by page, because activations of a small model are
    allocated and freed in every forward pass. This costs a tenth of a step's time on a CPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack mallopt
    if mallopt is not None:
        for option, value in (
            (_M_MMAP_THRESHOLD, 32 << 20),
            (_M_TRIM_THRESHOLD, 256 << 20),
            (_M_TOP_PAD, 64 << 20),
        ):
            mallopt(option, value)


def compute_fp32_exactly() -> None:
    """Keep matrix products in fp32 from being computed in TF32 on a GPU, in this process and in the engines
    that it starts.

    Call this before CUDA and Triton are loaded. TF32 rounds the factors of a product to 10 bits, an error of
    about 1e-3 in a log-prob. The log-prob gate of an fp32 job compares rounding errors of 1e-6.

    - Transformer Engine asks cuBLAS for TF32 (common/gemm/cublaslt_gemm.cu). NVIDIA_TF32_OVERRIDE=0 overrules
      this.
    - `tl.dot` takes TF32 unless the kernel or TRITON_F32_DEFAULT says otherwise (triton/language/core.py),
      and vLLM's attention kernel for fp32 says nothing.

    Neither variable affects bf16. Variables that the user has set stay."""
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")


def quiet_libraries() -> None:
    """Silence the warnings that torch, Megatron and vLLM give about missing or renamed parts, about thirty
    lines per process.

    Call this before torch, Megatron and vLLM are imported. PYTHONWARNINGS and the libraries' own logging
    variables restore the warnings."""
    if os.environ.get("PYTHONWARNINGS"):
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for module in (r"megatron\.", r"torch\.distributed\.", r"vllm\."):
        warnings.filterwarnings("ignore", module=module)
    for name in ("megatron", "vllm"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # multiprocessing starts its tracker process with these options. After a failure has ended a rank at once,
    # the tracker rightly removes the memory that vLLM shared between ranks. Its warning would only distract
    # from the failure.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")


def keep_checkout_off_path() -> None:
    """Remove a checkout of megarl from sys.path, where `-m` puts the working directory.

    vLLM would take our folder triton_kernels/ for OpenAI's package of that name."""
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.path[:] = [
        p
        for p in sys.path
        if not os.path.isdir(os.path.join(p or os.getcwd(), "triton_kernels", ""))
        or os.path.basename(p) == "site-packages"
    ]


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes.

    Shared pages count in each process. VmHWM is used because ru_maxrss of getrusage starts at the parent's
    size after a fork.
    """
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line: peak memory is measured on Linux only.")
