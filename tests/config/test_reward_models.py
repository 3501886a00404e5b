"""Reward models: which there are, what runs each, and every rule about them with the words of its finding.

pytest tests/config/test_reward_models.py"""

from __future__ import annotations

import dataclasses

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.check import check
from megarl.config.errors import ConfigError
from megarl.config.hf_config import ModelShape
from megarl.config.loader import load_config
from megarl.config.reward_models import (
    find_backend,
    needs_ground_truth,
    reward_errors,
    reward_models,
    uses_rule_reward,
)
from megarl.config.rules_layout import Job
from megarl.config.rules_training import offload

HAS_VALUE_HEAD = "value_head" in {field.name for field in dataclasses.fields(ModelShape)}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 283,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
ONE_LABEL = {"id2label": {"0": "LABEL_0"}}
FOLDERS = {
    "bert": {"architectures": ["BertForSequenceClassification"], "model_type": "bert", **ONE_LABEL},
    "two": {"architectures": ["BertForSequenceClassification"], "model_type": "bert"},
    "lm": {"architectures": ["Qwen3ForCausalLM"], **QWEN3},
    "value": {"architectures": ["Qwen3ForSequenceClassification"], **QWEN3, **ONE_LABEL},
    "odd": {"architectures": ["BertModel"], "model_type": "bert", **ONE_LABEL},
}


@pytest.fixture
def parsed(job, tmp_path, write_model, monkeypatch):
    """parsed("--flag value ...") -> TrainConfig of the job with these flags on top; the folders above are
    named as they are."""
    monkeypatch.chdir(tmp_path)
    for name, config in FOLDERS.items():
        write_model(config, name=name)
    (tmp_path / "judge.txt").write_text("{prompt} {response} {ground_truth}")
    (tmp_path / "empty.txt").write_text("{answer}")
    return lambda flags="": load_config([job, *flags.split()], REGISTRY)


def test_models_weights_and_backends(parsed):
    assert reward_models(parsed()) == []
    specs = reward_models(parsed("--reward-model lm bert --reward-model-weights 1 -0.5"))
    assert [dataclasses.astuple(spec) for spec in specs] == [
        ("reward_model", "lm", "judge", 1.0),
        ("reward_model_2", "bert", "transformers", -0.5),
    ]
    assert [
        spec.backend
        for spec in reward_models(parsed("--reward-model bert value --reward-model-backend transformers"))
    ] == ["transformers", "transformers"]
    assert [
        spec.backend
        for spec in reward_models(parsed("--reward-model value lm --reward-model-backend megatron auto"))
    ] == ["megatron", "judge"]


@pytest.mark.skipif(not HAS_VALUE_HEAD, reason="shapes have no value head yet")
def test_a_classifier_of_a_family_of_ours_is_megatrons(parsed, write_model):
    parsed()
    assert find_backend("value") == "megatron"
    write_model(
        FOLDERS["value"] | {"attention_bias": True}, name="biased"
    )  # Megatron's model would ignore them
    assert find_backend("biased") == "transformers"


def test_rule_rewards_count_where_they_are_asked_for(parsed):
    assert uses_rule_reward(parsed()) and needs_ground_truth(parsed())
    config = parsed("--reward-model lm")
    assert not uses_rule_reward(config) and not needs_ground_truth(config)
    for flag in ("--reward auto", "--reward math"):
        assert uses_rule_reward(parsed(f"--reward-model lm {flag}")) and needs_ground_truth(
            parsed(f"--reward-model lm {flag}")
        )
    own = parsed("--reward-model lm --reward-function f.py:f")
    assert uses_rule_reward(own) and not needs_ground_truth(own)
    assert needs_ground_truth(parsed("--reward-model lm --judge-template judge.txt"))


RIGHT = [
    "",
    "--reward-model lm",
    "--reward-model bert",
    "--reward-model lm bert --judge-max-tokens 9 --reward-model-weights 2 3",
    "--reward-model lm --judge-template judge.txt --judge-score-range 1 5 --judge-max-model-len 1000",
]


@pytest.mark.parametrize("flags", RIGHT)
def test_what_is_right(parsed, flags):
    assert list(reward_errors(parsed(flags))) == []


