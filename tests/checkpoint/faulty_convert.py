"""`megarl convert` on ranks, with a fault in the table that says where Megatron has each tensor. The first
argument names it; none: ''.

torchrun --nproc-per-node 2 tests/checkpoint/faulty_convert.py "swapped key and value" --model M --save OUT
--tensor-model-parallel-size 2"""

from __future__ import annotations

import sys

from megarl.convert import main
from megarl.reshard import megatron_atlas
from megarl.reshard.atlas import Row

ROWS = {
    "swapped key and value": (
        "self_attention.linear_qkv.weight",
        lambda row: Row(row.name, row.layout, *(row.hf_names[i] for i in (0, 2, 1)), needs=row.needs),
    ),
    "swapped gate and up": (
        "mlp.linear_fc1.weight",
        lambda row: Row(row.name, row.layout, *row.hf_names[::-1], needs=row.needs),
    ),
    "swapped heads": (
        "self_attention.linear_qkv.weight",
        lambda row: Row(row.name, megatron_atlas.fused_qkv, *row.hf_names, needs=row.needs),
    ),
}

if __name__ == "__main__":
    fault, *arguments = sys.argv[1:]
    if fault:
        name, change = ROWS[fault]
        megatron_atlas.LAYER = tuple(change(row) if row.name == name else row for row in megatron_atlas.LAYER)
    sys.exit(main(arguments))
