"""What --load may name, found before anything is built: each finding has the flag, the value, and what works
instead, which is tried here."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import pickle
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.algorithms import REGISTRY
from megarl.config import hf_config
from megarl.config.check import check_job
from megarl.config.errors import ConfigError
from megarl.config.hf_config import ModelShape, differences, function_fields
from megarl.config.loader import load_config
from megarl.config.render import write_args
from megarl.config.rules_data import rows_errors
from megarl.config.rules_files import (
    checkpoint_errors,
    checkpoint_notes,
    described_models,
    goes_on,
    newest_job,
)
from megarl.config.mesh import role_meshes
from megarl.config.roles import checkpointed_roles
from megarl.files.checkpoints import JobFileError, checkpoints_in, read_job, write_job
from megarl.files.writing import ReadError
from megarl.loggers.console import Progress
from megarl.trainer.checkpointer import Checkpointer
from megarl.trainer.run_folder import Run
from megarl.trainer.stop_request import StopRequest

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 120,
    "tie_word_embeddings": True,
}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """With model/, wide/ and a PPO run `old`, whose checkpoints are of steps 4 and 10."""
    monkeypatch.chdir(tmp_path)
    for name, changes in (("model", {}), ("wide", {"hidden_size": 128})):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(CONFIG | changes))
    Path("rows.jsonl").write_text("{}\n")
    for step in (4, 10):
        make_checkpoint(Path("old/checkpoints") / f"step_{step:06d}", step)
    return tmp_path


def config(flags: str):
    given = shlex.split(flags)
    default = [
        "--algorithm",
        "ppo",
        "--kl-mode",
        "none",
        "--model",
        "model",
        "--random-init",
        "--train-data",
        "rows.jsonl",
        "--train-iters",
        "20",
        "--save",
        "new",
        "--num-prompts",
        "8",
    ]
    kept = [word for flag, words in _by_flag(default) if flag not in given for word in words]
    return load_config([*kept, *given], REGISTRY)


def _by_flag(words: list[str]) -> list[tuple[str, list[str]]]:
    out: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            out.append((word, [word]))
        else:
            out[-1][1].append(word)
    return out


def make_checkpoint(folder: Path, step: int, flags: str = "") -> None:
    job, digests = config(flags), {}
    for role in checkpointed_roles(job, role_meshes(job, 1)):
        (folder / role).mkdir(parents=True)
        (folder / role / "checkpoint.json").write_text(f"{role} {step}")
        digests[role] = hashlib.sha256(f"{role} {step}".encode()).hexdigest()
    cursor = {"num_rows": 50, "seed": 0, "shuffle": True, "pass": 0, "offset": 0}
    write_job(
        folder,
        {
            "step": step,
            "weight_version": step,
            "models": described_models(job),
            "roles": digests,
            "metrics": {},
            "actors": {"": {"cursor": cursor, "kl": {"coef": 0.0}, "zero_reward_steps": 0}},
            "random_states": [],
            "arguments": write_args(job),
        },
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def findings(flags: str) -> tuple[str, ...]:
    try:
        check_job(config(flags), 1)
    except ConfigError as error:
        return error.errors
    return ()


def test_a_folder_with_checkpoints_alone_is_another_run(here):
    """As its run's files were removed to start again; a new run would prune them at once."""
    assert findings("--save old") == (
        "--save (old): holds another run (checkpoints/step_000010), which would be overwritten. Try --save "
        "old-2, or continue that run with --load old.",
    )


def test_a_run_with_stale_samples_goes_on_with_the_same_bound_or_a_larger_one(here):
    folder = Path("stale/checkpoints/step_000003")
    make_checkpoint(folder, 3)
    body = read_job(folder)
    body["actors"][""]["staleness"] = 2
    write_job(folder, body)
    smaller = [
        f"--staleness ({number}): the run that --load continues had 2, and its checkpoint holds samples that "
        "may be as old. Try --staleness 2."
        for number in (0, 1)
    ]
    assert findings("--load stale") == (smaller[0],)
    assert findings("--load stale --staleness 1") == (smaller[1],)
    assert findings("--load stale --staleness 2") == findings("--load stale --staleness 3") == ()