WRONG = {
    "--judge-max-tokens 3": "--judge-max-tokens (3): has no effect without --reward-model. Leave it out.",
    "--score-weights a=1": "--score-weights (a=1): has no effect without --reward-function. Leave it out.",
    "--reward-function r.py:f --score-weights a": "--score-weights (a): must be the name of a score, = and a finite "
    "number. Try correct=1 short=0.2.",
    "--reward-function r.py:f --score-weights a=inf": "--score-weights (a=inf): must be the name of a score, = and a "
    "finite number. Try correct=1 short=0.2.",
    "--reward-function r.py:f --score-weights a=1 a=2": "--score-weights (a=2): a has two weights. Try correct=1 short=0.2.",
    "--reward-model-weights 2": "--reward-model-weights (2.0): has no effect without "
    "--reward-model. Leave it out.",
    "--reward-model bert --judge-template "
    "judge.txt": "--judge-template (judge.txt): has no effect without a --reward-model that is a "
    "judge. Leave it out.",
    "--algorithm sft --reward-model "
    "bert": "--reward-model (bert): has no effect, as this algorithm samples nothing. Leave it out.",
    "--reward-model bert lm --reward-model-weights 1": "--reward-model-weights (1.0): must be one "
    "number per --reward-model (2). Try 1.0 1.0.",
    "--reward-model bert --reward-model-weights "
    "nan": "--reward-model-weights (nan): must be finite numbers. Try 1.0.",
    "--reward-model lm lm lm --reward-model-backend judge "
    "judge": "--reward-model-backend (judge judge): must be one word, or one per --reward-model "
    "(3). Try auto.",
    "--reward-model nowhere": "--reward-model (nowhere): must be a Hugging Face model folder, but "
    "config.json cannot be read: No such file or directory. Try bert.",
    "--reward-model odd": "--reward-model (odd): its config.json says neither "
    "*ForSequenceClassification nor *ForCausalLM, but BertModel, so "
    "its backend cannot be chosen by it. Add --reward-model-backend transformers or judge.",
    "--reward-model two": "--reward-model (two): must have one label, its score, and has 2. Give a "
    "model with num_labels 1.",
    "--reward-model lm --judge-template "
    "nowhere.txt": "--judge-template (nowhere.txt): cannot be read: No such file or directory.",
    "--reward-model lm --judge-template "
    "empty.txt": "--judge-template (empty.txt): must hold {response}, which the response takes the place of.",
    "--reward-model lm --judge-score-pattern [": "--judge-score-pattern ([): is not a regular "
    "expression: unterminated character set at position 0.",
    r"--reward-model lm --judge-score-pattern "
    r"\d": r"--judge-score-pattern (\d): must have one group, the number, and has 0. Try 'Score: (\d+)'.",
    "--reward-model lm --judge-score-range 5 1": "--judge-score-range (5.0 1.0): must be two "
    "numbers, the lower one first. Try 0 10.",
    "--reward-model lm --judge-score-range 5": "--judge-score-range (5.0): must be two numbers, the "
    "lower one first. Try 0 10.",
    "--reward-model lm --judge-max-model-len "
    "100": "--judge-max-model-len (100): must be above --judge-max-tokens (512), which is a part of "
    "it. Leave it out.",
}


@pytest.mark.parametrize(
    "flags, finding",
    [
        (
            "--reward-model lm --reward-offload parameters",
            "--reward-offload (parameters): a judge runs in processes of vLLM's own, whose memory stays. "
            "Leave it out.",
        ),
        (
            "--reward-model bert --reward-offload optimizer",
            "--reward-offload (optimizer): the reward is frozen, it has no optimizer. "
            "Try --reward-offload parameters.",
        ),
        ("--reward-model bert --reward-offload parameters", None),
        ("--reward-model lm --offload optimizer", None),  # of all roles: those that have it
    ],
)
def test_what_can_be_offloaded_of_models_that_megatron_does_not_run(parsed, flags, finding):
    job = Job(parsed(flags), None, None, 1, {})
    assert list(offload(job)) == ([finding] if finding else [])


@pytest.mark.parametrize("flags", WRONG)
def test_every_rule(parsed, flags):
    assert list(reward_errors(parsed(flags))) == [WRONG[flags]]


def test_weights_that_could_run_code_are_refused(parsed, tmp_path):
    config = parsed("--reward-model bert")
    (tmp_path / "bert" / "model.safetensors").rename(tmp_path / "bert" / "pytorch_model.bin")
    [finding] = reward_errors(config)
    assert finding.startswith("--reward-model (bert): holds no *.safetensors.")


def test_one_field_rules(parsed):
    for flags in (
        "--judge-max-tokens 0",
        "--judge-temperature -1",
        "--reward-model-backend vllm",
        "--judge-gpu-memory-utilization 0",
    ):
        with pytest.raises(ConfigError) as caught:
            parsed(f"--reward-model lm {flags}")
        assert flags.split()[0] in str(caught.value)


def test_ranks_for_another_number_of_models_are_an_error_and_no_more(parsed):
    flags = "--reward-model lm lm lm --reward-ranks 0 1 --actor-offload parameters --reshard-double-buffer"
    assert (
        "--reward-ranks (0 1): must be one list for all reward models, or one for each of the 3. "
        "Try --reward-ranks 0."
    ) in check(parsed(flags), None, 2)
