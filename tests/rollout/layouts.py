"""Which model is trained in which layouts and served by which engines: read by run_layouts.py and by the
tests that judge it."""

DENSE_2, EXPERTS_2 = ("one", "tp2", "pp2"), ("one", "pp2", "ep2", "tp2_sp", "tp2_sp_ep2")
DENSE_4, EXPERTS_4 = ("tp4", "tp2_pp2"), ("tp4_sp", "ep4", "tp2_sp_ep2_etp2", "pp2_ep2")
FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "gemma3", "qwen3_moe", "mixtral")
NAMES = (
    *FAMILIES,
    "qwen2_untied",
    "qwen3_tied",
    "llama_tied",
    "mistral_tied",
    "qwen3_moe_tied",
    "mixtral_tied",
)


def has_experts(name: str) -> bool:
    return name.startswith(("qwen3_moe", "mixtral", "deepseek"))


# (model, ranks of an engine) -> layouts of the trainer, on two ranks: every family and layout, tied and
# untied
COVERING = {
    ("qwen2", 2): ("tp2", "pp2"),
    ("qwen2_deep", 2): ("pp2_vpp2",),
    ("qwen3", 1): ("one", "tp2", "pp2"),
    ("llama_tied", 2): ("pp2",),
    ("mistral", 2): ("tp2",),
    ("gemma3", 2): ("tp2", "pp2"),
    ("qwen3_moe", 2): EXPERTS_2,
    ("mixtral", 1): ("ep2",),
    ("deepseek_v3", 2): ("tp2_sp_ep2",),
}
QUICK = {
    key: COVERING[key]
    for key in (("qwen2", 2), ("qwen3", 1), ("gemma3", 2), ("qwen3_moe", 2), ("deepseek_v3", 2))
}
"""Those that the default suite runs: every layout, every kind of layer, engines of one and of two ranks."""
EVERYTHING_2 = {(name, tp): EXPERTS_2 if has_experts(name) else DENSE_2 for name in NAMES for tp in (1, 2)}
EVERYTHING_4 = {
    (name, tp): EXPERTS_4 if has_experts(name) else DENSE_4 for name in FAMILIES for tp in (1, 2, 4)
}
"""On four ranks tp4 has more ranks than the models have key heads, on both sides."""
OUTSIDE = {("qwen3_moe", 2): ("pp2", "ep2")}
"""An engine in processes of its own takes 15 s to start; test_out_of_process.py has one of each of the dense
kinds."""
EVERYTHING_OUTSIDE = {
    tp: {(name, tp): ("pp2", "tp2_sp", "ep2") if has_experts(name) else DENSE_2 for name in NAMES}
    for tp in (1, 2)
}
WITHOUT_TABLES = {("llama", 1): ("pp2",), ("qwen3_moe", 2): ("ep2",)}
"""As if there were no tables of vLLM's layouts."""
TRANSFORMERS = {(name, 1): layouts for (name, _), layouts in COVERING.items() if name != "qwen2_deep"}
"""Engines of --rollout-backend transformers, whole on each rank."""
TRANSFORMERS_OUTSIDE = {("qwen2", 1): ("tp2", "pp2"), ("qwen3_moe", 1): ("ep2",)}
JOBS = {  # -> ranks of the trainer, --rollout-engine, combinations
    "quick": (2, "in-process", QUICK),
    "covering": (2, "in-process", COVERING),
    "outside": (2, "out-of-process", OUTSIDE),
    "transformers": (2, "in-process by transformers", TRANSFORMERS),
    "transformers_outside": (2, "out-of-process by transformers", TRANSFORMERS_OUTSIDE),
    "everything_2": (2, "in-process", EVERYTHING_2),
    "everything_4": (4, "in-process", EVERYTHING_4),
    "outside_without_tables": (2, "out-of-process without tables", WITHOUT_TABLES),
    **{
        f"everything_outside_{tp}": (2, "out-of-process", combinations)
        for tp, combinations in EVERYTHING_OUTSIDE.items()
    },
}
SYNCS = 3
