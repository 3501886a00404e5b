"""Weights that cannot be loaded are found from headers, by file and tensor; the loader of training agrees in
every case.

pytest tests/checks/test_weights.py"""

import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.algorithms import REGISTRY
from megarl.checkpoint.sources import open_weights
from megarl.checks.job import examine
from megarl.checks.machine import Machine
from megarl.config.hf_config import ModelShape
from megarl.config.loader import load_config
from megarl.files.tensor_header import TensorFileError
from megarl.reshard import hf_folder
from megarl.reshard.atlas import hf_atlas
from megarl.reshard.hf_folder import folder_problem
from megarl.reshard.hf_weights import load_hf
from tests.config.conftest import QWEN3, job, write_model, write_zeros  # noqa: F401

Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path, write_model):  # noqa: F811
    return write_model(QWEN3)


def rewrite(folder: Path, **changes) -> None:
    """Tensors by name in place of those of the file; None removes one."""
    tensors = {**load_file(folder / FILE), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / FILE)


def shard(folder: Path) -> dict[str, str]:
    """Split the file in two with an index -> its weight_map."""
    names = {1: load_file(folder / FILE)}
    names[2] = {name: names[1].pop(name) for name in list(names[1]) if "layers.1." in name}
    weight_map = {}
    for number, tensors in names.items():
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / FILE).rename(folder / "model-00001-of-00001.safetensors")
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def quantize(folder: Path) -> None:
    tensor = load_file(folder / FILE)[Q]
    rewrite(folder, **{Q: tensor.to(torch.int8)})


def lose_a_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def misplace(folder: Path) -> None:
    write_index(folder, shard(folder) | {Q: "model-00002-of-00002.safetensors"})


def index_alone(folder: Path, weight_map: object) -> None:
    (folder / FILE).rename(folder / "model-00001-of-00001.safetensors")
    write_index(folder, weight_map)


def two_sets(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    save_file({NORM: torch.zeros(128)}, folder / "other.safetensors")


def store_twice(folder: Path) -> None:
    shard(folder)
    second = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {NORM: torch.ones(128)}, second)


def head_of_its_own(folder: Path, dtype: torch.dtype = torch.float32, row: int = 200) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    head = load_file(folder / FILE)["model.embed_tokens.weight"].to(dtype)
    head[row:] += 1
    rewrite(folder, **{"lm_head.weight": head})


def cut(folder: Path, size: int) -> None:
    os.truncate(folder / FILE, size)


