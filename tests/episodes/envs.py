"""Environments for tests. The row's `prompt` says what an episode does."""

import asyncio
import os
import signal
import sys
import threading
import time

MEETING = threading.Barrier(12)


class Env:
    """Counts the answers, and does what the row says at the second one."""

    def reset(self, row):
        self.what, self.num = row["what"], 0
        if self.what == "reset raises":
            raise RuntimeError("no such row")
        if self.what == "no messages":
            return []
        print("printed by reset")
        return [{"role": "user", "content": f"start {self.what}"}]

    def step(self, text):
        self.num += 1
        if self.num == 2:
            self.misbehave()
        if self.what == "bad return" and self.num == 2:
            return "done"
        if self.what == "bad reward" and self.num == 2:
            return [], float("nan"), True
        if self.what == "no reply" and self.num == 2:
            return [], 1.0, False
        if self.num == 3:
            return [], 0.5, True
        return [{"role": "tool", "content": f"{self.num} {text}"}], 0.25 if self.num == 1 else None, False

    def misbehave(self):
        match self.what:
            case "raise":
                raise KeyError("planted")
            case "exit":
                sys.exit(3)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(600)
            case "slow":
                time.sleep(1.0)
            case "meet":
                MEETING.wait(15.0)
            case "secret":
                raise RuntimeError(f"secret {os.environ.get('MEGARL_JOB_SECRET')}")


class Async:
    """With coroutines, which wait in one event loop."""

    async def reset(self, row):
        await asyncio.sleep(0.01)
        return [{"role": "user", "content": "start"}]

    async def step(self, text):
        await asyncio.sleep(0.3)
        return [], 1.0, True


class Meeting(Async):
    """Waits in `step` until twelve episodes do."""

    num_waiting = 0

    async def step(self, text):
        Meeting.num_waiting += 1
        while Meeting.num_waiting < MEETING.parties:
            await asyncio.sleep(0.01)
        return [], 1.0, True


class Ended(Env):
    """Notes in a file that its episode has ended."""

    def reset(self, row):
        self.path = row["path"]
        return [{"role": "user", "content": "start"}]

    def close(self):
        with open(self.path, "a") as file:
            file.write("closed\n")


class Says:
    """Replies with the value of an expression in the row."""

    def reset(self, row):
        self.says = row["says"]
        if "tools" in row:
            function = {"name": "f", "parameters": eval(row["tools"])}
            self.tools = [{"type": "function", "function": function}]
        return [{"role": "user", "content": "start"}]

    def step(self, text):
        return [{"role": "tool", "content": eval(self.says, {"deep": deep, "itself": itself})}], None, False


def deep(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


def itself():
    value = []
    value.append(value)
    return value


class Pair:
    """Asks two actors in turn. The row says what an episode does.

    Each answer has a reward of its actor alone; the last one has one for both."""

    def reset(self, row):
        self.what, self.num = row["what"], 0
        if self.what == "second first":
            self.next_actor = "actor_2"
        if self.what == "number as name":
            self.next_actor = 2
        return [{"role": "user", "content": f"start {self.what}"}]

    def step(self, text):
        self.num += 1
        named = getattr(self, "next_actor", None) or "actor"
        if self.what == "ends at once":
            return [], 0.25, True
        if self.what == "raise" and self.num == 3:
            raise KeyError("planted")
        if self.what == "reward of nobody" and self.num == 2:
            return [], {"actor_3": 1.0}, True
        if self.what == "reward of no number" and self.num == 2:
            return [], {"actor_2": "much"}, True
        if self.num == 5:
            return [], 0.5, True
        self.next_actor = (
            "actor_3" if self.what == "unknown" else {"actor": "actor_2", "actor_2": "actor"}[named]
        )
        if self.what == "shared" and self.num == 1:
            return [{"role": "user", "content": text}], 0.125, False
        return [{"role": "user", "content": f"{self.num} {named} {text}"}], {named: float(self.num)}, False


class Named(Env):
    """Names the actor of its reward."""

    def reset(self, row):
        self.next_actor = "actor"
        return [{"role": "user", "content": "start"}]

    def step(self, text):
        return [], {"actor": 2.5}, True
