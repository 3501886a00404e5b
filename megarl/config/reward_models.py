"""Which reward models a job has, and what runs each: the --reward-model flags and the folders' config.json,
read together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.hf_config import FAMILIES, ModelShape
from megarl.config.schema import TrainConfig
from megarl.role_names import suffix_of

_CLASSIFIER, _LANGUAGE_MODEL = (
    "ForSequenceClassification",
    ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"),
)
GROUND_TRUTH = "{ground_truth}"


@dataclass(frozen=True, slots=True)
class RewardModelSpec:
    """One of --reward-model."""

    name: str
    """Of its role, without its actor's number: reward_model, reward_model_2, ..."""
    path: str
    backend: str
    """megatron, transformers or judge."""
    weight: float


def reward_models(config: TrainConfig) -> list[RewardModelSpec]:
    """In the order of --reward-model, for a configuration that `check` accepts."""
    given = config.reward_models
    count = len(given.reward_model)
    backends = (
        given.reward_model_backend * count
        if len(given.reward_model_backend) == 1
        else given.reward_model_backend
    )
    return [
        RewardModelSpec(
            f"reward_model{suffix_of(index)}",
            path,
            find_backend(path) if backend == "auto" else backend,
            weight,
        )
        for index, (path, backend, weight) in enumerate(
            zip(given.reward_model, backends, given.reward_model_weights or (1.0,) * count, strict=True)
        )
    ]


def uses_rule_reward(config: TrainConfig) -> bool:
    """Whether --reward or --reward-function takes part: always without reward models, else if one of them was
    given."""
    return (
        not config.reward_models.reward_model
        or config.data.reward is not None
        or config.data.reward_function is not None
    )


def needs_ground_truth(config: TrainConfig) -> bool:
    """Whether every row of the data must have one. A user's own function may do without."""
    if uses_rule_reward(config) and config.data.reward_function is None:
        return True
    template = config.reward_models.judge_template
    return template is not None and GROUND_TRUTH in Path(template).read_text(encoding="utf-8")


def find_backend(path: str) -> str:
    """What --reward-model-backend auto means for a folder.

    Raises: ConfigError for a folder without a usable config.json, or whose architecture is neither a
    classifier nor a language model."""
    config = read_model_config(path)
    architecture = str((config.get("architectures") or ["missing"])[0])
    if architecture.endswith(_CLASSIFIER):
        return "megatron" if _is_trainable(config, path) else "transformers"
    if architecture.endswith(_LANGUAGE_MODEL):
        return "judge"
    raise ConfigError(
        [
            f"--reward-model ({path}): its config.json says neither *{_CLASSIFIER} nor "
            f"*ForCausalLM, but {architecture}, so "
            "what runs it cannot be chosen by it. Add --reward-model-backend transformers or judge."
        ]
    )


def read_model_config(path: str) -> dict[str, object]:
    """Raises: ConfigError naming the flag."""
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            [
                f"--reward-model ({path}): must be a Hugging Face model folder, but config.json "
                "cannot be read: "
                f"{error.strerror}."
            ]
        ) from error
    except ValueError as error:
        raise ConfigError([f"--reward-model ({path}): config.json is not JSON: {error}."]) from error
    if not isinstance(config, dict):
        raise ConfigError([f"--reward-model ({path}): config.json must hold a JSON object."])
    return config


def value_model_shape(path: str) -> ModelShape:
    """Of a reward model for the megatron backend. Raises: ConfigError for what Megatron's model cannot be."""
    return ModelShape.load(path, value_head=True)


def num_labels(config: dict[str, object]) -> int:
    """As transformers counts them: names of labels if config.json has any, else 2."""
    return (
        len(config["id2label"])
        if isinstance(config.get("id2label"), dict)
        else int(config.get("num_labels", 2))
    )


def _is_trainable(config: dict[str, object], path: str) -> bool:
    if config.get("model_type") not in FAMILIES:
        return False
    try:
        value_model_shape(path)
    except ConfigError:  # a key that Megatron's model would ignore; transformers does not
        return False
    return True
