"""What the driver keeps of one actor and the roles of its number: where it is in its data, its KL controller, whether its engine agrees."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.config.hf_config import ModelShape
from megarl.config.reward_models import reward_models, uses_rule_reward
from megarl.config.schema import TrainConfig
from megarl.data.cursor import DataCursor
from megarl.driver.preflight import Inputs


class Learner:
    """Args: config: of this actor; suffix: its number, "" of the first; inputs: its data."""

    def __init__(self, suffix: str, config: TrainConfig, inputs: Inputs) -> None:
        self.suffix, self.config, self.shape, self.actor = suffix, config, inputs.shape, f"actor{suffix}"
        self.cursor = DataCursor(len(inputs.train), config.batch.seed, config.data.shuffle)
        self.eval_rows = list(range(len(inputs.evaluation or ())))[: config.run.eval_num_prompts]
        self.kl = config.algorithm.build_kl_controller()
        self.gate_passed = False
        self.weight_of = {f"reward{suffix}": 1.0} if uses_rule_reward(config) else {}
        """Role that scores -> what its score is multiplied by."""
        self.weight_of |= {f"{model.name}{suffix}": model.weight for model in reward_models(config)}

    def hidden_size(self, role: str) -> int:
        """Of the model of one of its roles; it says what a long sequence costs beside a short one."""
        if role == f"critic{self.suffix}" and self.config.model.critic_model:
            return ModelShape.load(self.config.model.critic_model, value_head=True).hidden_size
        for model in reward_models(self.config):
            if role == f"{model.name}{self.suffix}":
                config = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
                return int(config.get("hidden_size", self.shape.hidden_size))
        return self.shape.hidden_size
