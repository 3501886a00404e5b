"""Which layouts write which checkpoints, and which read them: for run_checkpoints.py and the tests that judge
it."""

CASES = (
    # family, writer, readers; +sharded: distributed optimizer; +fsdp: Megatron-FSDP; +bf16: bf16 weights with
    # fp32 masters
    ("qwen3", "tp2_sp", ("dp2", "tp2_stacked")),
    ("qwen3", "dp2+sharded", ("tp2_sp", "pp2_vpp2+sharded", "cp2+sharded")),
    ("qwen3", "pp2_vpp2", ("tp2",)),
    ("qwen2", "dp2+sharded+bf16", ("tp2_sp+bf16", "pp2+sharded+bf16")),
    ("qwen2", "pp2+sharded", ("dp2",)),
    ("qwen3", "dp2+fsdp", ("tp2_sp", "cp2+fsdp")),
    ("qwen2", "dp2+fsdp+bf16", ("pp2+sharded+bf16",)),
    ("qwen3_moe", "ep2+sharded", ("one", "tp2_sp_ep2")),
    ("deepseek_v3", "tp2_sp_ep2+sharded", ("pp2",)),
    ("qwen3_critic", "pp2", ("dp2+sharded",)),
    ("qwen3_lora", "tp2_sp+bf16", ("pp2+sharded+bf16",)),
)

MEGATRON_CASES = (
    ("qwen3", "tp2_sp"),
    ("qwen3", "pp2"),
    ("qwen2", "tp2"),
    ("qwen3_moe", "tp2_sp_ep2"),
    ("deepseek_v3", "ep2"),
)
"""What megatron.core.dist_checkpointing saves. Not tied over two stages: it would ask the global
parallel_state."""
