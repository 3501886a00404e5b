"""Which layouts each model family runs in: read by run_layouts.py and run_values.py and by the tests that judge them; and how those start them."""

import subprocess
import sys
from pathlib import Path

from megarl.config.schema import LoRAConfig

DENSE = ("one", "tp2", "tp2_sp", "pp2", "one_stacked", "tp2_sp_stacked")
FAMILY_LAYOUTS = {
    "qwen2_tied": DENSE,
    "qwen3": DENSE,
    "llama": DENSE,
    "mistral": ("one", "tp2"),
    # Megatron splits attention beside experts with sequence parallelism only
    "qwen3_moe": ("one", "tp2_sp", "pp2", "ep2", "tp2_sp_ep2"),
    "qwen3_moe_unscaled": ("one",),
}
CASES = [(family, layout) for family, layouts in FAMILY_LAYOUTS.items() for layout in layouts]

VALUE_LAYOUTS = {
    "qwen3": ("one", "tp2", "tp2_sp", "pp2", "tp2_pp2", "one_bf16"),
    "qwen2_tied": ("one", "pp2"),  # embeddings that are tied in the config, and here are not
    "llama": ("one",),
    "mistral": ("one",),
    "qwen3_moe": ("one", "tp2_sp_ep2"),
}
"""Of value models."""
VALUE_CASES = [(family, layout) for family, layouts in VALUE_LAYOUTS.items() for layout in layouts if layout != "one_bf16"]

LORA_LAYOUTS = {
    "qwen2_tied": ("one", "one_recompute", "tp2", "tp2_sp", "tp2_sp_selective", "tp2_sp_stacked_sharded", "pp2", "pp2_vpp2", "dp2",
                   "dp2_sharded", "one_bf16"),
    "critic": ("one", "tp2_sp"),
    "qwen3_moe": ("one", "tp2_sp_ep2"),
}
LORA = {
    "qwen2_tied": LoRAConfig(lora_rank=4, lora_alpha=8.0),
    "critic": LoRAConfig(lora_rank=3, lora_alpha=6.0, lora_target_modules=("linear_proj", "linear_fc1")),
    "qwen3_moe": LoRAConfig(lora_rank=4, lora_alpha=8.0, lora_target_modules=("linear_qkv", "linear_proj")),
}
"""Of models with adapters. _sharded: with the distributed optimizer, where no rank sees whole gradients."""


def run_ranks(script: str, out: Path, count: int, *arguments: str) -> None:
    """A script of this folder under torchrun; its ranks write to `out`."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count),
                           str(Path(__file__).with_name(script)), str(out), *arguments],
                          capture_output=True, text=True, timeout=600, cwd=out)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
