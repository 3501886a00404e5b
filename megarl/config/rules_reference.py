"""Check --reference-model and --reference-update-interval: what the reference is, if not always the model
that training starts from."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.config.errors import ConfigError, Errors
from megarl.config.flags import algorithm_name
from megarl.config.hf_config import ModelShape
from megarl.config.rules_layout import Job
from megarl.config.teachers import teacher_folders


def reference_updates(job: Job) -> Errors:
    """Yield an error for a reference that is to take over the actor's weights and cannot."""
    config, interval = job.config, job.config.model.reference_update_interval
    if interval is None:
        return
    head, algorithm = f"--reference-update-interval ({interval})", config.algorithm
    if not algorithm.needs_rollout:
        yield (
            f"{head}: --algorithm {algorithm_name(type(algorithm))} compares the policy with the model that training "
            "starts from. Leave it out."
        )
    elif config.model.reference_model is not None:
        yield (
            f"{head}: the reference is another model, --reference-model {config.model.reference_model}, which does not "
            "take the actor's weights. Leave one of them out."
        )
    elif algorithm.teacher_column == "teacher_hidden":
        yield (
            f"{head}: the actor's ranks hold the output layer that the teacher begins with. Try --teacher-top-k 64, for "
            "which the teacher uses its own."
        )
    elif config.lora is not None and config.lora.lora_rank:
        yield (
            f"{head}: with --lora-rank the reference is the actor without its adapters, and has no weights of its own. "
            "Leave one of them out."
        )


def reference_model(job: Job) -> Errors:
    """Yield an error for a teacher that is not named, and for a reference model that cannot be loaded or does
    not know the actor's tokens."""
    model, algorithm = job.config.model, job.config.algorithm
    folder = model.reference_model
    if folder is None:
        if teacher_folders(algorithm):
            yield "--teachers: needs --reference-model, which teaches the rows of all other sources. Name one of them."
        elif algorithm.is_taught:
            yield (
                "--reference-model (none): is the teacher, without which the policy would learn from itself. Give "
                "the folder of a model with the same tokenizer."
            )
        return
    yield from _foreign_model(job, "--reference-model", folder)
    for other in teacher_folders(algorithm):
        yield from _foreign_model(job, "--teachers", other)
    if teacher_folders(algorithm) and job.config.reference.offload:
        yield (
            f"--reference-offload ({' '.join(job.config.reference.offload)}): is not built for several teachers, "
            "--teachers. Leave it out."
        )


def _foreign_model(job: Job, flag: str, folder: str) -> Errors:
    """Yield an error for a folder that cannot be loaded or does not know the actor's tokens."""
    model = job.config.model
    try:
        shape = ModelShape.load(folder)
    except ConfigError as error:
        yield from (line.replace("--model ", f"{flag} ", 1) for line in error.errors)
        return
    if job.shape is not None and shape.vocab_size < job.shape.vocab_size:
        yield (
            f"{flag} ({folder}): has a vocabulary of {shape.vocab_size}, and --model of "
            f"{job.shape.vocab_size}, whose last tokens it does not know. Name a model of the same family."
        )
    ours, theirs = (_vocabulary(path) for path in (model.tokenizer_model or model.model, folder))
    if ours is not None and theirs is not None and ours != theirs:
        token = min({*ours.items()} ^ {*theirs.items()}, key=lambda item: (item[1], item[0]))
        yield (
            f"{flag} ({folder}): has another tokenizer than --model: token {token[1]} is {token[0]!r} in "
            "one of them only. It must read the actor's ids. Name a model of the same family."
        )
    longest = job.config.sampling.max_length
    if longest > shape.max_position_embeddings:
        yield (
            f"{flag} ({folder}): takes {shape.max_position_embeddings} tokens "
            f"(max_position_embeddings), and --max-prompt-length + --max-response-length = {longest}. Make them "
            "shorter."
        )


def teaching(job: Job) -> Errors:
    """Yield an error for a teacher whose whole distribution a policy cannot learn from."""
    config, algorithm = job.config, job.config.algorithm
    if algorithm.teacher_column is None:
        return
    name, k, key = algorithm_name(type(algorithm)), algorithm.teacher_top_k, algorithm.teacher_hint_key
    if config.model.random_init:
        yield f"--random-init: with --algorithm {name} the teacher would be random too. Give --model a model that is trained."
    if k is not None and job.shape is not None and k >= job.shape.vocab_size:
        yield (
            f"--teacher-top-k ({k}): must be below the vocabulary of --model ({job.shape.vocab_size}). Leave it out to "
            "compare over all tokens."
        )
    if key is not None and config.episodes.has_turns:
        yield (
            f"--teacher-hint-key ({key}): extends the prompts of --train-data, and the prompts of --env and "
            "--agent-command are their own. Leave it out."
        )


def _vocabulary(folder: str) -> dict[str, int] | None:
    """Return token -> id of a folder's tokenizer.json; None where there is none that can be read."""
    try:
        content = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
        words = content["model"]["vocab"]
        if not isinstance(words, dict):
            words = {word: index for index, (word, *_) in enumerate(words)}
        return words | {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError):
        return None
