"""Run one training step: choose the arguments of each call of the flow and handle its result.

    generate -> plan which sample is trained on by which rank of every mesh -> send the samples there
    score    -> rewards
    update   <- after the log-prob gate has found that trainer and engine agree

A role works on the samples of the rollout with the same number or, if the flow has none, on the first
actor's. This module handles numbers and ids only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megarl.config.mesh import MeshSpec, replicas, scores_untrained, shard_keys, training_data_roles
from megarl.config.teachers import teacher_folders
from megarl.futures import Future
from megarl.runtime.executor import Executor
from megarl.flow import Actor, Data, Flow, Metrics, Node, Reference, Reward, RewardModel, Rollout
from megarl.flow.job_roles import Record
from megarl.flow.columns import COMPUTED_COLUMNS, DRIVER_COLUMNS, WIDE_COLUMNS, any_in_driver, base
from megarl.invariants import check_plan, check_samples, check_versions
from megarl.packing import Sample, plan_mini_batches, preferred_ranks
from megarl.role_names import kind_and_suffix
from megarl.trainer.canaries import Canaries
from megarl.trainer.data_rows import plan_rows
from megarl.trainer.dynamic_sampling import Refill, fill_step
from megarl.trainer.early_scores import EarlyScores, ScoresFuture
from megarl.trainer.engine_set import EngineSet
from megarl.trainer.gate import LogProbGate
from megarl.trainer.group_future import GroupFuture
from megarl.trainer.rank_events import RankEvents
from megarl.trainer.replay import DriverLog
from megarl.trainer.rollout_batch import RolloutBatch
from megarl.trainer.scheduler import NodeResult, Scheduler
from megarl.trainer.scores import check_failed_rewards, take_scores
from megarl.trainer.actor_state import ActorState
from megarl.trainer.state import TrainState
from megarl.trainer.step_batches import StepBatches
from megarl.trainer.step_report import metrics_of_actors
from megarl.trainer.stop_request import StopRequest
from megarl.trainer.weights import send_weights

_READS_ROWS = (RewardModel.score, Reference.hidden_states, Reference.top_tokens)
_SAMPLING_CALLS = (Rollout.generate, Reward.score)
"""Calls of the rounds of --dynamic-sampling."""


class StepRunner:
    """Runs the flow of each training step: gives every call its arguments, and keeps the results that the
    driver needs.

    Args:
        meshes: role -> its mesh.
        gate: compares trainer and engine before an actor's first update.
        stop: a request for a shutdown, which drops the step until its first update.
    """

    driver_columns = DRIVER_COLUMNS

    def __init__(
        self,
        executor: Executor,
        meshes: Mapping[str, MeshSpec],
        state: TrainState,
        gate: LogProbGate,
        stop: StopRequest,
    ) -> None:
        self.executor, self.meshes, self.state, self.gate, self.stop = executor, meshes, state, gate, stop
        self.shard_key_of = shard_keys(
            meshes, scores_untrained({suffix: actor.config for suffix, actor in state.actors.items()})
        )
        keys = dict.fromkeys(self.shard_key_of[role] for role in training_data_roles(meshes))
        self.hidden_size = {key: state.actor_of(key).hidden_size(key) for key in keys}
        self.rows: Sequence[Sequence[tuple[int, int, float | None]]] = []
        """(length, response length, reward) of the samples of each row of the training data, if the algorithm
        samples nothing."""
        self.batches = StepBatches(0, Flow(), state.actors)
        """Batches of the last step that has begun."""
        self.results: dict[str, NodeResult] = {}
        """Futures of the step's issued nodes, by node name."""
        self.canaries = Canaries(executor, meshes, state, self.shard_key_of)
        self.engines = EngineSet(executor, meshes, state)
        self.early = EarlyScores(executor, meshes, state, self.shard_key_of, self.hidden_size)
        self.events = RankEvents(executor, meshes, state, self.engines, self.early)
        self.scheduler = Scheduler(executor, meshes, self, self.shard_key_of, self.events.wait_any)
        self._refill: Refill | None = None
        """Rounds of --dynamic-sampling of the last step; None without."""
        self._round_flow: Flow | None = None
        """The part of the last flow that a round of --dynamic-sampling runs."""
        self._is_further_round = False
        """Whether a round of --dynamic-sampling runs that is not the step's first one."""
        self.log: DriverLog | None = None
        """Log of asynchronous rollouts; None in synchronous training."""
        self._trained: dict[str, list[int]] = {}
        """Rollout source -> samples of the last step that trained on its groups, whose memory is not free."""

    def start_log(self) -> None:
        """Begin the log of an asynchronous run, after the checkpoint of --load is restored."""
        if self.log is not None:
            self.log.start(self.state)
            self.engines.start(self.log)

    def sample(self, flow: Flow, rows: Mapping[str, Sequence[int] | None]) -> StepBatches:
        """Run a step's flow until the driver has the samples, lengths and rewards, and return the batches of
        all actors.

        Args:
            rows: suffix of each actor that admits prompts -> rows of the training data; None takes the next
                ones.
        Raises: ValueError with --staleness, if the step has its samples already."""
        staleness = self.state.first.config.streaming.staleness
        has_samples = any(batch.samples for batch in self.batches.of_actor.values())
        if staleness and self.batches.step == self.state.step and has_samples:
            raise ValueError(
                f"rollout() was called before in step {self.state.step}: with --staleness {staleness} the "
                "step has taken its samples from the buffer, and nothing is discarded. Call "
                "trainer.update(batch) first."
            )
        self.batches = StepBatches(self.state.step, flow, self.state.actors)
        self.canaries.begin_step()
        self.early.begin_step(flow)
        self.engines.start_requested()
        self._refill = None
        for suffix, rows_of_actor in rows.items():
            actor = self.state.actors[suffix]
            if actor.config.batch.dynamic_sampling and rows_of_actor is None:
                self._sample_rounds(flow, actor)
                continue
            actor.admit(rows_of_actor, self.state.step)
            if not actor.algorithm.needs_rollout:
                self._take_rows(suffix)
        awaited = {
            node.name
            for node in flow.nodes
            if not node.background
            and not self.skips(node)
            and any_in_driver(node.writes or ())
            and node.declaration() is not Actor.receive_rows  # the driver knows their lengths already
        }
        self.results = self.scheduler.run(flow, until=awaited)
        return self.batches

    def _sample_rounds(self, flow: Flow, actor: ActorState) -> None:
        """Sample and score rounds of prompts until the actor's step is full, and send its tokens to the ranks.
        The flow's own calls for this are then skipped.

        Raises: DynamicSamplingError if --max-sampling-rounds are not enough; ValueError for a flow that does not
            score by a rule or an environment."""
        nodes = [node for node in flow.declared if node.declaration() in _SAMPLING_CALLS]
        if not any(node.declaration() is Reward.score for node in nodes):
            raise ValueError(
                "flow: has no call of reward.score, and --dynamic-sampling keeps prompts by their rewards. Add "
                "the call, or leave --dynamic-sampling out."
            )
        self._round_flow = round_flow = Flow(nodes)

        def sample_round(is_further: bool) -> RolloutBatch:
            self.batches = StepBatches(self.state.step, round_flow, self.state.actors)
            self._is_further_round = is_further
            self.scheduler.run(round_flow, until={node.name for node in round_flow.nodes})
            self._is_further_round = False
            return self.batches.of_actor[actor.suffix]

        refill = fill_step(actor, self.state.step, sample_round)
        self.batches = StepBatches(self.state.step, flow, self.state.actors)
        refill.fill(self.batches.of_actor[actor.suffix])
        Data(self.executor, "data").release(refill.unused, f"train{actor.suffix}")
        self._distribute(f"rollout{actor.suffix}")
        self._refill = refill

    @property
    def _metrics_of_rounds(self) -> dict[str, float]:
        return {} if self._refill is None else self._refill.metrics()

    def finish(self) -> list[NodeResult]:
        """Run the rest of the step. Returns the calls whose results are metrics."""
        self.results = self.scheduler.resume()
        for node in self.batches.flow.nodes:
            if node.declaration() is not Rollout.sync or not self.skips(node):
                continue
            if self.state.actor_of(node.role).buffer.staleness:  # versions are counted
                Rollout(self.executor, node.role).set_version(self.batches.step)
                self.events.pinned.synced(node.role)
        reporting = {
            node.name
            for node in self.batches.flow.nodes
            if not node.background and (declared := node.declaration()) and declared.reports
        }
        return [result for name, result in self.results.items() if name in reporting]

    def metrics(self, reports: Iterable[Future[Metrics]]) -> dict[str, dict[str, float]]:
        """Return suffix of each actor -> its metrics of the step. Waits for the reports.

        Args:
            reports: the calls whose results are metrics."""
        reports = list(reports)
        transfers = [call for batch in self.batches.of_actor.values() for call in batch.transfers]
        calls: list[Future[Metrics]] = [*reports, *transfers]
        while left := [call for call in calls if not call.done()]:  # then the seconds of a call are known
            self.events.wait_any(left)
        seconds = self.executor.take_seconds()
        seconds |= {
            (role, "score_groups"): seconds.get((role, "score_groups"), 0.0) for role in self.early.roles
        }
        for result in self.results.values():
            if result.node is not None and isinstance(result.future, GroupFuture | ScoresFuture):
                seconds[result.role, result.node.method] += result.future.waited_s
                if isinstance(result.future, GroupFuture) and result.future.waited_s:
                    # the canaries were sampled during this wait
                    seconds.pop((result.role, "sample_canaries"), None)
        of_actors = metrics_of_actors(self.batches, self.state, reports, seconds)
        return {
            suffix: own
            | self.canaries.metrics(suffix)
            | self.engines.metrics(suffix)
            | self._metrics_of_rounds
            | self.state.actors[suffix].measure(
                [self.batches.of_actor[suffix]] if self._refill is None else self._refill.rounds
            )
            for suffix, own in of_actors.items()
        }

    def judge(self, of_actors: Mapping[str, Mapping[str, float]]) -> list[str]:
        """Update every actor's KL controller with the metrics of the step, and check its log-prob gate.
        Returns warnings for the user.

        Raises: GateError if trainer and engine have drifted apart."""
        warnings = []
        for suffix, metrics in of_actors.items():
            actor, batch = self.state.actors[suffix], self.batches.of_actor[suffix]
            actor.update_kl(metrics, self.batches.batch_of(actor.actor))
            self.canaries.check(suffix)  # first, because its error names the engine
            if "mismatch/max_abs" in metrics:  # a user's own loop may compute no log-probs
                self.gate.check(actor, metrics)
            warnings += [actor.note_useless_rewards(batch), actor.note_unscored_updates(metrics, batch.step)]
        return [warning for warning in warnings if warning]

    # Called by the scheduler.

    def arguments(
        self, node: Node, results: Mapping[str, NodeResult]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the positional and the keyword arguments of a node's call. The driver already has every
        value that the node reads.

        Raises: StopRequested instead of an update that a shutdown drops."""
        arguments = tuple(self._arguments(node, results))
        if (declared := node.declaration()) is not None and declared.commits:
            self.stop.begin_update()
        return arguments, self._scores(node) if declared is Actor.advantages else {}

    def _arguments(self, node: Node, results: Mapping[str, NodeResult]) -> Sequence[object]:
        batch, actor = self.batches.batch_of(node.role), self.state.actor_of(node.role)
        called = node.declaration()
        if called is Rollout.generate:
            return self._prompts(node.role, actor)
        if called is Reward.score:
            return "train", batch.sample_ids
        if called is RewardModel.score and node.role in self.early.roles:
            return ({},)  # the scores come from calls that were made before
        if called in _READS_ROWS or called is Reference.log_probs and teacher_folders(actor.algorithm):
            return ({sample.sample_id: batch.visits[sample.group] for sample in batch.samples},)
        if called is Actor.receive_rows:
            size = len(batch.samples), self.meshes["actor"].dp
            return batch.visits, plan_rows(batch.samples, *size, actor.config, actor.shape.hidden_size)
        if called is Actor.log_probs and actor.config.streaming.staleness:
            if not self.batches.is_on_policy(node.role):
                return ()
            return batch.step - 1, self.canaries.are_sent(actor.suffix)
        if called is Actor.advantages:
            rewards = [batch.rewards[sample] for sample in batch.sample_ids]
            return (
                *(batch.sample_ids, batch.group_ids, rewards, actor.kl.coef, batch.reward_digests),
                *batch.turns,
            )
        if called is Actor.update:
            if self.batches.is_on_policy(node.role):
                self._check_gate(node.role, results)
            elif actor.algorithm.takes_engine_log_probs:
                raise ValueError(
                    f"--old-log-probs (engine): {node.role} trains on samples of another actor, whose engine's "
                    "log-probs are not its own. Try --old-log-probs trainer."
                )
            return actor.kl.coef, *actor.sft_rows(batch, self.meshes[node.role].dp)
        if called is Rollout.sync:
            send_weights(self.executor, self.meshes, batch.step, actor.suffix)
            self.events.pinned.synced(node.role)
            return (batch.step,)
        return ()

    def _scores(self, node: Node) -> dict[str, object]:
        """Return the single scores of the step's samples, for an algorithm that learns from them."""
        actor, batch = self.state.actor_of(node.role), self.batches.batch_of(node.role)
        if not actor.algorithm.takes_scores:
            return {}
        weight_of = {role: weight for role, weight in self.state.weight_of.items() if role in batch.records}
        found = batch.scores(weight_of, actor.config.data.weights_of_scores)
        return found if actor.multiplier is None else found | {"multiplier": actor.multiplier.value}

    def _prompts(self, rollout: str, actor: ActorState) -> Sequence[object]:
        """Return the arguments of `Rollout.generate`, and free the samples that were trained on before."""
        if self._is_further_round:
            return "train", actor.buffer.issue(), False, None, True, (), True
        if not actor.buffer.staleness:  # the call releases the samples of the call before
            return "train", actor.buffer.issue()
        source = f"train{actor.suffix}"
        if trained := self._trained.pop(source, None):
            Data(self.executor, "data").release(trained, source)
        assert self.log is not None
        engines = self.log.route(actor.suffix, self.batches.step, actor.buffer, self.meshes[rollout].dp)
        arguments = "train", actor.buffer.issue(engines), False, engines, False
        if actor.config.streaming.max_tokens_per_step is None:
            return arguments
        return *arguments, [group.visit for group in actor.buffer.due(self.batches.step)]

    def end_of(self, node: Node, call: Future[Any]) -> Future[Any]:
        """Return the future of a node. Sampling ends when the actor's buffer has the groups of the step."""
        actor, step = self.state.actor_of(node.role), self.batches.step
        buffer, called = actor.buffer, None if node.background else node.declaration()
        if called is Actor.log_probs:
            self.canaries.ask(actor.suffix)
        if called is RewardModel.score and node.role in self.early.roles:
            return self.early.scores(node.role, self.batches.batch_of(node.role))
        if called is not Rollout.generate or not buffer.staleness:
            return call
        self.canaries.sample(node.role)

        def is_ready() -> bool:
            self.events.take()
            return buffer.is_ready(step) and self.canaries.is_ready(node.role)

        ranks = [*self.meshes[node.role].ranks]
        return GroupFuture(self.executor, call, is_ready, lambda: self.events.num_reported, ranks)

    def _check_gate(self, actor: str, results: Mapping[str, NodeResult]) -> None:
        for result in results.values():
            if result.role == actor and result.node and result.node.declaration() is Actor.log_probs:
                if not self.state.actor_of(actor).gate_passed:
                    self.canaries.check(self.state.actor_of(actor).suffix)
                self.gate.check_first(result)

    def skips(self, node: Node) -> bool:
        """Return whether a node is left out of this step, as are an actor's update and weight sync while its
        critic warms up."""
        if self._refill is not None and node.declaration() in _SAMPLING_CALLS:
            return True  # the rounds have made these calls
        warming_up = self.state.actor_of(node.role).is_warming_up(self.batches.step)
        return warming_up and node.declaration() in (Actor.update, Rollout.sync)

    def move(self, columns: Sequence[str], source: str, node: Node) -> Future[Any] | None:
        """Send token columns from a role's ranks to the node's ranks. Returns the future, or None if no call
        is needed."""
        giver, taker = self.shard_key_of[source], self.shard_key_of[node.role]
        columns = [column for column in map(base, columns) if column in (*COMPUTED_COLUMNS, *WIDE_COLUMNS)]
        if giver == taker or not columns or taker not in self.hidden_size:
            return None
        ranks = sorted({*self.meshes[giver].ranks, *self.meshes[taker].ranks})
        moved = Data(self.executor, "data", ranks).exchange(columns, giver, taker)
        self.batches.batch_of(node.role).transfers.append(moved)
        return moved

    def finished(self, node: Node, values: list[Any]) -> None:
        """Store the samples or scores that a node returned. Results of other nodes and of background nodes
        are not kept."""
        if node.background:
            return
        if node.declaration() is Rollout.generate:
            self._take_samples(node.role, [sample for of_rank in values for sample in of_rank])
        elif node.declaration() in (Reward.score, RewardModel.score):
            self._take_scores(node.role, values)

    # Handling of results.

    def _take_samples(self, rollout: str, samples: Sequence[Sample]) -> None:
        """Add samples to the buffer, take the step's groups from it, and send their tokens to the ranks that
        train on them."""
        actor, batch = self.state.actor_of(rollout), self.batches.batch_of(rollout)
        actor.buffer.add(samples)
        groups = actor.buffer.take(self.batches.step)
        if self.log is not None:
            self.log.take(actor.suffix, self.batches.step, groups)
            if self.log.is_replaying(self.batches.step):
                batch.transfers.append(Rollout(self.executor, rollout).catch_up())
        batch.take(groups)
        self.early.complete(rollout, groups)
        self._trained[f"train{actor.suffix}"] = [sample.sample_id for sample in batch.samples]
        sizes = {group.visit: group.num_samples for group in groups}
        check_samples(batch.samples, sizes, actor.config.sampling.max_length)
        if staleness := actor.config.streaming.staleness:
            check_versions(batch.samples, batch.step, staleness)
        if self.batches.flow is self._round_flow:
            return  # the rewards decide what is trained on
        self._distribute(rollout)
        self.events.take()  # an engine may have left before it sampled its canaries
        self.canaries.distribute(rollout, self.batches.step)

    def _distribute(self, rollout: str) -> None:
        """Send the tokens of a batch to all ranks that train on it or score it."""
        actor, batch = self.state.actor_of(rollout), self.batches.batch_of(rollout)
        keys = [
            key
            for key in self.hidden_size
            if self.batches.batch_of(key) is batch and key not in self.early.roles
        ]
        ranks = sorted({rank for role in (rollout, *keys) for rank in self.meshes[role].ranks})
        for key in keys:
            mesh, of_actor = self.meshes[key], self.state.actor_of(key).config.batch
            scores = kind_and_suffix(key)[0] == "reward_model"
            samples = batch.samples if scores else batch.trained_samples
            mini_batches = plan_mini_batches(
                samples,
                of_actor.global_batch_size,
                preferred_ranks(samples, replicas(mesh)),
                mesh.dp,
                of_actor.max_tokens_per_micro_batch,
                self.hidden_size[key],
                seed=f"{of_actor.seed}/{batch.step}",
            )
            check_plan(mini_batches, samples, of_actor.max_tokens_per_micro_batch)
            data = Data(self.executor, "data", ranks)
            sent = data.distribute(key, batch.samples, mini_batches, f"train{actor.suffix}")
            batch.transfers.append(sent)

    def _take_rows(self, suffix: str) -> None:
        """Take the rows of a step of an algorithm that samples nothing: each row is a finished group."""
        actor, batch = self.state.actors[suffix], self.batches.of_actor[suffix]
        for visit, row in actor.buffer.issue().items():
            for index, (length, response_length, reward) in enumerate(self.rows[row]):
                sample = visit * len(self.rows[row]) + index
                actor.buffer.add([Sample(sample, length, response_length, group=visit)])
                if reward is not None:
                    batch.rewards[sample] = reward
        batch.take(actor.buffer.take(self.batches.step))

    def _take_scores(self, role: str, per_rank: Iterable[Iterable[Record]]) -> None:
        """Add a role's scores to the rewards. Raises RewardsFailed once all roles have scored and too many
        rewards are missing."""
        batch, actor = self.batches.batch_of(role), self.state.actor_of(role)
        weight_of = self.state.weight_of
        if self.log is not None:
            per_rank = self.log.scores(role, batch.step, per_rank)
        take_scores(batch, role, per_rank, weight_of)
        scoring = [role for role in weight_of if self.batches.batch_of(role) is batch]
        if all(role in batch.records for role in scoring):
            weighted = [role for role in weight_of if role in batch.records]
            check_failed_rewards(batch, weighted, actor.config.data.reward_max_failed_share)
