"""Check the flags of multi-turn episodes. What an environment cannot be combined with yet is an error."""

from __future__ import annotations

import ast
import difflib
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.config.environments import REMOTE, EnvSpec, environments, names, split_name
from megarl.config.episode_sections import settings_of_verifiers
from megarl.config.errors import Errors
from megarl.config.flags import algorithm_name, refuse_set
from megarl.config.installed import answer_parsers
from megarl.config.roles import configs_of_actors
from megarl.config.rules_files import bound_names
from megarl.config.rules_layout import Job
from megarl.config.schema import EpisodeConfig

_SERVED = ("openenv", *REMOTE)
_NO_EFFECT = "has no effect without --env. Leave it out."
_NO_VERIFIERS = "has no effect without --env-verifiers. Leave it out."
_NO_AGENT = "has no effect without --agent-command. Leave it out."
_OF_AGENTS = ("agent_timeout_s", "agent_host", "tool_call_parser", "reasoning_parser", "max_branches")
"""Flags of all episodes that other programs lead."""
_OF_PROCESSES = ("env_episodes_per_process", "env_python")
"""Flags of --env and --env-verifiers."""
_OF_VERIFIERS = ("env_verifiers_client", "env_verifiers_config")


def episodes(job: Job) -> Errors:
    """Yield an error per flag of episodes that does not fit --env or --agent-command, and per flag that these
    two cannot be combined with."""
    config = job.config
    env, agent = config.episodes.env, config.episodes.agent_command
    verifiers = config.episodes.env_verifiers
    if not config.episodes.has_agent:
        yield from refuse_set(config.episodes, _NO_AGENT, *_OF_AGENTS)
    if agent is None:
        yield from refuse_set(config.episodes, _NO_AGENT, "agent_num_processes")
    if env is None:
        yield from refuse_set(config.episodes, _NO_EFFECT, "env_timeout_s", "turn_rewards", "share_episodes")
    if env is None and verifiers is None:
        yield from refuse_set(config.episodes, _NO_EFFECT, *_OF_PROCESSES)
    if verifiers is None:
        yield from refuse_set(config.episodes, _NO_VERIFIERS, *_OF_VERIFIERS)
    if not config.episodes.has_turns:
        yield from refuse_set(config.sampling, _NO_EFFECT, "max_turns", "max_context_length")
        return
    if agent is not None:
        head, who = f"--agent-command ({agent})", "agent"
    elif verifiers is not None:
        head, who = f"--env-verifiers ({verifiers})", "environment"
    else:
        head, who = f"--env ({' '.join(env or ())})", "environment"
    if not job.uses_rollout:
        yield f"{head}: has no effect, as supervised fine-tuning samples nothing. Leave it out."
        return
    if agent is not None:
        yield from (f"{head}: {rule}" for rule in _agent(agent, env))
    elif verifiers is not None:
        yield from _verifiers(config.episodes, head)
    else:
        yield from environment_errors(config.episodes)
    yield from _parsers(config.episodes)
    yield from (f"{head}: {rule}" for rule in _combinations(job, who))
    if env is not None and config.episodes.share_episodes and config.placement.num_actors == 1:
        yield "--share-episodes: has no effect with one actor. Leave it out, or try --num-actors 2."
    if config.episodes.turn_rewards and env is not None:
        yield from (f"--turn-rewards: {rule}" for rule in _turn_rewards(job))
    sampling = config.sampling
    limit, prompt = sampling.max_context_length, sampling.max_prompt_length
    if limit is not None and limit <= prompt:
        yield (
            f"--max-context-length ({limit}): must be above --max-prompt-length ({prompt}), or no token is "
            f"left for an answer. Try {prompt + sampling.max_response_length}."
        )


