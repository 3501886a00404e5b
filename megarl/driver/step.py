"""One step of reinforcement learning as the scheduler asks for it: what each call gets, and what becomes of its answer.

    generate -> plan: which sample is trained on by which rank of every mesh -> the samples go there
    scores   -> rewards
    update   <- after trainer and engine were found to agree

Numbers and ids only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megarl.algorithms.kl_controller import MEASURED_KL
from megarl.config.mesh import replicas, share_keys, training_data_roles
from megarl.config.reward_models import reward_models, uses_rule_reward
from megarl.driver.executor import Future
from megarl.driver.job import Job
from megarl.driver.metrics import phase_times
from megarl.driver.weights import send_weights
from megarl.flow import Node
from megarl.invariants import check_plan, check_samples, check_scores
from megarl.metrics import combine
from megarl.packing import Sample, homes_of, plan_mini_batches
from megarl.rewards.combine import combine_rewards


@dataclass
class RolloutBatch:
    """What the driver knows of the step that is running. The tokens are on the ranks.

    Example: sample 0's reward less a little for its length, before the advantages are computed:
        batch.rewards[0] -= 0.01 * batch.response_lengths[0]
    """

    step: int
    rows: list[int]
    """Of the data set, one per prompt."""
    num_samples_per_prompt: int
    samples: list[Sample] = field(default_factory=list)
    """By sample id: num_samples_per_prompt of the first row, then of the second, ..."""
    records: dict[str, dict[int, dict]] = field(default_factory=dict)
    """Role that scored -> sample id -> what it says of the sample."""
    rewards: dict[int, float | None] = field(default_factory=dict)
    """By sample id: what those who score say, weighted; None: one of them failed. What it holds when the advantages are computed counts."""
    moved: list[Future] = field(default_factory=list)
    """Calls that bring its samples and columns to where they are needed; their answers are metrics."""

    @property
    def sample_ids(self) -> list[int]:
        return [s.sample_id for s in self.samples]

    @property
    def group_ids(self) -> list[int]:
        """Which of `rows` each sample answers, in the order of sample_ids."""
        return [s.sample_id // self.num_samples_per_prompt for s in self.samples]

    @property
    def texts(self) -> dict[int, dict[str, object]]:
        """Sample id -> prompt, response, ground_truth, ... of the first --num-rollouts-to-log samples (-1: of all)."""
        return {sample: record for sample, record in self.records.get("reward", {}).items() if "response" in record}

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of prompt and response, by sample id."""
        return {s.sample_id: s.length for s in self.samples}

    @property
    def response_lengths(self) -> dict[int, int]:
        """Tokens of the response, by sample id."""
        return {s.sample_id: s.response_length for s in self.samples}

    def score_of(self, role: str, sample: int) -> float | None:
        """What a role that scores has given a sample, before its weight; None: it failed."""
        return self.records[role][sample]["reward" if role == "reward" else "score"]

    def __repr__(self) -> str:
        scored = [r for r in self.rewards.values() if r is not None]
        mean = f", mean reward {sum(scored) / len(scored):.3f}" if scored else ""
        return f"RolloutBatch(step {self.step}, {len(self.samples)} samples, {sum(s.length for s in self.samples)} tokens{mean})"


class RewardsFailed(RuntimeError):
    """More rewards of a step failed than may."""


def check_failed_rewards(step: RolloutBatch, roles: Sequence[str], max_share: float) -> None:
    """Raises: RewardsFailed with the first failure that says why."""
    failed = [sample for sample, reward in step.rewards.items() if reward is None]
    if len(failed) <= max_share * len(step.rewards):
        return
    reasons = (step.records[role][sample].get("failure") for sample in failed for role in roles)
    silent = next(f"{role} gave none for sample {sample}" for sample in failed for role in roles if step.score_of(role, sample) is None)
    raise RewardsFailed(f"{len(failed)} of {len(step.rewards)} rewards have failed, and --reward-max-failed-share ({max_share:g}) allows "
                        f"{int(max_share * len(step.rewards))}. The first: {next(filter(None, reasons), silent)}")


