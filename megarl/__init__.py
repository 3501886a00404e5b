"""Train large language models by reinforcement learning, with Megatron-Core for training and vLLM for
sampling."""

import importlib

__version__ = "0.1.0"

_HOME = {
    "Trainer": "megarl.trainer.trainer",
    "PPOTrainer": "megarl.trainer.trainer",
    "GRPOTrainer": "megarl.trainer.trainer",
    "load_config": "megarl.trainer.configure",
    "DeviceMap": "megarl.config.roles",
    "ConfigError": "megarl.config.errors",
    "RemoteError": "megarl.runtime.executor",
    "CallTimeout": "megarl.runtime.executor",
    "GateError": "megarl.trainer.gate",
    "symbolic_roles": "megarl.flow",
    "dataflow": "megarl.flow",
    "FlowError": "megarl.flow",
}
"""Where the Python API lives. Imported when first used, so that `import megarl` costs nothing."""
__all__ = [*_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(
            f"module 'megarl' has no attribute {name!r}. The Python API: {', '.join(_HOME)}."
        )
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