# what happened to the folder -> what is said, beside the folder's name
DAMAGES = {
    "empty": (lambda folder: cut(folder, 0), [FILE, "is cut short or not a safetensors file: 0 bytes"]),
    "within the length": (
        lambda folder: cut(folder, 5),
        [FILE, "is cut short or not a safetensors file: 5 bytes"],
    ),
    "within the header": (
        lambda folder: cut(folder, 300),
        [FILE, "is cut short or not a safetensors file: 300 bytes"],
    ),
    "one byte short": (
        lambda folder: cut(folder, (folder / FILE).stat().st_size - 1),
        [FILE, "is cut short or damaged: ", " should be bytes "],
    ),
    "not safetensors": (
        lambda folder: (folder / FILE).write_bytes(b"PK\x03\x04" + bytes(99)),
        [FILE, "safetensors"],
    ),
    "Git LFS": (
        lambda folder: (folder / FILE).write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        [FILE, "git lfs pull"],
    ),
    "a folder": (
        lambda folder: ((folder / FILE).unlink(), (folder / FILE).mkdir()),
        [FILE, "cannot be read: Is a directory"],
    ),
    "missing": (lambda folder: rewrite(folder, **{Q: None}), [f"{Q} is missing"]),
    "several missing": (
        lambda folder: rewrite(folder, **{Q: None, NORM: None}),
        [f"{Q} is missing; {NORM} is missing"],
    ),
    "extra": (
        lambda folder: rewrite(folder, extra=torch.zeros(2)),
        ["extra is not a tensor of a qwen3 model"],
    ),
    "of another size": (
        lambda folder: rewrite(folder, **{Q: torch.zeros(128, 64)}),
        [f"{Q} in {FILE} is 128x64 there and 128x128 by config.json"],
    ),
    "larger": (
        lambda folder: rewrite(folder, **{NORM: torch.zeros(256)}),
        [f"{NORM} in {FILE} is 256x1 there and 128x1 by config.json"],
    ),
    "three dimensions": (
        lambda folder: rewrite(folder, **{Q: torch.zeros(4, 32, 128)}),
        [f"{Q} in {FILE} is 4x32x128 there"],
    ),
    "quantized": (quantize, [f"{Q} in {FILE} is of I8: quantized weights cannot be trained"]),
    "another model": (
        lambda folder: write_zeros(folder, **{f"model.layers.2.{n}": (1, 1) for n in "abcdefg"}),
        ["and 2 more"],
    ),
    "a missing shard": (
        lose_a_shard,
        ["model-00002-of-00002.safetensors is missing; the folder's index names it"],
    ),
    "the wrong shard": (
        misplace,
        [f"{Q} is not in ", "model-00002-of-00002.safetensors, where the folder's index says"],
    ),
    "an index without a map": (
        lambda folder: index_alone(folder, None),
        ["model.safetensors.index.json is not an index"],
    ),
    "an empty index": (
        lambda folder: index_alone(folder, {}),
        ["model.safetensors.index.json is not an index"],
    ),
    "an index that leads out": (
        lambda folder: index_alone(folder, {Q: "../x.safetensors"}),
        ["x.safetensors", "not a file of its folder"],
    ),
    "a tensor in two files without an index": (
        two_sets,
        [f"{NORM} is in ", "model-00001-of-00002.safetensors and in other.safetensors"],
    ),
    "a tensor in two files of the index": (
        store_twice,
        [f"{NORM} is in ", "model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors"],
    ),
    "a head beside tied embeddings": (
        head_of_its_own,
        [
            "model.safetensors differs from model.embed_tokens.weight",
            '"tie_word_embeddings": false in config.json keeps',
        ],
    ),
    "such a head of another dtype": (
        lambda folder: head_of_its_own(folder, torch.bfloat16),
        ["model.safetensors differs from model.embed_tokens.weight"],
    ),
}


def loads(folder: Path) -> bool:
    """Whether the loader of training takes the folder."""
    shape = ModelShape.load(folder)
    tensors = {name: torch.empty(param.rows, param.cols) for name, param in hf_atlas(shape).items()}
    try:
        load_hf(folder, hf_atlas(shape), tensors, shape)
    except (ValueError, OSError):
        return False
    return True


def findings_of(job_file: str, *flags: str) -> list[str]:
    return list(examine(load_config([job_file, *flags], REGISTRY), 2, machine=Machine(10**12)).errors)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage(name, folder, job):  # noqa: F811
    assert findings_of(job) == [] and loads(folder)
    damage, words = DAMAGES[name]
    damage(folder)
    (finding,) = findings_of(job)
    assert finding.startswith(f"--model ({folder}): ") and all(word in finding for word in words), finding
    assert not loads(folder)
    assert findings_of(job, "--random-init") == []  # which reads no weights


def test_what_may_be_there_besides(folder, job):  # noqa: F811
    rewrite(
        folder,
        **{"model.rotary_emb.inv_freq": torch.zeros(16), Q: torch.zeros(128, 128, dtype=torch.bfloat16)},
    )
    assert findings_of(job) == [] and loads(folder)
    shard(folder)
    assert findings_of(job) == [] and loads(folder)
    (folder / "consolidated.safetensors").write_bytes(b"")  # no file of the index
    assert findings_of(job) == [] and loads(folder)


def test_a_tied_embedding_may_be_repeated(write_model, job):  # noqa: F811
    folder = write_model(QWEN3 | {"tie_word_embeddings": True})
    assert findings_of(job) == [] and loads(folder)
    rewrite(folder, **{"lm_head.weight": torch.zeros(283, 128)})
    assert findings_of(job) == [] and loads(folder)


def test_a_head_that_differs_between_the_compared_places_is_found_on_reading(folder, job, monkeypatch):  # noqa: F811
    monkeypatch.setattr(hf_folder, "_COMPARED_PLACES", 1)
    head_of_its_own(folder, row=50)
    assert findings_of(job) == []  # check reads a few places of a large model
    assert not loads(folder)
    with pytest.raises(TensorFileError, match='"tie_word_embeddings": false'):
        open_weights(folder, ModelShape.load(folder))


