"""One training job as its loop sees it: roles, data cursor, plans, checks, records. Numbers and ids only, no tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import role_meshes
from megarl.config.schema import TrainConfig
from megarl.data.cursor import DataCursor
from megarl.data.prompts import PromptDataset
from megarl.driver.evaluate import held_out_accuracy
from megarl.driver.executor import Executor, Future, RoleHandle
from megarl.driver.gate import GateError, gate_finding
from megarl.driver.metrics import phase_times
from megarl.driver.run import Run
from megarl.driver.weights import sync_weights
from megarl.metrics import combine
from megarl.packing import MiniBatch, Move, Sample, plan_exchange, plan_mini_batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepPlan:
    """Which sample goes where in this step."""

    samples: list[Sample]
    mini_batches: list[MiniBatch]
    moves: list[Move]
    samples_per_prompt: int

    @property
    def sample_ids(self) -> list[int]:
        return [s.sample_id for s in self.samples]

    @property
    def group_ids(self) -> list[int]:
        """The prompt that each sample answers."""
        return [s.sample_id // self.samples_per_prompt for s in self.samples]


class Job:
    def __init__(self, config: TrainConfig, shape: ModelShape, executor: Executor, run: Run, train: PromptDataset,
                 evaluation: PromptDataset | None, world_size: int) -> None:
        self.config, self.shape, self.executor, self.run = config, shape, executor, run
        self.meshes = role_meshes(config, world_size)
        self.cursor = DataCursor(len(train), config.batch.seed, config.data.shuffle)
        self.eval_rows = list(range(len(evaluation or ())))[: config.run.eval_num_prompts]
        self.gate_passed = False

    def role(self, name: str) -> RoleHandle | None:
        """The role, or None if this algorithm has none of that name."""
        return self.executor.role(name) if name in self.meshes else None

    def set_up(self) -> None:
        """Build every role, in an order that all ranks share."""
        for future in [self.executor.call(name, "setup") for name in self.meshes]:
            future.result()
        took = ", ".join(f"{role} {seconds:.1f} s" for (role, _), seconds in self.executor.take_seconds().items())
        self.run.progress.note(f"roles are set up: {took}")

    def sync(self, version: int) -> Future:
        """Bring the actor's weights into the engines as `version`."""
        return sync_weights(self.executor, self.meshes, version)

    def steps(self) -> Iterator[int]:
        for step in range(1, self.config.batch.train_iters + 1):
            self.executor.step = step
            self.run.begin_step(step)
            yield step

    def plan_step(self, per_rank: list[list[Sample]], step: int) -> StepPlan:
        """Mini-batches and micro-batches for all data-parallel ranks, and the moves that bring the samples there."""
        samples = sorted((s for rank in per_rank for s in rank), key=lambda s: s.sample_id)
        batch, actor = self.config.batch, self.meshes["actor"]
        homes = {s.sample_id: actor.coordinates(s.holders[0])["dp"] for s in samples if s.holders[0] in actor.ranks}
        mini_batches = plan_mini_batches(samples, batch.global_batch_size, homes, actor.dp, batch.max_tokens_per_micro_batch,
                                         self.shape.hidden_size, seed=f"{batch.seed}/{step}")
        return StepPlan(samples, mini_batches, plan_exchange(samples, self._destinations(mini_batches)), batch.num_samples_per_prompt)

    def _destinations(self, mini_batches: list[MiniBatch]) -> dict[int, tuple[int, ...]]:
        """Sample id -> all ranks of the model-parallel block that trains on it."""
        actor = self.meshes["actor"]
        blocks = [actor.ranks_where(dp=dp_rank) for dp_rank in range(actor.dp)]
        return {s: blocks[dp_rank] for m in mini_batches for dp_rank in range(actor.dp) for s in m.samples_of(dp_rank)}

    def hand_over(self, plan: StepPlan) -> None:
        """Bring every sample to the ranks that train on it."""
        self.role("actor").receive(plan.samples, plan.moves, plan.mini_batches)
        if set(self.meshes["rollout"].ranks) - set(self.meshes["actor"].ranks):  # those are not asked by the first call
            self.role("rollout").hand_over(plan.samples, plan.moves)

    def plan_rows(self, rows: list[int], lengths: list[tuple[int, int]]) -> StepPlan:
        """One mini-batch of dataset rows (SFT); (length, response length) by row."""
        batch = self.config.batch
        samples = [Sample(row, *lengths[row]) for row in rows]
        mini_batches = plan_mini_batches(samples, len(samples), {}, self.meshes["actor"].dp, batch.max_tokens_per_micro_batch,
                                         self.shape.hidden_size, seed=None)
        return StepPlan(samples, mini_batches, moves=[], samples_per_prompt=1)

    def check_gate(self, gap: Future) -> None:
        """Before the first update wait for the comparison of trainer and engine; raise GateError if they disagree."""
        if not self.gate_passed:
            self._check_mismatch(combine(gap.result()))
            self.gate_passed = True

    def _check_mismatch(self, mismatch: dict[str, float]) -> None:
        if (finding := gate_finding(mismatch, self.config)) is not None:
            worst = [token for rank in self.role("actor").worst_tokens(5).result() for token in rank]
            raise GateError(finding, worst)

    def collect_rewards(self, plan: StepPlan, per_rank: list[list[dict]]) -> list[float | None]:
        """Rewards in the order of plan.samples; the logged samples go to rollouts/."""
        records = {r["sample_id"]: r for rank in per_rank for r in rank}
        self.run.write_rollouts([r for r in records.values() if "response" in r])
        return [records[s]["reward"] for s in plan.sample_ids]

    def finish_step(self, step: int, plan: StepPlan, rewards: list[float | None], gap: Future, shaped: Future, updated: Future,
                    synced: Future) -> None:
        """Read the step's results and record them, then judge them. Raises GateError if trainer and engine have drifted apart."""
        mismatch = combine(gap.result())
        metrics = mismatch | combine(shaped.result()) | combine(updated.result()) | combine(synced.result())
        lengths = [s.response_length for s in plan.samples]
        scored = [r for r in rewards if r is not None]
        tokens = sum(s.length for s in plan.samples)
        metrics |= {
            "reward/mean": sum(scored) / max(len(scored), 1), "reward/min": min(scored, default=0.0), "reward/max": max(scored, default=0.0),
            "response/length_mean": sum(lengths) / len(lengths), "response/length_max": max(lengths),
            "response/truncated": sum(s.truncated for s in plan.samples) / len(plan.samples),
            **phase_times(self.executor.take_seconds()), "batch/tokens": tokens, "batch/samples_moved": len(plan.moves), "sync/version": step,
        }  # fmt: skip
        self.run.finish_step(step, metrics, tokens)
        self._check_mismatch(mismatch)

    def finish_sft_step(self, step: int, plan: StepPlan, updated: Future) -> dict[str, float]:
        """Record the step. Returns its metrics."""
        metrics = combine(updated.result()) | phase_times(self.executor.take_seconds())
        self.run.finish_step(step, metrics, sum(s.length for s in plan.samples))
        return metrics

    def evaluate(self, step: int) -> None:
        """Held-out accuracy by sampling at --temperature and greedily: before the first step, every --eval-interval, after the last."""
        interval = self.config.run.eval_interval
        if not self.eval_rows or not interval or (step % interval and step != self.config.batch.train_iters):
            return
        scores, answers = held_out_accuracy(self.role("rollout"), self.role("reward"), self.eval_rows, step)
        for name, answer in answers.items():
            self.run.keep_answer(step, name, answer)
        self.run.record_evaluation(step, scores)
        self.executor.take_seconds()  # evaluation is not part of the next step

    def export(self, step: int, last: bool = False) -> None:
        """Write hf/ every --save-interval steps and at the end."""
        interval = self.config.run.save_interval
        if last or step == self.config.batch.train_iters or (interval and step % interval == 0):
            self.role("actor").export_hf(str(self.run.folder / "hf")).result()
            self.executor.take_seconds()  # nor is the export
