"""Let environments of the package `verifiers` play episodes against the endpoint of `proxy.Proxy`.

verifiers leads the rollout and scores it, in a Python of its own; megarl samples and records. A process holds several
rollouts at a time (verifiers_env.py), so the package is imported once for all of them. To `runner.play` the pool is
one of agents: each rollout has a key of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.environments import EnvSpec
from megarl.episodes.agent_pool import AgentPool
from megarl.episodes.answers import AnswerParser
from megarl.episodes.env_pool import EnvironmentPool
from megarl.episodes.environments import Reply, Sampled

_ADAPTER = f"{Path(__file__).with_name('verifiers_env.py')}:Rollout"
_NOTHING = Sampled([], [], is_cut=False)


@dataclass(frozen=True, slots=True)
class Verifiers:
    """Which environment of `verifiers` is played, and how.

    Example: Verifiers("my-env", python="envs/bin/python")"""

    name: str
    """Id of the environment, as its loader takes it."""
    python: str
    """Interpreter that has `verifiers` and the environment."""
    client: str = "eval"
    """Client of verifiers that asks: "eval" sends messages, "train" token ids."""
    tokenizer: str = ""
    """Folder of the tokenizer with which the client "train" renders messages."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of its configuration."""


class VerifiersPool(AgentPool):
    """The rollouts of open episodes, and the endpoint that they call.

    Args:
        verifiers: the environment.
        timeout_s: deadline of a rollout.
        num_per_process: rollouts that share a process at a time.
        max_length, host, parser, vocab_size: as in `AgentPool`."""

    def __init__(
        self,
        verifiers: Verifiers,
        timeout_s: float,
        num_per_process: int,
        max_length: int,
        host: str = "127.0.0.1",
        parser: AnswerParser | None = None,
        vocab_size: int = 0,
    ) -> None:
        self._verifiers = verifiers
        adapter = EnvSpec(None, _ADAPTER, verifiers.python)
        self._rollouts = EnvironmentPool([adapter], timeout_s, num_per_process)
        self._episode_of: dict[int, int] = {}  # number in the pool of rollouts -> episode
        self._number_of: dict[int, int] = {}
        super().__init__("verifiers", timeout_s, 0, max_length, host, parser, vocab_size=vocab_size)

    def close(self) -> None:
        super().close()
        self._rollouts.close()

    def end(self, episode: int) -> None:
        """End an episode's rollout, and forget it."""
        number = self._number_of.pop(episode, None)
        if number is not None:
            del self._episode_of[number]
            self._rollouts.end(number)
            self.proxy.close(episode)
        super().end(episode)

    def extend(self, seconds: float) -> None:
        self._rollouts.prolong(seconds)

    def is_open(self, episode: int) -> bool:
        return episode in self._number_of

    def _start(self) -> None:
        """Start all waiting episodes. They wait in verifiers' event loops, which takes no process each."""
        while self._waiting:
            episode = next(iter(self._waiting))
            row = self._waiting.pop(episode)
            key = self.proxy.open(episode)
            how = {**asdict(self._verifiers), "url": self.proxy.url, "key": key}
            number = self._rollouts.open({"row": row, "how": how})
            self._episode_of[number], self._number_of[episode] = episode, number

    def _endings(self, timeout_s: float) -> list[Reply]:
        self._wait(self._rollouts.descriptors, timeout_s)
        found = []
        for reply in self._rollouts.replies(0.0):
            if reply.episode not in self._episode_of:
                continue
            if reply.failure is None and not reply.done:  # the rollout is set up; this call runs it
                self._rollouts.step(reply.episode, "", _NOTHING)
                continue
            found.append(self._last(self._episode_of[reply.episode], reply))
        return found

    def _last(self, episode: int, reply: Reply) -> Reply:
        """Return the last reply of an episode, given that of its rollout."""
        if reply.failure is not None:
            return Reply(episode, failure=reply.failure, cause=reply.cause)
        if not self._num_answers[episode]:
            why = "the rollout ended without an answer of the model that can be trained on"
            return Reply(episode, failure=why, cause="malformed")
        return Reply(episode, reward=reply.reward, done=True)
