"""Define the partner of the model in an episode: an environment that is called, or an agent that calls.

`runner.play` sees only this protocol. `env_pool.EnvironmentPool` calls the user's class, and
`agent_pool.AgentPool` runs the user's program, whose requests arrive over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Request:
    """Where an agent's request belongs in the tree of its episode's turns."""

    number: int
    """Number of the request in its episode."""
    parent: int | None = None
    """Number of the turn whose conversation the messages continue; None: they begin another one."""
    count: int = 1
    """Number of answers."""
    token_ids: list[int] | None = None
    """The whole prompt, if the agent sends token ids in place of messages. The ids decide what it continues."""


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
    """Tools that an agent's request shows to the model, in OpenAI's form."""
    request: Request | None = None
    """An agent's request. None: the messages follow the last answer."""
    actor: str | None = None
    """Name of the actor that answers next; None is the first one."""
    rewards: dict[str, float | None] | None = None
    """Name of each actor -> its reward, where an environment tells them apart."""
    how: dict[str, Any] = field(default_factory=dict)
    """How an agent wants the next answer sampled: with `stop` strings, or by a JSON `schema`, so that it is
    not trained on."""
    num_unreadable: int = 0
    """With an agent's last reply: answers of the model with tool calls that cannot be read."""


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
    log_probs: list[float] = field(default_factory=list)
    """Log-prob of each of `ids`."""
    turn: int = 0
    """Number of the answer's turn among the turns of its episode, from 0."""
    request: int = 0
    """Number of the agent's request."""

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

    def refuse(self, reply: Reply, code: str, message: str, is_final: bool = False) -> bool:
        """Refuse the messages of a reply. Returns whether the episode may go on or still gives a reward, so
        that another reply follows.

        Args:
            is_final: whether the episode gets no further answer."""
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
