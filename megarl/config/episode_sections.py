"""Define the section of the configuration tree about episodes of several turns, with an environment or an
agent.

Each field is one flag, see schema.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from megarl.config.errors import Count, Seconds, Section, at_least, at_most, section


@section
class EpisodeConfig(Section):
    """multi-turn episodes"""

    env: tuple[str, ...] | None = None
    """Your own environment, path/to/file.py:Class, with reset(row) -> messages, step(text) -> messages,
    reward, done; or reasoning-gym:TASK, skyrl-gym:NAME, openenv:URL, http://HOST:PORT of megarl env-serve. It
    gives the rewards, in place of --reward. Several: NAME=VALUE ...; a row has the one of its data_source."""
    env_timeout_s: Seconds = 60.0
    """With --env: seconds that one call of reset or step may take; then its episode has failed."""
    env_episodes_per_process: Count = 16
    """With --env: episodes that share one process of the environment. Their calls overlap. 1: none share
    one."""
    env_python: tuple[str, ...] | None = None
    """With --env: the Python that runs the environment, 3.9 or later, e.g. venv/bin/python, with packages of
    its own. megarl need not be installed there. NAME=PYTHON: that of one environment. Default: megarl's."""
    turn_rewards: bool = False
    """With --env and --algorithm grpo: an answer is judged by the rewards from it on, see docs/agents.md."""
    agent_command: str | None = None
    """Your own agent, e.g. "python agent.py": a process per episode that calls the model through an SDK and
    prints the reward, or --reward or --reward-function judges its last answer. See docs/agents.md."""
    share_episodes: bool = False
    """With --env and --num-actors 2 or more: all actors play in the same episodes, each with its own
    conversation and reward. The environment says who answers next, see docs/agents.md. By default each has
    its own episodes."""
    agent_timeout_s: Seconds = 600.0
    """With --agent-command: seconds of an episode, but for those in which the engine stands still; then it
    fails."""
    tool_call_parser: str | None = None
    """With --agent-command: vLLM's parser that finds tool calls in answers, e.g. hermes (Qwen2.5, Qwen3),
    llama3_json or deepseek_v31. Without it requests with tools are refused."""
    env_verifiers: str | None = None
    """An environment of the package verifiers, by its id, with --env-python as the Python that has both.
    verifiers leads the rollouts and scores them, in place of --env and --reward. See docs/agents.md."""
    env_verifiers_client: Literal["eval", "train"] = "eval"
    """With --env-verifiers: verifiers' client. eval sends messages, train the token ids that its renderers
    make."""
    env_verifiers_config: str | None = None
    """With --env-verifiers: a JSON file with fields of verifiers' EnvConfig, e.g.
    {"agent": {"max_turns": 4}}. By default agents run in processes of the machine."""
    reasoning_parser: str | None = None
    """With --agent-command: vLLM's parser that takes the reasoning out of answers, e.g. qwen3 or
    deepseek_r1."""
    agent_num_processes: Count = 16
    """With --agent-command: agents per engine that run at a time. The others wait."""
    agent_host: str = "127.0.0.1"
    """With --agent-command: interface of the agents' endpoint, which asks for a key and does not encrypt."""
    max_branches: Annotated[int, at_least(1), at_most(4096)] = 16
    """With --agent-command and --env-verifiers: conversations of an episode, each a sample for training.
    Further ones are refused."""

    @property
    def has_turns(self) -> bool:
        """Whether the job plays episodes of several turns."""
        return self.env is not None or self.has_agent

    @property
    def has_agent(self) -> bool:
        """Whether a program of its own leads the episodes, and asks the model at an endpoint."""
        return self.agent_command is not None or self.env_verifiers is not None


def settings_of_verifiers(episodes: EpisodeConfig) -> dict[str, Any]:
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
