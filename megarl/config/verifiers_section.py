"""Define the flags of episodes that other programs lead: agents, and environments of the package verifiers."""

from __future__ import annotations

from typing import Annotated, Literal

from megarl.config.errors import Section, at_least, at_most, section


@section
class LedEpisodes(Section):
    """multi-turn episodes that are led from outside"""

    env_verifiers: str | None = None
    """An environment of the package verifiers, by its id, with --env-python as the Python that has both. verifiers
    leads the rollouts and scores them, in place of --env and --reward. See docs/agents.md."""
    env_verifiers_client: Literal["eval", "train"] = "eval"
    """With --env-verifiers: verifiers' client. eval sends messages, train the token ids that its renderers make."""
    max_branches: Annotated[int, at_least(1), at_most(4096)] = 16
    """With --agent-command and --env-verifiers: conversations of an episode, each a sample for training. Further ones
    are refused."""
