"""Define the names under which megarl registers its parts with vLLM. This module imports nothing."""

BACKEND = "megarl"
"""Name of the weight-transfer backend: LLM(weight_transfer_config={"backend": "megarl"})."""

CPU_NORMS = "megarl_c"
"""Name of the norm provider in cpu_norms.py."""
