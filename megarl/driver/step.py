"""One step of reinforcement learning as the scheduler asks for it: what each call gets, and what becomes of its answer.

    generate -> plan: which sample is trained on by which rank of every mesh -> the samples go there
    scores   -> rewards
    update   <- after trainer and engine were found to agree

Numbers and ids only, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.algorithms.kl_controller import MEASURED_KL
from megarl.config.mesh import replicas, share_keys, training_data_roles
from megarl.config.reward_models import reward_models, uses_rule_reward
from megarl.driver.executor import Future
from megarl.driver.job import Job
from megarl.driver.metrics import phase_times
from megarl.driver.weights import send_weights
from megarl.flow import Node
from megarl.metrics import combine
from megarl.packing import Sample, homes_of, plan_mini_batches
from megarl.rewards.combine import combine_rewards


@dataclass
class _Step:
    """What the driver knows of the step that is running."""

    number: int
    rows: list[int]
    samples: list[Sample] = field(default_factory=list)
    records: dict[str, dict[int, dict]] = field(default_factory=dict)
    """Role that scored -> sample id -> what it says of the sample."""
    moved: list[Future] = field(default_factory=list)

    @property
    def sample_ids(self) -> list[int]:
        return [s.sample_id for s in self.samples]


class StepHost:
    """What `Scheduler` asks of a training job."""

    driver_columns = ("lengths", "rewards", "scores")
    """What comes back to the driver: who reads it waits until it is there."""

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config
        self.share_of = share_keys(job.meshes)
        self.shares = list(dict.fromkeys(self.share_of[role] for role in training_data_roles(job.meshes)))
        self.weight_of = {"reward": 1.0} if uses_rule_reward(job.config) else {}
        """Role that scores -> what its score is multiplied by."""
        self.weight_of |= {model.name: model.weight for model in reward_models(job.config)}
        self.kl = job.config.algorithm.build_kl_controller()
        self.step = _Step(0, [])

    def begin(self, number: int, rows: list[int]) -> None:
        self.step = _Step(number, rows)

    # Asked by the scheduler.

    def arguments(self, node: Node, results: Mapping[str, Future]) -> tuple[tuple, dict]:
        """Of the node's call; everything that it reads from the driver is there."""
        step = self.step
        match node.name:
            case "rollout.generate":
                return ("train", step.rows, step.number), {}
            case "reward.score":
                return ("train",), {}
            case "actor.advantages":
                groups = [self._prompt_of(s) for s in step.sample_ids]
                return (step.sample_ids, groups, self.rewards(), self.kl.coef), {}
            case "actor.update":
                self.job.check_gate(results["actor.log_probs"])
                return (self.kl.coef,), {}
            case "rollout.sync":
                send_weights(self.job.executor, self.job.meshes, step.number)
                return (step.number,), {}
        if node.role in self.weight_of:
            return ({s: step.rows[self._prompt_of(s)] for s in step.sample_ids},), {}
        return (), {}

    def _prompt_of(self, sample_id: int) -> int:
        return sample_id // self.config.batch.num_samples_per_prompt

    def rewards(self) -> list[float | None]:
        """The reward of each sample of the step: what rule and reward models say, weighted. None: one of them failed."""
        return combine_rewards([self._scores(role) for role in self.weight_of], list(self.weight_of.values()))

    def _scores(self, role: str) -> list[float | None]:
        """In the order of the step's samples."""
        key = "reward" if role == "reward" else "score"
        return [self.step.records[role][sample][key] for sample in self.step.sample_ids]

    def skips(self, node: Node) -> bool:
        """While the critic warms up the actor stays as it is."""
        warming_up = self.step.number <= self.config.algorithm.critic_warmup_iters
        return warming_up and (node.role, node.method) in (("actor", "update"), ("rollout", "sync"))

    def move(self, columns: Sequence[str], source: str, node: Node) -> Future | None:
        """Bring token columns from the ranks of a role to those of the node's, if they are not there."""
        giver, taker = self.share_of[source], self.share_of[node.role]
        columns = [column for column in columns if column in TOKEN_COLUMNS]
        if giver == taker or not columns or taker not in self.shares:
            return None
        ranks = sorted({*self.job.meshes[giver].ranks, *self.job.meshes[taker].ranks})
        self.step.moved.append(self.job.executor.call_on(ranks, "data", "exchange", columns, giver, taker))
        return self.step.moved[-1]

    def finished(self, node: Node, values: list) -> None:
        """Take the answers that are the driver's to keep."""
        if (node.role, node.method) == ("rollout", "generate"):
            self._plan(values)
        elif node.method == "score":
            self._take_scores(node.role, values)

    def _plan(self, per_rank: list[list[Sample]]) -> None:
        """Mini-batches and micro-batches of every mesh, and the samples on their way there."""
        job, batch = self.job, self.config.batch
        self.step.samples = samples = sorted((s for rank in per_rank for s in rank), key=lambda s: s.sample_id)
        for share in self.shares:
            mesh = job.meshes[share]
            mini_batches = plan_mini_batches(samples, batch.global_batch_size, homes_of(samples, replicas(mesh)), mesh.dp, batch.max_tokens_per_micro_batch,
                                             job.shape.hidden_size, seed=f"{batch.seed}/{self.step.number}")
            self.step.moved.append(job.role("data").distribute(share, samples, mini_batches))

    def _take_scores(self, role: str, per_rank: list[list[dict]]) -> None:
        self.step.records[role] = {record["sample_id"]: record for rank in per_rank for record in rank}

    # At the end of the step.

    def finish(self, results: Mapping[str, Future]) -> None:
        """Read the step's results and record them, then judge them. Raises GateError if trainer and engine have drifted apart."""
        job, step = self.job, self.step
        metrics = combine(rank for name, future in results.items() if name.split(".")[1] in REPORTING for rank in future.result())
        metrics |= combine(rank for future in step.moved for rank in future.result())
        if MEASURED_KL in metrics:
            self.kl.update(metrics[MEASURED_KL], len(step.samples))
        lengths = [s.response_length for s in step.samples]
        rewards = self.rewards()
        self._write_rollouts(rewards)
        scored = [r for r in rewards if r is not None]
        tokens = sum(s.length for s in step.samples)
        metrics |= {
            "reward/mean": sum(scored) / max(len(scored), 1), "reward/min": min(scored, default=0.0), "reward/max": max(scored, default=0.0),
            "response/length_mean": sum(lengths) / len(lengths), "response/length_max": max(lengths),
            "response/truncated": sum(s.truncated for s in step.samples) / len(step.samples),
            **self._score_metrics(), **phase_times(job.executor.take_seconds()), "batch/tokens": tokens, "sync/version": step.number,
        }  # fmt: skip
        job.run.finish_step(step.number, metrics, tokens)
        job.check_mismatch(metrics)


    def _score_metrics(self) -> dict[str, float]:
        """Of each that scores, if there are several."""
        if len(self.weight_of) == 1:
            return {}
        scored = {role: [x for x in self._scores(role) if x is not None] for role in self.weight_of}
        return {f"reward/{role}_mean": sum(scores) / max(len(scores), 1) for role, scores in scored.items()}

    def _write_rollouts(self, rewards: list[float | None]) -> None:
        """The logged samples with their texts and rewards, and what each reward model says of them."""
        reward_of = dict(zip(self.step.sample_ids, rewards, strict=True))
        models = [role for role in self.weight_of if role != "reward"]
        rows = []
        for sample, record in self.step.records["reward"].items():
            if "response" in record:
                said = {role: {k: v for k, v in self.step.records[role][sample].items() if k != "sample_id"} for role in models}
                rows.append(record | {"reward": reward_of[sample]} | ({"rule_reward": record["reward"]} | said if models else {}))
        self.job.run.write_rollouts(rows)


TOKEN_COLUMNS = ("old_log_probs", "ref_log_probs", "values", "advantages", "returns")
REPORTING = ("log_probs", "advantages", "update", "sync")
"""Methods whose answers are metrics."""
