"""Damaged folders of models, and Megatron's checkpoints that are none: weights, or an error that names the
folder; and nothing is run.

pytest tests/fuzz/test_models.py"""

from __future__ import annotations

import contextlib
import json
import pickle
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from hypothesis import strategies as st

from megarl.checkpoint.manifest import CheckpointError
from megarl.checkpoint.sources import open_weights
from megarl.checkpoint.tensor_file import TensorFile, TensorFileError
from megarl.checkpoint.torch_dist import megatron_folder, read_metadata
from megarl.config.errors import ConfigError
from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import hf_sizes
from sums.model import write_model_folder
from tests.fuzz.cases import fuzz, may_refuse
from tests.fuzz.damage import damaged, damages, edited, edits, json_values


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


bombs = st.sampled_from(
    [pickle.dumps(Bomb(), protocol) for protocol in range(6)]
    + [pickle.dumps(torch.Size([1])), b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR.", b"cos\nsystem\n."]
)


@fuzz(
    st.binary(max_size=80) | bombs | st.tuples(bombs, damages).map(lambda drawn: damaged(*drawn)),
    st.binary(max_size=12) | st.sampled_from([b"release", b"5", b"-1", b"99" * 3000, b"../..", b"\x00"]),
    json_values,
)
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


@fuzz(
    st.sampled_from(
        ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]
    ),
    edits,
    damages,
    st.booleans(),
    quick=20,
)
def test_model_folders(folder: Path, name: str, drawn: list, damage: list, is_text: bool) -> None:
    changed = model(folder)
    path, index = (
        changed / name,
        {
            "metadata": {},
            "weight_map": dict.fromkeys(
                TensorFile(changed / "model.safetensors").keys(), "model.safetensors"
            ),
        },
    )
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


BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": [1, 2],
    "torch_dtype": "bfloat16",
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
DEEPSEEK = BASE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "head_dim": None,
}
CONFIGS = {
    "qwen2": BASE,
    "qwen3": BASE,
    "llama": BASE
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    },
    "mistral": BASE | {"sliding_window": 64},
    "gemma3_text": BASE
    | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 64,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "qwen2_moe": BASE
    | EXPERTS
    | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "qwen3_moe": BASE | EXPERTS,
    "mixtral": BASE | EXPERTS,
    "deepseek_v2": DEEPSEEK
    | {
        "topk_method": "group_limited_greedy",
        "rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v3": DEEPSEEK | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
}


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
