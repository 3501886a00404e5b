"""The Python API before anything starts: imports, configuration, refusals. With ranks:
tests/e2e/test_python_api.py.

pytest tests/trainer/test_python_api.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import megarl
from megarl.algorithms import REGISTRY
from megarl.config import loader
from tests.launch import succeed

NEEDED = ("--model", "m", "--train-data", "d.jsonl", "--save", "s", "--train-iters", "3")


def test_the_api_is_there_and_costs_nothing_until_it_is_used():
    code = """
import json, sys
import megarl
assert not any(name.startswith("megarl.") for name in sys.modules)
megarl.load_config, megarl.PPOTrainer, megarl.DeviceMap, megarl.RemoteError
print(json.dumps(sorted({"torch", "numpy", "vllm", "megatron", "transformers"} & set(sys.modules))))"""
    assert json.loads(succeed("-P", "-c", code, timeout=60).stdout) == []
    assert {"Trainer", "load_config"} <= set(dir(megarl)) and all(
        getattr(megarl, name) for name in megarl.__all__
    )
    with pytest.raises(AttributeError, match="no attribute 'Trainr'. The Python API: Trainer, "):
        megarl.Trainr


@pytest.mark.parametrize(
    "keywords, words",
    [
        ({"lr": 1e-5, "seed": 3}, "--lr 1e-05 --seed 3"),
        ({"bf16": True, "shuffle": False}, "--bf16 --no-shuffle"),
        ({"eval_data": ["a.jsonl", "b.jsonl"]}, "--eval-data a.jsonl b.jsonl"),
        ({"value_clip_eps": None}, "--value-clip-eps none"),
        ({"tokenizer_model": Path("some where")}, None),
        ({"tokenizer_model": "-x@y"}, None),
        (
            {"device_map": megarl.DeviceMap(actor=[0, 1], critic=[2], rollout=[0])},
            "--actor-ranks 0,1 --critic-ranks 2 --rollout-ranks 0",
        ),
    ],
)
def test_keywords_are_flags(keywords, words):
    config = megarl.load_config("--algorithm", "ppo", *NEEDED, **keywords)
    if words is None:
        assert config.model.tokenizer_model == str(keywords["tokenizer_model"])
    else:
        assert config == loader.load_config(["--algorithm", "ppo", *NEEDED, *words.split()], REGISTRY)


def test_wrong_keywords_are_told_as_flags():
    with pytest.raises(megarl.ConfigError) as raised:
        megarl.load_config("--algorithm", "grpo", *NEEDED, lrr=1, num_prompts="many", train_iters=4)
    text = str(raised.value)
    assert (
        "--lrr (1): no such flag. Did you mean --lr?" in text
        and "--num-prompts (many): must be a whole number" in text
    )
    assert "--train-iters (3 and 4): is given twice" in text


@pytest.mark.parametrize(
    "trainer, algorithm, told",
    [
        ("PPOTrainer", "grpo", r"--algorithm \(grpo\): PPOTrainer wants ppo."),
        ("GRPOTrainer", "ppo", r"--algorithm \(ppo\): GRPOTrainer wants grpo."),
        ("Trainer", "sft", r"--algorithm \(sft\): nothing is sampled. Use `megarl train`."),
        ("Trainer", "ppo", r"(?s)configuration errors:.*--model \(m\): must be"),
    ],
)
def test_what_cannot_start_is_refused_at_once(trainer, algorithm, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(megarl.ConfigError, match=told):
        getattr(megarl, trainer)(megarl.load_config("--algorithm", algorithm, *NEEDED))
    assert not list(tmp_path.iterdir())
