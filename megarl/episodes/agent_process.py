"""Run an agent's command so that it ends with this job: `python agent_process.py PARENT COMMAND ...`.

The kernel kills the command when the process that started it ends. The process replaces itself by the
command, which therefore keeps its id, its pipes and its process group."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"--agent-command: {command[0]} cannot be run: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
