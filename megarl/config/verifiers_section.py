"""Define the flags of episodes that other programs lead: agents, and environments of the package verifiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from megarl.config.errors import Count, Positive, Section, at_least, at_most, section


@section
class LedEpisodes(Section):
    """multi-turn episodes that are led from outside"""

    env_verifiers: str | None = None
    """An environment of the package verifiers, by its id, with --env-python as the Python that has both. verifiers
    leads the rollouts and scores them, in place of --env and --reward. See docs/agents.md."""
    env_verifiers_client: Literal["eval", "train"] = "eval"
    """With --env-verifiers: verifiers' client. eval sends messages, train the token ids that its renderers make."""
    env_verifiers_config: str | None = None
    """With --env-verifiers: a JSON file with fields of verifiers' EnvConfig, e.g. {"agent": {"max_turns": 4}}. By
    default agents run in processes of the machine."""
    agent_timeout_s: Positive = 600.0
    """With --agent-command: seconds of an episode, but for those in which the engine stands still; then it fails."""
    tool_call_parser: str | None = None
    """With --agent-command: vLLM's parser that finds tool calls in answers, e.g. hermes (Qwen2.5, Qwen3),
    llama3_json or deepseek_v31. Without it requests with tools are refused."""
    reasoning_parser: str | None = None
    """With --agent-command: vLLM's parser that takes the reasoning out of answers, e.g. qwen3 or deepseek_r1."""
    agent_num_processes: Count = 16
    """With --agent-command: agents per engine that run at a time. The others wait."""
    agent_host: str = "127.0.0.1"
    """With --agent-command: interface of the agents' endpoint, which asks for a key and does not encrypt."""
    max_branches: Annotated[int, at_least(1), at_most(4096)] = 16
    """With --agent-command and --env-verifiers: conversations of an episode, each a sample for training. Further ones
    are refused. With --staleness above 0 there is one."""


def settings_of_verifiers(episodes: LedEpisodes) -> dict[str, Any]:
    """Return the fields of --env-verifiers-config. Raises: ValueError if the file holds no JSON object."""
    path = episodes.env_verifiers_config
    if path is None:
        return {}
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError('must hold an object, e.g. {"agent": {"max_turns": 4}}')
    return found
