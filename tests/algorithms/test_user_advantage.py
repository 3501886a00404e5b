"""Check --advantage path/to/file.py:function: equal to the built-in advantages of the same formula, and errors by
name."""

import re

import pytest
import torch

from megarl.algorithms import GRPO, REGISTRY
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config

NEEDED = "--algorithm grpo --model m --train-data d.jsonl --save s --train-iters 1".split()
SOURCE = """
import torch

def centred(rewards, group_ids, lengths):
    found = torch.full_like(rewards, float("nan"))
    for group in group_ids.unique():
        members = group_ids == group
        found[members] = rewards[members] - rewards[members].nanmean()
    return found

def by_length(rewards, group_ids, lengths):
    return rewards / lengths

def total(rewards, group_ids, lengths):
    return rewards.nansum()

def mean_of_all(rewards, group_ids, lengths):
    return rewards - rewards.mean()

def short(rewards):
    return rewards

number = 3
"""
REWARDS = torch.tensor([1.0, 0.0, float("nan"), 0.5, 2.0, 0.25])
GROUPS = torch.tensor([7, 7, 7, 9, 9, 9])
LENGTHS = torch.tensor([2, 4, 5, 5, 8, 1])


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return file


def advantages(name):
    return GRPO(advantage=name).sample_advantages(REWARDS, GROUPS, LENGTHS)


def test_a_function_of_the_same_formula_gives_the_built_in_advantages(path):
    """Means of three fp32 numbers, here and in fp64: 1e-6."""
    builtin = GRPO(normalize_advantages_by_std=False).sample_advantages(REWARDS, GROUPS, LENGTHS)
    torch.testing.assert_close(advantages(f"{path}:centred"), builtin, atol=1e-6, rtol=0)


def test_lengths_and_failed_rewards(path):
    wanted = torch.tensor([0.5, 0.0, 0.0, 0.1, 0.25, 0.25])
    assert torch.equal(advantages(f"{path}:by_length"), wanted)


@pytest.mark.parametrize(
    "name, error, told",
    [
        ("total", TypeError, r"returned shape \(\); must be \(6,\)"),
        ("mean_of_all", ValueError, "gave nan to a sample of reward 1; must be finite"),
    ],
)
def test_what_is_no_advantage_of_each_sample_is_an_error(path, name, error, told):
    with pytest.raises(error, match=told):
        advantages(f"{path}:{name}")


@pytest.mark.parametrize(
    "name, told",
    [
        ("absent", "defines no absent"),
        ("number", "defines int as number"),
        ("short", r"short\(rewards\): too many"),
    ],
)
def test_what_is_no_function_is_refused(path, name, told):
    with pytest.raises(ConfigError, match=rf"--advantage \({re.escape(str(path))}:{name}\)[^\n]*{told}"):
        load_config([*NEEDED, "--advantage", f"{path}:{name}"], REGISTRY)


def test_flags_that_the_function_replaces_are_refused(path):
    with pytest.raises(ConfigError, match="is not for --advantage"):
        load_config([*NEEDED, "--advantage", f"{path}:centred", "--no-normalize-advantages-by-std"], REGISTRY)
    with pytest.raises(ConfigError, match="there is no file nowhere.py"):
        load_config([*NEEDED, "--advantage", "nowhere.py:f"], REGISTRY)
    assert not GRPO(advantage=f"{path}:centred").takes_turn_rewards and GRPO().takes_turn_rewards


def test_other_algorithms_have_no_such_flag(path):
    with pytest.raises(ConfigError, match="is a flag of grpo"):
        load_config(["--algorithm", "rloo", *NEEDED[2:], "--advantage", f"{path}:centred"], REGISTRY)
