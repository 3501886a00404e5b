"""Run the user's environments in processes that can be killed, so that a bad one costs one episode.

    with EnvironmentPool([EnvSpec(None, "my_env.py:Env")], timeout_s=60, episodes_per_process=16) as pool:
        episode = pool.open(row)                 # asks for the first messages
        for reply in pool.replies(timeout_s=1):  # messages, reward, done, or a failure
            pool.step(reply.episode, text)       # the model's answer
        pool.end(episode)

A call never blocks. Each call gets one reply, in any order. A call that takes longer than the deadline fails,
and its process gets no further episodes; it is killed when its other episodes have ended. If a process dies,
its episodes fail and no others."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config.environments import EnvSpec, of_source
from megarl.episodes.env_messages import EnvReply, read_reply
from megarl.episodes.environments import Reply, Sampled
from megarl.files.printed import Printed
from megarl.runtime.signing import JOB_SECRET

_START_S = 120.0  # the user's file may have slow imports
_MOST_REMOTE = 1024  # episodes of a process that only waits for a server
ENV_KEY = "MEGARL_ENV_KEY"
"""Environment variable with the key of `megarl env-serve`. Only the processes that call a server have it."""
# `-P`, which keeps the current folder off the path, is new in Python 3.11.
_RUN = """
import importlib.util, runpy, sys
if sys.version_info < (3, 9):
    sys.exit("--env-python (" + sys.executable + "): is Python " + sys.version.split()[0] + "; must be 3.9 or later.")
