"""Names under which megarl registers its parts with vLLM. Imports nothing."""

BACKEND = "megarl"
"""Name of the weight-transfer backend: LLM(weight_transfer_config={"backend": "megarl"})."""

CPU_NORMS = "megarl_c"
"""Name of the provider of norms in cpu_norms.py."""
