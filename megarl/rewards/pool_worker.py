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
import inspect
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from megarl.config.schema import DataConfig
from megarl.files.user_code import be_script
from megarl.messages import decode
from megarl.rewards import load_reward
from megarl.rewards.base import RewardSample, Score, event_loop, judge
from megarl.rewards.pool_messages import Reply, Request

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LONGEST_MESSAGE = 8000  # characters


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
    is_async = any(map(inspect.iscoroutinefunction, (function, function.__call__)))
    reply(ready=True, is_async=is_async)

    def answer(request: Request, get: Callable[[], Any] | None = None) -> None:
        sample, began = request.sample, (time.monotonic(), sum(os.times()[:4]))
        try:
            score = judge(function, sample, data.weights_of_scores, get)
            verdict = {"reward": float(score)}
            if isinstance(score, Score):
                verdict |= {"answer": score.answer and _printable(score.answer), "scores": score.scores}
        except ValueError as error:
            verdict = {"failure": _printable(str(error)[-_LONGEST_MESSAGE:])}
        seconds, cpu_seconds = time.monotonic() - began[0], sum(os.times()[:4]) - began[1]
        waits = seconds > 0.05 and cpu_seconds < seconds / 8
        reply(request=request.number, digest=sample.digest, waits=waits, **verdict)

    async def value_of(sample: RewardSample) -> Any:
        try:
            async with asyncio.timeout(data.reward_timeout_s) as limit:
                return await function(**sample.arguments)
        except TimeoutError as error:  # the function's own, or that of the limit
            late = f"took longer than --reward-timeout-s ({data.reward_timeout_s:g})"
            raise TimeoutError(late) if limit.expired() else error

    loop = event_loop()
    if is_async:
        loop.add_reader(requests.fileno(), loop.stop)
    while True:
        try:
            if is_async:
                loop.run_forever()  # until there is a request
            request = decode(requests.recv_bytes(), Request)
        except SystemExit:  # of an awaited call, which is answered next
            continue
        except EOFError:
            return
        if is_async:
            task = loop.create_task(value_of(request.sample))
            task.add_done_callback(lambda task, request=request: answer(request, task.result))
        else:
            answer(request)


def _printable(text: str) -> str:
    """Return the text with lone surrogates, which JSON cannot hold, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


if __name__ == "__main__":
    main(int(sys.argv[1]))
