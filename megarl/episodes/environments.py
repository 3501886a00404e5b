"""Define the partner of the model in an episode: an environment that is called, or an agent that calls.

`runner.play` sees only this protocol. `env_pool.EnvironmentPool` calls the user's class, and
`agent_pool.AgentPool` runs the user's program, whose requests arrive over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of an environment to one call, or the reason why there is none."""

    episode: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    reward: float | None = None
    done: bool = False
    failure: str | None = None
    """Why the call failed. The episode must be ended."""
    cause: str | None = None
    """One of `env_messages.CAUSES`."""
    max_tokens: int | None = None
    """Tokens of the next answer at most, if an agent wants fewer than the job allows."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools that an agent's first request shows to the model, in OpenAI's form."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of an answer, which the agent is told."""

    num_prompt: int
    num_sampled: int
    is_cut: bool
    """Whether the answer ended at its limit of tokens."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token ids of an answer, and of the prompt before it."""

    prompt: list[int]
    ids: list[int]
    is_cut: bool
    """Whether the answer ended at its limit of tokens."""

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt), len(self.ids), self.is_cut)


class Environments(Protocol):
    """Open episodes, which reply in any order."""

    def open(self, row: Mapping[str, Any]) -> int:
        """Start an episode on a row of the data set, and return its number."""
        ...

    def step(self, episode: int, text: str, sampled: Sampled) -> None:
        """Send the model's answer to the environment or agent of an episode. `replies` returns the reply."""
        ...

    def refuse(self, episode: int, code: str, message: str) -> bool:
        """Refuse the last messages of an episode. Returns whether the episode may go on or still gives a
        reward, so that a reply follows."""
        ...

    def end(self, episode: int) -> None:
        """Forget an episode. No reply follows."""
        ...

    def replies(self, timeout_s: float) -> list[Reply]:
        """Return the replies that have arrived, in order. Waits at most `timeout_s` seconds for the first."""
        ...

    def extend(self, seconds: float) -> None:
        """Note that no answer could be given for so long, because the engine stood still. The time does not
        count against an agent."""
        ...

    def close(self) -> None:
        """End all processes of environments or agents."""
        ...
