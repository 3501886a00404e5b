"""Flags of several teachers and of teachers of whole distributions. `pytest tests/config/test_teachers.py`"""

import json

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.rules_layout import Job
from megarl.config.rules_reference import reference_model, reference_updates, teaching
from megarl.config.teachers import teacher_folders, teachers_errors, teachers_of
from megarl.trainer.preflight import read_inputs
from tests.algorithms.test_listing import load
from tests.config.conftest import ROW

GKD = "--algorithm gkd --reference-model m"


def errors(flags):
    job = Job(load(flags), None, None, 1, {})
    return [error for rule in (reference_model, reference_updates, teaching) for error in rule(job)]


def test_a_source_has_a_folder():
    algorithm = load("--algorithm distill --reference-model m --teachers a/b=x=1 c=y").algorithm
    assert teachers_of(algorithm) == {"a/b": {"x=1": 1.0}, "c": {"y": 1.0}}
    assert teacher_folders(algorithm) == ["x=1", "y"]
    assert teachers_of(load("").algorithm) == {} and teacher_folders(load("").algorithm) == []


def test_teachers_of_a_source_have_weights():
    flags = "--algorithm distill --reference-model m --teachers a=x a=y b=x --teacher-weights 0.25 0.75 1"
    algorithm = load(flags).algorithm
    assert teachers_of(algorithm) == {"a": {"x": 0.25, "y": 0.75}, "b": {"x": 1.0}}
    assert teacher_folders(algorithm) == ["x", "y"]


@pytest.mark.parametrize(
    "flags, text",
    {
        "--teachers a=x a=y": "or add --teacher-weights",
        "--teachers a=x a=x --teacher-weights 0.5 0.5": "each of these texts once",
        "--teachers a=x a=y --teacher-weights 1": "one number for each of the 2 --teachers",
        "--teachers a=x a=y --teacher-weights 0 1": "must be above 0",
        "--teachers a=x a=y b=x --teacher-weights 0.5 0.4 1": "add up to 1 over the teachers of a. Try 0.5 0.5",
        "--teacher-weights 1": "one number for each of the 0 --teachers",
    }.items(),
)
def test_weights_that_do_not_fit_are_refused(flags, text):
    with pytest.raises(ConfigError) as error:
        load(f"--algorithm distill --reference-model m {flags}")
    assert text in str(error.value)


def test_gkd_has_no_weights():
    with pytest.raises(ConfigError, match="--teacher-weights"):
        load(f"{GKD} --teacher-top-k 4 --teachers a=x --teacher-weights 1")


@pytest.mark.parametrize("given", ["a", "=x", "a=", "a=x a=y"])
def test_what_is_no_teacher_is_refused(given):
    with pytest.raises(ConfigError, match=r"--teachers .* must be data_source=folder, each"):
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


def test_a_teacher_of_rows_that_are_not_there_is_refused():
    flags = "--algorithm distill --reference-model m --teachers gsm8k=x b=y"
    (error,) = teachers_errors(load(flags).algorithm, ["openai/gsm8k", "b", "b"])
    assert error == (
        "--teachers (gsm8k=x): no row of --train-data has the data_source 'gsm8k'. There are: 'b', 'openai/gsm8k'."
    )
    assert teachers_errors(load("").algorithm, ["b"]) == []


@pytest.mark.parametrize("sources", ["ab", "ac"])
def test_rows_of_a_source_may_be_those_of_another_actor_with_the_same_teachers(job, tmp_path, sources):
    files = [tmp_path / f"rows_{number}.jsonl" for number in (1, 2)]
    for file, source in zip(files, sources):
        file.write_text(json.dumps(ROW | {"data_source": source}) + "\n")
    model = tmp_path / "model"
    flags = f"--algorithm distill --reference-model {model} --teachers a={model} b={model} --num-actors 2 "
    flags += f"--train-data {files[0]} --actor-2-train-data {files[1]}"
    config = load_config([job, *flags.split()], REGISTRY)
    if sources == "ab":
        assert [len(data.train) for data in read_inputs(config, 2, is_checked=True).values()] == [1, 1]
        return
    with pytest.raises(ConfigError) as raised:
        read_inputs(config, 2, is_checked=True)
    assert list(raised.value.errors) == [
        f"--teachers (b={model}): no row of --train-data has the data_source 'b'. There are: 'a', 'c'."
    ]
