"""Run an agent's command so that all its processes end with the episode: `python agent_process.py PARENT
COMMAND ...`.

    pool         starts this process, in a session of its own
      guard      this process, which ends as the agent does, after it has killed what the agent leaves running
        agent    COMMAND

The guard adopts processes whose parents have ended, also those in sessions of their own. SIGTERM kills them
all; the kernel sends it when the pool's process ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main(parent: int, command: list[str]) -> None:
    prctl = ctypes.CDLL(None).prctl
    signal.signal(signal.SIGTERM, lambda signum, frame: _end(128 + signum))
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    agent = os.fork()
    if agent == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            sys.exit(f"--agent-command: {command[0]} cannot be run: {error}")
    status = os.waitpid(agent, 0)[1]
    _end(os.waitstatus_to_exitcode(status))


def _end(code: int) -> None:
    """Kill all descendants, and end as the agent did: with its exit code, or by its signal (-code)."""
    while True:  # the children of those that end become children of this process
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = file.read().split()
        if not children:
            break
        for child in children:
            with contextlib.suppress(OSError):
                os.kill(int(child), signal.SIGKILL)
        os.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
