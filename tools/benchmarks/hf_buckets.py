"""Gather full tensors under their Hugging Face names and send them in buckets, as other frameworks do."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import hf_sizes

BUCKET_BYTES = 512 << 20


def full_hf_tensors(
    shape: ModelShape, sources: dict[str, Tensor], group: dist.ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """Every full tensor on every rank, under its Hugging Face name."""
    sizes = hf_sizes(shape)
    for name, local in sources.items():
        parts = [torch.empty_like(local) for _ in range(group.size())]
        if "norm" in name:
            parts = [local]
        else:
            group.allgather([parts], [local]).wait()
        for hf_name, tensor in split_to_hf(shape, name, parts):
            yield hf_name, tensor.reshape(-1) if sizes[hf_name][1] == 1 else tensor


def split_to_hf(shape: ModelShape, name: str, parts: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Megatron's local layer spec, dense models."""
    prefix = (
        name.replace("decoder.layers.", "model.layers.").rpartition("self_attention.")[0]
        or name.replace("decoder.layers.", "model.layers.").rpartition("mlp.")[0]
    )
    kind = name.rpartition(".")[2]
    if "word_embeddings" in name:
        yield "model.embed_tokens.weight", torch.cat(parts)[: shape.vocab_size]
    elif name == "output_layer.weight":
        yield "lm_head.weight", torch.cat(parts)[: shape.vocab_size]
    elif "final_layernorm" in name:
        yield "model.norm.weight", parts[0]
    elif "linear_qkv" in name:
        groups, heads, head_dim = (
            shape.num_query_groups,
            shape.num_attention_heads // shape.num_query_groups,
            shape.head_dim,
        )
        full = torch.cat(parts).view(groups, heads + 2, head_dim, -1)
        for letter, part in zip("qkv", full.split([heads, 1, 1], dim=1), strict=True):
            yield f"{prefix}self_attn.{letter}_proj.{kind}", part.reshape(-1, full.shape[-1])
    elif "q_layernorm" in name or "k_layernorm" in name:  # Qwen3's, of queries and keys
        yield f"{prefix}self_attn.{name.rpartition('_layernorm')[0][-1]}_norm.weight", parts[0]
    elif "linear_proj" in name:
        yield f"{prefix}self_attn.o_proj.weight", torch.cat(parts, dim=1)
    elif "linear_fc1" in name:
        halves = [part.chunk(2) for part in parts]
        for index, hf in enumerate(("gate", "up")):
            yield f"{prefix}mlp.{hf}_proj.weight", torch.cat([half[index] for half in halves])
    elif "linear_fc2" in name:
        yield f"{prefix}mlp.down_proj.weight", torch.cat(parts, dim=1)
    else:
        layer = name.replace("decoder.layers.", "model.layers.")
        yield layer.replace("pre_mlp_layernorm", "post_attention_layernorm"), parts[0]


def buckets(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[Tensor, list]]:
    """(bytes, [(name, start, end, size)]) of at most BUCKET_BYTES, in one buffer that is used again."""
    buffer, entries, at = torch.empty(BUCKET_BYTES, dtype=torch.uint8), [], 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if at + size > BUCKET_BYTES:
            yield buffer[:at], entries
            entries, at = [], 0
        buffer[at : at + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        entries.append((name, at, at + size, tensor.shape))
        at += size
    yield buffer[:at], entries