def test_the_groups_of_a_checkpoint_keep_their_size_and_are_trained_on_in_time(here):
    """Eight prompts of version 3 in the checkpoint, of two samples: with --staleness 1 two steps are left."""
    folder = Path("stale/checkpoints/step_000003")
    make_checkpoint(folder, 3)
    body = read_job(folder)
    groups = [{"visit": visit, "row": visit, "num_samples": 2, "version": 3} for visit in range(8)]
    body["actors"][""] |= {"staleness": 1, "buffer": groups}
    write_job(folder, body)
    flags = "--load stale --staleness 1 --global-batch-size 2"
    assert findings(f"{flags} --num-samples-per-prompt 2") == ()
    assert findings(f"{flags} --num-samples-per-prompt 2 --num-prompts 4") == ()
    assert findings(f"{flags} --num-samples-per-prompt 4") == (
        "--num-samples-per-prompt (4): the run that --load continues had 2, and its checkpoint holds groups of "
        "that size. Try --num-samples-per-prompt 2.",
    )
    assert findings(f"{flags} --num-samples-per-prompt 2 --num-prompts 3") == (
        "--num-prompts (3): the checkpoint that --load names holds 8 prompts, which would be older than "
        "--staleness (1) before a step trains on the last of them. Try --num-prompts 4.",
    )
    larger = flags.replace("--staleness 1", "--staleness 2")
    assert findings(f"{larger} --num-samples-per-prompt 2 --num-prompts 3") == ()
    odd = flags.replace("--global-batch-size 2", "--global-batch-size 6")
    assert findings(f"{odd} --num-samples-per-prompt 2 --num-prompts 3")[0].endswith("Try --num-prompts 6.")


@pytest.mark.parametrize(
    ("had", "greedy", "now", "n"),
    [("grpo", 0, "remax", 3), ("remax", 1, "grpo", 4)],
    ids=["to remax", "from remax"],
)
def test_an_algorithm_with_another_number_of_greedy_samples_is_refused(here, had, greedy, now, n):
    """Groups of four samples: four drawn ones, or three and the greedy one of ReMax."""
    folder = Path("stale/checkpoints/step_000003")
    sizes = "--staleness 1 --global-batch-size 12 --num-prompts 12"
    make_checkpoint(folder, 3, f"--algorithm {had} {sizes}")
    body = read_job(folder)
    group = {"visit": 0, "row": 0, "num_samples": 4, "version": 3}
    body["actors"][""] |= {"staleness": 1, "buffer": [group], "greedy_samples": greedy}
    write_job(folder, body)
    flags = f"--load stale {sizes}"
    assert findings(f"{flags} --algorithm {now} --num-samples-per-prompt {n}") == (
        f"--algorithm ({now}): has {1 - greedy} greedy responses per prompt, and the groups in the checkpoint "
        f"that --load names have {greedy}. Try --algorithm {had}, or start a new run from the exported hf/ "
        "folder.",
    )
    assert findings(f"{flags} --algorithm {had} --num-samples-per-prompt {4 - greedy}") == ()
    del body["actors"][""]["greedy_samples"]  # an older checkpoint
    write_job(folder, body)
    assert findings(f"{flags} --algorithm {had} --num-samples-per-prompt {4 - greedy}") == ()
    body["actors"][""]["buffer"] = []
    write_job(folder, body)
    assert findings(f"{flags} --algorithm {now} --num-samples-per-prompt {n}") == ()


def test_what_can_be_continued(here):
    make_checkpoint(Path("mine/checkpoints/step_000003"), 3)
    Path("mine/resolved.args").write_text("")
    Path("mine/metrics.jsonl").write_text("")
    for flags in (
        "--load old",
        "--load old/checkpoints/step_000004",
        "--load old/checkpoints/step_000010 --train-iters 10",
        "--load mine --save mine",
        "--load mine/checkpoints/step_000003 --save mine",
        "--load ./mine/ --save mine",
        "--load new --save new",
        "--load old --algorithm grpo",
    ):
        assert findings(flags) == (), flags
    assert (
        newest_job(config("--load old"))[1]["step"] == 10
        and newest_job(config("--load new --save new")) is None
    )
    assert not goes_on(config("--load old")) and goes_on(config("--load mine --save mine"))
    assert [path.name for path in checkpoints_in(Path("old"))] == ["step_000010", "step_000004"]


