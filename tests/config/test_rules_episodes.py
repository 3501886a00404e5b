"""The flags of multi-turn episodes: what each rule says, and that what it proposes is right.

pytest tests/config/test_rules_episodes.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.installed import answer_parsers
from megarl.algorithms import REGISTRY
from megarl.config.check import check
from megarl.config.environments import EnvSpec, environments
from megarl.config.hf_config import ModelShape
from megarl.config.loader import load_config
from megarl.config.reward_models import needs_ground_truth, uses_rule_reward
from megarl.config.user_files import user_files

ENV = "class Env:\n    def reset(self, row): ...\n    def step(self, text): ...\n"
OWN = f"{Path(__file__).with_name('own_advantage.py')}:centred"
IS = "--env env.py:Env"


@pytest.fixture
def errors(job, tmp_path, monkeypatch):
    """errors("--flag value") -> the errors of the job with these flags on top, and with env.py beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "broken.py").write_text("class Env\n")

    def find(flags: str) -> list[str]:
        config = load_config([job, *(OWN if word == "OWN" else word for word in flags.split())], REGISTRY)
        return check(config, ModelShape.load(config.model.model), world_size=2)

    return find


VERIFIERS = "--env-verifiers my-env --max-context-length 200"
RULES = {
    "verifiers without a Python": (
        VERIFIERS,
        "--env-verifiers (my-env): needs --env-python, one Python that has verifiers and the environment. Try the "
        "bin/python of a virtual environment in which you ran `pip install verifiers`.",
        f"{VERIFIERS} --env-python python3",
    ),
    "verifiers and an environment": (
        f"{VERIFIERS} --env-python python3 {IS}",
        "--env-verifiers (my-env): verifiers plays the episodes, and --env (env.py:Env) would too. Leave one of them out.",
        f"{VERIFIERS} --env-python python3",
    ),
    "verifiers and a rule": (
        f"{VERIFIERS} --env-python python3 --reward auto",
        "--env-verifiers (my-env): the environment gives the rewards, and --reward (auto) would too. Leave one of them "
        "out.",
        f"{VERIFIERS} --env-python python3",
    ),
    "settings that are no JSON": (
        f"{VERIFIERS} --env-python python3 --env-verifiers-config env.py",
        "--env-verifiers-config (env.py): cannot be read as JSON: Expecting value: line 1 column 1 (char 0).",
        f"{VERIFIERS} --env-python python3",
    ),
    "two parsers": (
        f"{VERIFIERS} --env-python python3 --env-verifiers-client train --tool-call-parser hermes",
        "--tool-call-parser (hermes): with --env-verifiers-client train verifiers parses the answers itself. Leave it out.",
        f"{VERIFIERS} --env-python python3 --env-verifiers-client train",
    ),
    "a client without verifiers": (
        "--env-verifiers-client train",
        "--env-verifiers-client (train): has no effect without --env-verifiers. Leave it out.",
        f"{VERIFIERS} --env-python python3 --env-verifiers-client train",
    ),
    "branches without an agent": (
        "--max-branches 3",
        "--max-branches (3): has no effect without --agent-command. Leave it out.",
        "--max-branches 3 --agent-command python3 --max-context-length 200",
    ),
    "turns without an environment": (
        "--max-turns 3",
        "--max-turns (3): has no effect without --env. Leave it out.",
        f"--max-turns 3 {IS}",
    ),
    "a context without an environment": (
        "--max-context-length 200",
        "--max-context-length (200): has no effect without --env. Leave it out.",
        f"--max-context-length 200 {IS}",
    ),
    "a deadline without an environment": (
        "--env-timeout-s 3",
        "--env-timeout-s (3): has no effect without --env. Leave it out.",
        f"--env-timeout-s 3 {IS}",
    ),
    "a Python without an environment": (
        "--env-python python3",
        "--env-python (python3): has no effect without --env. Leave it out.",
        f"--env-python python3 {IS}",
    ),
    "no such Python": (
        f"--env-python no/python {IS}",
        "--env-python (no/python): there is no such program. Try the bin/python of a virtual environment, or leave it "
        "out.",
        f"--env-python python3 {IS}",
    ),
    "environments without names": (
        "--env env.py:Env a=env.py:Env",
        "--env (env.py:Env a=env.py:Env): must be one environment, or several that each have a name, the data_source "
        "of their rows. Try NAME=env.py:Env NAME=env.py:Env.",
        None,
    ),
    "an environment of a library without a name": (
        "--env reasoning-gym:",
        "--env (reasoning-gym:): must be SCHEME:NAME. Try reasoning-gym:leg_counting.",
        "--env reasoning-gym:leg_counting",
    ),
    "a served environment without an address": (
        "--env openenv:localhost",
        "--env (openenv:localhost): must be the URL of a server. Try openenv:http://127.0.0.1:8100.",
        "--env openenv:http://127.0.0.1:8000/?a=b",
    ),
    "a server without an address": (
        "--env a=http:// b=env.py:Env",
        "--env (a=http://): must be the URL of a server. Try http://127.0.0.1:8100.",
        "--env a=http://127.0.0.1:8100 b=env.py:Env",
    ),
    "a Python of a server": (
        "--env http://h:1 --env-python python3",
        "--env (http://h:1): is played by a server, and --env-python (python3) would have no effect. Give it to "
        "`megarl env-serve`.",
        "--env http://h:1",
    ),
    "two environments of a name": (
        "--env a=env.py:Env a=env.py:Env",
        "--env (a=env.py:Env a=env.py:Env): two environments are called 'a'. A row has one environment: give other "
        "names.",
        None,
    ),
    "a named environment without a file": (
        "--env a=no.py:Env b=env.py:Env",
        "--env (a=no.py:Env): there is no file no.py.",
        None,
    ),
    "a Python for no environment": (
        f"{IS} --env-python b=python3",
        "--env-python (b=python3): no environment of --env is called 'b'. Try python3.",
        f"{IS} --env-python python3",
    ),
    "two Pythons of an environment": (
        f"{IS} --env-python python3 sh",
        "--env-python (sh): is the second interpreter of the same environment. Leave one out.",
        f"{IS} --env-python python3",
    ),
    "no class": (
        "--env env.py",
        "--env (env.py): must be path/to/file.py:Class. Try env.py:Env.",
        "--env env.py:Env",
    ),
    "no file": (
        "--env no.py:Env",
        "--env (no.py:Env): there is no file no.py. Its path is relative to the folder in which you are.",
        IS,
    ),
    "another class": ("--env env.py:Enf", "--env (env.py:Enf): env.py defines no Enf. Try env.py:Env.", IS),
    "no Python": ("--env broken.py:Env", "--env (broken.py:Env): broken.py is not Python: expected ':'", IS),
    "a reward": (
        f"{IS} --reward math",
        "--env (env.py:Env): the environment gives the rewards, and --reward (math) would too. Leave one of "
        "them out.",
        IS,
    ),
    "partial rollouts": (
        f"{IS} --staleness 1 --max-tokens-per-step 8",
        "--env (env.py:Env): --max-tokens-per-step (8) stops one long response until the next version of the "
        "weights, and an episode has several. Leave it out.",
        f"{IS} --staleness 1",
    ),
    "tensor parallelism in the workers": (
        f"{IS} --rollout-tensor-parallel-size 2",
        "--env (env.py:Env): an engine in the workers with --rollout-tensor-parallel-size (2) takes its steps "
        "on several ranks, and only one of them hears the environment. Try --rollout-engine out-of-process.",
        f"{IS} --rollout-tensor-parallel-size 2 --rollout-engine out-of-process",
    ),
    "replayed experts": (
        f"{IS} --moe-routing-replay engine",
        "--env (env.py:Env): --moe-routing-replay (engine) replays the experts of one request, and an episode "
        "has several. Try --moe-routing-replay policy.",
        None,
    ),
    "a context without room": (
        f"{IS} --max-context-length 64",
        "--max-context-length (64): must be above --max-prompt-length (64), or no token is left for an answer. "
        "Try 128.",
        f"{IS} --max-context-length 128",
    ),
    "a context beyond the model": (
        f"{IS} --max-context-length 513",
        "--max-context-length (513): must be at most the model's max_position_embeddings (512). Try 512.",
        f"{IS} --max-context-length 512",
    ),
    "rewards of answers without an environment": (
        "--turn-rewards",
        "--turn-rewards (True): has no effect without --env. Leave it out.",
        f"--turn-rewards {IS}",
    ),
    "rewards of answers for a critic": (
        f"{IS} --turn-rewards --algorithm ppo",
        "--turn-rewards: --algorithm (ppo) has one advantage for all answers of an episode. Try grpo.",
        f"{IS} --turn-rewards --algorithm grpo",
    ),
    "rewards of answers for a function of one's own": (
        f"{IS} --turn-rewards --algorithm grpo --advantage OWN",
        f"--turn-rewards: --advantage ({OWN}) has one advantage for all answers of an episode. Leave one of them out.",
        f"{IS} --algorithm grpo --advantage OWN",
    ),
    "rewards of answers and a KL of episodes": (
        f"{IS} --turn-rewards --kl-mode reward --kl-coef 0.1",
        "--turn-rewards: --kl-mode (reward) belongs to no single answer. Try --kl-mode loss.",
        f"{IS} --turn-rewards --kl-mode loss --kl-coef 0.1",
    ),
    "rewards of answers and a penalty of episodes": (
        f"{IS} --turn-rewards --overlong-buffer 8",
        "--turn-rewards: --overlong-buffer (8) changes the reward of the whole episode. Leave one of them out.",
        f"{IS} --overlong-buffer 8",
    ),
    "an agent's deadline without an agent": (
        "--agent-timeout-s 3",
        "--agent-timeout-s (3): has no effect without --agent-command. Leave it out.",
        "--agent-timeout-s 3 --agent-command sh --reward math",
    ),
    "a tool parser without an agent": (
        "--tool-call-parser hermes",
        "--tool-call-parser (hermes): has no effect without --agent-command. Leave it out.",
        "--tool-call-parser hermes --agent-command sh",
    ),
    "no tool parser of vLLM": (
        "--agent-command sh --tool-call-parser hermess",
        "--tool-call-parser (hermess): must be one of vLLM's: "
        f"{', '.join(answer_parsers('tool_parsers'))}. Try hermes.",
        "--agent-command sh --tool-call-parser llama3_json",
    ),
    "no reasoning parser of vLLM": (
        "--agent-command sh --reasoning-parser think",
        f"--reasoning-parser (think): must be one of vLLM's: {', '.join(answer_parsers('reasoning'))}. Try qwen3.",
        "--agent-command sh --reasoning-parser deepseek_r1",
    ),
    "an agent and an environment": (
        f"{IS} --agent-command sh",
        "--agent-command (sh): an episode is played by an agent or by an environment, and --env (env.py:Env) is "
        "given. Leave one out.",
        "--agent-command sh",
    ),
    "an environment's deadline for an agent": (
        "--agent-command sh --env-timeout-s 3",
        "--env-timeout-s (3): has no effect without --env. Leave it out.",
        "--agent-command sh --agent-timeout-s 3",
    ),
    "rewards of answers by an agent": (
        "--agent-command sh --turn-rewards",
        "--turn-rewards (True): has no effect without --env. Leave it out.",
        "--agent-command sh",
    ),
    "no program": (
        "--agent-command no-such-program",
        '--agent-command (no-such-program): there is no program no-such-program. Try "python agent.py".',
        "--agent-command sh --max-turns 3",
    ),
    "an open quote": (
        "--agent-command 'sh",
        "--agent-command ('sh): cannot be split into words: No closing quotation.",
        "--agent-command sh",
    ),
    "fine-tuning": (
        f"--algorithm sft {IS}",
        "--env (env.py:Env): has no effect, as supervised fine-tuning samples nothing. Leave it out.",
        "--algorithm sft",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_and_what_it_proposes(name, errors):
    flags, wanted, right = RULES[name]
    found = errors(flags)
    assert any(error.startswith(wanted) for error in found), found
    assert right is None or errors(right) == []


def test_each_environment_has_its_interpreter_and_its_files(job, tmp_path, errors):
    assert not errors("--env a=env.py:Env b/c=env.py:Env --env-python b/c=sh python3")
    config = load_config(
        [job, *"--env a=env.py:Env b/c=env.py:Env --env-python b/c=sh python3".split()], REGISTRY
    )
    assert environments(config.episodes) == (
        EnvSpec("a", "env.py:Env", "python3"),
        EnvSpec("b/c", "env.py:Env", "sh"),
    )
    assert [*user_files(config)] == ["env a=", "env b/c="]
    folder = tmp_path / "lr=1"
    folder.mkdir()
    (folder / "env.py").write_text(ENV)
    config = load_config([job, "--env", f"{folder}/env.py:Env"], REGISTRY)
    assert environments(config.episodes) == (EnvSpec(None, f"{folder}/env.py:Env"),)  # a path, no name
    assert [*user_files(config)] == ["env"]


def test_an_environment_is_the_rule_that_scores(job, tmp_path, errors):
    config = load_config([job, *IS.split()], REGISTRY)
    assert uses_rule_reward(config) and not needs_ground_truth(config)
    assert config.sampling.max_length == 128 and config.max_sampled_length == 64 * 10
    config = load_config([job, *IS.split(), "--max-context-length", "300", "--max-turns", "2"], REGISTRY)
    assert config.sampling.max_length == 300 and config.max_sampled_length == 64 * 2
    assert load_config([job], REGISTRY).max_sampled_length == 64
