"""One step of reinforcement learning as the scheduler asks for it: what each call gets, and what becomes of
its answer.

    generate -> plan: which sample is trained on by which rank of every mesh -> the samples go there
    scores   -> rewards
    update   <- after trainer and engine were found to agree

Each actor has a batch of its own; a role works on the samples of the rollout with its number, or, if the flow
has none, of the first. Numbers and ids only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megarl.algorithms.kl_controller import MEASURED_KL
from megarl.config.mesh import replicas, shard_keys, training_data_roles
from megarl.runtime.executor import Future
from megarl.driver.failed_rewards import check_failed_rewards
from megarl.driver.job import Job
from megarl.driver.learner import Learner
from megarl.driver.metrics import phase_times
from megarl.driver.rollout_batch import RolloutBatch
from megarl.driver.scheduler import NodeResult
from megarl.driver.weights import send_weights
from megarl.flow import Flow, Node, declaration
from megarl.flow.columns import COMPUTED_COLUMNS, DRIVER_COLUMNS, base
from megarl.invariants import check_plan, check_rewards, check_samples, check_scores
from megarl.metrics import combine
from megarl.packing import Sample, preferred_ranks, plan_mini_batches
from megarl.rewards.combine import combine_rewards
from megarl.role_names import kind_and_suffix, with_suffix


class StepHost:
    """What `Scheduler` asks of a training job."""

    driver_columns = DRIVER_COLUMNS

    def __init__(self, job: Job) -> None:
        self.job = job
        self.share_of = shard_keys(job.meshes)
        shares = dict.fromkeys(self.share_of[role] for role in training_data_roles(job.meshes))
        self.hidden_size = {share: job.learner_of(share).hidden_size(share) for share in shares}
        self.weight_of = {
            role: weight for learner in job.learners.values() for role, weight in learner.weight_of.items()
        }
        self.flow = job.flow
        self.batches: dict[str, RolloutBatch] = {}
        self.begin(0, {}, job.flow)

    @property
    def current(self) -> RolloutBatch:
        """The first actor's, which has the others'."""
        return self.batches[""]

    def begin(self, number: int, visits: Mapping[str, dict[int, int]], flow: Flow) -> RolloutBatch:
        """A step. visits: suffix of an actor -> visits for its engines, each with its row of the data."""
        self.flow = flow
        self.batches = {}
        for suffix, learner in self.job.learners.items():
            samples_per_prompt = learner.config.batch.num_samples_per_prompt
            of_actor = visits.get(suffix, {})
            self.batches[suffix] = RolloutBatch(number, of_actor, samples_per_prompt, kl_coef=learner.kl.coef)
        for batch in self.batches.values():
            batch.actors = {
                learner.actor: self.batches[learner.suffix] for learner in self.job.learners.values()
            }
        return self.current

    def batch_of(self, role: str) -> RolloutBatch:
        """With the samples that the role works on."""
        return self.batches.get(self.flow.rollout_source(role), self.current)

    def has_own_samples(self, role: str) -> bool:
        """Whether the role works on samples of its own actor's engines, and not on another actor's."""
        return self.flow.rollout_source(role) == self.job.learner_of(role).suffix

    # Asked by the scheduler.

    def arguments(self, node: Node, results: Mapping[str, NodeResult]) -> tuple[tuple, dict]:
        """Of the node's call; everything that it reads from the driver is there."""
        batch, learner = self.batch_of(node.role), self.job.learner_of(node.role)
        match kind_and_suffix(node.role)[0], node.method:
            case "rollout", "generate":
                return ("train", batch.visits), {}
            case "reward", "score":
                return ("train",), {}
            case "actor", "advantages":
                return (
                    batch.sample_ids,
                    batch.group_ids,
                    [batch.rewards[s] for s in batch.sample_ids],
                    learner.kl.coef,
                    batch.reward_digests,
                ), {}
            case "actor", "update":
                for result in results.values() if self.has_own_samples(node.role) else ():
                    if (result.role, result.method) == (node.role, "log_probs"):
                        self.job.check_gate(result)
                return (learner.kl.coef,), {}
            case "rollout", "sync":
                send_weights(self.job.executor, self.job.meshes, batch.step, learner.suffix)
                return (batch.step,), {}
        if node.role in self.weight_of:
            return (batch.row_of,), {}
        return (), {}

    def skips(self, node: Node) -> bool:
        """While its critic warms up an actor stays as it is."""
        warming_up = self.current.step <= self.job.learner_of(node.role).config.algorithm.critic_warmup_iters
        return warming_up and (kind_and_suffix(node.role)[0], node.method) in (
            ("actor", "update"),
            ("rollout", "sync"),
        )

    def move(self, columns: Sequence[str], source: str, node: Node) -> Future | None:
        """Bring token columns from the ranks of a role to those of the node's, if they are not there."""
        giver, taker = self.share_of[source], self.share_of[node.role]
        columns = [column for column in map(base, columns) if column in COMPUTED_COLUMNS]
        if giver == taker or not columns or taker not in self.hidden_size:
            return None
        ranks = sorted({*self.job.meshes[giver].ranks, *self.job.meshes[taker].ranks})
        moved = self.batch_of(node.role).moved
        moved.append(self.job.executor.call_on(ranks, "data", "exchange", columns, giver, taker))
        return moved[-1]

    def finished(self, node: Node, values: list) -> None:
        """Take the answers that are the driver's to keep. What comes in the background may be of the step
        before."""
        if node.background:
            return
        if (kind_and_suffix(node.role)[0], node.method) == ("rollout", "generate"):
            self._plan(node.role, values)
        elif node.method == "score":
            self._take_scores(node.role, values)

    def _plan(self, rollout: str, per_rank: list[list[Sample]]) -> None:
        """Mini-batches and micro-batches of every mesh that works on the rollout's samples, and these on
        their way there."""
        job, batch, suffix = self.job, self.batch_of(rollout), self.job.learner_of(rollout).suffix
        batch.samples = samples = sorted((s for rank in per_rank for s in rank), key=lambda s: s.sample_id)
        limits = job.learner_of(rollout).config.sampling
        longest = limits.max_prompt_length + limits.max_response_length
        check_samples(samples, dict.fromkeys(batch.visits, batch.num_samples_per_prompt), longest)
        shares = [share for share in self.hidden_size if self.batch_of(share) is batch]
        ranks = sorted({rank for role in (rollout, *shares) for rank in job.meshes[role].ranks})
        for share in shares:
            mesh, of_actor = job.meshes[share], job.learner_of(share).config.batch
            preferred = preferred_ranks(samples, replicas(mesh))
            mini_batches = plan_mini_batches(
                samples,
                of_actor.global_batch_size,
                preferred,
                mesh.dp,
                of_actor.max_tokens_per_micro_batch,
                self.hidden_size[share],
                seed=f"{of_actor.seed}/{batch.step}",
            )
            check_plan(mini_batches, samples)
            batch.moved.append(
                job.executor.call_on(
                    ranks, "data", "distribute", share, samples, mini_batches, f"train{suffix}"
                )
            )

    def _take_scores(self, role: str, per_rank: list[list[dict]]) -> None:
        """The rewards are whole when all have scored. Raises RewardsFailed if too many of them have
        failed."""
        batch, config = self.batch_of(role), self.job.learner_of(role).config
        check_scores(role, [record for rank in per_rank for record in rank], batch.samples)
        batch.records[role] = {
            r["sample_id"]: {k: v for k, v in r.items() if k != "digest"} for rank in per_rank for r in rank
        }
        weights = {role: weight for role, weight in self.weight_of.items() if role in batch.records}
        rewards = (
            combine_rewards([_scores(batch, role) for role in weights], list(weights.values()))
            if weights
            else []
        )
        batch.rewards = dict(zip(batch.sample_ids, rewards))
        check_rewards(
            batch.rewards, [(weight, _scores_by_id(batch, role)) for role, weight in weights.items()]
        )
        if all(other in batch.records for other in self.weight_of if self.batch_of(other) is batch):
            check_failed_rewards(batch, list(weights), config.data.reward_max_failed_share)

    # At the end of the step.

    def finish(self, results: Mapping[str, NodeResult]) -> dict[str, float]:
        """Record the step: what the nodes report, and what the driver knows. Returns it. Raises as
        `record`."""
        return self.record([result for result in results.values() if result.is_on_path and _reports(result)])

    def record(self, reports: Iterable[Future]) -> dict[str, float]:
        """Record the step with the metrics of these calls, then judge them. Raises GateError if trainer and
        engine have drifted apart."""
        job, reports = self.job, list(reports)
        of_actors = {
            learner: self._metrics(
                self.batches[suffix], [r for r in reports if job.learner_of(r.role) is learner]
            )
            for suffix, learner in job.learners.items()
        }
        seconds = job.executor.take_seconds()  # of all these calls, as they have ended now
        for learner, own in of_actors.items():
            own |= phase_times(
                {call: value for call, value in seconds.items() if job.learner_of(call[0]) is learner}
            )
        metrics = {
            with_suffix(name, learner.suffix): value
            for learner, own in of_actors.items()
            for name, value in own.items()
        }
        self._write_rollouts()
        job.run.finish_step(
            self.current.step,
            metrics,
            sum(s.length for batch in self.batches.values() for s in batch.samples),
        )
        for learner, own in of_actors.items():
            self._judge(learner, own)
            zero_rewards = learner.note_zero_rewards(self.batches[learner.suffix])
            unscored = learner.note_unscored_updates(own, self.current.step)
            for note in filter(None, (zero_rewards, unscored)):
                job.run.progress.note(note)
        return metrics

    def _judge(self, learner: Learner, metrics: Mapping[str, float]) -> None:
        if MEASURED_KL in metrics:
            batch = self.batch_of(learner.actor)
            num_failed = sum(reward is None for reward in batch.rewards.values())
            learner.kl.update(metrics[MEASURED_KL], len(batch.samples) - num_failed)
        if "mismatch/max_abs" in metrics:  # a loop of one's own may compute no log-probs
            self.job.check_mismatch(learner, metrics)

    def _metrics(self, batch: RolloutBatch, reports: Iterable[Future]) -> dict[str, float]:
        """Of one actor."""
        metrics = combine(self._named(future, rank) for future in reports for rank in future.result())
        metrics |= combine(rank for future in batch.moved for rank in future.result())
        if batch is not self.current and not batch.samples:  # it learnt from the samples of another
            return metrics
        return (
            metrics
            | self._metrics_of_samples(batch)
            | {"batch/tokens": sum(s.length for s in batch.samples), "sync/version": batch.step}
        )

    def _named(self, report: Future, of_rank: Mapping[str, float] | None) -> dict[str, float]:
        """Return a rank's metrics. The distance to another actor, which sampled, is no mismatch that the gate
        judges."""
        if self.has_own_samples(report.role):
            return of_rank or {}
        return {name.replace("mismatch/", "off_policy/"): value for name, value in (of_rank or {}).items()}

    def _metrics_of_samples(self, batch: RolloutBatch) -> dict[str, float]:
        """{} of a step that sampled nothing."""
        lengths = [s.response_length for s in batch.samples]
        scored = [r for r in batch.rewards.values() if r is not None]
        if not lengths:
            return {}
        return {
            "reward/mean": sum(scored) / max(len(scored), 1),
            "reward/min": min(scored, default=0.0),
            "reward/max": max(scored, default=0.0),
            "response/length_mean": sum(lengths) / len(lengths),
            "response/length_max": max(lengths),
            "response/truncated": sum(s.truncated for s in batch.samples) / len(lengths),
            **self._score_metrics(batch),
        }

    def _score_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Of each that scores, if there are several."""
        roles = [role for role in self.weight_of if role in batch.records]
        scored = {
            role: [x for x in _scores(batch, role) if x is not None] for role in roles if len(roles) > 1
        }
        return {
            f"reward/{self._without_number(role)}_mean": sum(scores) / max(len(scores), 1)
            for role, scores in scored.items()
        }

    def _without_number(self, role: str) -> str:
        return role.removesuffix(self.job.learner_of(role).suffix)

    def _write_rollouts(self) -> None:
        """The logged samples with their texts and rewards; what rule and each reward model say of them, where
        that is not the reward."""
        rows = []
        for suffix, batch in self.batches.items():
            models = [
                role
                for role in self.weight_of
                if kind_and_suffix(role)[0] != "reward" and role in batch.records
            ]
            of = {"actor": f"actor{suffix}"} if suffix else {}
            for sample, record in batch.texts.items():
                reward = batch.rewards.get(sample)
                said = {
                    self._without_number(role): _without_id(batch.records[role][sample]) for role in models
                }
                rule = {"rule_reward": record["reward"]} if models or reward != record["reward"] else {}
                rows.append(of | record | {"reward": reward} | rule | said)
        self.job.run.write_rollouts(rows)


def _scores_by_id(batch: RolloutBatch, role: str) -> dict[int, float | None]:
    return {sample: batch.score_of(role, sample) for sample in batch.records[role]}


def _scores(batch: RolloutBatch, role: str) -> list[float | None]:
    """In the order of the batch's samples."""
    return [batch.score_of(role, sample) for sample in batch.sample_ids]


def _without_id(record: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in record.items() if key != "sample_id"}


def _reports(result: NodeResult) -> bool:
    """Whether the values of the call are metrics of the step."""
    declared = declaration(result.role, result.method)
    return declared is not None and declared.reports