sys.path[:] = [path for path in sys.path if path]
folder = {folder!r}
spec = importlib.util.spec_from_file_location(
    "megarl", folder + "/__init__.py", submodule_search_locations=[folder]
)
sys.modules["megarl"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
runpy.run_module("megarl.episodes.env_process", run_name="__main__", alter_sys=True)
"""


class EnvironmentPool:
    """Runs processes that each hold the environments of several open episodes. Processes are started as
    needed.

    Use a pool on the main thread: the kernel ends the processes with the thread that started them.

    Args:
        specs: the environments of --env. A row has the one that its `data_source` names.
        timeout_s: deadline of each call.
        episodes_per_process: number of episodes that share a process at a time."""

    def __init__(self, specs: Sequence[EnvSpec], timeout_s: float, episodes_per_process: int) -> None:
        self._specs, self._timeout_s, self._per_process = specs, timeout_s, episodes_per_process
        self._processes: list[_Process] = []
        # Kept, since a look comes before every step of the engine.
        self._selector = selectors.DefaultSelector()
        self._late_at = math.inf  # no process or call is late before
        self._of_episode: dict[int, _Process] = {}
        self._lost: dict[int, Reply] = {}  # the process of the episode has ended
        self._ready: list[Reply] = []  # replies that need no process
        self._num_episodes = self._num_calls = 0

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes of the pool."""
        for process in [*self._processes]:
            self._kill(process)
        self._selector.close()

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that become readable when replies arrive or a process ends."""
        return [process.fileno() for process in self._processes]

    def load(self) -> None:
        """Start a process of each environment, and wait until it is loaded.

        Raises: ValueError if one cannot be loaded."""
        for spec in self._specs:
            process = self._with_room(spec)
            while not process.is_ready:
                self.replies(1.0)
                if process not in self._processes:
                    why = f"its process has ended, or has not loaded it within {_START_S:g} s"
                    raise ValueError(f"--env ({spec}): {why}. stderr may say more")

    def open(self, row: Mapping[str, Any]) -> int:
        """Start an episode on a row of the data set, and return its number. A reply with the first messages
        follows.

        Raises: ValueError if the row has no environment."""
        spec = of_source(self._specs, row.get("data_source"))
        if spec is None:
            raise ValueError(f"no environment of --env is called {row.get('data_source')!r}")
        episode = self._num_episodes
        self._num_episodes += 1
        process = self._with_room(spec)
        self._of_episode[episode] = process
        process.episodes.add(episode)
        self._ask(episode, op="reset", row=row)
        return episode

    def step(self, episode: int, text: str, sampled: Sampled | None = None) -> None:
        """Send the model's answer to the environment of an episode. `replies` returns the environment's
        reply."""
        if episode in self._lost:
            self._ready.append(self._lost[episode])
        else:
            self._ask(episode, op="step", text=text)

    def refuse(self, reply: Reply, code: str, message: str, is_final: bool = False) -> bool:
        """Return False: an environment has replied already, and gives no further reward."""
        return False

    def extend(self, seconds: float) -> None:
        """Do nothing: an environment does not wait for the engine while it works on a call."""

    def prolong(self, seconds: float) -> None:
        """Give all calls so much more time, for environments that do wait for the engine."""
        for process in self._processes:
            process.calls = {
                number: _Call(call.episode, call.deadline + seconds) for number, call in process.calls.items()
            }

    def end(self, episode: int) -> None:
        """Forget an episode. No reply to an earlier call of it follows."""
        self._ready = [reply for reply in self._ready if reply.episode != episode]
        self._lost.pop(episode, None)
        process = self._of_episode.pop(episode, None)
        if process is None:
            return
        process.episodes.discard(episode)
        process.calls = {call: one for call, one in process.calls.items() if one.episode != episode}
        if process.is_retired and not process.episodes:
            self._kill(process)
        else:
            process.tell({"op": "end", "episode": episode})

    def replies(self, timeout_s: float) -> list[Reply]:
        """Return the replies that have arrived, in order. Waits at most `timeout_s` seconds for the first.

        Raises: ValueError if a process cannot load the environment."""
        patience = 0.0 if self._ready else max(0.0, min(timeout_s, self._late_at - time.monotonic()))
        readable = [key.data for key, _ in self._selector.select(patience)]
        found, self._ready = self._ready, []
        for process in readable:
            found += self._read(process)
        for process in self._processes:
            process.flush()
        if time.monotonic() >= self._late_at:
            for process in [*self._processes]:
                found += self._late(process)
            limits = [process.deadline() for process in self._processes]
            self._late_at = min((limit for limit in limits if limit is not None), default=math.inf)
        return found

    def _with_room(self, spec: EnvSpec) -> _Process:
        """Return a process of an environment that can take another episode."""
        limit = _MOST_REMOTE if spec.is_remote else self._per_process
        free = [one for one in self._processes if one.spec is spec and one.can_take(limit)]
        if not free:
            free = [_Process(spec, self._per_process)]
            self._processes += free
            self._selector.register(free[0], selectors.EVENT_READ, free[0])
            self._late_at = min(self._late_at, free[0].start_by)
        return min(free, key=lambda one: len(one.episodes))

    def _ask(self, episode: int, **request: object) -> None:
        call, process = self._num_calls, self._of_episode[episode]
        self._num_calls += 1
        deadline = time.monotonic() + self._timeout_s
        process.calls[call] = _Call(episode, deadline)
        self._late_at = min(self._late_at, deadline)
        process.tell({"call": call, "episode": episode, **request})

    def _read(self, process: _Process) -> list[Reply]:
        """Return the replies of a process that has written something or has ended."""
        lines, found = process.read(), []
        if lines is None:
            return self._lose(process, "died", process.cause_of_death())
        for line in lines:
            try:
                reply = read_reply(line)
            except ValueError as error:
                why = f"wrote into the pipe of its replies what is no reply: {line[:200]!r} ({error})"
                return found + self._lose(process, "malformed", why)
            if reply.error is not None:
                raise ValueError(reply.error)
            if reply.ready:
                deadline = time.monotonic() + self._timeout_s
                process.begin(deadline)
                self._late_at = min(self._late_at, deadline)
            elif (call := process.calls.pop(reply.call, None)) is not None:  # else it came too late
                found.append(_reply(call.episode, reply))
        return found

    def _late(self, process: _Process) -> list[Reply]:
        """Return the failures of calls that have passed their deadline."""
        now = time.monotonic()
        if not process.is_ready:
            if now < process.start_by:
                return []
            why = f"has not loaded the environment within {_START_S:g} s"
            return self._lose(process, "timeout", why)
        late = {call: one for call, one in process.calls.items() if one.deadline <= now}
        for call in late:
            process.is_retired = True
            del process.calls[call]
        why = f"a call took longer than --env-timeout-s ({self._timeout_s:g})"
        return [Reply(one.episode, failure=why, cause="timeout") for one in late.values()]

    def _lose(self, process: _Process, cause: str, why: str) -> list[Reply]:
        """Kill a process, and return a failure for each of its episodes that waits for a reply.

        The other ones fail at their next call."""
        self._kill(process)
        failure = f"the process of the environment {why}"
        for episode in process.episodes:
            del self._of_episode[episode]
            self._lost[episode] = Reply(episode, failure=failure, cause=cause)
        return [self._lost[call.episode] for call in process.calls.values() if call.episode in self._lost]

    def _kill(self, process: _Process) -> None:
        self._processes.remove(process)
        self._selector.unregister(process)
        process.kill()


def command(python: str | None) -> list[str]:
    """Return the words of the command that runs env_process.py, without its arguments.

    An interpreter of the user's does not see what is installed beside megarl, only megarl itself, whose modules
    that env_process.py imports need nothing else."""
    if python is None:
        return [sys.executable, "-P", "-m", "megarl.episodes.env_process"]
    import megarl

    assert megarl.__file__ is not None
    return [python, "-c", _RUN.format(folder=os.path.dirname(os.path.abspath(megarl.__file__)))]


def _reply(episode: int, reply: EnvReply) -> Reply:
    if reply.failure is not None:
        return Reply(episode, failure=reply.failure, cause=reply.cause)
    return Reply(
        episode,
        reply.messages,
        reply.reward,
        reply.done,
        tools=reply.tools,
        actor=reply.actor,
        rewards=reply.rewards,
    )


@dataclass(frozen=True, slots=True)
class _Call:
    episode: int
    deadline: float


class _Process:
    """One process of the pool (env_process.py)."""

    def __init__(self, spec: EnvSpec, num_threads: int) -> None:
        self.spec = spec
        self.episodes: set[int] = set()
        self.calls: dict[int, _Call] = {}
        """Calls without a reply, by number."""
        self.is_ready = self.is_retired = False
        """is_retired: a call hangs, so the process gets no further episodes."""
        self.start_by = time.monotonic() + _START_S
        hidden = (JOB_SECRET,) if spec.is_remote else (JOB_SECRET, ENV_KEY)
        self._printed = Printed("environment")
        self._process = subprocess.Popen(
            [
                *command(None if spec.is_remote else spec.python),
                str(os.getpid()),
                spec.target,
                str(num_threads),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed.writer,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in hidden},
            bufsize=0,
        )
        self._printed.follow()
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self._unsent, self._unread = b"", b""

    def fileno(self) -> int:
        """Return the file descriptor of the replies, so that a selector accepts a process."""
        return self._process.stdout.fileno()

    def can_take(self, limit: int) -> bool:
        return not self.is_retired and len(self.episodes) < limit and self._process.poll() is None

    def deadline(self) -> float | None:
        """Return the time at which the process or one of its calls is late, or None if no reply is
        awaited."""
        if not self.is_ready:
            return self.start_by
        return min((call.deadline for call in self.calls.values()), default=None)

    def begin(self, deadline: float) -> None:
        """Note that the environment is loaded. Calls that waited for this have their deadline from now on."""
        self.is_ready = True
        self.calls = {number: _Call(call.episode, deadline) for number, call in self.calls.items()}

    def tell(self, request: Mapping[str, Any]) -> None:
        self._printed.end_call()
        self._unsent += json.dumps(request, default=str).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write as many bytes of the waiting requests as the pipe takes."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # `read` reports a process that has ended
            while self._unsent:
                self._unsent = self._unsent[os.write(self._process.stdin.fileno(), self._unsent) :]

    def read(self) -> list[bytes] | None:
        """Return the complete lines that have arrived, or None if the process has ended."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.fileno(), 1 << 16):
                self._unread += data
            if not self._unread:
                return None
        *lines, self._unread = self._unread.split(b"\n")
        return lines or ([] if self._process.poll() is None else None)

    def cause_of_death(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "has closed the pipe of its replies"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kill the process and its children in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._printed.close()
        self._process.stdin.close()
        self._process.stdout.close()
