"""Register the algorithms by name (--algorithm). A new one is a file with a subclass of `Algorithm`, an
import and a line here."""

from megarl.algorithms.base import AdvantageInputs, Algorithm, LossInputs, ValueLossInputs
from megarl.algorithms.grpo import GRPO
from megarl.algorithms.maxrl import MaxRL
from megarl.algorithms.opo import OPO
from megarl.algorithms.ppo import PPO
from megarl.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from megarl.algorithms.rloo import RLOO
from megarl.algorithms.sft import SFT

REGISTRY: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "rloo": RLOO,
    "reinforce++": ReinforcePlusPlus,
    "reinforce++-baseline": ReinforcePlusPlusBaseline,
    "opo": OPO,
    "maxrl": MaxRL,
    "ppo": PPO,
    "sft": SFT,
}
"""--algorithm -> the dataclass with its flags and its math."""

__all__ = ["GRPO", "PPO", "REGISTRY", "SFT", "AdvantageInputs", "Algorithm", "LossInputs", "ValueLossInputs"]
