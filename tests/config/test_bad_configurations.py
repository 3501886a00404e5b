"""Mistakes drawn from a table: each is reported with its flag and value, and everything that a report
proposes makes that report go away. Whoever follows the first proposals ends with a job that passes.

    pytest tests/config/test_bad_configurations.py"""

import json
import os
import random
import re
import resource
import subprocess
import sys

import pytest

from megarl.algorithms import REGISTRY
from megarl.checks.job import examine
from megarl.checks.machine import Machine
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from tests.config.bad_configurations import RECIPES, Argv, apply, mistakes, remedies, words_of
from tests.config.conftest import MIXTURE, QWEN3, ROW

ALL = sorted(mistakes(), key=str)
DRAWN = random.Random(7).sample(range(len(ALL)), 60)
MACHINE = Machine(ram_bytes=10**12)
MOST_ROUNDS = 4


@pytest.fixture
def jobs(tmp_path, write_model, monkeypatch):
    """recipe -> its flags, for a job that passes; its files are in the current folder."""
    write_model(QWEN3)
    write_model(MIXTURE, name="experts")
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "reward.py").write_text("def lower_case(**sample):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    files = {"train-data": ["train.jsonl"], "save": ["run"]}
    return {
        name: {"model": ["experts" if name == "experts" else "model"], **files, **flags}
        for name, flags in RECIPES.items()
    }


def findings_of(argv: Argv) -> list[str]:
    try:
        config = load_config(words_of(argv), REGISTRY)
    except ConfigError as error:
        return list(error.errors)
    return list(examine(config, config.placement.nproc_per_node, machine=MACHINE).errors)


def follow(argv: Argv) -> list[str]:
    """What is left after a reader has done what the first finding says first, a few times."""
    for _ in range(MOST_ROUNDS):
        found = findings_of(argv)
        flag = re.search(r"--([a-z][\w-]*)", found[0])[1] if found else ""
        proposed = remedies(found[0], flag) if found else []
        if not proposed:
            return found
        argv = apply(argv, proposed[0], flag)
    return findings_of(argv)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_jobs_themselves_are_right(recipe, jobs):
    assert findings_of(jobs[recipe]) == []


@pytest.mark.parametrize(
    "index",
    [
        index if index in DRAWN else pytest.param(index, marks=pytest.mark.nightly)
        for index in range(len(ALL))
    ],
    ids=[f"{recipe}: --{' '.join([flag, *words])}" for recipe, flag, words, _ in ALL],
)
def test_a_mistake(index, jobs):
    recipe, flag, words, needs = ALL[index]
    argv = jobs[recipe] | needs | {flag: words}
    found = findings_of(argv)
    about_it = [finding for finding in found if f"--{flag}" in finding and " ".join(words) in finding]
    assert about_it, found
    for finding in about_it:
        proposed = remedies(finding, flag)
        assert proposed, f"proposes nothing: {finding}"
        for changes in proposed:
            changed = apply(argv, changes, flag)
            assert finding not in findings_of(changed), f"{changes} does not help: {finding}"
            assert follow(changed) == [], f"{changes} leads nowhere: {finding}"


REAL = [
    ["--learning-rate", "1e-5"],
    ["--train-iters", "0"],
    ["--top-p", "0.9"],
    ["--train-data", "trian.jsonl"],
    ["--max-prompt-length", "2"],
]


@pytest.mark.parametrize("wrong", REAL, ids=" ".join)
def test_the_command_says_the_same(wrong, jobs):
    argv = {**jobs["grpo"], wrong[0].removeprefix("--"): wrong[1:]}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-P", "-m", "megarl.cli", "check", *words_of(argv)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (result.returncode, result.stdout) == (2, "") and not os.path.exists("run")
    *found, last = result.stderr.splitlines()
    assert [line.removeprefix("  - ") for line in found] == findings_of(argv)
    assert last == "More is checked when this is corrected."
    assert (
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    )  # of processor time: others may use the machine too
