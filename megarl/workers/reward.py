"""The reward role on one rank: scores what this rank's engine has sampled."""

from __future__ import annotations

import torch.distributed as dist

from megarl.config.mesh import MeshSpec
from megarl.config.reward_models import uses_rule_reward
from megarl.config.schema import TrainConfig
from megarl.rewards import load_reward
from megarl.rewards.base import RewardSample, score
from megarl.workers.data_plane import DataPlane
from megarl.workers.rollout import RolloutRole


class RewardRole:
    def __init__(self, config: TrainConfig, mesh: MeshSpec, plane: DataPlane, rollout: RolloutRole) -> None:
        self.config, self.mesh, self.plane, self.rollout = config, mesh, plane, rollout

    def setup(self) -> None:
        self.function = load_reward(self.config.data.reward, self.config.data.reward_function) if uses_rule_reward(self.config) else None

    def score(self, purpose: str, num_logged: int | None = None) -> list[dict[str, object]]:
        """Rule rewards of this engine's samples, from its first rank only: sample_id, reward (None: it failed, or the job has no rule).

        The first num_logged samples of the step (default: --num-rollouts-to-log) also carry their texts, for the rollouts/ files."""
        if self.mesh.coordinates(dist.get_rank())["tp"] != 0:
            return []
        made, tokenizer, dataset = self.plane.rollouts[purpose + self.rollout.suffix], self.rollout.tokenizer, self.rollout.datasets[purpose]
        texts = tokenizer.decode_batch(made.responses)
        rewards = [None] * len(texts) if self.function is None else score(self.function, [
            RewardSample(dataset[row].data_source, text, dataset[row].ground_truth, dataset[row].extra_info, sample_id)
            for row, text, sample_id in zip(made.rows, texts, made.sample_ids, strict=True)])  # fmt: skip
        limit = self.config.run.num_rollouts_to_log if num_logged is None else num_logged
        out = []
        for i, (sample_id, reward) in enumerate(zip(made.sample_ids, rewards, strict=True)):
            record: dict[str, object] = {"sample_id": sample_id, "reward": reward}
            if limit < 0 or sample_id < limit:
                prompt = dataset[made.rows[i]]
                record |= {"row": made.rows[i], "prompt": prompt.messages, "response": texts[i], "ground_truth": prompt.ground_truth,
                           "response_length": len(made.responses[i]), "rollout_log_prob": sum(made.log_probs[i])}  # fmt: skip
            out.append(record)
        return out
