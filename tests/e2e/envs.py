"""An environment for whole jobs, from which an untrained model gets different rewards and turns."""

import asyncio
import os
import random
import time


class LowerCase:
    """Gives each answer its share of lower-case letters, and ends after an answer without any digit."""

    def reset(self, row):
        self.index = row["extra_info"]["index"]
        if self.index % 3 == 1:  # not of the first row, which is tried before training
            raise RuntimeError("planted")
        return row["prompt"]

    def step(self, text):
        reward = sum(c.islower() for c in text) / 20
        if not any(c.isdigit() for c in text):
            return [], reward, True
        return [{"role": "tool", "content": f"{len(text)} characters, é"}], reward, False


class UpperCase(LowerCase):
    """Gives each answer its share of upper-case letters."""

    def step(self, text):
        messages, _, done = super().step(text)
        return messages, sum(c.isupper() for c in text) / 20, done


class Waiting:
    """Waits for minutes in each step once a file exists, as a slow tool does."""

    def reset(self, row):
        return row["prompt"]

    def step(self, text):
        if os.path.exists(os.environ["MEGARL_TEST_SLOW"]):
            time.sleep(600)
        return [], 0.5, True


class Slow:
    """Works for a while at some of its calls. Its replies depend on the answers only."""

    def reset(self, row):
        self.index = row["extra_info"]["index"]
        return row["prompt"]

    def step(self, text):
        if (self.index + len(text)) % 3 == 0:
            time.sleep(0.5)
        reward = sum(c.islower() for c in text) / 20
        if not any(c.isdigit() for c in text):
            return [], reward, True
        return [{"role": "tool", "content": f"{len(text)} characters"}], reward, False


class Clock(Slow):
    """The same, and tells the time."""

    def step(self, text):
        messages, reward, done = super().step(text)
        return [{**one, "content": f"{time.time_ns() % 1000}"} for one in messages], reward, done


class Pair:
    """Asks two actors in turn, twice each. Some first answers end the episode, before the second actor was asked.

    An answer's share of lower-case letters is the reward of its actor, and that of the last answer is both's."""

    def reset(self, row):
        self.num, self.next_actor = 0, "actor"
        return row["prompt"]

    def step(self, text):
        self.num += 1
        reward, judged = sum(c.islower() for c in text) / 20, self.next_actor
        if self.num == 4 or self.num == 1 and len(text) % 4 == 0:
            return [], reward, True
        self.next_actor = "actor_2" if judged == "actor" else "actor"
        return [{"role": "user", "content": f"{self.num} {len(text)} é"}], {judged: reward}, False


class Tools:
    """Ends an episode after one answer. Once a file exists, it calls a tool in each of four turns, and a call takes
    0.1 to 5 s.

    It writes into the folder of that file when a call begins and ends, and when an episode ends, a byte each."""

    def reset(self, row):
        self.slow, self.turn, self.draws = os.environ["MEGARL_TEST_SLOW"], 0, random.Random(id(self))
        return row["prompt"]

    async def step(self, text):
        self.turn += 1
        reward = sum(c.islower() for c in text) / 20
        if not os.path.exists(self.slow):
            return [], reward, True
        self.count("begun")
        await asyncio.sleep(0.1 * 50 ** self.draws.random())
        self.count("ended")
        if self.turn == 4:
            self.count("over")
        return [{"role": "tool", "content": f"{self.turn}"}], reward, self.turn == 4

    def count(self, name):
        with open(f"{self.slow}.{name}.{os.getpid()}", "a") as file:
            file.write("+")


class Talking:
    """Replies with tools' results and questions, which depend on the answer only, and shows a tool."""

    WORDS = ("é", "日本", "🙂", "\n\n", " ", "twelve", '{"a": 1}', "</think>", "the result of 12")

    def reset(self, row):
        add = {"name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {}}}
        self.tools, self.turn = [{"type": "function", "function": add}], 0
        return row["prompt"]

    def step(self, text):
        self.turn += 1
        draws = random.Random(text)
        messages = [
            {
                "role": draws.choice(["tool", "tool", "user"]),
                "content": " ".join(draws.choices(self.WORDS, k=4)),
            }
            for _ in range(draws.choice([1, 1, 2]))
        ]
        return messages, sum(c.islower() for c in text) / 20, draws.random() < 0.1
