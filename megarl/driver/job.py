"""One training job as its loop sees it: roles, data cursor, plans, checks, records. Numbers and ids only, no
tensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping

from megarl.algorithms.base import flow_of_actors
from megarl.config.loader import write_args
from megarl.config.mesh import role_meshes
from megarl.config.reward_models import uses_rule_reward
from megarl.config.roles import configs_of_actors
from megarl.config.schema import TrainConfig
from megarl.driver.checkpoints import Checkpoints
from megarl.driver.evaluate import held_out_accuracy
from megarl.runtime.executor import Executor, Future
from megarl.driver.gate import GateError, gate_finding
from megarl.driver.learner import Learner
from megarl.driver.metrics import phase_times
from megarl.driver.preflight import Inputs
from megarl.flow import Role, role_class
from megarl.loggers.console import Progress
from megarl.driver.run import Run
from megarl.driver.weights import sync_weights
from megarl.metrics import combine
from megarl.packing import MiniBatch, Sample, plan_mini_batches
from megarl.role_names import actor_suffix, kind_and_suffix, with_suffix

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_job(
    executor: Executor,
    config: TrainConfig,
    inputs: Mapping[str, Inputs],
    world_size: int,
    progress: Progress | None = None,
) -> Iterator[Job]:
    """Create the run folder; close it and stop the engines after the last call. `progress`: as of `Run`."""
    with Run(config, write_args(config), progress) as run:
        job = Job(config, executor, run, inputs, world_size)
        try:
            yield job
        except BaseException:
            job.checkpoints.abandon()
            raise
        for role in job.meshes:
            if kind_and_suffix(role)[0] in ("rollout", "reward", "reward_model"):
                job.role(role).shut_down().result()


class Job:
    """Args: inputs: suffix of each actor -> its data; see `read_inputs`."""

    def __init__(
        self, config: TrainConfig, executor: Executor, run: Run, inputs: Mapping[str, Inputs], world_size: int
    ) -> None:
        self.config, self.executor, self.run = config, executor, run
        self.meshes = role_meshes(config, world_size)
        self.learners = {
            suffix: Learner(suffix, of_actor, inputs[suffix])
            for suffix, of_actor in configs_of_actors(config).items()
        }
        self.first = self.learners[""]
        self.flow = flow_of_actors(config, self.meshes)
        """One step, as the algorithms say."""
        self.checkpoints = Checkpoints(self)
        self.last_step = 0
        """The last whole one before that of `executor.step`."""
        self._states: dict[str, dict[str, object]] = {}  # of the learners, then

    stops_in_order = False
    """A SIGTERM ends the job with a checkpoint of the last whole step, see `stopping.py`."""

    def learner_of(self, role: str) -> Learner:
        """Of the actor that the role belongs to."""
        return self.learners[actor_suffix(role, self.meshes)]

    def role(self, name: str) -> Role | None:
        """The role, or None if this job has none of that name."""
        return role_class(name)(self.executor, name) if name in self.executor.ranks else None

    def set_up(self) -> None:
        """Build every role, in an order that all ranks share."""
        for future in [self.executor.call(name, "setup") for name in self.meshes]:
            future.result()
        took = ", ".join(
            f"{role} {seconds:.1f} s" for (role, _), seconds in self.executor.take_seconds().items()
        )
        self.run.progress.note(f"roles are set up: {took}")

    def sync(self, version: int, learner: Learner) -> Future:
        """Bring an actor's weights into its engines as `version`."""
        return sync_weights(self.executor, self.meshes, version, learner.suffix)

    def begin_step(self, step: int) -> None:
        """From here on calls, errors and times are this step's."""
        self.last_step = step - 1
        self._states = {suffix: learner.state() for suffix, learner in self.learners.items()}
        self.executor.step = step
        self.executor.stop.is_armed = self.stops_in_order
        self.executor.stop.check()
        self.checkpoints.poll()
        self.executor.take_seconds()
        self.run.begin_step(step)

    def step_is_whole(self) -> None:
        """Updated, synced and recorded."""
        self.last_step = self.executor.step
        self.executor.stop.step_is_whole()

    def drop_step(self) -> None:
        """What the driver keeps is again as it was before the step that runs, if that is not whole."""
        if self.last_step != self.executor.step:
            for suffix, learner in self.learners.items():
                learner.restore(self._states[suffix])

    def steps(self, after: int = 0) -> Iterator[int]:
        """Those that are left of --train-iters."""
        for step in range(after + 1, self.config.batch.train_iters + 1):
            self.begin_step(step)
            yield step

    def plan_visits(self, visits: Mapping[int, int], lengths: list[tuple[int, int]]) -> list[MiniBatch]:
        """Return one mini-batch (SFT) with a sample per visit.

        Args:
            visits: visit -> row. lengths: (length, response length) by row."""
        batch = self.config.batch
        samples = [Sample(visit, *lengths[row]) for visit, row in visits.items()]
        return plan_mini_batches(
            samples,
            len(samples),
            {},
            self.meshes["actor"].dp,
            batch.max_tokens_per_micro_batch,
            self.first.shape.hidden_size,
            seed=None,
        )

    def check_gate(self, gap: Future) -> None:
        """Before an actor's first update wait for its comparison of trainer and engine; raise GateError if
        they disagree."""
        learner = self.learner_of(gap.role)
        if not learner.gate_passed:
            self.check_mismatch(learner, combine(gap.result()))
            learner.gate_passed = True

    def check_mismatch(self, learner: Learner, mismatch: Mapping[str, float]) -> None:
        """Raise GateError if the differences between trainer and engine are too large."""
        if (finding := gate_finding(mismatch, learner.gate_limits)) is not None:
            worst = [token for rank in self.role(learner.actor).worst_tokens(5).result() for token in rank]
            raise GateError(f"{learner.actor}: {finding}" if learner.suffix else finding, worst)

    def finish_sft_step(
        self, step: int, rows: Iterable[int], lengths: list[tuple[int, int]], updated: Future
    ) -> dict[str, float]:
        """Record the step. Returns its metrics."""
        metrics = combine(updated.result()) | phase_times(self.executor.take_seconds())
        self.run.finish_step(step, metrics, sum(lengths[row][0] for row in rows))
        self.step_is_whole()
        return metrics

    def evaluate_if_due(self, step: int) -> None:
        """Before the first step, every --eval-interval, after the last."""
        interval = self.config.run.eval_interval
        if (
            self.first.eval_rows
            and interval
            and (step % interval == 0 or step == self.config.batch.train_iters)
        ):
            self.evaluate(step)

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out accuracy by sampling at --temperature and greedily, recorded. Raises ValueError without
        --eval-data or a rule."""
        scores = {}
        for learner in self.learners.values():
            if not learner.eval_rows:
                raise ValueError(
                    "--eval-data: an evaluation needs held-out rows. Give one or more *.jsonl or "
                    "*.parquet files."
                )
            if not uses_rule_reward(learner.config):
                raise ValueError(
                    "--reward-model: held-out answers are scored by a rule, and with it there is "
                    "none. Add --reward auto."
                )
            rollout, reward = (self.role(f"{kind}{learner.suffix}") for kind in ("rollout", "reward"))
            found, answers = held_out_accuracy(rollout, reward, learner.eval_rows)
            for name, answer in answers.items():
                self.run.keep_answer(step, with_suffix(name, learner.suffix), answer)
            scores |= {with_suffix(name, learner.suffix): score for name, score in found.items()}
        self.run.record_evaluation(step, scores)
        return scores

    def checkpoint_if_due(self, step: int, last: bool = False) -> None:
        """Begin a checkpoint every --save-interval steps and at the end, unless there is one of this step."""
        interval = self.config.checkpoint.save_interval
        due = interval and (last or step % interval == 0 or step == self.config.batch.train_iters)
        if due and step != self.checkpoints.last_step:
            self.checkpoints.save(step)

    def export(self, step: int, last: bool = False) -> None:
        """Write hf/, and with a critic hf_critic/, every --export-interval steps and at the end; of the
        second actor hf_2/ and hf_critic_2/."""
        interval = self.config.run.export_interval
        if last or step == self.config.batch.train_iters or (interval and step % interval == 0):
            for role in self.meshes:
                kind, suffix = kind_and_suffix(role)
                if kind in ("actor", "critic"):
                    folder = "hf" if kind == "actor" else "hf_critic"
                    self.role(role).export_hf(str(self.run.folder / f"{folder}{suffix}")).result()
