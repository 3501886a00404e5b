"""Run one process of an environment pool: `python -m megarl.episodes.env_process PARENT FILE:CLASS THREADS`.

Requests arrive on stdin and replies go to stdout (env_messages.py). The process holds several episodes, each
with an object of the user's class. Their calls run in the main thread, as in a script of its own: coroutines
in one event loop, other methods outside of it. Calls of different episodes overlap: one that finds the main
thread busy for long runs in another thread, unless the environment has set a signal handler, which only the
main thread can. What the environment prints goes to stderr.

Of megarl this module imports four files and no package that has to be installed. It runs in Python 3.9."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import inspect
import json
import math
import os
import resource
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, thread
from typing import Any

from megarl.episodes.adapters import ADAPTERS, PACKAGES
from megarl.episodes.failure import EpisodeFailure
from megarl.episodes.json_values import json_problem
from megarl.files.user_code import be_script, run_file

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LONGEST_MESSAGE = 8000  # characters
_HERE = __file__  # which `be_script` changes
_PATIENCE_S = 0.1  # for which a call waits for the main thread
_LARGEST_REWARD = 3.4028234663852886e38  # of float32
WANTED = "Wanted path/to/file.py:Class, with reset(row) -> messages and step(text) -> messages, reward, done."


class Malformed(ValueError):
    """Raised for a value that a method of an environment must not return."""


def load_environment(env: str) -> Callable[[], Any]:
    """Run the user's file and return the class, or function, that makes an environment.

    Raises: ValueError if there is no such file or class, or the file fails."""
    flag = f"--env ({env})"
    scheme, _, rest = env.partition(":")
    if scheme in ADAPTERS:
        return _adapted(flag, scheme, rest)
    path, colon, name = env.rpartition(":")
    if not colon or not path or not name:
        raise ValueError(f"{flag} does not name a file and a class. {WANTED}")
    if not os.path.isfile(path):
        raise ValueError(f"{flag}: there is no file {path}. {WANTED}")
    if os.path.dirname(path) != os.path.dirname(_HERE):  # not verifiers_env.py
        be_script(path)
    made = vars(run_file(path, flag, "megarl_env_")).get(name)
    if not callable(made):
        raise ValueError(f"{flag}: {path} defines no class {name}. {WANTED}")
    for method in ("reset", "step") if inspect.isclass(made) else ():
        if not callable(getattr(made, method, None)):
            raise ValueError(f"{flag}: {name} has no method {method}. {WANTED}")
    return made


def _adapted(flag: str, scheme: str, name: str) -> Callable[[], Any]:
    """Return what makes an environment of another library. Raises: ValueError if it cannot be used."""
    try:
        return ADAPTERS[scheme](name)
    except ImportError as error:
        raise ValueError(
            f"{flag}: {sys.executable} cannot import {PACKAGES[scheme]} ({error}). Install it into a virtual "
            f"environment, and give that one's Python: --env-python path/to/venv/bin/python."
        ) from error
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


class Environments:
    """The episodes of this process, and their calls.

    Args:
        write: sends a reply."""

    make: Callable[[], Any]
    """Makes the object of an episode."""

    def __init__(self, num_threads: int, write: Callable[[dict[str, Any]], None]) -> None:
        self._write = write
        self._main, self._calls = asyncio.new_event_loop(), deque()
        self._sets_signals = False
        """Whether a call has set a signal handler, so that calls may run in the main thread only."""
        self._set_handler, signal.signal = signal.signal, self._set_signal
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="environment")
        self._of_episode: dict[int, Any] = {}
        self._open: set[int] = set()
        """Episodes that have begun and not ended; the object of one may be in the making."""
        self._tasks: set[asyncio.Task[None]] = set()

    def _set_signal(self, number: int, handler: Any) -> Any:
        self._sets_signals |= number != signal.SIGINT  # which asyncio.run sets
        return self._set_handler(number, handler)

    def run(self) -> None:
        """Run calls, one at a time, and coroutines between them. Call this in the main thread."""
        while True:
            with contextlib.suppress(SystemExit):  # of a coroutine, whose future has it too
                self._main.run_forever()  # until there is a call
            while self._calls:
                future, call = self._calls.popleft()
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(call())
                    except BaseException as error:  # thread boundary: raised where the result is wanted
                        future.set_exception(error)

    def take(self, request: dict[str, Any]) -> None:
        """Start what a request asks for. Must be called in the event loop."""
        if request["op"] == "end":
            self._open.discard(request["episode"])
            self._close(self._of_episode.pop(request["episode"], None))
            return
        if request["op"] == "reset":
            self._open.add(request["episode"])
        self._start(self._call(request))

    def _close(self, ended: Any) -> None:
        close = getattr(ended, "close", None)
        if close is not None:
            self._start(self._quietly(close))

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop keeps weak references only
        task.add_done_callback(self._tasks.discard)

    async def _call(self, request: dict[str, Any]) -> None:
        op, episode = request["op"], request["episode"]
        try:
            if op == "reset":
                made = await self._run(self.make)
                if episode not in self._open:  # it has been ended meanwhile, and no reply is awaited
                    self._close(made)
                    return
                self._of_episode[episode] = environment = made
                messages = await self._run(made.reset, request["row"])
                reply = {"messages": _messages(messages, "reset", may_be_empty=False)}
                reply["tools"] = _tools(getattr(made, "tools", None) or [])
            else:
                environment = self._of_episode[episode]
                reply = _step(await self._run(environment.step, request["text"]))
            reply |= _next_actor(environment)
        except Malformed as error:
            reply = {"failure": _printable(str(error)), "cause": "malformed"}
        except EpisodeFailure as error:
            reply = {"failure": _printable(str(error)), "cause": error.cause}
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            text = f"{op} raised {type(error).__name__}: {error}\n{_traceback(error)}"
            reply = {"failure": _printable(text[-_LONGEST_MESSAGE:]), "cause": "raised"}
        self._write({"call": request["call"], **reply})

    async def _quietly(self, close: Callable[[], Any]) -> None:
        try:
            await self._run(close)
        except (Exception, SystemExit):
            traceback.print_exc()

    async def _run(self, function: Callable[..., Any], *arguments: object) -> Any:
        future, call = Future(), functools.partial(function, *arguments)
        self._calls.append((future, call))
        self._main.call_soon_threadsafe(self._main.stop)
        result = asyncio.wrap_future(future)
        await asyncio.wait([result], timeout=_PATIENCE_S)
        if not self._sets_signals and future.cancel():  # the main thread is busy
            result = asyncio.get_running_loop().run_in_executor(self._threads, call)
        value = await result
        if inspect.isawaitable(value):
            value = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_result(value), self._main))
        return value


async def _result(value: Any) -> Any:
    return await value


def _messages(value: object, method: str, may_be_empty: bool) -> list[dict[str, Any]]:
    """Return the messages that a method returned. Raises: Malformed unless they are a list of messages."""
    wanted = 'a list of messages, e.g. [{"role": "user", "content": "1+1 ?"}]'
    if not isinstance(value, (list, tuple)):
        raise Malformed(
            f"{method} returned {value!r:.300} ({type(value).__name__}) as messages; wanted {wanted}"
        )
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Malformed(f"{method} returned the message {message!r:.300}; wanted {wanted}")
    if not value and not may_be_empty:
        raise Malformed(f"{method} returned no messages, and the model has to answer some; wanted {wanted}")
    return list(value)


def _tools(value: object) -> list[dict[str, Any]]:
    """Return an environment's tools. Raises: Malformed unless they have OpenAI's form."""
    for tool in value if isinstance(value, (list, tuple)) else [value]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            wanted = (
                '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
            )
            raise Malformed(f"the environment's `tools` have {tool!r:.300}; wanted {wanted}")
    return list(value)


def _step(value: object) -> dict[str, Any]:
    """Return the reply to a step. Raises: Malformed unless it is (messages, reward, done)."""
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise Malformed(f"step returned {value!r:.300}; wanted (messages, reward, done)")
    messages, reward, done = value
    is_last = bool(done)
    reply = {"messages": _messages(messages or [], "step", is_last), "done": is_last}
    if not isinstance(reward, dict):
        return reply | {"reward": _reward(reward)}
    if unnamed := [name for name in reward if not isinstance(name, str)]:
        raise Malformed(
            f"step returned a reward for {unnamed[0]!r:.300}; wanted names of actors, as 'actor_2'"
        )
    return reply | {"rewards": {name: _reward(of_actor) for name, of_actor in reward.items()}}


def _reward(value: object) -> float | None:
    """Return a reward as a float. Raises: Malformed unless it is a finite number or None."""
    if value is None:
        return None
    try:
        reward = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not abs(reward) <= _LARGEST_REWARD:
        raise Malformed(f"step returned the reward {value!r:.300}; wanted a finite number, or None")
    return reward


def _next_actor(environment: object) -> dict[str, str]:
    """Return the actor that the environment names as the next to answer; {} without. Raises: Malformed if it
    is no text."""
    actor = getattr(environment, "next_actor", None)
    if actor is not None and not isinstance(actor, str):
        raise Malformed(f"the environment's `next_actor` is {actor!r:.300}; wanted a name, as 'actor_2'")
    return {} if actor is None else {"actor": actor}


def _traceback(error: BaseException) -> str:
    """Return the traceback of an error that a call has raised, from the first line of the user's code on."""
    entry = error.__traceback__
    assert entry is not None
    while entry.tb_next is not None and entry.tb_frame.f_code.co_filename in (_HERE, thread.__file__):
        entry = entry.tb_next
    return "".join(traceback.format_exception(type(error), error, entry))