WRONG = (
    (
        "--load nowhere",
        "--load (nowhere): there is no such folder. Name a run folder, or leave it out for a new run.",
        "",
    ),
    (
        "--load model",
        "--load (model): holds no checkpoints/step_*. Name a run folder, or leave it out for a new run.",
        "--load old",
    ),
    (
        "--load old/checkpoints",
        "--load (old/checkpoints): is the folder of a run's checkpoints. Try --load old.",
        "--load old",
    ),
    (
        "--load old/checkpoints/step_000010/critic",
        "--load (old/checkpoints/step_000010/critic): is the part of one role. Try "
        "--load old/checkpoints/step_000010.",
        "--load old/checkpoints/step_000010",
    ),
    (
        "--load old/checkpoints/step_000007",
        "--load (old/checkpoints/step_000007): holds no complete checkpoint. "
        "old/checkpoints/step_000007 is not a "
        "checkpoint of a job: it has no job.json. Name another run, or leave it out.",
        "--load old",
    ),
    (
        "--load old --train-iters 9",
        "--train-iters (9): old/checkpoints/step_000010 is of step 10 already. Try --train-iters 20.",
        "--load old --train-iters 20",
    ),
    (
        "--load old --model wide",
        "--load (old): step_000010 is of another model: its actor has hidden_size 64, not 128. Give "
        "the model that the run "
        "had, or leave --load out.",
        "--model wide",
    ),
    (
        "--load old --seed 3",
        "--seed (3): the run that --load continues has another. Try --seed 0.",
        "--load old --seed 0",
    ),
    (
        "--load old --no-shuffle",
        "--no-shuffle: the run that --load continues had --shuffle. Try --shuffle.",
        "--load old --shuffle",
    ),
    (
        "--load old --num-actors 2 --actor-ranks 0",
        "--load (old): step_000010 has no actor_2, but actor, critic. Leave --load out, or name a "
        "run that has one.",
        None,
    ),
    (
        "--load weights",
        "--load (weights): is a checkpoint of one model, not of a job. Make a Hugging Face folder "
        "of it by `megarl convert` and give "
        "that as --model.",
        "--load old",
    ),
    (
        "--load old/checkpoints/step_000004 --save old --max-restarts 2",
        "--max-restarts (2): a restart goes on from the newest checkpoint of --save, and "
        "--load (old/checkpoints/step_000004) is an older one of the same run, whose newest is "
        "old/checkpoints/step_000010. Remove the newer ones, or try "
        "--max-restarts 0.",
        "--load old/checkpoints/step_000004 --save old --max-restarts 0",
    ),
    (
        "--optimizer-cpu-offload --max-restarts 2",
        "--max-restarts (2): the state of --optimizer-cpu-offload cannot be saved",
        "--max-restarts 2",
    ),
    ("--load old --save old", "--load (old): holds no complete checkpoint. ", None),
)


@pytest.mark.parametrize("flags, message, works", WRONG, ids=[flags for flags, _, _ in WRONG])
def test_what_is_wrong_and_what_works(here, flags, message, works):
    Path("weights").mkdir()
    Path("weights/checkpoint.json").write_text("{}")
    if flags == "--load old --save old":
        for folder in checkpoints_in(Path("old")):
            (folder / "job.json").write_text("{")
    found = findings(flags)
    assert any(finding.startswith(message) for finding in found), found
    assert works is None or findings(works) == ()


# keys of config.json -> what is said of the actor; "" if they change nothing that the model computes
OTHER_FUNCTIONS = (
    ({"rope_theta": 1e6}, "rope_theta 10000.0, not 1000000.0"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        "rope_scaling None, not {'rope_type': 'linear', 'factor': 2.0}",
    ),
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-06, not 1e-05"),
    (
        {"rope_theta": 5e5, "rms_norm_eps": 1e-5},
        "rms_norm_eps 1e-06, not 1e-05, rope_theta 10000.0, not 500000.0",
    ),
    ({"tie_word_embeddings": False}, "tie_word_embeddings True, not False"),
    (
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        "model_type qwen3, not qwen2, qkv_bias False, not True, qk_layernorm True, not False",
    ),
    ({"max_position_embeddings": 4096, "eos_token_id": 7, "torch_dtype": "bfloat16"}, ""),
)


@pytest.mark.parametrize("keys, said", OTHER_FUNCTIONS, ids=[str(keys) for keys, _ in OTHER_FUNCTIONS])
def test_a_model_that_computes_something_else(here, keys, said):
    """Every field that differs is named, with both values."""
    Path("model/config.json").write_text(json.dumps(CONFIG | keys))
    found = findings("--load old")
    if not said:
        assert found == ()
        return
    of_actor, of_critic = (
        found if "tie_word" not in said else (*found, said)
    )  # a critic's embeddings are never tied
    assert (
        of_actor == f"--load (old): step_000010 is of another model: its actor has {said}. Give the model "
        "that the run had, or leave --load out."
    )
    assert said in of_critic


