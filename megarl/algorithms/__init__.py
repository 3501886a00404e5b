"""One file per algorithm. A new one is a file with a subclass of `Algorithm`, and here its import and a line: its fields become flags."""

from megarl.algorithms.base import Algorithm, LossInputs
from megarl.algorithms.grpo import GRPO
from megarl.algorithms.sft import SFT

REGISTRY: dict[str, type[Algorithm]] = {"grpo": GRPO, "sft": SFT}
"""--algorithm -> the dataclass with its flags and its math."""

__all__ = ["GRPO", "REGISTRY", "SFT", "Algorithm", "LossInputs"]
