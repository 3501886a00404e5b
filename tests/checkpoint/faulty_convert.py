"""`megarl convert` on ranks, with a fault in the table that says where Megatron has each tensor. The first
argument names it; none: ''.

torchrun --nproc-per-node 2 tests/checkpoint/faulty_convert.py "swapped key and value" --model M --save OUT
--tensor-model-parallel-size 2"""

from __future__ import annotations

import sys
from dataclasses import replace

from megarl.convert import main
from megarl.reshard import megatron_atlas

ROWS = {
    "swapped key and value": (
        "self_attention.linear_qkv.weight",
        lambda row: replace(row, hf_names=(row.hf_names[0], row.hf_names[2], row.hf_names[1])),
    ),
    "swapped gate and up": ("mlp.linear_fc1.weight", lambda row: replace(row, hf_names=row.hf_names[::-1])),
    "swapped heads": (
        "self_attention.linear_qkv.weight",
        lambda row: replace(row, layout=megatron_atlas.fused_qkv),
    ),
}

if __name__ == "__main__":
    fault, *arguments = sys.argv[1:]
    if fault:
        name, change = ROWS[fault]
        megatron_atlas.LAYER = tuple(change(row) if row.name == name else row for row in megatron_atlas.LAYER)
    sys.exit(main(arguments))
