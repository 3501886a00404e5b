"""Rules about rewards and reward models. Only config.json files and the judge's template are read; no
weights."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.flags import flag_name
from megarl.config.reward_models import find_backend, num_labels, read_model_config, value_model_shape
from megarl.config.schema import DataConfig, RewardModelConfig, TrainConfig


def reward_findings(config: TrainConfig) -> Iterator[str]:
    """One line per rule that the rewards and reward models break."""
    if config.data.reward != "code":
        unset = DataConfig(train_data=config.data.train_data)
        for name in ("code_timeout_s", "code_memory_limit_bytes", "allow_unsandboxed_code"):
            if (value := getattr(config.data, name)) != getattr(unset, name):
                yield (
                    f"--{flag_name(name)} ({_words(value)}): has no effect without --reward code. "
                    "Leave it out."
                )
    yield from _reward_models(config)


def _reward_models(config: TrainConfig) -> Iterator[str]:
    given = config.reward_models
    if not given.reward_model:
        yield from _without_effect(given, "", "--reward-model")
        return
    if not config.algorithm.needs_rollout:
        yield (
            f"--reward-model ({' '.join(given.reward_model)}): has no effect, as this algorithm "
            "samples nothing. Leave it out."
        )
        return
    yield from _counts(given)
    backends = list(given.reward_model_backend)
    backends = backends * len(given.reward_model) if len(backends) == 1 else backends
    judged = False
    for path, backend in zip(given.reward_model, backends):
        try:
            found = find_backend(path) if backend == "auto" else backend
            yield from _model(path, found, read_model_config(path), config)
            if found == "judge":
                judged = True
                yield from _judge_length(path, given)
        except ConfigError as error:
            yield from error.findings
            judged = True  # it may be one
    if judged:
        yield from _judge(given)
    else:
        yield from _without_effect(given, "judge_", "a --reward-model that is a judge")


def _without_effect(given: RewardModelConfig, prefix: str, need: str) -> Iterator[str]:
    """Fields that begin with the prefix and were set."""
    default = RewardModelConfig()
    for name in [field.name for field in dataclasses.fields(default) if field.name.startswith(prefix)]:
        if getattr(given, name) != getattr(default, name):
            yield (
                f"--{flag_name(name)} ({_words(getattr(given, name))}): has no effect without "
                f"{need}. Leave it out."
            )


def _counts(given: RewardModelConfig) -> Iterator[str]:
    count, weights = len(given.reward_model), given.reward_model_weights
    if weights is not None and len(weights) != count:
        yield (
            f"--reward-model-weights ({_words(weights)}): must be one number per --reward-model "
            f"({count}). Try {_words([1.0] * count)}."
        )
    if weights is not None and not all(map(math.isfinite, weights)):
        yield (
            f"--reward-model-weights ({_words(weights)}): must be finite numbers. Try "
            f"{_words([1.0] * count)}."
        )
    if len(given.reward_model_backend) not in (1, count):
        yield (
            f"--reward-model-backend ({_words(given.reward_model_backend)}): must be one word, or "
            f"one per --reward-model ({count}). "
            "Try auto."
        )


def _model(path: str, backend: str, model: dict[str, object], config: TrainConfig) -> Iterator[str]:
    if not any(Path(path).glob("*.safetensors")):
        yield (
            f"--reward-model ({path}): holds no *.safetensors. Other formats can run code when "
            "they are read; convert it first."
        )
    if backend != "judge" and (labels := num_labels(model)) != 1:
        yield (
            f"--reward-model ({path}): must have one label, its score, and has {labels}. Give a "
            "model with num_labels 1."
        )
    if backend == "megatron":
        yield from _shape_findings(path, config)


def _shape_findings(path: str, config: TrainConfig) -> Iterator[str]:
    try:
        shape = value_model_shape(path)
    except ConfigError as error:
        yield from (
            f"--reward-model ({path}), --reward-model-backend megatron: {finding}"
            for finding in error.findings
        )
        return
    longest, limit = (
        config.sampling.max_prompt_length + config.sampling.max_response_length,
        shape.max_position_embeddings,
    )
    if longest > limit:
        yield (
            f"--reward-model ({path}): takes {limit} tokens (max_position_embeddings), and "
            "--max-prompt-length "
            f"({config.sampling.max_prompt_length}) + --max-response-length "
            f"({config.sampling.max_response_length}) = {longest}. "
            "Make them shorter."
        )


def _judge_length(path: str, given: RewardModelConfig) -> Iterator[str]:
    limit = read_model_config(path).get("max_position_embeddings")
    if isinstance(limit, int) and given.judge_max_tokens >= limit:
        yield (
            f"--judge-max-tokens ({given.judge_max_tokens}): leaves nothing for the question of the "
            f"{limit} tokens that {path} can take. "
            f"Try {limit // 4}."
        )


def _judge(given: RewardModelConfig) -> Iterator[str]:
    template, pattern = given.judge_template, given.judge_score_pattern
    if template is not None:
        yield from _template(Path(template))
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield f"--judge-score-pattern ({pattern}): is not a regular expression: {error}."
    else:
        if groups != 1:
            yield (
                f"--judge-score-pattern ({pattern}): must have one group, the number, and has "
                f"{groups}. Try 'Score: (\\d+)'."
            )
    bounds = given.judge_score_range
    if len(bounds) != 2 or not all(map(math.isfinite, bounds)) or bounds[0] >= bounds[1]:
        yield f"--judge-score-range ({_words(bounds)}): must be two numbers, the lower one first. Try 0 10."
    if given.judge_max_model_len is not None and given.judge_max_model_len <= given.judge_max_tokens:
        yield (
            f"--judge-max-model-len ({given.judge_max_model_len}): must be above --judge-max-tokens "
            f"({given.judge_max_tokens}), which "
            "is a part of it. Leave it out."
        )


def _template(file: Path) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield f"--judge-template ({file}): cannot be read: {getattr(error, 'strerror', None) or error}."
        return
    if "{response}" not in text:
        yield f"--judge-template ({file}): must hold {{response}}, which the response takes the place of."


def _words(values: object) -> str:
    return " ".join(map(str, values)) if isinstance(values, (tuple, list)) else str(values)