def _printable(text: str) -> str:
    """Return the text with lone surrogates, which no reader of JSON accepts, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


async def _serve(environments: Environments, requests: Any) -> None:
    """Start each request as it arrives, until the pool closes its end."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        for line in requests:
            loop.call_soon_threadsafe(environments.take, json.loads(line))
        loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=read, name="requests", daemon=True).start()
    await closed.wait()
    sys.stderr.flush()
    os._exit(0)  # threads of calls that hang would be waited for


def main(parent: int, env: str, num_threads: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)
    own_pid, lock = os.getpid(), threading.Lock()

    def write(reply: dict[str, Any]) -> None:
        if os.getpid() != own_pid:  # a child that the environment has forked returns here
            os._exit(1)
        for name in ("messages", "tools"):
            if (problem := json_problem(reply.get(name), name)) is not None:
                why = f"{env} gave a value that no log and no checkpoint can hold: {problem}"
                reply = {"call": reply["call"], "failure": _printable(why), "cause": "malformed"}
        line = json.dumps(reply, ensure_ascii=False).encode()
        with lock:
            replies.write(line + b"\n")
            replies.flush()

    environments = Environments(num_threads, write)
    try:
        environments.make = load_environment(env)
    except ValueError as error:
        return write({"error": _printable(str(error))})
    write({"ready": True})
    served = _serve(environments, requests)
    threading.Thread(target=asyncio.run, args=(served,), name="calls", daemon=True).start()
    environments.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