def environment_errors(config: EpisodeConfig) -> Errors:
    """Yield an error per value of --env and --env-python that cannot be used."""
    specs = environments(config)
    head, given = f"--env ({' '.join(config.env or ())})", names(specs)
    for spec in specs:
        rules = _file(spec.target) if spec.scheme is None else _adapted(spec)
        yield from (f"--env ({spec}): {rule}" for rule in rules)
    if not specs or len(given) != len(specs) > 1:
        wanted = " ".join(f"NAME={spec.target}" for spec in specs)
        yield (
            f"{head}: must be one environment, or several that each have a name, the data_source of their rows. Try "
            f"{wanted or 'my_env.py:Env'}."
        )
    if doubled := sorted({name for name in given if given.count(name) > 1}):
        yield f"{head}: two environments are called {doubled[0]!r}. A row has one environment: give other names."
    if "" in given:
        yield f"{head}: a name must not be empty. Give the data_source of the environment's rows."
    yield from _pythons(config.env_python or (), given)


def _adapted(spec: EnvSpec) -> Iterator[str]:
    """Yield an error if --env names no environment of another library."""
    scheme, name = spec.scheme, spec.target.partition(":")[2]
    address = spec.target if spec.is_remote else name
    if scheme in _SERVED and not re.fullmatch(r"https?://[^/\s]+\S*", address):
        yield f"must be the URL of a server. Try {'openenv:' if scheme == 'openenv' else ''}http://127.0.0.1:8100."
    elif not name:
        yield f"must be SCHEME:NAME. Try {'skyrl-gym:gsm8k' if scheme == 'skyrl-gym' else 'reasoning-gym:leg_counting'}."
    if spec.is_remote and spec.python is not None:
        yield f"is played by a server, and --env-python ({spec.python}) would have no effect. Give it to `megarl env-serve`."


def _pythons(values: Sequence[str], given: Sequence[str]) -> Errors:
    """Yield an error per value of --env-python that cannot be used. `given`: the names of --env."""
    seen: set[str | None] = set()
    for value in values:
        name, python = split_name(value)
        head = f"--env-python ({value})"
        if shutil.which(python) is None:
            yield (
                f"{head}: there is no such program. Try the bin/python of a virtual environment, or leave it out."
            )
        if name is not None and name not in given:
            yield f"{head}: no environment of --env is called {name!r}. Try {' or '.join(given) or python}."
        if name in seen:
            yield f"{head}: is the second interpreter of the same environment. Leave one out."
        seen.add(name)


def _agent(command: str, env: Sequence[str] | None) -> Iterator[str]:
    """Yield an error if --agent-command cannot be run."""
    if env is not None:
        yield (
            f"an episode is played by an agent or by an environment, and --env ({' '.join(env)}) is given. Leave "
            "one out."
        )
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield f'cannot be split into words: {error}. Try "python agent.py".'
        return
    if not words:
        yield 'must name a program. Try "python agent.py".'
    elif shutil.which(words[0]) is None:
        yield f'there is no program {words[0]}. Try "python agent.py".'


def _verifiers(config: EpisodeConfig, head: str) -> Iterator[str]:
    """Yield an error per flag that --env-verifiers needs or cannot have."""
    env = None if config.env is None else " ".join(config.env)
    for flag, value in (("--env", env), ("--agent-command", config.agent_command)):
        if value is not None:
            yield f"{head}: verifiers plays the episodes, and {flag} ({value}) would too. Leave one of them out."
    if len(config.env_python or ()) != 1:
        yield (
            f"{head}: needs --env-python, one Python that has verifiers and the environment. Try the bin/python of "
            "a virtual environment in which you ran `pip install verifiers`."
        )
    yield from _pythons(config.env_python or (), ())
    try:
        settings_of_verifiers(config)
    except ValueError as error:
        yield f"--env-verifiers-config ({config.env_verifiers_config}): {error}."
    if config.env_verifiers_client == "train" and config.tool_call_parser is not None:
        yield (
            f"--tool-call-parser ({config.tool_call_parser}): with --env-verifiers-client train verifiers parses the "
            "answers itself. Leave it out."
        )


