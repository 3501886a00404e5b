"""megarl: reinforcement learning of large language models on Megatron-Core and vLLM."""

__version__ = "0.1.0"
