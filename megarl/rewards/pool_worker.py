"""Run one process of a RewardPool: `python -m megarl.rewards.pool_worker PARENT`.

Requests arrive on stdin and replies go to stdout (pool_messages.py). Every reply has the number of its
request, the digest of the judged text, and the id of the writing process. The process id matters because a
reward function may fork, and its child returns here with the same pipes. The child sends one reply and ends.

The function runs in the main thread, outside of any event loop: it may set alarms, call asyncio.run and start
processes, as in a script of its own. If it is asynchronous, what it returns is awaited while further calls begin.

Output of the reward function goes to stderr, which the pool reads (printed.py). The function has no stdin."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable
from multiprocessing.connection import Connection
from typing import Any

from megarl.config.schema import DataConfig
from megarl.files.user_code import be_script
from megarl.messages import decode
from megarl.rewards import load_reward
from megarl.rewards.base import Score, judge, name_of
from megarl.rewards.pool_messages import Reply, Request

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LONGEST_MESSAGE = 8000  # characters
_WAIT_S, _BUSY_SHARE = 0.05, 1 / 8
"""A call that takes longer than this, and less CPU time than this share of it, waits for something."""


class _Awaited(BaseException):
    """Raised with what an asynchronous function has returned, to be awaited later."""


def main(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = Connection(os.dup(0), writable=False), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # several processes print into one log

    own_pid = os.getpid()

    def reply(**answer: object) -> None:
        replies.write(Reply(pid=os.getpid(), **answer).line())
        replies.flush()
        if os.getpid() != own_pid:
            os._exit(1)

    data = decode(requests.recv_bytes(), DataConfig)
    # RLIMIT_DATA limits allocated, not mapped memory: a GPU's libraries map more than any machine has.
    resource.setrlimit(resource.RLIMIT_DATA, (data.reward_memory_limit_bytes,) * 2)
    if data.reward_function is not None:
        be_script(data.reward_function.rpartition(":")[0])
    try:
        function = load_reward(data)
    except ValueError as error:
        return reply(error=_printable(str(error)))
    reply(ready=True)
    loop, tasks = asyncio.new_event_loop(), set()
    loop.add_reader(requests.fileno(), loop.stop)

    def later(value: Awaitable[Any]) -> None:
        raise _Awaited(value)

    def answer(request: Request, task: asyncio.Task[Any] | None = None) -> None:
        sample, began, cpu = request.sample, time.monotonic(), _cpu_seconds()
        call = function if task is None else lambda **_: task.result()
        try:
            score = judge(call, sample, data.weights_of_scores, later, name_of(function))
            verdict = {"reward": float(score)}
            if isinstance(score, Score):
                verdict |= {"answer": score.answer and _printable(score.answer), "scores": score.scores}
        except _Awaited as awaited:
            new = loop.create_task(_in_time(awaited.args[0], data.reward_timeout_s))
            tasks.add(new)  # the loop keeps weak references only
            new.add_done_callback(tasks.discard)
            new.add_done_callback(lambda task: answer(request, task))
            return
        except ValueError as error:
            verdict = {"failure": _printable(str(error)[-_LONGEST_MESSAGE:])}
        seconds = time.monotonic() - began
        waits = seconds > _WAIT_S and _cpu_seconds() - cpu < _BUSY_SHARE * seconds
        reply(
            request=request.number,
            digest=sample.digest,
            waits=waits,
            is_awaited=task is not None,
            **verdict,
        )

    while True:
        try:
            loop.run_forever()  # until there is a request
            request = decode(requests.recv_bytes(), Request)
        except SystemExit:  # of an awaited call, which is answered next
            continue
        except EOFError:
            return
        answer(request)


async def _in_time(value: Awaitable[Any], timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await value
    except TimeoutError as error:  # the function's own, or that of the limit
        raise (
            TimeoutError(f"took longer than --reward-timeout-s ({timeout_s:g})") if limit.expired() else error
        )


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of the processes that it has started and that have ended."""
    return sum(os.times()[:4])


def _printable(text: str) -> str:
    """Return the text with lone surrogates, which JSON cannot hold, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


if __name__ == "__main__":
    main(int(sys.argv[1]))
