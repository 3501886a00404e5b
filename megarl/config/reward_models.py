"""List the reward models of a job with their backends, and check the rules about rewards.

The module reads the config.json of the folders and the judge's template, but no weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

from megarl.config.errors import ConfigError, Errors
from megarl.config.flags import refuse_set, words_of
from megarl.config.hf_config import ModelShape, read_json
from megarl.config.hf_families import Json, num_labels
from megarl.config.hub import has_weights
from megarl.config.schema import RewardModelConfig, TrainConfig
from megarl.role_names import suffix_of

_CLASSIFIER = "ForSequenceClassification"
_LANGUAGE_MODEL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
GROUND_TRUTH = "{ground_truth}"
_NO_EFFECT = "has no effect without {}. Leave it out."


@dataclass(frozen=True, slots=True)
class RewardModelSpec:
    """One model of --reward-model: its role, folder, backend and the weight of its score."""

    name: str
    """Name of its role, without its actor's number: reward_model, reward_model_2, ..."""
    path: str
    backend: str
    """megatron, transformers or judge."""
    weight: float


def reward_models(config: TrainConfig) -> list[RewardModelSpec]:
    """Return the reward models in the order of --reward-model, for a configuration without errors."""
    given = config.reward_models
    weights = given.reward_model_weights or (1.0,) * len(given.reward_model)
    models = []
    for path, backend, weight in zip(given.reward_model, _backends(given), weights, strict=True):
        backend = find_backend(path) if backend == "auto" else backend
        models.append(RewardModelSpec(f"reward_model{suffix_of(len(models))}", path, backend, weight))
    return models


def _backends(given: RewardModelConfig) -> tuple[str, ...]:
    """Return what --reward-model-backend says (`auto` included) for each model. A single word is for all
    models."""
    backends = given.reward_model_backend
    return backends * len(given.reward_model) if len(backends) == 1 else backends


def uses_rule_reward(config: TrainConfig) -> bool:
    """Return whether a rule or an environment scores responses: if one is given, or if there are no reward
    models."""
    is_given = config.data.reward is not None or config.data.reward_function is not None
    return is_given or not config.reward_models.reward_model


def rule_judges_agents(config: TrainConfig) -> bool:
    """Return whether a rule gives the rewards of agents' episodes. Otherwise every agent prints its reward
    itself."""
    is_given = config.data.reward is not None or config.data.reward_function is not None
    return config.episodes.agent_command is not None and is_given


def needs_ground_truth(config: TrainConfig) -> bool:
    """Return whether every row of the data must have a ground truth. A user's function or environment need
    not have one."""
    if config.episodes.has_turns and not rule_judges_agents(config):
        return False
    if uses_rule_reward(config) and config.data.reward_function is None:
        return True
    template = config.reward_models.judge_template
    return template is not None and GROUND_TRUTH in Path(template).read_text(encoding="utf-8")


def find_backend(path: str) -> str:
    """Return the backend (megatron, transformers or judge) that --reward-model-backend auto chooses for a
    folder.

    Raises: ConfigError for a folder without a usable config.json, or whose architecture is neither a
    classifier nor a language model."""
    architecture = str((read_model_config(path).get("architectures") or ["missing"])[0])
    if architecture.endswith(_CLASSIFIER):
        try:
            value_model_shape(path)
        except ConfigError:  # a family or a key that Megatron's model does not know; transformers does
            return "transformers"
        return "megatron"
    if architecture.endswith(_LANGUAGE_MODEL):
        return "judge"
    text = (
        f"--reward-model ({path}): its config.json says neither *{_CLASSIFIER} nor *ForCausalLM, but "
        f"{architecture}, so its backend cannot be chosen by it. Add --reward-model-backend transformers or "
        "judge."
    )
    raise ConfigError([text])


def read_model_config(path: str) -> Json:
    """Return the content of a reward model's config.json. Raises: ConfigError naming the flag if it cannot be
    read."""
    return read_json(Path(path) / "config.json", "--reward-model")


def value_model_shape(path: str) -> ModelShape:
    """Return a reward model's shape with its value head. Raises: ConfigError if Megatron cannot run it."""
    return ModelShape.load(path, value_head=True)


