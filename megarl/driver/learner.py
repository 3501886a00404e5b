"""What the driver keeps of one actor and the roles of its number: where it is in its data, its KL controller,
whether its engine agrees."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from megarl.config.hf_config import ModelShape
from megarl.config.reward_models import reward_models, uses_rule_reward
from megarl.config.schema import TrainConfig
from megarl.data.cursor import DataCursor
from megarl.driver.preflight import Inputs
from megarl.driver.rollout_batch import RolloutBatch
from megarl.gate_limits import GateLimits


class Learner:
    """Args: config: of this actor; suffix: its number, "" of the first; inputs: its data."""

    def __init__(self, suffix: str, config: TrainConfig, inputs: Inputs) -> None:
        self.suffix, self.config, self.shape, self.actor = suffix, config, inputs.shape, f"actor{suffix}"
        self.cursor = DataCursor(len(inputs.train), config.batch.seed, config.data.shuffle)
        self.eval_rows = list(range(len(inputs.evaluation or ())))[: config.run.eval_num_prompts]
        self.kl = config.algorithm.build_kl_controller()
        self.gate_limits = GateLimits.of(config, inputs.shape)
        self.gate_passed = False
        self.zero_reward_steps = 0
        """In a row, until now."""
        self.weight_of = {f"reward{suffix}": 1.0} if uses_rule_reward(config) else {}
        """Role that scores -> what its score is multiplied by."""
        self.weight_of |= {f"{model.name}{suffix}": model.weight for model in reward_models(config)}

    def note_zero_rewards(self, batch: RolloutBatch) -> str | None:
        """What to say when there has been no reward but 0 for long."""
        if not batch.rewards:  # it learns from the samples of another
            return None
        self.zero_reward_steps = 0 if any(batch.rewards.values()) else self.zero_reward_steps + 1
        limit = self.config.run.warn_after_zero_reward_steps
        if not limit or not self.zero_reward_steps or self.zero_reward_steps % limit:
            return None
        return (
            f"step {batch.step}: no reward but 0 in {self.zero_reward_steps} steps of {self.actor}. "
            "Does the reward see what you think? "
            "Look at the texts in rollouts/."
        )

    def note_unscored_updates(self, metrics: Mapping[str, float], step: int) -> str:
        """What to say when updates were left out because no sample of their mini-batches had a reward."""
        kinds = {"actor": "policy/updates_unscored", "critic": "critic/updates_unscored"}
        said = " and ".join(
            f"{metrics[name]:.0f} of {kind}{self.suffix}" for kind, name in kinds.items() if name in metrics
        )
        return said and f"step {step}: updates left out, as every reward of their mini-batch failed: {said}."

    def state(self) -> dict[str, object]:
        """What a checkpoint holds of it, for JSON."""
        return {
            "cursor": self.cursor.state(),
            "kl": self.kl.state_dict(),
            "zero_reward_steps": self.zero_reward_steps,
        }

    def restore(self, state: dict[str, object]) -> None:
        """What `state` returned. Raises: ValueError if the training data has changed its size. The gate is
        passed anew."""
        self.cursor = DataCursor.restore(state["cursor"], self.cursor.num_rows)
        self.kl.load_state_dict(state["kl"])
        self.zero_reward_steps = state["zero_reward_steps"]

    def hidden_size(self, role: str) -> int:
        """Of the model of one of its roles; it says what a long sequence costs beside a short one."""
        if role == f"critic{self.suffix}" and self.config.model.critic_model:
            return ModelShape.load(self.config.model.critic_model, value_head=True).hidden_size
        for model in reward_models(self.config):
            if role == f"{model.name}{self.suffix}":
                config = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
                return int(config.get("hidden_size", self.shape.hidden_size))
        return self.shape.hidden_size