def old_shards(folder: Path) -> None:
    """Other weights in shards, with their index, beside model.safetensors."""
    new = load_file(folder / FILE)
    rewrite(folder, **{name: tensor + 1 for name, tensor in new.items()})
    shard(folder)
    save_file(new, folder / FILE)


def short_index(folder: Path) -> None:
    name_in = {file: name for name, file in shard(folder).items()}
    write_index(folder, {name: file for file, name in name_in.items()})


READ_AS_TRANSFORMERS = {
    "beside older shards": old_shards,
    "beside an index whose shards are gone": lambda folder: (
        old_shards(folder),
        [path.unlink() for path in folder.glob("model-0*")],
    ),
    "beside a broken index": lambda folder: write_index(folder, None),
    "beside a file of another format": lambda folder: save_file(
        {Q: torch.ones(3)}, folder / "consolidated.safetensors"
    ),
    "in shards of which the index names one tensor each": short_index,
    "in a file that config.json names": lambda folder: (
        (folder / "config.json").write_text(json.dumps(QWEN3 | {"transformers_weights": "b.safetensors"})),
        save_file(load_file(folder / FILE), folder / "b.safetensors"),
        save_file({Q: torch.ones(3)}, folder / FILE),
    ),
}
"""Where the weights are -> what makes such a folder of one file."""


@pytest.mark.parametrize("name", READ_AS_TRANSFORMERS)
def test_the_file_that_transformers_reads_counts(name, folder, job):  # noqa: F811
    rewrite(folder, **{Q: torch.randn(128, 128)})
    READ_AS_TRANSFORMERS[name](folder)
    assert findings_of(job) == []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    atlas = hf_atlas(ModelShape.load(folder))
    tensors = {name: torch.empty(param.rows, param.cols) for name, param in atlas.items()}
    load_hf(folder, atlas, tensors, ModelShape.load(folder))
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(
            tensors[parameter_name].flatten(), parameter.data.flatten(), rtol=0, atol=0
        )


def test_an_engine_that_would_read_other_files_is_refused(folder, job):  # noqa: F811
    """vLLM loads a judge itself, and prefers the files of an index."""
    flags = ("--reward-model", str(folder), "--reward-model-backend", "judge", "--random-init")
    flags += ("--judge-max-tokens", "128")
    assert findings_of(job, *flags) == []
    old_shards(folder)
    (told,) = findings_of(job, *flags)
    assert "transformers reads model.safetensors, vLLM all files or those of model.safetensors.index" in told
    for path in folder.glob("model*-*"):
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    head_of_its_own(folder)
    (told,) = findings_of(job, *flags)
    assert '"tie_word_embeddings": false in config.json keeps' in told


def test_every_folder_of_a_job_is_looked_at(write_model, job, tmp_path):  # noqa: F811
    classifier = QWEN3 | {
        "architectures": ["Qwen3ForSequenceClassification"],
        "num_labels": 1,
        "id2label": {"0": "score"},
    }
    critic, scorer = write_model(QWEN3, name="critic"), write_model(classifier, name="scorer")
    flags = (
        "--algorithm",
        "ppo",
        "--critic-model",
        str(critic),
        "--reward-model",
        str(scorer),
        "--reward",
        "auto",
    )
    assert findings_of(job, *flags) == []
    rewrite(critic, **{NORM: None})
    rewrite(scorer, **{"score.weight": None})
    of_critic, of_scorer = findings_of(job, *flags)
    assert of_critic.startswith(f"--critic-model ({critic}): ") and f"{NORM} is missing" in of_critic
    assert of_scorer.startswith(f"--reward-model ({scorer}): ") and "score.weight is missing" in of_scorer
    cut(scorer, 100)
    assert (
        FILE in findings_of(job, *flags, "--reward-model-backend", "transformers")[1]
    )  # of a model that transformers runs: its files


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_found_or_harmless(folder, seed):
    """Bytes of the header or the length of the file change: what passes is what the loader takes, and nothing
    else is raised."""
    rng, path = random.Random(seed), folder / FILE
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    if seed % 4 == 0:
        content = content[: rng.randrange(len(content))]
    else:
        changed = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(header_end)] = rng.choice([0, 32, 48, 49, 57, 65, 255, rng.randrange(256)])
        content = bytes(changed)
    path.write_bytes(content)
    problem = folder_problem(folder, ModelShape.load(folder))
    assert (problem is None) == loads(folder)
    assert problem is None or str(folder) in problem
