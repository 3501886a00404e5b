"""Flags of several teachers and of teachers of whole distributions. `pytest tests/config/test_teachers.py`"""

import pytest

from megarl.config.errors import ConfigError
from megarl.config.rules_layout import Job
from megarl.config.rules_reference import reference_model, reference_updates, teaching
from megarl.config.teachers import teacher_folders
from tests.algorithms.test_listing import load

GKD = "--algorithm gkd --reference-model m"


def errors(flags):
    job = Job(load(flags), None, None, 1, {})
    return [error for rule in (reference_model, reference_updates, teaching) for error in rule(job)]


def test_a_source_has_a_folder():
    algorithm = load("--algorithm distill --reference-model m --teachers a/b=x=1 c=y").algorithm
    assert teacher_folders(algorithm) == {"a/b": "x=1", "c": "y"}
    assert teacher_folders(load("").algorithm) == {}


@pytest.mark.parametrize("given", ["a", "=x", "a=", "a=x a=y"])
def test_what_is_no_teacher_is_refused(given):
    with pytest.raises(ConfigError, match=r"--teachers .* must be data_source=folder, each source once"):
        load(f"--algorithm distill --reference-model m --teachers {given}")


def test_fields_of_gkd():
    with pytest.raises(ConfigError, match=r"--teachers .* needs --teacher-top-k"):
        load(f"{GKD} --teachers a=x")
    with pytest.raises(ConfigError, match=r"--jsd-beta \(0.2\): is for --divergence jsd"):
        load(f"{GKD} --jsd-beta 0.2")


@pytest.mark.parametrize(
    "flags, text",
    {
        "--algorithm distill --teachers a=x": "--teachers: needs --reference-model",
        "--algorithm gkd": "--reference-model (none): is the teacher",
        "--algorithm gkd --teacher-hint-key a --random-init": "--random-init: with --algorithm gkd",
        "--algorithm gkd --teacher-hint-key a --env f.py:E --max-turns 2": "--teacher-hint-key (a): extends",
        "--algorithm gkd --teacher-hint-key a --reference-update-interval 1": "Try --teacher-top-k 64",
    }.items(),
)
def test_refused(flags, text):
    assert any(text in error for error in errors(flags)), errors(flags)


@pytest.mark.parametrize(
    "flags",
    [
        "--algorithm gkd --teacher-hint-key a",
        "--algorithm gkd --teacher-hint-key a --teacher-top-k 4 --reference-update-interval 1",
    ],
)
def test_allowed(flags):
    assert errors(flags) == []