class StepHost:
    """What `Scheduler` asks of a training job."""

    driver_columns = ("lengths", "rewards", "scores")
    """What comes back to the driver: who reads it waits until it is there, and a batch that is handed out has it."""

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config
        self.share_of = share_keys(job.meshes)
        self.shares = list(dict.fromkeys(self.share_of[role] for role in training_data_roles(job.meshes)))
        self.weight_of = {"reward": 1.0} if uses_rule_reward(job.config) else {}
        """Role that scores -> what its score is multiplied by."""
        self.weight_of |= {model.name: model.weight for model in reward_models(job.config)}
        self.kl = job.config.algorithm.build_kl_controller()
        self.zero_reward_steps = 0
        """In a row, until now."""
        self.current = RolloutBatch(0, [], self.config.batch.num_samples_per_prompt)

    def begin(self, number: int, rows: list[int]) -> RolloutBatch:
        self.current = RolloutBatch(number, rows, self.config.batch.num_samples_per_prompt)
        return self.current

    # Asked by the scheduler.

    def arguments(self, node: Node, results: Mapping[str, Future]) -> tuple[tuple, dict]:
        """Of the node's call; everything that it reads from the driver is there."""
        step = self.current
        match f"{node.role}.{node.method}":
            case "rollout.generate":
                return ("train", step.rows, step.step), {}
            case "reward.score":
                return ("train",), {}
            case "actor.advantages":
                return (step.sample_ids, step.group_ids, [step.rewards[s] for s in step.sample_ids], self.kl.coef), {}
            case "actor.update":
                self.job.check_gate(results["actor.log_probs"])
                return (self.kl.coef,), {}
            case "rollout.sync":
                send_weights(self.job.executor, self.job.meshes, step.step)
                return (step.step,), {}
        if node.role in self.weight_of:
            return (dict(zip(step.sample_ids, [step.rows[group] for group in step.group_ids], strict=True)),), {}
        return (), {}

    def skips(self, node: Node) -> bool:
        """While the critic warms up the actor stays as it is."""
        warming_up = self.current.step <= self.config.algorithm.critic_warmup_iters
        return warming_up and (node.role, node.method) in (("actor", "update"), ("rollout", "sync"))

    def move(self, columns: Sequence[str], source: str, node: Node) -> Future | None:
        """Bring token columns from the ranks of a role to those of the node's, if they are not there."""
        giver, taker = self.share_of[source], self.share_of[node.role]
        columns = [column for column in columns if column in EXCHANGED_COLUMNS]
        if giver == taker or not columns or taker not in self.shares:
            return None
        ranks = sorted({*self.job.meshes[giver].ranks, *self.job.meshes[taker].ranks})
        self.current.moved.append(self.job.executor.call_on(ranks, "data", "exchange", columns, giver, taker))
        return self.current.moved[-1]

    def finished(self, node: Node, values: list) -> None:
        """Take the answers that are the driver's to keep. What comes in the background may be of the step before."""
        if node.background:
            return
        if (node.role, node.method) == ("rollout", "generate"):
            self._plan(values)
        elif node.method == "score":
            self._take_scores(node.role, values)

    def _plan(self, per_rank: list[list[Sample]]) -> None:
        """Mini-batches and micro-batches of every mesh, and the samples on their way there."""
        job, batch = self.job, self.config.batch
        self.current.samples = samples = sorted((s for rank in per_rank for s in rank), key=lambda s: s.sample_id)
        limits = self.config.sampling
        check_samples(samples, len(self.current.rows), self.current.num_samples_per_prompt, limits.max_prompt_length + limits.max_response_length)
        for share in self.shares:
            mesh = job.meshes[share]
            homes = homes_of(samples, replicas(mesh))
            mini_batches = plan_mini_batches(samples, batch.global_batch_size, homes, mesh.dp, batch.max_tokens_per_micro_batch,
                                             job.shape.hidden_size, seed=f"{batch.seed}/{self.current.step}")
            check_plan(mini_batches, samples)
            self.current.moved.append(job.role("data").distribute(share, samples, mini_batches))

    def _take_scores(self, role: str, per_rank: list[list[dict]]) -> None:
        """The rewards are whole when all have scored. Raises RewardsFailed if too many of them have failed."""
        step = self.current
        check_scores(role, [record for rank in per_rank for record in rank], step.samples)
        step.records[role] = {r["sample_id"]: {k: v for k, v in r.items() if k != "digest"} for rank in per_rank for r in rank}
        weights = {role: weight for role, weight in self.weight_of.items() if role in step.records}
        rewards = combine_rewards([self._scores(role) for role in weights], list(weights.values())) if weights else []
        step.rewards = dict(zip(step.sample_ids, rewards))
        if step.records.keys() >= self.weight_of.keys():
            check_failed_rewards(step, list(self.weight_of), self.config.data.reward_max_failed_share)

    def _scores(self, role: str) -> list[float | None]:
        """In the order of the step's samples."""
        return [self.current.score_of(role, sample) for sample in self.current.sample_ids]

    # At the end of the step.

    def finish(self, results: Mapping[str, Future]) -> dict[str, float]:
        """Record the step: what the nodes report, and what the driver knows. Returns it. Raises as `record`."""
        return self.record([future for name, future in results.items() if name.rpartition(".")[2] in REPORTING])

    def record(self, reports: Iterable[Future]) -> dict[str, float]:
        """Record the step with the metrics of these calls, then judge them. Raises GateError if trainer and engine have drifted apart."""
        job, step = self.job, self.current
        metrics = combine(rank for future in reports for rank in future.result())
        metrics |= combine(rank for future in step.moved for rank in future.result())
        tokens = sum(s.length for s in step.samples)
        metrics |= self._metrics_of_samples() | phase_times(job.executor.take_seconds()) | {"batch/tokens": tokens, "sync/version": step.step}
        self._write_rollouts()
        job.run.finish_step(step.step, metrics, tokens)
        self._note_zero_rewards()
        if MEASURED_KL in metrics:
            self.kl.update(metrics[MEASURED_KL], len(step.samples))
        if "mismatch/max_abs" in metrics:  # a loop of one's own may compute no log-probs
            job.check_mismatch(metrics)
        return metrics

    def _note_zero_rewards(self) -> None:
        self.zero_reward_steps = 0 if any(self.current.rewards.values()) else self.zero_reward_steps + 1
        limit = self.config.run.warn_after_zero_reward_steps
        if limit and self.zero_reward_steps % limit == 0 and self.zero_reward_steps:
            self.job.run.progress.note(f"step {self.current.step}: no reward but 0 in {self.zero_reward_steps} steps. Does the reward see what you "
                                       f"think? Look at {self.job.run.folder}/rollouts.")  # fmt: skip

    def _metrics_of_samples(self) -> dict[str, float]:
        """{} of a step that sampled nothing."""
        lengths = [s.response_length for s in self.current.samples]
        scored = [r for r in self.current.rewards.values() if r is not None]
        if not lengths:
            return {}
        return {
            "reward/mean": sum(scored) / max(len(scored), 1), "reward/min": min(scored, default=0.0), "reward/max": max(scored, default=0.0),
            "response/length_mean": sum(lengths) / len(lengths), "response/length_max": max(lengths),
            "response/truncated": sum(s.truncated for s in self.current.samples) / len(lengths), **self._score_metrics(),
        }  # fmt: skip

    def _score_metrics(self) -> dict[str, float]:
        """Of each that scores, if there are several."""
        roles = [role for role in self.weight_of if role in self.current.records]
        scored = {role: [x for x in self._scores(role) if x is not None] for role in roles if len(roles) > 1}
        return {f"reward/{role}_mean": sum(scores) / max(len(scores), 1) for role, scores in scored.items()}

    def _write_rollouts(self) -> None:
        """The logged samples with their texts and rewards; what rule and each reward model say of them, where that is not the reward."""
        step, rows = self.current, []
        models = [role for role in self.weight_of if role != "reward" and role in step.records]
        for sample, record in step.texts.items():
            reward = step.rewards.get(sample)
            said = {role: {k: v for k, v in step.records[role][sample].items() if k != "sample_id"} for role in models}
            rule = {"rule_reward": record["reward"]} if models or reward != record["reward"] else {}
            rows.append(record | {"reward": reward} | rule | said)
        self.job.run.write_rollouts(rows)


EXCHANGED_COLUMNS = ("old_log_probs", "ref_log_probs", "values", "advantages", "returns")
"""Token columns that a role computes. What the engine made (tokens, rollout_log_probs) goes to every mesh when the step is planned."""
REPORTING = ("log_probs", "advantages", "update", "sync")
"""Methods whose answers are metrics."""
