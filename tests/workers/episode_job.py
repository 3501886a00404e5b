"""A job of one engine with episodes, without weights: stream, buffer, chat and log are the real ones, the engine is that
of small_engine.py, and environments reply late, so that thousands of schedules can be tried."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.config.schema import EpisodeConfig, StreamingConfig
from megarl.episodes.chat import Chat
from megarl.episodes.environments import Reply, Request, Sampled
from megarl.episodes.episode import Limits
from megarl.rollout.engine import Engine
from megarl.rollout.replay_log import Admit, Checkpoint
from megarl.trainer.buffer import SampleBuffer
from megarl.trainer.groups import Group
from megarl.workers.answer import Answer
from megarl.workers.engine_recorder import EngineRecorder
from megarl.workers.episode_stream import EpisodeStream
from megarl.workers.store import RolloutSample, SampleTable
from tests.workers.small_engine import STOP_TOKEN, SmallEngine, config

GROUP_SIZE = 2
LONGEST = 6  # tokens of an answer; without this limit most have more
LIMITS = Limits(max_turns=10, max_response_length=LONGEST, max_context_length=400)
FAILS = 5  # row % 7 of episodes whose environment fails at once


class Letters:
    """A tokenizer with one id per character."""

    @staticmethod
    def template(messages):
        return "".join(f"[{one['content']}." for one in messages) + "]"

    def render(self, messages, tools=(), arguments=None):
        return self.template(messages)

    def encode_prompts(self, prompts, tools=(), arguments=None):
        return [[2 + ord(c) % 50 for c in self.render(one)] for one in prompts]

    def encode_responses(self, texts):
        return [[STOP_TOKEN if c == "." else 2 + ord(c) % 50 for c in text] for text in texts]

    def decode_batch(self, sequences):
        return ["".join(chr(48 + index) for index in ids if index != STOP_TOKEN) for ids in sequences]


CHAT = Chat(Letters(), [STOP_TOKEN])


def reply_of(row: int, texts: Sequence[str], salt: str = "") -> Reply:
    """Return what the environment of a row replies after these answers."""
    if not texts:
        if row % 7 == FAILS:
            return Reply(0, failure="planted", cause="raised")
        return Reply(0, [{"role": "user", "content": f"r{row}{salt}"}])
    is_last = len(texts) > row % 4
    return Reply(0, [] if is_last else [{"role": "tool", "content": f"{len(texts[-1])}{salt}"}], 0.5, is_last)


class Pool:
    """Environments that reply after a random number of looks.

    Args:
        rng: chooses the delays.
        salt: changes what they reply.
        of_agents: whether they are agents, of which some first ask for a second conversation, and are
            refused."""

    def __init__(self, rng: random.Random, salt: str = "", of_agents: bool = False) -> None:
        self.rng, self.salt, self.of_agents = rng, salt, of_agents
        self.refused: set[tuple[int, int]] = set()
        self.texts: dict[int, tuple[int, list[str]]] = {}
        self.due: dict[int, int] = {}
        self.num_opened = 0
        self.stood_still = 0.0

    def open(self, row: Mapping[str, Any]) -> int:
        number = self.num_opened
        self.num_opened += 1
        self.texts[number], self.due[number] = (row["row"], []), self.rng.randrange(4)
        return number

    def step(self, episode: int, text: str, sampled: Sampled) -> None:
        assert episode not in self.due
        self.texts[episode][1].append(text)
        self.due[episode] = self.rng.choice([0, 1, 2, 30])

    def refuse(self, reply: Reply, code: str, message: str, is_final: bool = False) -> bool:
        if self.of_agents:
            assert code == "too_many_branches" and "--max-branches is 1" in message and not is_final
            self.due[reply.episode] = self.rng.choice([0, 1, 2])
        return self.of_agents

    def extend(self, seconds: float) -> None:
        self.stood_still += seconds

    def end(self, episode: int) -> None:
        del self.texts[episode]
        self.due.pop(episode, None)

    def replies(self, timeout_s: float) -> list[Reply]:
        ready = [number for number, looks in self.due.items() if looks == 0]
        self.due = {number: looks - 1 for number, looks in self.due.items() if looks}
        row_and_texts = [(number, *self.texts[number]) for number in ready]
        if self.of_agents:
            return [self.request(number, row, texts) for number, row, texts in row_and_texts]
        return [
            replace(reply_of(row, texts, self.salt), episode=number) for number, row, texts in row_and_texts
        ]

    def request(self, number: int, row: int, texts: Sequence[str]) -> Reply:
        reply, asked = replace(reply_of(row, texts, self.salt), episode=number), (number, len(texts))
        if reply.done or reply.failure is not None:
            return reply
        if texts and row % 2 and asked not in self.refused:
            self.refused.add(asked)
            other = [{"role": "user", "content": "sub-agent"}]
            return replace(reply, messages=other, reward=0.0, request=Request(100 + len(texts)))
        return replace(reply, request=Request(len(texts), len(texts) - 1 if texts else None))

    def close(self) -> None:
        pass


class Job:
    """One engine with its stream, log and environments."""

    def __init__(
        self,
        folder: Path,
        seed: int = 0,
        replay: Path | None = None,
        weight_update: str = "recompute",
        of_agents: bool = False,
        salt: str = "",
        max_running: int = 3,
        limits: Limits = LIMITS,
        pool: Pool | None = None,
        engine: SmallEngine | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        job = replace(
            config(folder),
            streaming=StreamingConfig(staleness=2, weight_update=weight_update),
            episodes=EpisodeConfig(env="env.py:Env"),
        )
        self.engine = Engine(job, None, "")
        self.engine.inference = self.inference = engine or SmallEngine(max_running)
        self.table: SampleTable = SampleTable("train")
        self.samples: list[RolloutSample] = []
        self.pool = pool or Pool(self.rng, salt, of_agents)
        sampler = SimpleNamespace(
            environments=self.pool, chat=CHAT, limits=lambda purpose: limits, of_agents=of_agents
        )
        self.stream = EpisodeStream(
            self.engine, self.table, self.samples.extend, sampler, lambda answer: {"row": answer.row}
        )
        self.recorder = EngineRecorder(
            self.inference, self.stream.step, "rollout_0", folder, replay, timeout_s=5
        )
        self.stream.recorder = self.recorder
        self.engine.committing = self.recorder.committing

    def step(self, count: int) -> None:
        for _ in range(count):
            if self.stream.has_unfinished() and not self.recorder.is_held():
                self.stream.step()

    def finish(self) -> None:
        while self.stream.has_unfinished():
            self.stream.step()

    def watch(self) -> list[tuple]:
        """Return a list that gets what the engine computes in each of its steps."""
        computed, step = [], getattr(self.inference, self.inference.computing)

        def watched() -> None:
            before = self.inference.num_steps
            rows = [(one.request.key, len(one.tokens)) for one in self.inference.requests]
            step()
            if self.inference.num_steps > before:
                computed.append((self.inference.version, tuple(rows)))

        setattr(self.inference, self.inference.computing, watched)
        return computed

    def run(self, steps: Sequence[int], longest: int, after_step: Callable[[int], None] = lambda step: None):
        """Admit, sample and commit for some steps. Returns what the engine computed in each of its steps.

        Args:
            longest: most engine steps of a step.
            after_step: called after each commit."""
        computed = self.watch()
        if steps[0] == 1:
            self.recorder.start(0)
        for number in steps:
            self.admit(number, [2 * number, 2 * number + 1])
            self.step(self.rng.randrange(longest))
            self.recorder.catch_up()
            self.engine.commit(number)
            after_step(number)
        return computed

    def admit(self, step: int, visits: Sequence[int]) -> None:
        with self.recorder.taking_effect(Admit(step=step, version=step - 1, visits=tuple(visits))):
            self.stream.add(answers(*visits))

    def save(self, path: Path) -> list[int]:
        """Make the checkpoint of step 3 of `run`. Returns the groups that are not finished then."""
        with self.recorder.taking_effect(Checkpoint(step=3)):
            self.stream.save(path, self._left)
        return self._left

    @property
    def _left(self) -> list[int]:
        return sorted({2, 3, 4, 5, 6, 7} - {sample.group for sample in self.samples})

    def train(
        self, staleness: int, num_steps: int, longest: int
    ) -> Iterator[tuple[int, SampleBuffer, list[Group], list[RolloutSample]]]:
        """Let the driver's buffer decide which groups steps of three prompts take, and commit new weights after each.
        Yields number, buffer, groups and samples of each step after its commit.

        Args:
            longest: most engine steps between admission and the wait for the step's groups."""
        self.recorder.start(0)
        buffer, admitted, num_taken = SampleBuffer(3, staleness), 0, 0
        for step in range(1, num_steps + 1):
            new = buffer.num_to_admit(step - 1, num_steps)
            buffer.admit({visit: visit for visit in range(admitted, admitted + new)}, GROUP_SIZE, step - 1)
            admitted += new
            self.admit(step, [*buffer.issue([0] * new)])
            self.step(self.rng.randrange(longest))
            while True:
                buffer.add(sample.record((0,)) for sample in self.samples[num_taken:])
                num_taken = len(self.samples)
                if buffer.is_ready(step):
                    break
                self.stream.step()
            groups = buffer.take(step)
            ids = {sample for group in groups for sample in group.samples}
            if self.engine.config.streaming.weight_update == "wait":
                self.stream.drain()
                assert not self.inference.requests
            self.engine.commit(step)
            yield step, buffer, groups, [sample for sample in self.samples if sample.sample_id in ids]

    def lose_engine(self, other: Job, path: Path) -> None:
        """Sample six groups, lose the engine after some steps, and let another job go on with the rest."""
        for one in (self, other):
            one.recorder.start(0)
        self.stream.add(answers(*range(6)))
        self.step(25)
        self.inference.report()
        self.step(2)
        self.stream.give_up(path)
        assert not self.stream.has_unfinished()
        done = {sample.group for sample in self.samples}
        other.stream.load(answers(*[visit for visit in range(6) if visit not in done]), [path])
        other.finish()


def answers(*visits: int, purpose: str = "train") -> list[Answer]:
    asked = [(visit, GROUP_SIZE * visit + index) for visit in visits for index in range(GROUP_SIZE)]
    return [
        Answer(sample, visit, visit, [2 + visit % 40, 3], key=7 * sample + 1, purpose=purpose)
        for visit, sample in asked
    ]