def reward_errors(config: TrainConfig) -> Errors:
    """Yield an error per rule that the rewards and reward models break."""
    if config.data.reward != "code":
        names = ("code_timeout_s", "code_memory_limit_bytes", "allow_unsandboxed_code")
        yield from refuse_set(config.data, _NO_EFFECT.format("--reward code"), *names)
    yield from _score_weights(config)
    given = config.reward_models
    if not given.reward_model:
        yield from refuse_set(given, _NO_EFFECT.format("--reward-model"))
        return
    if not config.algorithm.needs_rollout:
        yield (
            f"--reward-model ({' '.join(given.reward_model)}): has no effect, as this algorithm "
            "samples nothing. Leave it out."
        )
        return
    yield from _counts(given)
    judged = False
    for path, backend in zip(given.reward_model, _backends(given)):
        try:
            found = find_backend(path) if backend == "auto" else backend
            yield from _model(path, found, read_model_config(path), config)
            if found == "judge":
                judged = True
                yield from _judge_length(path, given)
        except ConfigError as error:
            yield from error.errors
            judged = True  # it may be one
    if judged:
        yield from _judge(given)
    else:
        of_judge = [field.name for field in fields(given) if field.name.startswith("judge_")]
        yield from refuse_set(given, _NO_EFFECT.format("a --reward-model that is a judge"), *of_judge)


def _score_weights(config: TrainConfig) -> Errors:
    """Yield an error per entry of --score-weights that is no name=number, comes twice, or weighs nothing."""
    names: set[str] = set()
    if config.data.reward_function is None:
        yield from refuse_set(config.data, _NO_EFFECT.format("--reward-function"), "score_weights")
        return
    for entry in config.data.score_weights:
        name, _, number = entry.partition("=")
        head, wanted = f"--score-weights ({entry})", "Try correct=1 short=0.2."
        try:
            is_number = math.isfinite(float(number))
        except ValueError:
            is_number = False
        if not name.isidentifier() or not is_number:
            yield f"{head}: must be the name of a score, = and a finite number. {wanted}"
        elif name in names:
            yield f"{head}: {name} has two weights. {wanted}"
        names.add(name)


def _counts(given: RewardModelConfig) -> Errors:
    count, weights = len(given.reward_model), given.reward_model_weights
    if weights is not None and len(weights) != count:
        yield (
            f"--reward-model-weights ({words_of(weights)}): must be one number per --reward-model "
            f"({count}). Try {words_of([1.0] * count)}."
        )
    if weights is not None and not all(map(math.isfinite, weights)):
        yield (
            f"--reward-model-weights ({words_of(weights)}): must be finite numbers. Try "
            f"{words_of([1.0] * count)}."
        )
    if len(given.reward_model_backend) not in (1, count):
        yield (
            f"--reward-model-backend ({words_of(given.reward_model_backend)}): must be one word, or one per "
            f"--reward-model ({count}). Try auto."
        )


def _model(path: str, backend: str, model: Json, config: TrainConfig) -> Errors:
    if not has_weights(path):
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
        yield from _shape_errors(path, config)


def _shape_errors(path: str, config: TrainConfig) -> Errors:
    try:
        shape = value_model_shape(path)
    except ConfigError as error:
        yield from (
            f"--reward-model ({path}), --reward-model-backend megatron: {reason}" for reason in error.errors
        )
        return
    longest, limit = config.sampling.max_length, shape.max_position_embeddings
    if longest > limit:
        yield (
            f"--reward-model ({path}): takes {limit} tokens (max_position_embeddings), and "
            f"--max-prompt-length ({config.sampling.max_prompt_length}) + --max-response-length "
            f"({config.sampling.max_response_length}) = {longest}. Make them shorter."
        )


def _judge_length(path: str, given: RewardModelConfig) -> Errors:
    limit = read_model_config(path).get("max_position_embeddings")
    if isinstance(limit, int) and given.judge_max_tokens >= limit:
        yield (
            f"--judge-max-tokens ({given.judge_max_tokens}): leaves nothing for the question of the {limit} "
            f"tokens that {path} can take. Try {limit // 4}."
        )


def _judge(given: RewardModelConfig) -> Errors:
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
        yield f"--judge-score-range ({words_of(bounds)}): must be two numbers, the lower one first. Try 0 10."
    if given.judge_max_model_len is not None and given.judge_max_model_len <= given.judge_max_tokens:
        yield (
            f"--judge-max-model-len ({given.judge_max_model_len}): must be above --judge-max-tokens "
            f"({given.judge_max_tokens}), which is a part of it. Leave it out."
        )


def _template(file: Path) -> Errors:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield f"--judge-template ({file}): cannot be read: {getattr(error, 'strerror', None) or error}."
        return
    if "{response}" not in text:
        yield f"--judge-template ({file}): must hold {{response}}, which the response takes the place of."
