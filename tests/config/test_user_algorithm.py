"""Check --algorithm path/to/file.py:Class: its flags, its place in resolved.args, and errors by name."""

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.render import write_args

NEEDED = "--model m --train-data d.jsonl --save s --train-iters 1".split()
GOOD = '''
from dataclasses import dataclass
from typing import Annotated
from megarl.algorithms.base import Algorithm
from megarl.algorithms.grpo import GRPO
from megarl.config.errors import above

@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled(GRPO):
    """GRPO with scaled advantages"""

    scale: Annotated[float, above(0)] = 2.0
    """Factor of all advantages."""

@dataclass(frozen=True, kw_only=True)
class Wrong(Algorithm):
    """An algorithm whose loss takes too much"""

    def loss(self, log_probs, advantages):
        return None

class Plain(GRPO):
    """No dataclass"""

@dataclass(frozen=True, kw_only=True)
class Required(GRPO):
    """An algorithm with a field without default"""
    needed: int

number = 3
'''


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    return file


def test_flags_and_resolved_args(path, tmp_path):
    name = f"{path}:Scaled"
    config = load_config(["--algorithm", name, "--scale", "3", *NEEDED], REGISTRY)
    assert type(config.algorithm).__name__ == "Scaled" and config.algorithm.scale == 3
    text = write_args(config)
    assert f"--algorithm {name}\n" in text and "--scale 3.0\n" in text
    (tmp_path / "resolved.args").write_text(text)
    assert load_config([f"@{tmp_path / 'resolved.args'}"], REGISTRY) == config
    assert load_config(["--algorithm", "grpo", *NEEDED], REGISTRY).algorithm == REGISTRY["grpo"]()


def test_help_shows_the_flags_of_the_file(path, capsys):
    for words in (["--algorithm", f"{path}:Scaled"], [f"--algorithm={path}:Scaled"]):
        with pytest.raises(SystemExit):
            load_config([*words, "--help"], REGISTRY)
        shown = capsys.readouterr().out
        assert "--scale" in shown and "Factor of all advantages." in shown
    with pytest.raises(ConfigError, match="defines no Absent"):
        load_config(["--algorithm", f"{path}:Absent", "--help"], REGISTRY)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Absent", "defines no Absent"),
        ("number", "int is no subclass of Algorithm"),
        ("Plain", "Plain is no frozen dataclass"),
        ("Wrong", r"Wrong\.loss\(self, log_probs, advantages\): missing a required argument"),
        ("Required", "Field needed of Required has no default"),
    ],
)
def test_a_class_that_is_no_algorithm_is_refused(path, name, told):
    with pytest.raises(ConfigError, match=told):
        load_config(["--algorithm", f"{path}:{name}", *NEEDED], REGISTRY)


def test_a_file_that_is_absent_or_fails_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no file nowhere.py"):
        load_config(["--algorithm", "nowhere.py:Scaled", *NEEDED], REGISTRY)
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_config(["--algorithm", f"{broken}:Scaled", *NEEDED], REGISTRY)


def test_a_flag_of_the_file_obeys_its_rule(path):
    with pytest.raises(ConfigError, match="--scale"):
        load_config(["--algorithm", f"{path}:Scaled", "--scale", "-1", *NEEDED], REGISTRY)