def _parsers(config: EpisodeConfig) -> Iterator[str]:
    """Yield an error per parser that the installed vLLM does not have."""
    for flag, kind, name in (
        ("--tool-call-parser", "tool_parsers", config.tool_call_parser),
        ("--reasoning-parser", "reasoning", config.reasoning_parser),
    ):
        if name is None:
            continue
        names = answer_parsers(kind)
        if not names:
            yield f"{flag} ({name}): is a parser of vLLM, which is not installed. Leave it out."
        elif name not in names:
            near = difflib.get_close_matches(name, names, 1) or [
                "hermes" if kind == "tool_parsers" else "qwen3"
            ]
            yield f"{flag} ({name}): must be one of vLLM's: {', '.join(names)}. Try {near[0]}."


def _file(env: str) -> Iterator[str]:
    """Yield an error if --env does not name a class in a file. The file is read, not run."""
    name, _, wanted = env.rpartition(":")
    path = Path(name)
    if not name or not wanted.isidentifier():
        yield f"must be path/to/file.py:Class.{_advice(Path(name or env))}"
        return
    if not path.is_file():
        yield f"there is no file {name}. Its path is relative to the folder in which you are."
        return
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        yield f"{path} is not Python: {error}."
        return
    bound = bound_names(tree)
    if wanted not in bound and "*" not in bound:
        yield f"{path} defines no {wanted}.{_advice(path)}"


def _advice(path: Path) -> str:
    """Return a sentence that proposes a class of the file that has the methods of an environment."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return " Give a class with the methods reset and step."
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = {getattr(one, "name", None) for one in node.body}
            if {"reset", "step"} <= methods:
                return f" Try {path}:{node.name}."
    return " Give a class with the methods reset and step."


def _turn_rewards(job: Job) -> Iterator[str]:
    """Yield an error per flag that --turn-rewards cannot be combined with."""
    for suffix, of_actor in configs_of_actors(job.config).items():
        algorithm = of_actor.algorithm
        if not algorithm.takes_turn_rewards:
            flag, value = f"--algorithm{suffix}", algorithm_name(type(algorithm))
            advice = "Try grpo."
            if (own := getattr(algorithm, "advantage", None)) is not None:
                flag, value, advice = "--advantage", own, "Leave one of them out."
            yield f"{flag} ({value}) has one advantage for all answers of an episode. {advice}"
        if getattr(algorithm, "kl_mode", "none") == "reward":
            yield "--kl-mode (reward) belongs to no single answer. Try --kl-mode loss."
        if (buffer := getattr(algorithm, "overlong_buffer", None)) is not None:
            yield f"--overlong-buffer ({buffer}) changes the reward of the whole episode. Leave one of them out."
    if job.config.episodes.share_episodes:
        yield "--share-episodes has one reward per actor and episode. Leave one of them out."


def _combinations(job: Job, who: str) -> Iterator[str]:
    """Yield an error per flag that --env and --agent-command cannot be combined with.

    Args:
        who: what plays the episodes, "environment" or "agent"."""
    config = job.config
    rules = [("--reward", config.data.reward), ("--reward-function", config.data.reward_function)]
    for flag, value in (
        *(rules if config.episodes.agent_command is None else []),
        ("--reward-model", " ".join(config.reward_models.reward_model) or None),
    ):
        if value is not None:
            yield f"the {who} gives the rewards, and {flag} ({value}) would too. Leave one of them out."
    if (limit := config.streaming.max_tokens_per_step) is not None:
        yield (
            f"--max-tokens-per-step ({limit}) stops one long response until the next version of the weights, and "
            "an episode has several. Leave it out."
        )
    tp = config.rollout.tensor_parallel_size
    if job.engine == "in-process" and tp > 1:
        yield (
            f"an engine in the workers with --rollout-tensor-parallel-size ({tp}) takes its steps on several "
            f"ranks, and only one of them hears the {who}. Try --rollout-engine out-of-process."
        )
    if config.experts.moe_routing_replay == "engine":
        yield (
            "--moe-routing-replay (engine) replays the experts of one request, and an episode has several. "
            "Try --moe-routing-replay policy."
        )
