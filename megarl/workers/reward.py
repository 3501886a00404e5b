"""The reward role on one rank: scores what this rank's engine has sampled."""

from __future__ import annotations

import os

import torch.distributed as dist

from megarl.config.mesh import MeshSpec
from megarl.config.reward_models import uses_rule_reward
from megarl.config.schema import TrainConfig
from megarl.flow.job_roles import Record, Reward
from megarl.invariants import InvariantError, digest
from megarl.rewards.base import RewardSample, digest_of_text
from megarl.rewards.pool import RewardPool, Verdict
from megarl.workers.data_plane import DataPlane
from megarl.workers.implements import implements
from megarl.workers.rollout import RolloutRole


@implements(Reward)
class RewardRole:
    def __init__(self, config: TrainConfig, mesh: MeshSpec, plane: DataPlane, rollout: RolloutRole) -> None:
        self.config, self.mesh, self.plane, self.rollout = config, mesh, plane, rollout

    pool: RewardPool | None = None
    """None: the job has no rule, or another rank of this engine calls it."""

    def setup(self) -> None:
        if uses_rule_reward(self.config) and self.mesh.coordinates(dist.get_rank())["tp"] == 0:
            self.pool = RewardPool(self.config.data, num_workers(self.config.data.reward_num_workers))

    def shut_down(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def score(self, purpose: str, num_logged: int | None = None) -> list[Record]:
        """Rule rewards of this engine's samples, from its first rank only: sample_id, reward (None: it
        failed, then `failure` says why, or the job has no rule).

        The first num_logged samples of the step (default: --num-rollouts-to-log) also carry their texts, for
        the rollouts/ files.

        Raises: InvariantError if the pool gave a sample the verdict on another one."""
        if self.mesh.coordinates(dist.get_rank())["tp"] != 0:
            return []
        made, tokenizer, dataset = (
            self.plane.rollouts[purpose + self.rollout.suffix],
            self.rollout.tokenizer,
            self.rollout.datasets[purpose],
        )
        texts = tokenizer.decode_batch(made.responses)
        verdicts = (
            [Verdict(None)] * len(texts)
            if self.pool is None
            else self.pool.score(
                [
                    RewardSample(
                        dataset[row].data_source,
                        text,
                        dataset[row].ground_truth,
                        dataset[row].extra_info,
                        sample_id,
                    )
                    for row, text, sample_id in zip(made.rows, texts, made.sample_ids, strict=True)
                ]
            )
        )
        limit = self.config.run.num_rollouts_to_log if num_logged is None else num_logged
        out = []
        for i, (sample_id, verdict) in enumerate(zip(made.sample_ids, verdicts, strict=True)):
            if self.pool is not None and (verdict.sample_id, verdict.digest) != (
                sample_id,
                digest_of_text(texts[i]),
            ):
                raise InvariantError(
                    f"the reward of sample {sample_id} ({verdict.reward}) is that of sample "
                    f"{verdict.sample_id}, or of another "
                    "response"
                )
            record: dict[str, object] = {
                "sample_id": sample_id,
                "reward": verdict.reward,
                "digest": digest(made.prompts[i], made.responses[i]),
            }
            if verdict.failure is not None:
                record["failure"] = verdict.failure
            if limit < 0 or made.num_before + i < limit:
                prompt = dataset[made.rows[i]]
                record |= {
                    "row": made.rows[i],
                    "prompt": prompt.messages,
                    "response": texts[i],
                    "ground_truth": prompt.ground_truth,
                    "response_length": len(made.responses[i]),
                    "rollout_log_prob": sum(made.log_probs[i]),
                    "prompt_ids": made.prompts[i],
                    "response_ids": made.responses[i],
                }
            out.append(record)
        return out


def num_workers(asked: int | None) -> int:
    """Processes of one rank's pool: what --reward-num-workers says, else the rank's share of the node's
    cores, at most 8."""
    return (
        asked
        if asked is not None
        else max(1, min(8, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    )
