"""`megarl algorithms`, the tables in the documentation and the requirements come from what the algorithms
declare.

pytest tests/algorithms/test_listing.py"""

import shlex
from pathlib import Path

import pytest

from megarl.algorithms import REGISTRY
from megarl.algorithms.corrections import MIS_BOUNDS
from megarl.algorithms.listing import CORRECTIONS, RECIPES, as_markdown, as_text
from megarl.algorithms.ratio_transforms import TRANSFORMS
from megarl.config.loader import load_config
from megarl.config.rules_algorithm import CONDITIONS, condition_notes, conditions
from megarl.config.rules_layout import Job

ROOT = Path(__file__).parents[2]
REQUIRED = "--model m --train-data d --save s --train-iters 1 --global-batch-size 128"


def load(flags):
    words = shlex.split(flags)
    chosen = [] if "--algorithm" in words else ["--algorithm", "grpo"]
    given = [word for word in words if word.startswith("--")]
    required = shlex.split(REQUIRED)
    defaults = [
        x for i in range(0, len(required), 2) if required[i] not in given for x in required[i : i + 2]
    ]
    return load_config([*chosen, *words, *defaults], REGISTRY)


def broken(flags):
    """(errors, notes) of the table of conditions."""
    config = load(flags)
    return [*conditions(Job(config, None, None, 1, {}))], [*condition_notes(config)]


def test_the_page_has_the_tables():
    page = (ROOT / "docs/algorithms.md").read_text()
    between = page.split("<!-- begin megarl algorithms --markdown -->\n")[1].split("<!-- end -->")[0]
    assert between.strip() == as_markdown().strip(), "paste the output of `megarl algorithms --markdown`"


def test_everything_is_listed():
    text = as_text()
    for name in (*REGISTRY, *TRANSFORMS, *(c.flags for c in CORRECTIONS), *(r.flags for r in RECIPES)):
        assert f"  {name}" in text, name
    for level in MIS_BOUNDS:
        assert f"--mis-level {level}" in text


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_flags_of_each_paper_are_accepted(recipe):
    assert broken(recipe.flags + " --max-response-length 8192") == ([], [])


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: correction.name)
def test_the_flags_of_each_correction_are_one(correction):
    assert load(correction.flags).algorithm.has_correction and not load("").algorithm.has_correction


TWO_UPDATES = "--global-batch-size 64"
ERRORS = {
    "--policy-loss reinforce --staleness 1 --tis-clip none": "so with --staleness 1 nothing in the loss",
    f"--policy-loss reinforce {TWO_UPDATES}": "the last of 2 updates per step",
    f"--algorithm online-dpo {TWO_UPDATES}": "here it would make 2. Try --global-batch-size",
    "--policy-loss reinforce --num-epochs 3": "the last of 3 updates per step",
    "--early-stop-kl 0.02": "--early-stop-kl (0.02): a step has one epoch",
    "--old-log-probs engine --staleness 1": "also scores the canaries",
    "--old-log-probs engine --moe-routing-replay policy": "replays the experts of that pass",
    "--old-log-probs engine --policy-loss gspo --bf16": "--policy-loss gspo clips the ratio of a whole response",
    "--overlong-buffer 1024 --max-response-length 1024": "(1024): must be below --max-response-length (1024)",
    "--overlong-buffer 96 --max-response-length 48 --max-turns 2 --env env.py:Env": "below --max-response-length "
    "x --max-turns (96), or every response is penalised. Try 9.",
}
ERRORS |= {
    "--old-log-probs interpolated": "(interpolated): without --staleness the weights before the step",
    "--old-log-probs interpolated --staleness 1 --num-canaries 0": "--num-canaries (0): with --old-log-probs",
    "--old-log-probs interpolated --staleness 1 --moe-routing-replay policy": "experts of the pass that it saves",
    "--old-log-probs interpolated --staleness 1 --policy-loss gspo": "is made for ratios of single tokens",
}
NOTES = {
    f"--policy-loss reinforce --tis-clip 2 {TWO_UPDATES}": "not for the 2 updates of the step",
    f"--algorithm opo {TWO_UPDATES}": "--algorithm (opo): its baseline is derived for exact on-policy",
    "--algorithm opo --staleness 1": "has --staleness 1 and 1 updates per step",
    "--kl-mode reward --kl-coef 0.1 --staleness 1": "--kl-mode (reward): every estimate of the KL",
    "--algorithm distill --staleness 1": "measure the KL to the teacher where the current weights sampled",
    "--algorithm ppo --staleness 1": "--algorithm (ppo): with --staleness 1 GAE sums",
}
FINE = [
    "",
    "--policy-loss reinforce",
    "--policy-loss reinforce --staleness 1",
    f"--policy-loss gspo --staleness 1 {TWO_UPDATES}",
    "--algorithm opo",
    "--algorithm ppo",
    "--kl-mode reward --kl-coef 0.1",
    "--overlong-buffer 1023 --max-response-length 1024",
    "--overlong-buffer 48 --max-response-length 48 --max-turns 2 --env env.py:Env",
    "--early-stop-kl 0.02 --num-epochs 2",
    "--old-log-probs engine --bf16",
    "--old-log-probs engine --policy-loss gmpo",
    "--old-log-probs engine --moe-routing-replay engine",
    "--old-log-probs interpolated --staleness 1",
    "--positive-nll-coef 0.1",
    "--algorithm remax --num-samples-per-prompt 1",
    "--algorithm sft --staleness 0",
    "--algorithm online-dpo --staleness 1",
    f"--algorithm gkd --staleness 1 {TWO_UPDATES}",
]


@pytest.mark.parametrize("flags", ERRORS)
def test_what_an_algorithm_cannot_do_is_refused(flags):
    errors, notes = broken(flags)
    assert len(errors) == 1 and ERRORS[flags] in errors[0] and notes == []
    assert "ry " in errors[0]  # a value that works


@pytest.mark.parametrize("flags", NOTES)
def test_what_an_algorithm_does_worse_is_noted(flags):
    errors, notes = broken(flags)
    assert errors == [] and len(notes) == 1 and NOTES[flags] in notes[0]


@pytest.mark.parametrize("flags", FINE)
def test_nothing_is_said_of_what_fits(flags):
    assert broken(flags) == ([], [])


def test_every_row_of_the_table_is_tried():
    assert len(CONDITIONS) == len({*ERRORS.values()} | {*NOTES.values()}) - 3  # two flags each for three rows