def test_adapters_of_another_scale(here):
    make_checkpoint(Path("adapted/checkpoints/step_000001"), 1, "--lora-rank 4")
    assert findings("--load adapted --lora-rank 4") == ()
    assert (
        "its actor has lora_alpha 32.0, not 16.0. "
        in findings("--load adapted --lora-rank 4 --lora-alpha 16")[0]
    )
    assert "lora_rank 4, not 0, lora_alpha 32.0, not none" in findings("--load adapted")[0]
    others = "--load adapted --lora-rank 4 --lora-target-modules linear_proj linear_qkv"
    assert "linear_qkv'], not ['linear_proj', 'linear_qkv']. " in findings(others)[0]


def test_adapters_over_a_model_that_was_trained_as_a_whole(here):
    """Their tensors are missing in the checkpoint, and none of them is to be called damaged for it."""
    assert findings("--load old --lora-rank 4") == tuple(
        f"--load (old): step_000010 is of another model: its {role} has lora_rank 0, not 4. Give the model "
        "that the run had, or leave --load out."
        for role in ("actor", "critic")
    )


def test_adapters_of_an_older_checkpoint_are_compared_as_far_as_it_goes(here):
    """It stored their rank and their scale."""
    folder = Path("adapted/checkpoints/step_000001")
    make_checkpoint(folder, 1, "--lora-rank 4")
    body = read_job(folder)
    for model in body["models"].values():
        del model["lora_target_modules"]
    write_job(folder, body)
    assert findings("--load adapted --lora-rank 4") == ()
    assert (
        "did not store lora_target_modules of its actor"
        in checkpoint_notes(config("--load adapted --lora-rank 4"))[0]
    )


@pytest.mark.parametrize(
    "name",
    sorted({field.name for field in dataclasses.fields(ModelShape)} - {*hf_config._CHANGE_NOTHING}),
)
def test_each_field_is_compared(here, name):
    """By a value that no model has."""
    shape = ModelShape.load("model")
    saved, now = function_fields(shape), function_fields(dataclasses.replace(shape, **{name: "another"}))
    assert differences(saved, saved) == [] and differences(saved, now) == [
        f"{name} {saved[name]}, not another"
    ]


def test_an_older_checkpoint_is_compared_as_far_as_it_goes(here):
    """And what could not be compared is told."""
    for folder in checkpoints_in(Path("old")):
        body = read_job(folder)
        for model in body["models"].values():
            del model["rope_theta"], model["rms_norm_eps"], model["qkv_bias"]
        write_job(folder, body)
    assert checkpoint_notes(config("--train-iters 20")) == [] and findings("--load old") == ()
    assert checkpoint_notes(config("--load old"))[0] == (
        "--load (old): an earlier version saved it and did not store rms_norm_eps, rope_theta of "
        "its actor, so they could not be compared with --model"
    )
    Path("model/config.json").write_text(
        json.dumps(CONFIG | {"rope_theta": 1e6, "tie_word_embeddings": False})
    )
    assert "its actor has tie_word_embeddings True, not False. " in findings("--load old")[0]


def test_a_critic_that_the_run_had_not(here):
    make_checkpoint(Path("grpo/checkpoints/step_000001"), 1, "--algorithm grpo")
    assert findings("--load grpo") == (
        "--load (grpo): step_000001 has no critic, but actor. Leave --load out, or name a run that has one.",
    )


WITH_KL = "--kl-mode loss --kl-coef 0.1"


def test_a_reference_that_followed_the_actor_goes_on_only_where_it_follows(here):
    """A run without the flag at step 10 and with it at step 20, where the checkpoint holds the reference. The
    older one is not taken in its place."""
    make_checkpoint(Path("run/checkpoints/step_000010"), 10, WITH_KL)
    make_checkpoint(Path("run/checkpoints/step_000020"), 20, f"{WITH_KL} --reference-update-interval 5")
    before = contents(Path("run"))
    flags = "--save run --train-iters 30 --load run"
    refused = (
        "--reference-update-interval (none): run/checkpoints/step_000020 holds a reference that has taken "
        "over weights of the actor, and this job's is the model that training starts from. Try "
        "--reference-update-interval 5, or start a new run from the exported hf/ folder.",
    )
    assert findings(f"{flags} {WITH_KL}") == refused and contents(Path("run")) == before
    follows = f"{WITH_KL} --reference-update-interval 8"
    assert findings(f"{flags} {follows}") == findings(flags) == ()
    assert findings(f"{flags}/checkpoints/step_000010 {follows}") == ()


