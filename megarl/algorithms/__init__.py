"""Register the algorithms by name (--algorithm). A new one is a file with a subclass of `Algorithm`, an
import and a line here."""

from megarl.algorithms.base import AdvantageInputs, Algorithm, LossInputs, ValueLossInputs
from megarl.algorithms.bradley_terry import BradleyTerry
from megarl.algorithms.distill import Distill
from megarl.algorithms.dpo import DPO
from megarl.algorithms.gdpo import GDPO
from megarl.algorithms.gkd import GKD
from megarl.algorithms.grpo import GRPO
from megarl.algorithms.ipo import IPO
from megarl.algorithms.kto import KTO
from megarl.algorithms.maxrl import MaxRL
from megarl.algorithms.online_dpo import OnlineDPO
from megarl.algorithms.opo import OPO
from megarl.algorithms.orpo import ORPO
from megarl.algorithms.ppo import PPO
from megarl.algorithms.ppo_lagrangian import PPOLagrangian
from megarl.algorithms.raft import RAFT
from megarl.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from megarl.algorithms.remax import ReMax
from megarl.algorithms.rloo import RLOO
from megarl.algorithms.rpo import RPO
from megarl.algorithms.sft import SFT
from megarl.algorithms.simpo import SimPO

REGISTRY: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "rloo": RLOO,
    "remax": ReMax,
    "reinforce++": ReinforcePlusPlus,
    "reinforce++-baseline": ReinforcePlusPlusBaseline,
    "opo": OPO,
    "maxrl": MaxRL,
    "gdpo": GDPO,
    "ppo": PPO,
    "ppo-lagrangian": PPOLagrangian,
    "raft": RAFT,
    "online-dpo": OnlineDPO,
    "distill": Distill,
    "gkd": GKD,
    "sft": SFT,
    "dpo": DPO,
    "ipo": IPO,
    "kto": KTO,
    "simpo": SimPO,
    "orpo": ORPO,
    "rpo": RPO,
    "bradley-terry": BradleyTerry,
}
"""--algorithm -> the dataclass with its flags and its math."""


def samples(name: str | None) -> bool:
    """Return whether the algorithm of this name samples responses; True for an unknown one."""
    return name not in REGISTRY or REGISTRY[name].needs_rollout


__all__ = [
    "GRPO",
    "PPO",
    "REGISTRY",
    "SFT",
    "AdvantageInputs",
    "Algorithm",
    "LossInputs",
    "ValueLossInputs",
    "samples",
]
