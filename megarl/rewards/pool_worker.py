"""Run one process of a RewardPool: `python -m megarl.rewards.pool_worker PARENT`.

Requests arrive on stdin and replies go to stdout (pool_messages.py). Every reply has the number of its
request, the digest of the judged text, and the id of the writing process. The process id matters because a
reward function may fork, and its child returns here with the same pipes. The child sends one reply and ends.

The function runs in the main thread, outside of any event loop: it may set alarms, call asyncio.run and start
processes, as in a script of its own.

Output of the reward function goes to stderr, which the pool reads (printed.py). The function has no stdin."""

from __future__ import annotations

import ctypes
import operator
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection

from megarl.config.schema import DataConfig
from megarl.files.user_code import be_script
from megarl.messages import decode
from megarl.rewards import load_reward
from megarl.rewards.base import Score, judge
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
    weights = data.weights_of_scores
    reply(ready=True)
    while True:
        try:
            request = decode(requests.recv_bytes(), Request)
        except EOFError:
            return
        sample, began = request.sample, os.times()
        try:
            score = judge(function, sample, weights)
            verdict = {"reward": float(score)}
            if isinstance(score, Score):
                verdict |= {"answer": score.answer and _printable(score.answer), "scores": score.scores}
        except ValueError as error:
            verdict = {"failure": _printable(str(error)[-_LONGEST_MESSAGE:])}
        *cpu, seconds = map(operator.sub, os.times(), began)
        waits = seconds > 0.05 and sum(cpu) < seconds / 8
        reply(request=request.number, digest=sample.digest, waits=waits, **verdict)


def _printable(text: str) -> str:
    """Return the text with lone surrogates, which JSON cannot hold, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


if __name__ == "__main__":
    main(int(sys.argv[1]))