def test_the_checkpoint_that_damage_leaves_must_suit_the_job_too(here):
    """The flags decide that, so it is an error of the configuration, and nothing is removed."""
    for step in (10, 20):
        make_checkpoint(
            Path(f"run/checkpoints/step_{step:06d}"), step, f"{WITH_KL} --reference-update-interval 5"
        )
    Path("run/checkpoints/step_000020/actor/checkpoint.json").write_text("damaged")
    before, told = contents(Path("run")), io.StringIO()
    job = config(f"--load run --save run --train-iters 30 {WITH_KL}")
    with Run(job, "", Progress(30, told, terminal=False)) as run:
        checkpointer = Checkpointer(job, SimpleNamespace(ranks={"actor": (0,)}), {}, None, run, StopRequest())
        with pytest.raises(ConfigError, match="step_000010 holds a reference"):
            checkpointer.restore()
    assert contents(Path("run")) == before
    assert told.getvalue().count("is passed over") == 1 and "step_000020 is passed over" in told.getvalue()


def test_a_job_file_that_cannot_be_read_is_no_damage(here):
    """An error of the file system, here by a link to itself, may be gone the next time."""
    path = Path("old/checkpoints/step_000010/job.json")
    path.unlink()
    path.symlink_to(path.name)
    (error,) = findings("--load old")
    assert error.startswith(
        f"--load (old): {path} cannot be read: Too many levels of symbolic links. That is no damage"
    )
    assert checkpoint_notes(config("--load old")) == []
    with pytest.raises(ReadError):
        read_job(path.parent)
    assert pickle.loads(pickle.dumps(ReadError(path, OSError(5, "Input/output error")))).errno == 5


def test_other_training_rows(here):
    saved = newest_job(config("--load old"))[1]
    assert [*rows_errors(config("--load old"), 1, (20, 30), 0, saved)] == []
    assert [*rows_errors(config("--load old"), 1, (21, 30), 0, saved)] == [
        "--train-data (rows.jsonl): has 51 rows, and the run that --load continues has 50. Give the "
        "same files, or start a new run from the exported "
        "hf/ folder."
    ]


def test_other_rows_of_a_file_with_a_weight_and_of_fine_tuning(here):
    """The walk over each file goes on, so their sum is not enough."""
    saved = newest_job(config("--load old"))[1]
    actor = saved["actors"][""]
    actor["cursor"]["mixture"], actor["sft"] = {"sizes": [20, 30], "weights": [1.0, 1.0]}, {"num_rows": 7}
    job = config("--load old --train-data a.jsonl b.jsonl --train-data-weights 1 1 --sft-data c.jsonl")
    assert [*rows_errors(job, 1, (20, 30), 7, saved)] == [*rows_errors(job, 1, (20, 30), 0, saved)] == []
    rest = "Give the same files, or start a new run from the exported hf/ folder."
    assert [*rows_errors(job, 1, (30, 20), 8, saved)] == [
        "--train-data (a.jsonl b.jsonl): has 30 and 20 rows, and the run that --load continues has 20 and "
        f"30. {rest}",
        f"--sft-data (c.jsonl): has 8 rows, and the run that --load continues has 7. {rest}",
    ]


def test_a_newer_one_that_is_damaged_does_not_count(here):
    shutil.rmtree("old/checkpoints/step_000010/critic")
    assert findings("--load old --train-iters 5") == () and newest_job(config("--load old"))[1]["step"] == 4


def _signed(body: dict) -> str:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return json.dumps({"format": "megarl job", "version": 1, "sha256": digest, **body})


@pytest.mark.parametrize(
    "damage, cause",
    [
        (lambda text: text[:-40], "cannot be read: "),
        (lambda text: "[]", "is not of a megarl job."),
        (lambda text: text.replace('"seed": 0', '"seed": 1'), "its digest"),
        (
            lambda text: text.replace('"version": 1', '"version": 2'),
            "has version 2 of the format; this megarl reads 1.",
        ),
        (lambda text: _signed({"step": 3}), "is not of a megarl job: it has no roles."),
        (lambda text: "[" * 100_000, "cannot be read: "),
        (lambda text: "\0", "cannot be read: "),
    ],
)
def test_a_damaged_job_file_is_named(here, damage, cause):
    path = Path("old/checkpoints/step_000010/job.json")
    path.write_text(damage(path.read_text()))
    with pytest.raises(JobFileError) as error:
        read_job(path.parent)
    assert str(error.value).startswith(str(path)) and cause in str(error.value)


def test_an_optimizer_that_cannot_be_saved_is_refused(here):
    message = (
        "--save-interval (5): the state of --optimizer-cpu-offload cannot be saved or loaded "
        "yet. Leave one out; --offload optimizer can be saved."
    )
    assert checkpoint_errors(config("--save-interval 5 --critic-optimizer-cpu-offload")) == [message]
    assert (
        checkpoint_errors(config("--save-interval 0 --optimizer-cpu-offload"))
        == checkpoint_errors(config("--save-interval 5"))
        == []
    )
