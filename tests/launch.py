"""Start Python processes for tests: anew, or by forking one that has imported torch, Megatron-Core and vLLM.

Tests of the numbers that a job or a rank computes start it `preloaded` (tests/fork_server.py), which saves
about 8 s of a core per rank. Tests of starting, signals, deadlines and imports start it anew. With
`MEGARL_TEST_PRELOADED=0` in the environment, as in the nightly run, all are started anew."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER, CONTROLLER = "MEGARL_TEST_FORK_FOLDER", "MEGARL_TEST_CONTROLLER"
PRELOADED_ENGINES = {"MEGARL_TEST_PRELOADED_ENGINES": "1"}
"""Environment in which what a preloaded process spawns by multiprocessing is preloaded too: vLLM's processes of
an engine. Not for tests that look for these, or stop them: such a process has another id than its parent knows."""
_START_S = 240.0


def python(preloaded: bool) -> str:
    """Return the interpreter for the command line of a process."""
    return preloaded_python() if preloaded else sys.executable


def command_line(*arguments: object) -> str:
    """Return the command line `python *arguments`, as a shell or --agent-command reads it."""
    return shlex.join([sys.executable, *map(str, arguments)])


def run(
    *arguments: object,
    timeout: float,
    preloaded: bool = False,
    folder: Path | None = None,
    environment: Mapping[str, str | None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` and return its exit code and output. Raises: TimeoutExpired.

    `environment` changes this process's variables; None removes one."""
    variables = {**os.environ, **(environment or {})}
    return subprocess.run(
        [python(preloaded), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env={name: value for name, value in variables.items() if value is not None},
    )


def without_warnings_of_machine(output: str) -> str:
    """Return a job's output without what depends on the machine: the warning that it has fewer cores than the job
    has ranks, and the linker's that vLLM's LD_PRELOAD does not exist, as it cannot name a path with blanks."""
    cores = r"warning: --nproc-per-node \(\d+\): this machine has "
    return re.sub(
        rf"^({cores}|ERROR: ld\.so: object '.*' from LD_PRELOAD ).*\n", "", output, flags=re.MULTILINE
    )


def succeed(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """As `run`, for a process that must exit with 0."""
    done = run(*arguments, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done


def torchrun(
    num_ranks: int,
    script: Path,
    *arguments: object,
    timeout: float,
    folder: Path | None = None,
    preloaded: bool = True,
) -> None:
    """Run a script on the ranks of a torchrun job, which must succeed."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks)
    succeed(*launcher, script, *arguments, timeout=timeout, folder=folder, preloaded=preloaded)


def run_ranks(
    num_ranks: int,
    arguments: Callable[[int], Sequence[object]],
    timeout: float,
    preloaded: bool = True,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run `python *arguments(rank)` as each rank of a world that finds itself. All must succeed.

    Returns:
        what each rank wrote to standard error. None of them survives."""
    ranks = [
        subprocess.Popen(
            [python(preloaded), *map(str, arguments(rank))],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        for rank in range(num_ranks)
    ]
    try:
        errors = [rank.communicate(timeout=timeout)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert not any(rank.returncode for rank in ranks), "\n".join(errors)[-8000:]
    return errors


def prepare() -> None:
    """Choose the fork server's folder, for this process and the workers of pytest-xdist that it starts."""
    if FOLDER not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="megarl-tests-"))
        interpreter = folder / "python"
        client = (HERE / "fork_client.py").read_text().replace("@INTERPRETER@", sys.executable)
        # A first line ends at a blank, and may have 255 bytes: /bin/sh starts the interpreter, which reads the
        # two lines as text.
        start = f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} -IS \"$0\" \"$@\"\n' '''\n"
        interpreter.write_text(start + client)
        interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
        os.environ.update({FOLDER: str(folder), CONTROLLER: str(os.getpid())})


def clean_up() -> None:
    """Remove the folder. The server ends with the process that has chosen it."""
    if os.environ.get(CONTROLLER) == str(os.getpid()):
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


def preloaded_python() -> str:
    """Return the interpreter whose processes have everything imported. The first call starts the server, unless
    `start_early` has."""
    if os.environ.get("MEGARL_TEST_PRELOADED") == "0":
        return sys.executable
    folder = Path(os.environ[FOLDER])
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _start_server(folder)
        deadline = time.monotonic() + _START_S
        while not (folder / "socket").exists():
            if _has_ended(int((folder / "server").read_text())) or time.monotonic() > deadline:
                log = (folder / "server.log").read_text()
                raise RuntimeError(f"tests/fork_server.py has not started: {log}")
            time.sleep(0.05)
    return str(folder / "python")


def start_early() -> None:
    """Start the server before a test asks for it. Otherwise all workers of pytest-xdist but one wait for it idly,
    17 s."""
    if os.environ.get("MEGARL_TEST_PRELOADED") != "0" and os.environ.get(CONTROLLER) == str(os.getpid()):
        _start_server(Path(os.environ[FOLDER]))


def _start_server(folder: Path) -> None:
    if (folder / "server").exists():
        return
    with open(folder / "server.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-u", "-P", str(HERE / "fork_server.py"), str(folder), os.environ[CONTROLLER]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # what megarl.runtime.process sets before libraries are imported
            env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR", "TRITON_F32_DEFAULT": "ieee"},
        )
    (folder / "server").write_text(str(server.pid))


def _has_ended(pid: int) -> bool:
    """Whether a process has ended, also if its parent has not noticed yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
