"""Check --policy-loss path/to/file.py:function: equal to the built-in loss of the same formula, and errors by
name."""

import re
from pathlib import Path

import pytest
import torch

from megarl.algorithms.promised_weight import promised_weight
from megarl.algorithms import GRPO, REGISTRY
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from tests.algorithms.test_policy_losses import make_inputs, make_samples

NEEDED = "--algorithm grpo --model m --train-data d.jsonl --save s --train-iters 1".split()
PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
OTHERS = """
from megarl.algorithms.ratio_transforms import Transform

def reinforce(tokens, flags):
    return -tokens.advantages * tokens.log_probs, None

plain = Transform(paper="", summary="", loss=reinforce, has_ratio=False)
empty = Transform(paper="", summary="")
wide = Transform(paper="", summary="", loss=reinforce, defaults={"width": 1.0})
number = 3

def summed(tokens, flags):
    return (-tokens.advantages * tokens.ratio).sum(), None

def bare(tokens, flags):
    return -tokens.advantages * tokens.ratio

def short(tokens):
    return None
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OTHERS)
    return file


@pytest.fixture
def gspo(tmp_path):
    """The file that the page shows."""
    source = re.search(r"```python\n(# gspo.py.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "gspo.py"
    file.write_text(source[1])
    return file


def loss_and_gradient(algorithm):
    inputs, samples = make_inputs(algorithm, make_samples())
    loss, metrics = algorithm.loss(inputs)
    (gradient,) = torch.autograd.grad(loss, inputs.log_probs)
    return loss, gradient, metrics


def test_the_example_of_the_page_is_gspo_to_the_last_bit(gspo):
    mine = GRPO(policy_loss=f"{gspo}:gspo", clip_eps_low=3e-4, clip_eps_high=4e-4)
    here, there = loss_and_gradient(mine), loss_and_gradient(GRPO(policy_loss="gspo"))
    assert torch.equal(here[0], there[0]) and torch.equal(here[1], there[1])
    assert here[2] == there[2] and here[2]["policy/clip_fraction"] > 0


def test_a_function_gets_whole_responses_and_a_transform_says_itself(path, gspo):
    assert not GRPO(policy_loss=f"{gspo}:gspo").token_level and GRPO(policy_loss=f"{gspo}:gspo").has_ratio
    plain = GRPO(policy_loss=f"{path}:plain")
    assert plain.token_level and not plain.has_ratio
    here, there = loss_and_gradient(plain), loss_and_gradient(GRPO(policy_loss="reinforce"))
    assert torch.equal(here[1], there[1])


@pytest.mark.parametrize(
    "name, told",
    [
        ("absent", "defines no absent"),
        ("number", "number is int, not a function"),
        ("empty", "empty has no loss"),
        ("wide", "wide reads width, which must be one of clip_eps_high"),
        ("short", r"short\(tokens\): too many positional arguments"),
    ],
)
def test_what_is_no_loss_is_refused(path, name, told):
    with pytest.raises(ConfigError, match=rf"--policy-loss \({re.escape(str(path))}:{name}\)[^\n]*{told}"):
        load_config([*NEEDED, "--policy-loss", f"{path}:{name}"], REGISTRY)


def test_an_absent_file_and_a_misspelled_name_are_refused():
    with pytest.raises(ConfigError, match="there is no file nowhere.py. Wanted path/to/file.py:function"):
        load_config([*NEEDED, "--policy-loss", "nowhere.py:f"], REGISTRY)
    with pytest.raises(ConfigError, match="must be one of ppo, .*Did you mean gspo-token?"):
        load_config([*NEEDED, "--policy-loss", "gspo-tokn"], REGISTRY)


def test_a_flag_that_a_transform_does_not_read_is_refused(path):
    flags = [*NEEDED, "--policy-loss", f"{path}:plain", "--clip-eps-low", "0.1"]
    with pytest.raises(ConfigError, match="clip-eps-low.*is not for --policy-loss"):
        load_config(flags, REGISTRY)


@pytest.mark.parametrize("name, told", [("summed", r"losses of shape \(\)"), ("bare", "returned Tensor")])
def test_a_loss_that_is_not_one_number_per_token_is_an_error(path, name, told):
    with pytest.raises(TypeError, match=told):
        loss_and_gradient(GRPO(policy_loss=f"{path}:{name}"))


def test_a_function_of_the_user_may_weigh_advantages_as_it_likes(path, gspo):
    """What weights add up to is promised for megarl's own losses, whose slope is 1."""
    counts = 12, 3, 8
    assert promised_weight(GRPO(policy_loss=f"{gspo}:gspo"), "loss", *counts) is None
    assert promised_weight(GRPO(policy_loss="gspo"), "loss", *counts) == 1.0
