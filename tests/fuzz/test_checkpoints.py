"""Damaged files of checkpoints and models: what was written, or an error that names the file; never other values.

pytest tests/fuzz/test_checkpoints.py"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from hypothesis import strategies as st

from megarl.checkpoint.load import Checkpoint, load
from megarl.checkpoint.manifest import MANIFEST, CheckpointError
from megarl.checkpoint.rectangles import Box, Rectangle
from megarl.checkpoint.save import save
from megarl.checkpoint.sources import open_weights
from megarl.checkpoint.tensor_file import TensorFile, TensorFileError
from megarl.checkpoint.torch_dist import megatron_folder, read_metadata
from megarl.config.checkpoint_folders import JobFileError, file_digest, read_job, write_job
from megarl.config.errors import ConfigError
from megarl.config.hf_config import ModelShape
from megarl.data.sums_model import write_model_folder
from megarl.driver.run_history import cut_after
from megarl.reshard.atlas import hf_sizes
from tests.fuzz.cases import fuzz, may_refuse

VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
TENSORS = "weights-00000.safetensors"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(["F32", "float32", "bfloat16", "nn", "x", "../x", "\x00", 2**63, 10**400, "[" * 3000]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4) | st.sampled_from(["dtype", "shape", "parts", "data_offsets"]), inner, max_size=4), max_leaves=6)  # fmt: skip
paths = st.lists(st.integers(0, 50), max_size=6)
edits = st.lists(st.tuples(paths, json_values, st.sampled_from(["put", "put", "drop", "add"])), min_size=1, max_size=3)
damages = st.lists(st.tuples(st.sampled_from(["flip", "cut", "drop", "insert", "zero"]), st.floats(0, 1), st.binary(min_size=1, max_size=12)), min_size=1, max_size=3)


def edited(value: object, path: list[int], new: object, how: str) -> object:
    """A copy with one value, somewhere inside, replaced, left out or added."""
    if not path or not isinstance(value, (dict, list)) or not value:
        return new
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, copy = keys[path[0] % len(keys)], value.copy()
    if len(path) > 1 or how == "put":
        copy[key] = edited(copy[key], path[1:], new, how)
    elif how == "drop":
        del copy[key]
    else:
        copy.update({"new": new}) if isinstance(copy, dict) else copy.append(new)
    return copy


def damaged(content: bytes, damage: list[tuple[str, float, bytes]]) -> bytes:
    for how, place, new in damage:
        at = int(place * len(content))
        changed = {"flip": bytes([content[at] ^ (new[0] or 1)]) if at < len(content) else b"", "cut": b"", "drop": b"", "insert": new + content[at : at + 1], "zero": bytes(len(new))}[how]
        content = content[:at] + changed + (b"" if how == "cut" else content[at + (len(new) if how in ("drop", "zero") else 1) :])
    return content


def rectangles() -> list[Rectangle]:
    boxes = (Box(0, 1, 0, 2), Box(0, 1, 2, 4), Box(1, 6, 0, 4))
    whole = torch.zeros(6, 4), torch.zeros(3, 1)
    return [*(Rectangle("weights", "x", (6, 4), box, whole[0][box.row_start : box.row_end, box.col_start : box.col_end]) for box in boxes),
            Rectangle("weights", "v", (3,), Box(0, 3, 0, 1), whole[1])]  # fmt: skip


def saved(folder: Path) -> Path:
    """A copy of a sound checkpoint."""
    if not (folder / "sound").exists():
        sound = rectangles()
        for r in sound:
            r.values.copy_(VALUES[r.box.row_start : r.box.row_end, r.box.col_start : r.box.col_end] if r.name == "x" else torch.ones(3, 1))
        save(folder / "sound", sound, {"note": "ü", "dtype": "float32"})
    shutil.rmtree(folder / "copy", ignore_errors=True)
    return shutil.copytree(folder / "sound", folder / "copy")


def reads_what_was_written(folder: Path) -> bool:
    into = rectangles()
    load(folder, into)
    return all(r.values.equal(VALUES[r.box.row_start : r.box.row_end, r.box.col_start : r.box.col_end] if r.name == "x" else torch.ones(3, 1)) for r in into)


@fuzz(st.sampled_from([MANIFEST, TENSORS]), damages)
def test_damaged_bytes_of_a_checkpoint(folder: Path, name: str, damage: list) -> None:
    """Found by their digests, every one of them."""
    copy = saved(folder)
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(damaged(content, damage))
    with may_refuse(CheckpointError, naming=str(copy)):
        assert reads_what_was_written(copy)
        assert (copy / name).read_bytes() == content or name == MANIFEST


@fuzz(edits, st.booleans())
def test_manifests_that_lie(folder: Path, drawn: list, state: bool) -> None:
    """With a digest that fits: somebody wrote them so. What they say of the tensors is not believed before it was seen in the files."""
    copy = saved(folder)
    stored = json.loads((copy / MANIFEST).read_text())
    body = {key: stored[key] for key in ("files", "tensors", "state")}
    for path, new, how in drawn:
        body = edited(body, path, new, how)
    if not isinstance(body, dict):
        return
    body = {key: body.get(key) for key in ("files", "tensors", "state")}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (copy / MANIFEST).write_text(json.dumps({"format": "megarl checkpoint", "version": 1, "sha256": digest, **body}))
    with may_refuse(CheckpointError):
        assert reads_what_was_written(copy)
    with may_refuse(CheckpointError, TensorFileError):
        checkpoint = Checkpoint(copy)
        for kind, tensors in checkpoint.manifest.tensors.items():
            for tensor_name, tensor in tensors.items():
                checkpoint.read(kind, tensor_name, Box(0, tensor.shape[0], 0, 1))


@fuzz(edits | damages | st.binary(max_size=60), st.integers(-3, 9), st.integers(-3, 9))
def test_files_of_tensors(folder: Path, drawn: list | bytes, first: int, last: int) -> None:
    path = folder / "a.safetensors"
    content = (saved(folder) / TENSORS).read_bytes()
    if isinstance(drawn, bytes):
        content = drawn
    elif len(drawn[0]) == 3 and isinstance(drawn[0][0], str):
        content = damaged(content, drawn)
    else:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        for at, new, how in drawn:
            header = edited(header, at, new, how)
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + content[8 + length :]
    path.write_bytes(content)
    with may_refuse(TensorFileError, naming=str(path)):
        file = TensorFile(path)
        for key in file.keys():  # noqa: SIM118 (not a dict)
            assert file.read(key).numel() * file.dtype(key).itemsize < len(content)
        for key in (*file.keys(), "missing"):
            assert file.read(key, first, last).shape[0] == last - first >= 0


JOB_BODY = {"step": 7, "weight_version": 7, "roles": {}, "models": {"actor": {"layers": 2}}, "actors": {"": {"cursor": {"pass": 0}}}, "random_states": [{"torch": "AA=="}],
            "metrics": {"reward/mean": 0.5}, "arguments": "--lr 1"}  # fmt: skip


@fuzz(edits, damages, st.booleans())
def test_files_of_jobs(folder: Path, drawn: list, damage: list, lies: bool) -> None:
    """Damaged ones, and ones that somebody wrote so, of whose digest nothing is to be seen."""
    root = saved(folder) / "job"
    root.mkdir()
    shutil.copytree(folder / "sound", root / "actor")
    body = JOB_BODY | {"roles": {"actor": file_digest(root / "actor" / MANIFEST)}}
    if lies:
        for at, new, how in drawn:
            body = edited(body, at, new, how)
    if not isinstance(body, dict):
        return
    try:
        write_job(root, body)
    except ValueError:  # NaN, which megarl writes nowhere
        return
    if not lies:
        (root / "job.json").write_bytes(damaged((root / "job.json").read_bytes(), damage))
    with may_refuse(JobFileError, naming=str(root)):
        assert read_job(root) == json.loads(json.dumps(body)) or lies


rows = st.dictionaries(st.sampled_from(["step", "reward/mean"]), json_values, max_size=2).map(json.dumps) | st.integers(0, 9).map('{{"step": {}}}'.format)
ends = st.sampled_from(["\n", "\n", "\n", "", "\r\n"])


@fuzz(st.lists(st.tuples(rows | st.text(max_size=6) | st.just("[" * 100_000), ends), max_size=5), st.integers(0, 9))
def test_rows_of_a_run_that_goes_on(folder: Path, drawn: list[tuple[str, str]], last: int) -> None:
    """Rows of earlier steps stay, byte for byte, and no other."""
    (folder / "rollouts").mkdir(exist_ok=True)
    path = folder / "metrics.jsonl"
    path.write_bytes("".join(row + end for row, end in drawn).encode(errors="replace"))
    before = path.read_bytes().splitlines(keepends=True)
    cut_after(folder, last)
    kept = path.read_bytes().splitlines(keepends=True)
    assert all(isinstance(json.loads(line)["step"], int) and json.loads(line)["step"] <= last for line in kept)
    assert [line for line in before if line in kept] == kept
    assert last == 0 or all(line in kept for line in before if line in [b'{"step": %d}\n' % step for step in range(last + 1)])


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """A damaged pickle may ask for tens of gigabytes, and this machine has other work."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (16 << 30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


