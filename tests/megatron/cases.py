"""How tests start the scripts of this folder, and which layouts value models are compared with transformers
in."""

from pathlib import Path

from megarl.config.schema import LoRAConfig

VALUE_LAYOUTS = {
    "qwen3": ("one", "tp2", "tp2_sp", "pp2", "tp2_pp2", "one_bf16"),
    "qwen2": ("one", "pp2"),  # embeddings that are tied in the config, and here are not
    "llama": ("one",),
    "mistral": ("one",),
    "gemma3": ("one", "pp2"),
    "qwen3_moe": ("one", "tp2_sp_ep2"),
}
"""Families of families.py -> layouts of value models."""
VALUE_CASES = [
    (family, layout)
    for family, layouts in VALUE_LAYOUTS.items()
    for layout in layouts
    if layout != "one_bf16"
]

LORA_LAYOUTS = {
    "qwen2_tied": (
        "one",
        "one_recompute",
        "tp2",
        "tp2_sp",
        "tp2_sp_selective",
        "tp2_sp_stacked_sharded",
        "pp2",
        "pp2_vpp2",
        "cp2",
        "dp2",
        "dp2_sharded",
        "one_bf16",
    ),
    "gemma3": ("one", "tp2_sp"),
    "critic": ("one", "tp2_sp"),
    "qwen3_moe": ("one", "tp2_sp_ep2"),
}
LORA_QUICK = [
    ("qwen2_tied", layout)
    for layout in LORA_LAYOUTS["qwen2_tied"]
    if layout not in ("tp2", "tp2_sp_selective", "pp2", "dp2")
] + [
    (family, layout)
    for family, layouts in LORA_LAYOUTS.items()
    if family != "qwen2_tied"
    for layout in layouts
]
"""Cases of the default suite. What the four others split is split in these too."""
LORA = {
    "qwen2_tied": LoRAConfig(lora_rank=4, lora_alpha=8.0),
    "gemma3": LoRAConfig(lora_rank=4, lora_alpha=8.0),
    "critic": LoRAConfig(lora_rank=3, lora_alpha=6.0, lora_target_modules=("linear_proj", "linear_fc1")),
    "qwen3_moe": LoRAConfig(lora_rank=4, lora_alpha=8.0, lora_target_modules=("linear_qkv", "linear_proj")),
}
"""Of models with adapters. _sharded: with the distributed optimizer, where no rank sees whole gradients."""

DECAY = {
    "lr": 0.2,
    "min_lr": 0.05,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 2,
    "lr_decay_iters": 5,
    "weight_decay": 0.5,
}
DECAY_STEPS, DECAY_RESUMED = 6, 3
"""Steps of a case, and the one after which it is resumed."""
DECAY_CASES = [
    ("actor", "one", "gemma3", 0),
    ("actor", "dp2_do", "biases", 0),
    ("actor", "dp2_do_bf16", "qwen3", 0),
    ("actor", "tp2_sp_ep2_latents", "deepseek_v3", 0),
    ("actor", "ep2_do", "qwen3_moe", 0),
    ("actor", "dp2_fsdp_biases", "biases", 0),
    ("actor", "dp2_do", "qwen3", 4),
    ("critic", "one", "qwen3", 4),
    ("critic", "pp2_vpp2_do", "biases", 0),
]
"""Role, layout and model of layouts.py, and --lora-rank."""


def name_of(case: tuple[object, ...]) -> str:
    return "_".join(map(str, case))


def run_ranks(script: str, out: Path, count: int, *arguments: str) -> None:
    """A script of this folder under torchrun; its ranks write to `out`."""
    from tests.launch import torchrun  # not of the ranks, which import this file by its name

    torchrun(count, Path(__file__).with_name(script), out, *arguments, timeout=1200, folder=out)
