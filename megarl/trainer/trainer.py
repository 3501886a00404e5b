"""Run training jobs in Python: the loop of `megarl train`, and loops of your own.

config = megarl.load_config("@configs/quickstart_ppo.args", train_iters=5)
with megarl.PPOTrainer(config) as trainer:
    for step in trainer.steps():
        batch = trainer.rollout()            # prompts -> responses -> rewards
        metrics = trainer.update(batch)      # log-probs, values -> advantages -> updates -> new weights
        print(metrics["reward/mean"])
    print(trainer.evaluate())
    trainer.roles.actor.export_hf("out").result()
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from megarl.algorithms import GRPO, PPO, Algorithm
from megarl.algorithms.flows import flow_of_actors
from megarl.config.errors import ConfigError
from megarl.config.flags import algorithm_name
from megarl.config.render import write_args
from megarl.config.mesh import role_meshes
from megarl.config.schema import TrainConfig
from megarl.futures import Future
from megarl.flow import Actor, Flow, Metrics, Node, Roles, ServiceRole, role_class
from megarl.flow.columns import COMPUTED_COLUMNS
from megarl.role_names import with_suffix
from megarl.trainer.checkpointer import Checkpointer
from megarl.trainer.evaluation import evaluate_actors, run
from megarl.trainer.failed_step import save_failed_step
from megarl.trainer.gate import LogProbGate
from megarl.trainer.profiled_steps import ProfiledSteps
from megarl.trainer.own_ranks import Started, start_ranks
from megarl.trainer.reference_updates import update_references
from megarl.trainer.replay import DriverLog
from megarl.trainer.rollout_batch import RolloutBatch
from megarl.trainer.run_folder import TIMELINE, Run
from megarl.trainer.scheduler import NodeResult
from megarl.trainer.set_up import set_up_roles
from megarl.trainer.state import TrainState
from megarl.trainer.stop_request import StopRequest
from megarl.trainer.step_report import rollout_rows
from megarl.trainer.step_runner import StepRunner
from megarl.trainer.weights import export_weights, sync_weights


class Trainer:
    """A training job whose driver is this process.

    The constructor starts the ranks, sets the roles up, restores the checkpoint of --load and brings the
    first weights into the engines. Leaving the `with` block ends all ranks, as do `close`, an exception,
    Ctrl-C, and any end of this process. After a failure (RemoteError, a rank's death) every further call
    fails.

    Args:
        config: see `load_config`. The job starts --nproc-per-node ranks on this machine. With --executor
            inline it starts none, and calls on roles run in this process, for pdb. The job writes the run
            folder --save as `megarl train` does.
        progress: print a line per step, as `megarl train` does.
        started: ranks that are already running; by default the trainer starts them.
    Raises: ConfigError for errors of the job, before a model is built; RemoteError if a rank fails.
    """

    algorithm: type[Algorithm] = Algorithm
    """The algorithm class that this trainer requires."""

    def __init__(self, config: TrainConfig, progress: bool = False, started: Started | None = None) -> None:
        self.config = config
        self._contexts = contextlib.ExitStack()
        try:
            if started is None:
                self._check_algorithm()
                started = self._contexts.enter_context(start_ranks(config, progress))
            self._open(started)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def _check_algorithm(self) -> None:
        config, wanted = self.config.algorithm, algorithm_name(self.algorithm)
        if isinstance(config, self.algorithm) and config.needs_rollout:
            return
        rule = "nothing is sampled. Use `megarl train`."
        if self.algorithm is not Algorithm:
            rule = f"{type(self).__name__} wants {wanted}."
        raise ConfigError([f"--algorithm ({algorithm_name(type(config))}): {rule}"])

    def _open(self, started: Started) -> None:
        """Create the run folder and the driver's objects, then set up the roles on the ranks and load their
        weights."""
        config, self.executor = self.config, started.executor
        self.meshes = role_meshes(config, started.world_size)
        self.run_folder = self._contexts.enter_context(Run(config, write_args(config), started.progress))
        self.state = TrainState(config, started.inputs)
        self.stop = StopRequest()
        """The request to shut the job down. A SIGTERM sets it, see `graceful_stop`."""
        self.executor.check_interrupt = self.stop.check
        self.roles = Roles(self.executor, self.executor.ranks)
        self.gate = LogProbGate(self.executor, self.state)
        self.runner = StepRunner(self.executor, self.meshes, self.state, self.gate, self.stop)
        self.checkpointer = Checkpointer(
            config, self.executor, self.meshes, self.state, self.run_folder, self.stop
        )
        if config.streaming.staleness:
            log = DriverLog(config, started.world_size, self.run_folder.progress.note)
            self.runner.log = self.checkpointer.log = log
        self.profiled = ProfiledSteps(config, self.executor, self.run_folder)
        self._contexts.push(self._finish)
        self.flow = flow_of_actors(config, self.meshes)
        """Flow of a step, combined from the algorithms of all actors."""
        self._validate(self.flow)
        self.stops_gracefully = False
        """Whether a SIGTERM ends the job with a checkpoint, see `graceful_stop`."""
        self._metrics: dict[str, float] = {}  # metrics of the last step
        self._set_up()

    def _finish(self, exc_type: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Wait for all calls, write timeline.json and stop the engines. After a failure only write
        timeline.json and the failed step's samples, and complete or remove the checkpoint in progress."""
        with contextlib.ExitStack() as last:
            last.callback(self.checkpointer.abandon)
            if isinstance(error, Exception):  # not after Ctrl-C or SIGTERM
                last.callback(save_failed_step, self.run_folder, self.runner.batches, self.state, error)
            last.callback(self.save_timeline)
            if exc_type is None:
                self.profiled.stop()
                self.wait()
                for role in self.meshes:
                    if issubclass(role_class(role), ServiceRole):
                        ServiceRole(self.executor, role).shut_down().result()

    def save_timeline(self) -> None:
        """Write timeline.json, with the calls that have ended so far. Does nothing before the first one.

        A file that cannot be written is noted: no training result depends on it."""
        timeline = self.runner.scheduler.timeline
        if timeline.records and not self.run_folder.is_superseded:
            try:
                timeline.write(self.run_folder.folder / TIMELINE)
            except OSError as error:
                self.run_folder.progress.note(str(error))

    def _set_up(self) -> None:
        """Build every role, in an order that all ranks share, restore --load, and copy the weights into the
        engines."""
        self.runner.rows = set_up_roles(self.executor, self.state, self.meshes, self.run_folder)
        self.checkpointer.restore()
        self.runner.start_log()
        for actor in self.state.actors.values():
            if actor.sft is not None:
                actor.sft.sizes = Actor(self.executor, actor.actor).load_sft_rows().first() or ()
        if self.state.first.algorithm.needs_rollout:
            for synced in [self.sync(actor.actor) for actor in self.state.actors.values()]:
                synced.result()
            self.checkpointer.load_requests()

    # Steps.

    @property
    def step(self) -> int:
        """Number of the running step; between two steps the last completed one, 0 before the first."""
        return self.state.step

    @property
    def results(self) -> dict[str, NodeResult]:
        """Futures of the calls that the running or the last step has issued, by node name
        ("actor.update")."""
        return self.runner.results

    @property
    def is_done(self) -> bool:
        """Whether the job has completed --train-iters steps, or its fine-tuning loss fell below --exit-loss."""
        metrics = self._metrics or self.checkpointer.restored_metrics
        exit_loss = self.config.run.exit_loss
        if self.state.completed >= self.config.batch.train_iters:
            return True
        # The loss of a policy gradient says nothing of progress: it is about 0 on policy, and may be negative.
        is_fine_tuning = not self.state.first.algorithm.needs_rollout
        return is_fine_tuning and exit_loss is not None and metrics.get("policy/loss", math.inf) < exit_loss

    def steps(self) -> Iterator[int]:
        """Yield the number of each remaining step. Each step ends with a checkpoint if one is due
        (--save-interval).

        Errors and records of calls within a step name this step."""
        while not self.is_done:
            self._begin_step()
            yield self.step
            if self.state.in_step:  # the loop has left the step out: the next one has another number
                self.state.check_left_out()
                self._complete_step()
            self.checkpoint_if_due()

    def rollout(
        self, flow: Flow | None = None, rows: Sequence[int] | Mapping[str, Sequence[int]] | None = None
    ) -> RolloutBatch:
        """Sample responses and score them. Returns the first actor's batch, as soon as the driver has all
        rewards.

        Other nodes that are ready run meanwhile. The call begins a step unless one has begun (see `steps`). A
        second call before `update` discards the step's samples and samples again; with --staleness it is an
        error. In supervised fine-tuning the batch is the next rows of the data.

        Args:
            flow: flow of a step, rollout and update, if not the algorithm's.
            rows: rows of the training data; default: the next --num-prompts. With several actors the rows
                apply to all actors that sample, or are given by name: {"actor": [...], "actor_2": [...]}.
                Only in synchronous training: see `admit`.
        Returns: the first actor's batch, which holds the other actors' batches.
        Raises: FlowError before anything runs; ValueError for rows that do not fit, and with --staleness for
        rows and for a second call; RemoteError if a rank fails."""
        if not self.state.in_step:
            self._begin_step()
        flow = self.flow if flow is None else flow
        self._validate(flow)
        return self.runner.sample(flow, self.state.rows_of_actors(flow, rows)).first

    def admit(self, rows: Sequence[int], actor: str = "actor") -> None:
        """Let an actor's engines answer these rows of the training data next, before other rows. They are
        admitted as places in the actor's buffer become free, and a later step trains on them. With --share-episodes
        all actors do.

        Raises: ValueError for rows that do not exist."""
        self.state.give_rows(rows, actor)

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """Run the rest of the step, from log-probs and values to the updates and the weight sync. Returns the
        step's metrics, which are recorded.

        Compares trainer and engine before the first update.

        Raises: GateError if trainer and engine disagree; ValueError for a batch that is not the last
        rollout's; RemoteError."""
        self._check_current(batch)
        self.checkpointer.poll()
        return self._record(self.runner.finish())

    def run(self, flow: Flow) -> dict[str, float]:
        """Run a step, rollout and update, with a custom flow. Returns the step's metrics and raises
        like `update`."""
        return self.update(self.rollout(flow))

    def finish(self, batch: RolloutBatch, *reports: Future[Metrics]) -> dict[str, float]:
        """Record a step whose calls the user's loop made itself, instead of `update`. Returns the step's
        metrics.

        Args:
            reports: the calls whose results are metrics.
        Raises: GateError if the reports include log-probs that disagree with the engine's; ValueError as
        `update`."""
        self._check_current(batch)
        return self._record(reports)

    def _begin_step(self) -> None:
        self.state.begin_step()
        self.executor.label = f"step {self.state.step}"
        self.stop.is_armed = self.stops_gracefully
        self.stop.check()
        self.checkpointer.poll()
        self.profiled.begin(self.step)
        self.executor.take_seconds()
        self.run_folder.begin_step()

    def _complete_step(self) -> None:
        self.state.complete_step()
        self.profiled.end(self.step)
        self.stop.step_completed()

    def _record(self, reports: Iterable[Future[Metrics]]) -> dict[str, float]:
        """Record the results of these calls as the metrics of the step and return them. Raises GateError,
        after recording, if trainer and engine disagree."""
        state, batches = self.state, self.runner.batches
        of_actors = self.runner.metrics(reports)
        metrics = {
            with_suffix(name, suffix): value
            for suffix, own in of_actors.items()
            for name, value in own.items()
        }
        self.run_folder.write_rollouts(state.step, rollout_rows(batches, state))
        self.run_folder.record_step(state.step, metrics, batches.num_tokens)
        jumps = [state.actors[suffix].jumps.note(state.step, own) for suffix, own in of_actors.items()]
        for note in filter(None, jumps):  # before the gate, which a destroyed model may fail
            self.run_folder.progress.note(note)
        for note in self.runner.judge(of_actors):
            self.run_folder.progress.note(note)
        update_references(self.executor, self.meshes, state, self.run_folder)
        self._complete_step()
        self._metrics = metrics
        return metrics

    # Calls for a user's own loop.

    def exchange(self, columns: Sequence[str], source: str, destination: str) -> Future[Metrics] | None:
        """Send token columns from the ranks of one role to those of another. Returns the future of the
        transfer, or None if both work on the same batch shard, so that no call is needed."""
        if unknown := sorted({*columns} - {*COMPUTED_COLUMNS}):
            raise ValueError(f"column ({unknown[0]}) must be one of {', '.join(COMPUTED_COLUMNS)}.")
        for role in (source, destination):
            if role not in self.runner.shard_key_of:
                raise ValueError(
                    f"role ({role}) must be one of those of the job: {', '.join(self.runner.shard_key_of)}."
                )
        node = Node(role=destination, method="exchange", reads=(), writes=())
        return self.runner.move(columns, source, node)

    def check_gate(self, log_probs: Future[Metrics]) -> None:
        """Raise GateError if the result of `roles.actor.log_probs()` disagrees with the engine's log-probs. A
        user's loop calls this before its first update.

        Raises: GateError; ValueError for an actor that works on another's samples."""
        if not self.runner.batches.is_on_policy(log_probs.role):
            raise ValueError(
                f"log_probs (of {log_probs.role}): the gate compares an actor with its own engines, "
                "and these samples are another actor's. Leave this check_gate out."
            )
        self.gate.check_first(log_probs)

    def sync(self, actor: str = "actor") -> Future[Metrics]:
        """Start to copy an actor's weights into its engines, and return the future of the engines' ranks. The
        weights' version is the number of the step."""
        suffix = self.state.actor(actor).suffix
        self.runner.events.pinned.synced(f"rollout{suffix}")
        return sync_weights(self.executor, self.meshes, self.step, suffix)

    @property
    def kl_coef(self) -> float:
        """KL coefficient of the first actor. Other actors: `batch.actors["actor_2"].kl_coef`."""
        return self.state.first.kl.coef

    # Between two steps.

    def evaluate(self) -> dict[str, float]:
        """Measure the accuracy of every actor on --eval-data, sampled and greedy. Returns metric -> mean
        reward, which is also recorded."""
        self.runner.events.pinned.finish()
        scores, answers = run(evaluate_actors(self.state, self.runner.events.answering))
        self.run_folder.record_evaluation(self.step, scores, answers)
        return scores

    def evaluate_if_due(self) -> None:
        """Evaluate before the first step, every --eval-interval steps and after the last; never without
        --eval-data or in supervised fine-tuning."""
        interval = self.config.run.eval_interval
        if not self.state.first.eval_rows or not interval or not self.state.first.algorithm.needs_rollout:
            return
        if self.step % interval == 0 or self.is_done:
            if self.step == 0:  # nothing else is shown yet
                count = len(self.state.first.eval_rows)
                self.run_folder.progress.note(f"evaluating {count} prompts before the first step")
            step, pinned = self.step, self.runner.events.pinned
            pinned.finish()
            record = partial(self.run_folder.record_evaluation, step)
            if self.is_done or not pinned.begin(step, record, self.run_folder.progress.note):
                self.evaluate()

    def save_checkpoint(self) -> None:
        """Begin a checkpoint of the state after this step, in --save. Returns when every rank has copied its
        state; `wait` or the next checkpoint completes it.

        Raises: ValueError within a step."""
        if self.state.in_step:
            raise ValueError(
                f"a checkpoint is made between steps, and step {self.step} has no update yet. Call "
                "update() first."
            )
        self.runner.events.pinned.finish()  # its metrics are in the checkpoint
        self.checkpointer.save()

    def checkpoint_if_due(self) -> None:
        """Begin a checkpoint every --save-interval steps and at the end, unless this step has one."""
        interval, log = self.config.checkpoint.save_interval, self.runner.log
        if self.state.in_step or self.step == self.checkpointer.last_step:
            return
        is_due = interval and (self.step % interval == 0 or self.is_done)
        if log is not None and log.must_save(self.step) or is_due:
            self.save_checkpoint()

    def export_if_due(self) -> None:
        """Write the weights in Hugging Face format to hf/, and a critic's to hf_critic/, every
        --export-interval steps and at the end.

        The folders of the second actor are hf_2/ and hf_critic_2/."""
        interval = self.config.run.export_interval
        if not self.is_done and not (interval and self.step % interval == 0):
            return
        self.run_folder.attempt.check("exported weights")
        export_weights(self.executor, self.meshes, self.run_folder.folder)

    def wait(self) -> None:
        """Wait for all calls in flight, also in the background, and until the current checkpoint is
        complete."""
        self.runner.events.pinned.finish()
        self.runner.scheduler.close()
        self.checkpointer.wait()

    # Shutdown.

    def close(self) -> None:
        """Wait for all calls in flight and shut the ranks down. A second call does nothing.

        After a failure the call ends the ranks and raises the error again."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._contexts.__exit__(exc_type, error, traceback)

    # Checks.

    def _validate(self, flow: Flow) -> None:
        """Raise FlowError for a flow that this job cannot run, or that lacks a column an algorithm needs."""
        needs = {}
        for actor in self.state.actors.values():
            needs[actor.actor, "advantages"] = actor.algorithm.advantage_reads
            needs[actor.actor, "update"] = actor.algorithm.loss_reads
        flow.validate(self.meshes, needs, self.config.streaming.staleness)

    def _check_current(self, batch: RolloutBatch) -> None:
        batches = self.runner.batches
        if batches is None or batch is not batches.first or not self.state.in_step:
            raise ValueError(
                f"batch ({batch}) must be what the last rollout() returned, once: the ranks hold "
                "the tokens of that one alone."
            )


class PPOTrainer(Trainer):
    """A Trainer that raises ConfigError unless the configuration has --algorithm ppo."""

    algorithm = PPO


class GRPOTrainer(Trainer):
    """A Trainer that raises ConfigError unless the configuration has --algorithm grpo."""

    algorithm = GRPO