class Bomb:
    def __reduce__(self) -> tuple:
        return exec, ("raise SystemExit('this was run')",)


bombs = st.sampled_from([pickle.dumps(Bomb(), protocol) for protocol in range(6)] + [pickle.dumps(torch.Size([1])), b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR.", b"cos\nsystem\n."])


@fuzz(st.binary(max_size=80) | bombs | st.tuples(bombs, damages).map(lambda drawn: damaged(*drawn)), st.binary(max_size=12) | st.sampled_from([b"release", b"5", b"-1", b"99" * 3000, b"../..", b"\x00"]),
      json_values)
def test_folders_of_megatron(folder: Path, metadata: bytes, latest: bytes, backend: object) -> None:
    root = folder / "megatron"
    (root / "iter_0000005").mkdir(parents=True, exist_ok=True)
    (root / "latest_checkpointed_iteration.txt").write_bytes(latest)
    for place in (root / "iter_0000005", root / "release"):
        place.mkdir(exist_ok=True)
        (place / ".metadata").write_bytes(metadata)
        (place / "metadata.json").write_text(json.dumps(backend))
    with may_refuse(CheckpointError, naming=str(root)):
        megatron_folder(root)
    with may_refuse(CheckpointError, naming=str(root)), little_memory():
        read_metadata(root / "release")


def model(folder: Path) -> Path:
    if not (folder / "model").exists():
        write_model_folder(str(folder / "model"), seed=0)
    shutil.rmtree(folder / "changed", ignore_errors=True)
    return shutil.copytree(folder / "model", folder / "changed", ignore=shutil.ignore_patterns("tokenizer*"))


@fuzz(st.sampled_from(["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]), edits, damages, st.booleans(), quick=30)
def test_model_folders(folder: Path, name: str, drawn: list, damage: list, is_text: bool) -> None:
    changed = model(folder)
    path, index = changed / name, {"metadata": {}, "weight_map": dict.fromkeys(TensorFile(changed / "model.safetensors").keys(), "model.safetensors")}
    content = json.dumps(index).encode() if name.endswith("index.json") else path.read_bytes()
    if is_text and name.endswith(".json"):
        value = json.loads(content)
        for at, new, how in drawn:
            value = edited(value, at, new, how)
        content = json.dumps(value).encode()
    else:
        content = damaged(content, damage)
    path.write_bytes(content)
    with may_refuse(ConfigError, CheckpointError, TensorFileError, naming=str(changed)):
        shape = ModelShape.load(changed)
        source = open_weights(changed, shape)
        for tensor_name in source.tensors:
            source.read(tensor_name, 0, 1)


BASE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": [1, 2], "torch_dtype": "bfloat16"}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
DEEPSEEK = BASE | {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": None,
                   "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "head_dim": None}  # fmt: skip
CONFIGS = {
    "qwen2": BASE, "qwen3": BASE, "llama": BASE | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}},
    "mistral": BASE | {"sliding_window": 64}, "gemma3_text": BASE | {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 64, "query_pre_attn_scalar": 16, "rope_local_base_freq": 1e4,
                                                                     "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "qwen2_moe": BASE | EXPERTS | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [0]}, "qwen3_moe": BASE | EXPERTS, "mixtral": BASE | EXPERTS,
    "deepseek_v2": DEEPSEEK | {"topk_method": "group_limited_greedy", "rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v3": DEEPSEEK | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
}  # fmt: skip


@fuzz(st.sampled_from(sorted(CONFIGS)), edits, st.booleans())
def test_shapes_of_models(folder: Path, model_type: str, drawn: list, value_head: bool) -> None:
    """What passes has the sizes of its tensors."""
    config = {"model_type": model_type} | CONFIGS[model_type]
    for at, new, how in drawn:
        config = edited(config, at, new, how)
    (folder / "config.json").write_text(json.dumps(config))
    with may_refuse(ConfigError, naming=str(folder)):
        shape = ModelShape.load(folder, value_head)
        assert shape.num_layers > 1000 or hf_sizes(shape)
