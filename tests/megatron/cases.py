"""Which layouts each model family runs in: read by run_layouts.py and by the tests that judge it."""

DENSE = ("one", "tp2", "tp2_sp", "pp2", "dp2", "tp2_recompute_full", "tp2_sp_recompute_selective", "one_stacked", "tp2_sp_whole", "pp2_whole",
         "tp2_sp_stacked_recompute", "one_bf16", "dp2_bf16")  # fmt: skip
FAMILY_LAYOUTS = {
    "qwen2_tied": DENSE,
    "qwen3": DENSE,
    "llama": DENSE,
    "mistral": ("one", "tp2"),
    # Megatron splits attention beside experts with sequence parallelism only
    "qwen3_moe": ("one", "tp2_sp", "pp2", "dp2", "ep2", "tp2_sp_ep2"),
    "qwen3_moe_unscaled": ("one",),
}
CASES = [(family, layout) for family, layouts in FAMILY_LAYOUTS.items() for layout in layouts if not layout.endswith("_bf16")]
