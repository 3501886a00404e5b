"""Collect the records of a step: metrics, the seconds of its phases, and samples with their texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megarl.algorithms.cross_entropy import over_updates_with_answers
from megarl.futures import Future
from megarl.flow import Metrics
from megarl.flow.role import time_metric
from megarl.metrics import combine
from megarl.role_names import kind_and_suffix
from megarl.trainer.episode_metrics import metrics_of_episodes
from megarl.trainer.rollout_batch import RolloutBatch
from megarl.trainer.scores import means_of_scores, scores_of
from megarl.trainer.staleness import staleness_metrics
from megarl.trainer.state import TrainState
from megarl.trainer.step_batches import StepBatches


def phase_times(seconds: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Return the metrics time/<phase>_s of a step: the seconds of its calls, added up by the phase that each
    method declares.

    The time of a call is that of its slowest rank. Calls of the same phase add up. Calls without a phase add
    up to `time/other_s`. Calls on disjoint ranks overlap, so the phases may add up to more than
    `time/step_s`. Without overlap the difference is the time of the driver and of the messages."""
    times: dict[str, float] = {}
    for (role, method), value in seconds.items():
        name = time_metric(role, method)
        times[name] = times.get(name, 0.0) + value
    return times


def metrics_of_actors(
    batches: StepBatches,
    state: TrainState,
    reports: Sequence[Future[Metrics]],
    seconds: Mapping[tuple[str, str], float],
) -> dict[str, dict[str, float]]:
    """Return suffix of each actor ("", "_2") -> its metrics of the step, without the suffix in their names.

    Args:
        reports: calls of the step whose results are metrics, one dict per rank.
        seconds: (role, method) -> seconds of all calls of the step."""
    metrics = {}
    for suffix, actor in state.actors.items():
        own_reports = [report for report in reports if state.actor_of(report.role) is actor]
        own_seconds = {call: value for call, value in seconds.items() if state.actor_of(call[0]) is actor}
        metrics[suffix] = _metrics_of_calls(batches, own_reports, batches.of_actor[suffix])
        if actor.algorithm.needs_rollout:
            metrics[suffix] |= _metrics_of_samples(batches, suffix, actor.weight_of)
            if (bound := actor.config.streaming.staleness) and (of_actor := batches.of_actor[suffix]).samples:
                metrics[suffix] |= staleness_metrics(of_actor.samples, of_actor.step, bound)
        metrics[suffix] |= phase_times(own_seconds)
    return metrics


def _metrics_of_calls(
    batches: StepBatches, reports: Iterable[Future[Metrics]], batch: RolloutBatch
) -> dict[str, float]:
    reported = []
    for report in reports:
        for of_rank in report.result():
            metrics = of_rank or {}
            if not batches.is_on_policy(report.role):
                # Another actor has sampled: the gate does not limit the distance to that actor's engines.
                metrics = {name.replace("mismatch/", "off_policy/"): value for name, value in metrics.items()}
            reported.append(metrics)
    of_calls = over_updates_with_answers(combine(reported))
    return of_calls | combine(of_rank for call in batch.transfers for of_rank in call.result())


def _metrics_of_samples(
    batches: StepBatches, suffix: str, weight_of: Mapping[str, float]
) -> dict[str, float]:
    """Return rewards and lengths of an actor's samples; {} if the actor trains on another's samples."""
    batch = batches.of_actor[suffix]
    if batch is not batches.first and not batch.samples:
        return {}
    metrics: dict[str, float] = {}
    if batch.samples:
        trained, of_episodes = batch.trained_episodes, batch.response_lengths
        lengths = [of_episodes[sample.sample_id] for sample in trained]
        only_scored = {
            episode: of_episodes[episode]
            for episode, samples in batch.episodes.items()
            if not samples[0].trained
        }
        rewards = [r for sample, r in batch.rewards.items() if r is not None and sample not in only_scored]
        metrics = {
            "reward/mean": sum(rewards) / max(len(rewards), 1),
            "reward/min": min(rewards, default=0.0),
            "reward/max": max(rewards, default=0.0),
            "response/length_mean": sum(lengths) / len(lengths),
            "response/length_max": max(lengths),
            "response/truncated": sum(sample.truncated for sample in trained) / len(lengths),
        }
        metrics |= _metrics_of_untrained(batch, only_scored)
        metrics |= metrics_of_episodes(batch)
        scoring = [role for role in weight_of if role in batch.records]
        records = (
            record
            for of_role in batch.records.values()
            for sample, record in of_role.items()
            if sample not in only_scored
        )
        metrics |= means_of_scores(records, "score/")
        for role in scoring if len(scoring) > 1 else ():
            found = zip(batch.sample_ids, scores_of(batch, role))
            scores = [s for sample, s in found if s is not None and sample not in only_scored]
            metrics[f"reward/{role.removesuffix(suffix)}_mean"] = sum(scores) / max(len(scores), 1)
    num_tokens = sum(sample.length for sample in batch.samples)
    return metrics | {"batch/tokens": num_tokens, "sync/version": batch.step}


def _metrics_of_untrained(batch: RolloutBatch, lengths: Mapping[int, int]) -> dict[str, float]:
    """Return number, tokens and mean reward of the samples that are scored and not trained on; {} without.

    There is no mean if every reward failed.

    Args:
        lengths: sample id -> its response tokens."""
    if not lengths:
        return {}
    rewards = [reward for sample in lengths if (reward := batch.rewards.get(sample)) is not None]
    metrics = {"untrained/samples": float(len(lengths)), "untrained/tokens": float(sum(lengths.values()))}
    return metrics | ({"untrained/reward_mean": sum(rewards) / len(rewards)} if rewards else {})


def rollout_rows(batches: StepBatches, state: TrainState) -> list[dict[str, object]]:
    """Return one dict per sample that is logged, with its texts and rewards, for rollouts/*.jsonl.

    The records of the rule and of each reward model are added unless they equal the reward."""
    rows = []
    for suffix, batch in batches.of_actor.items():
        models = [
            role
            for role in state.actors[suffix].weight_of
            if kind_and_suffix(role)[0] != "reward" and role in batch.records
        ]
        of_actor = {"actor": f"actor{suffix}"} if suffix else {}
        finished = {
            one.sample_id: {"finish_reason": "length" if one.truncated else "stop"}
            | ({} if one.trained else {"trained": False})
            for one in batch.samples
        }
        for sample, record in batch.texts.items():
            reward = batch.rewards.get(sample)
            said = {
                role.removesuffix(suffix): {
                    key: value for key, value in batch.records[role][sample].items() if key != "sample_id"
                }
                for role in models
            }
            rule = {"rule_reward": record["reward"]} if models or reward != record["reward"] else {}
            finish = {key: record[key] for key in ("finish_reason",) if key in record}
            rows.append(
                of_actor | record | {"reward": reward} | finished.get(sample, {}) | finish | rule | said
            )
    return rows
