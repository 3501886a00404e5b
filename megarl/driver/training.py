"""Reinforcement learning as a loop says it: roll out, update, evaluate. The built-in loop and users' own are
written with this.

for step in training.steps():
    batch = training.rollout()        prompts -> responses -> rewards
    training.update(batch)            -> log-probs, values -> advantages -> updates -> new weights into the engines
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megarl.runtime.executor import Future
from megarl.driver.job import Job
from megarl.driver.learner import Learner
from megarl.driver.rollout_batch import RolloutBatch
from megarl.driver.scheduler import NodeResult, Scheduler
from megarl.driver.step import StepHost
from megarl.flow import Flow, Node, Roles
from megarl.flow.columns import COMPUTED_COLUMNS, any_in_driver


class Training:
    """Steps of one job. `step` is the number of the one that runs, 0 before the first; `results` are the
    futures of its nodes by name."""

    def __init__(self, job: Job):
        self.job, self.config = job, job.config
        self.flow: Flow = job.flow
        """What depends on what in a step, as the algorithms of all actors say."""
        self.roles = Roles(job.executor, job.executor.ranks)
        self.step = 0
        self.results: dict[str, NodeResult] = {}
        self._host = StepHost(job)
        self._scheduler = Scheduler(job.executor, job.meshes, self._host, self._host.share_of)
        self._in_step = False
        self._validate(self.flow)

    def set_up(self) -> None:
        """Build every role, restore what --load names, and bring the actors' weights into the engines. `step`
        is then the last one done."""
        self.job.set_up()
        self.step = self.job.checkpoints.restore()
        for synced in [self.job.sync(self.step, learner) for learner in self.job.learners.values()]:
            synced.result()

    def steps(self) -> Iterator[int]:
        """The steps that are left of --train-iters. Whatever is called in one, is that step's in errors and
        records."""
        while self.step < self.config.batch.train_iters:
            self._begin_step()
            yield self.step

    def rollout(
        self, flow: Flow | None = None, rows: Sequence[int] | Mapping[str, Sequence[int]] | None = None
    ) -> RolloutBatch:
        """Sample responses and score them: the step's flow until the rewards are here. What else is ready is
        computed meanwhile.

        Begins a step unless one has begun (see `steps`). Called again before `update` it discards what the
        step has sampled, and samples anew: every call makes visits of its own.

        Args:
            flow: of the whole step, if not the algorithm's.
            rows: of the training data; default: the next --num-prompts. With several actors the same for all
                of them that sample, or by name: {"actor": [...], "actor_2": [...]}.
        Returns: the first actor's batch, which has those of the others.
        Raises: FlowError before anything runs; ValueError for rows that do not fit; RemoteError if a rank
            fails.
        """
        if not self._in_step:
            self._begin_step()
        flow = self.flow if flow is None else flow
        self._validate(flow)
        batch = self._host.begin(self.step, self._visits(flow, rows), flow)
        judged = {node.name for node in flow.nodes if not node.background and any_in_driver(node.writes)}
        self.results = self._scheduler.run(flow, until=judged)
        return batch

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """The rest of the step: log-probs, values, advantages, updates, new weights into the engines; what
        the flow says.

        Compares trainer and engine before the first update. Returns the step's metrics, which are recorded.
        Raises: GateError if trainer and engine disagree; ValueError for a batch that is not the last
        rollout's; RemoteError."""
        self._check_current(batch)
        self.job.checkpoints.poll()
        self.results = self._scheduler.resume()
        self._in_step = False
        metrics = self._host.finish(self.results)
        self.job.step_is_whole()
        return metrics

    def run(self, flow: Flow) -> dict[str, float]:
        """A whole step by a flow of one's own. Returns and raises like `update`."""
        return self.update(self.rollout(flow))

    def finish(self, batch: RolloutBatch, *reports: Future) -> dict[str, float]:
        """Instead of `update`, where the loop calls the roles itself: record the step with what these calls
        returned. Returns its metrics.

        Raises: GateError if log-probs are among them and disagree with the engine's; ValueError as
        `update`."""
        self._check_current(batch)
        self._in_step = False
        metrics = self._host.record(reports)
        self.job.step_is_whole()
        return metrics

    def exchange(self, columns: Sequence[str], source: str, destination: str) -> Future | None:
        """Bring token columns from the ranks of one role to those of another. None: they are there, as both
        work on the same share."""
        if unknown := sorted({*columns} - {*COMPUTED_COLUMNS}):
            raise ValueError(f"column ({unknown[0]}) must be one of {', '.join(COMPUTED_COLUMNS)}.")
        for role in (source, destination):
            if role not in self._host.share_of:
                raise ValueError(
                    f"role ({role}) must be one of those of the job: {', '.join(self._host.share_of)}."
                )
        return self._host.move(
            columns, source, Node(role=destination, method="exchange", reads=(), writes=())
        )

    def check_gate(self, log_probs: Future) -> None:
        """Before an update by hand, wait for `roles.actor.log_probs()`.

        Raises: GateError if trainer and engine disagree. ValueError for an actor that works on another's
        samples."""
        if not self._host.has_own_samples(log_probs.role):
            raise ValueError(
                f"log_probs (of {log_probs.role}): the gate compares an actor with its own engines, "
                "and these samples are another actor's. Leave this check_gate out."
            )
        self.job.check_gate(log_probs)

    def sync(self, actor: str = "actor") -> Future:
        """Bring an actor's weights into its engines."""
        return self.job.sync(self.step, self._learner(actor))

    def evaluate(self) -> dict[str, float]:
        """Held-out accuracy of every actor on --eval-data, sampled and greedy; recorded."""
        return self.job.evaluate(self.step)

    @property
    def kl_coef(self) -> float:
        """What the first actor's KL controller says. Of others: `batch.actors["actor_2"].kl_coef`."""
        return self.job.first.kl.coef

    def save_checkpoint(self) -> None:
        """Begin a checkpoint of the state after this step, in --save; `wait`, or the next one, ends it.
        Raises: ValueError within a step."""
        if self._in_step:
            raise ValueError(
                f"a checkpoint is made between steps, and step {self.step} has no update yet. Call "
                "update() first."
            )
        self.job.checkpoints.save(self.step)

    def wait(self) -> None:
        """For all that is in flight, in the background too: for the end of a job. Then timeline.json says
        when each call ran, and where."""
        self._scheduler.close()
        self.job.checkpoints.wait()
        self._scheduler.timeline.write(self.job.run.folder / "timeline.json")

    def _begin_step(self) -> None:
        self.step += 1
        self._in_step = True
        self.job.begin_step(self.step)

    def _validate(self, flow: Flow) -> None:
        """Raise FlowError for a flow that this job cannot run, or without a column that an algorithm
        needs."""
        needs = {}
        for learner in self.job.learners.values():
            needs[learner.actor, "advantages"] = learner.config.algorithm.advantage_reads
            needs[learner.actor, "update"] = learner.config.algorithm.loss_reads
        flow.validate(self.job.meshes, needs)

    def _learner(self, actor: str) -> Learner:
        names = {learner.actor: learner for learner in self.job.learners.values()}
        if actor not in names:
            raise ValueError(f"actor ({actor}) must be one of {', '.join(names)}.")
        return names[actor]

    def _visits(
        self, flow: Flow, rows: Sequence[int] | Mapping[str, Sequence[int]] | None
    ) -> dict[str, dict[int, int]]:
        """Suffix of each actor that samples -> visit -> row."""
        given = (
            {self._learner(actor).suffix: list(of_actor) for actor, of_actor in rows.items()}
            if isinstance(rows, Mapping)
            else {}
        )
        chosen = {}
        for suffix, learner in self.job.learners.items():
            if any(node.role == f"rollout{suffix}" and node.method == "generate" for node in flow.nodes):
                if suffix in given or rows is not None and not isinstance(rows, Mapping):
                    wanted = given[suffix] if suffix in given else list(rows)
                    chosen[suffix] = learner.cursor.visit(_checked(learner, wanted))
                else:
                    chosen[suffix] = learner.cursor.next_visits(learner.config.batch.num_prompts)
        return chosen

    def _check_current(self, batch: RolloutBatch) -> None:
        if batch is not self._host.current or not self._in_step:
            raise ValueError(
                f"batch ({batch}) must be what the last rollout() returned, once: the ranks hold "
                "the tokens of that one alone."
            )


def _checked(learner: Learner, rows: list[int]) -> list[int]:
    total, batch = learner.cursor.num_rows, learner.config.batch
    if outside := [row for row in rows if not 0 <= row < total]:
        raise ValueError(f"rows ({outside[0]}) must be rows of --train-data: 0 to {total - 1}.")
    if not rows or len(rows) * batch.num_samples_per_prompt % batch.global_batch_size:
        raise ValueError(
            f"rows ({len(rows)} of them) x num_samples_per_prompt ({batch.num_samples_per_prompt}) "
            "must be a multiple of "
            f"global_batch_size ({batch.global_batch_size}). Try {batch.num_prompts} rows."
        )
    return rows
