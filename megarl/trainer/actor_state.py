"""Keep the driver's state of one actor: position in the data, buffer, KL controller, log-prob gate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.algorithms.base import algorithm_of
from megarl.algorithms.kl_controller import MEASURED_KL
from megarl.algorithms.lagrange import MEAN_COST
from megarl.gate_limits import GateLimits
from megarl.config.hf_config import ModelShape
from megarl.config.reward_models import reward_models, uses_rule_reward
from megarl.config.schema import TrainConfig
from megarl.data.cursor import DataCursor
from megarl.data.measured_cursor import MeasuredCursor
from megarl.data.mixture import MixtureCursor
from megarl.packing import MiniBatch
from megarl.role_names import TRAINED_KINDS
from megarl.trainer.buffer import SampleBuffer
from megarl.trainer.data_rows import SftRows
from megarl.trainer.jumps import JumpWatch
from megarl.trainer.preflight import Inputs
from megarl.trainer.rollout_batch import RolloutBatch


class ActorState:
    """The driver's state of one actor: position in the data, sample buffer, KL controller, log-prob gate and
    reward weights.

    Args:
        suffix: "" for the first actor, "_2" for the second.
        config: the configuration of this actor.
        inputs: the data of this actor and the shape of its model.
    """

    def __init__(self, suffix: str, config: TrainConfig, inputs: Inputs) -> None:
        self.suffix, self.config, self.shape, self.actor = suffix, config, inputs.shape, f"actor{suffix}"
        self.algorithm = algorithm_of(config)
        walk, weights = (config.batch.seed, config.data.shuffle), config.data.train_data_weights
        self.cursor = DataCursor(len(inputs.train), *walk)
        self.measured = (
            self._measured_cursor(len(inputs.train), *walk) if config.curriculum.is_measured else None
        )
        """The cursor, if rewards decide which rows come next."""
        if self.measured is not None:
            self.cursor = self.measured
        if weights is not None:
            self.cursor = MixtureCursor(inputs.train.file_sizes, weights, *walk)
        self.sft = SftRows(config, inputs.num_sft_rows) if inputs.num_sft_rows else None
        """Rows of --sft-data; None without."""
        self.eval_rows = inputs.eval_rows(config.run.eval_num_prompts)
        """Held-out row -> its data source."""
        self.kl = self.algorithm.build_kl_controller()
        self.multiplier = self.algorithm.build_multiplier()
        """Factor of the cost; None if the algorithm holds none below a limit."""
        batch, streaming = config.batch, config.streaming
        self.buffer = SampleBuffer(
            batch.num_prompts if self.algorithm.needs_rollout else batch.global_batch_size,
            streaming.staleness,
            streaming.rollout_order == "in-order",
        )
        self.given_rows: list[int] = []
        """Rows that are admitted before the next ones of the data."""
        self.gate_limits = GateLimits.of(config, inputs.shape)
        self.gate_passed = not self.algorithm.needs_rollout
        """Whether trainer and engine have been found to agree. Without an engine there is nothing to compare."""
        self.zero_reward_steps = 0
        """Consecutive steps whose rewards were all zero."""
        self.equal_reward_steps = 0
        """Consecutive steps in which the samples of each prompt had equal rewards."""
        clip_grad = {"policy": config.optimizer.clip_grad}
        if config.critic_optimizer is not None:
            clip_grad |= dict.fromkeys(("critic", "cost_critic"), config.critic_optimizer.clip_grad)
        self.jumps = JumpWatch(self.algorithm.needs_rollout, clip_grad, suffix)
        self.weight_of = {f"reward{suffix}": 1.0} if uses_rule_reward(config) else {}
        """Weight of each scoring role's score in the reward, by role."""
        self.weight_of |= {f"{model.name}{suffix}": model.weight for model in reward_models(config)}

    def _measured_cursor(self, num_rows: int, seed: int, shuffle: bool) -> MeasuredCursor:
        given = self.config.curriculum
        return MeasuredCursor(
            num_rows,
            seed,
            shuffle,
            order=given.curriculum,
            low=given.difficulty_min,
            high=given.difficulty_max,
            rest=given.difficulty_rest,
        )

    def measure(self, batches: Sequence[RolloutBatch]) -> dict[str, float]:
        """Note the mean reward of each sampled prompt, for a curriculum. Returns its metrics; {} without one.

        Args:
            batches: every sampled group of the step, also those that --dynamic-sampling drops."""
        if self.measured is None:
            return {}
        for batch in batches:
            for row, rate in batch.mean_rewards.items():
                self.measured.measure(row, rate)
        return {
            "curriculum/measured": float(self.measured.num_measured),
            "curriculum/resting": float(self.measured.num_resting),
        }

    def update_kl(self, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        """Update the KL controller with the KL of a step, if the step measured one, and the multiplier with its
        cost. A step that trains the critic alone changes neither: the policy could not follow."""
        if self.is_warming_up(batch.step):
            return
        if self.multiplier is not None and MEAN_COST in metrics:
            self.multiplier.update(metrics[MEAN_COST])
        if MEASURED_KL in metrics:
            num_scored = sum(batch.rewards[one.sample_id] is not None for one in batch.trained_episodes)
            self.kl.update(metrics[MEASURED_KL], num_scored)

    def is_warming_up(self, step: int) -> bool:
        """Return whether a step trains the critic alone."""
        return step <= self.algorithm.critic_warmup_iters

    def note_useless_rewards(self, batch: RolloutBatch) -> str | None:
        """Count consecutive steps whose rewards were all zero, and those whose rewards did not differ within
        any group if the algorithm compares the samples of a group. Returns a warning at every multiple of
        --warn-after-zero-reward-steps, else None."""
        if not batch.rewards:  # the actor learns from another actor's samples
            return None
        self.zero_reward_steps = 0 if any(batch.rewards.values()) else self.zero_reward_steps + 1
        self.equal_reward_steps = 0 if batch.groups_that_differ else self.equal_reward_steps + 1
        limit, look = self.config.run.warn_after_zero_reward_steps, "Look at the texts in rollouts/."
        if limit and self.zero_reward_steps and self.zero_reward_steps % limit == 0:
            return (
                f"step {batch.step}: no reward but 0 in {self.zero_reward_steps} steps of {self.actor}. Does "
                f"the reward see what you think? {look}"
            )
        if not limit or not self.algorithm.relative_to_group or not self.equal_reward_steps:
            return None
        if self.equal_reward_steps % limit:
            return None
        return (
            f"step {batch.step}: in {self.equal_reward_steps} steps of {self.actor} all samples of a prompt "
            "had the same reward, and nothing is learnt from that. Does the reward tell good answers from bad "
            f"ones? Are the prompts too easy or too hard? {look}"
        )

    def note_unscored_updates(self, metrics: Mapping[str, float], step: int) -> str:
        """Return a warning if updates were left out because no sample of their mini-batch is learnt from,
        else ""."""
        names = {kind: "policy" if kind == "actor" else kind for kind in TRAINED_KINDS}
        said = " and ".join(
            f"{metrics[counted]:.0f} of {kind}{self.suffix}"
            for kind, name in names.items()
            if (counted := f"{name}/updates_unscored") in metrics
        )
        why = (
            "no sample of their mini-batch is learnt from (rewards failed, or the algorithm leaves them out)"
        )
        return said and f"step {step}: updates left out, as {why}: {said}."

    def admit(self, rows: Sequence[int] | None, step: int) -> None:
        """Add the prompts of a step to the buffer, or raise ValueError for rows that do not exist or do not
        fill whole mini-batches.

        Args:
            rows: rows of the training data; None takes the next ones.
        Raises: ValueError for rows that do not exist or do not fill whole mini-batches."""
        last_step = max(step, self.config.batch.train_iters)  # a user's own loop may train for more steps
        if rows is not None and self.buffer.staleness:
            raise ValueError(
                f"rows: with --staleness {self.buffer.staleness} a step trains on rows that were admitted "
                "before. Call trainer.admit(rows), then trainer.rollout()."
            )
        if rows is not None and self.config.batch.dynamic_sampling:
            raise ValueError(
                "rows: with --dynamic-sampling a step takes rows until enough of them can be learnt from. Call "
                "trainer.admit(rows), then trainer.rollout()."
            )
        if rows is None:
            self.admit_next(self.buffer.num_to_admit(step - 1, last_step), step)
        else:
            visits = self.cursor.visit(self._checked(rows))
            self.buffer.admit(visits, self.num_samples_per_prompt, step - 1)

    def admit_next(self, count: int, step: int) -> None:
        """Add the prompts of the next `count` rows to the buffer: given rows first, then those of the data."""
        given, self.given_rows = self.given_rows[:count], self.given_rows[count:]
        visits = self.cursor.visit(given) | self.cursor.next_visits(count - len(given))
        self.buffer.admit(visits, self.num_samples_per_prompt, step - 1)

    def return_rows(self, rows: Sequence[int]) -> None:
        """Let rows that were sampled, but not trained on, be admitted first in the next step."""
        self.given_rows = [*rows, *self.given_rows]

    def sft_rows(self, batch: RolloutBatch, dp: int) -> tuple[dict[int, int], list[MiniBatch]] | tuple[()]:
        """Return the arguments of `Actor.update` with the next rows of --sft-data; () without."""
        if self.sft is None:
            return ()
        num_updates = -(-len(batch.trained_episodes) // self.config.batch.global_batch_size)
        return self.sft.next(num_updates, dp, self.shape.hidden_size)

    def give_rows(self, rows: Sequence[int]) -> None:
        """Let these rows be admitted before others, or raise ValueError for rows that do not exist."""
        self._check_existing(rows)
        self.given_rows += rows

    @property
    def num_samples_per_prompt(self) -> int:
        """Number of samples in a group: the responses to a prompt, with those that are only scored, or without
        a rollout the samples that a row of the data becomes."""
        if self.algorithm.needs_rollout:
            return self.config.batch.num_samples_per_prompt + self.algorithm.greedy_samples
        return self.algorithm.samples_per_row

    def _checked(self, rows: Sequence[int]) -> Sequence[int]:
        self._check_existing(rows)
        batch = self.config.batch
        if not rows or len(rows) * batch.num_samples_per_prompt % batch.global_batch_size:
            raise ValueError(
                f"rows ({len(rows)} of them) x num_samples_per_prompt ({batch.num_samples_per_prompt}) "
                f"must be a multiple of global_batch_size ({batch.global_batch_size}). "
                f"Try {batch.num_prompts} rows."
            )
        limit = batch.global_batch_size // batch.num_samples_per_prompt
        if self.algorithm.makes_one_update and len(rows) > limit:
            raise ValueError(
                f"rows ({len(rows)} of them): the loss of {type(self.algorithm).__name__} allows one update per step, "
                f"of {limit} rows (global_batch_size / num_samples_per_prompt). Try {limit} rows."
            )
        return rows

    def _check_existing(self, rows: Sequence[int]) -> None:
        total = self.cursor.num_rows
        if outside := [row for row in rows if not 0 <= row < total]:
            raise ValueError(f"rows ({outside[0]}) must be rows of --train-data: 0 to {total - 1}.")

    def snapshot(self) -> dict[str, Any]:
        """Return the part of the actor's state that a checkpoint holds, as values that JSON can represent."""
        state = {
            "cursor": self.cursor.state(),
            "kl": self.kl.state_dict(),
            "zero_reward_steps": self.zero_reward_steps,
            "equal_reward_steps": self.equal_reward_steps,
        }
        if staleness := self.config.streaming.staleness:
            state["staleness"] = staleness
        if self.given_rows:
            state["given_rows"] = [*self.given_rows]
        if self.multiplier is not None:
            state["multiplier"] = self.multiplier.state_dict()
        if self.sft is not None:
            state["sft"] = self.sft.state()
        if len(self.buffer):
            state["buffer"] = self.buffer.snapshot()
            state["greedy_samples"] = self.algorithm.greedy_samples  # of each group of the buffer
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `snapshot` returned, or raise ValueError if the size of the training data
        has changed."""
        self.cursor = self.cursor.restored(state["cursor"])
        self.measured = self.cursor if isinstance(self.cursor, MeasuredCursor) else None
        self.kl.load_state_dict(state["kl"])
        self.zero_reward_steps = state["zero_reward_steps"]
        self.equal_reward_steps = state.get("equal_reward_steps", 0)  # older checkpoints lack it
        self.buffer.restore(state.get("buffer", ()))
        self.given_rows = [*state.get("given_rows", ())]
        if self.multiplier is not None and "multiplier" in state:
            self.multiplier.load_state_dict(state["multiplier"])
        if self.sft is not None and "sft" in state:  # else it begins at the first row
            self.sft.restore(state["sft"])

    def hidden_size(self, role: str) -> int:
        """Return the hidden size of a role's model, which the cost estimate of a sequence uses."""
        if role in (f"critic{self.suffix}", f"cost_critic{self.suffix}") and self.config.model.critic_model:
            return ModelShape.load(self.config.model.critic_model, value_head=True).hidden_size
        if role == f"reference{self.suffix}" and self.config.model.reference_model:
            return ModelShape.load(self.config.model.reference_model).hidden_size
        for model in reward_models(self.config):
            if role == f"{model.name}{self.suffix}":
                config = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
                return int(config.get("hidden_size", self.shape.hidden_size))
        return self.shape.hidden_size
