"""Answer the held-out rows and score the answers: the evaluations of a training job and of `megarl eval`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megarl.config.reward_models import uses_rule_reward
from megarl.config.rules_training import NO_EVAL_DATA
from megarl.config.schema import TrainConfig
from megarl.episodes.episode import SILENT
from megarl.flow import Reward, Rollout
from megarl.flow.job_roles import Record
from megarl.futures import Future
from megarl.packing import Sample, by_episode
from megarl.role_names import with_suffix
from megarl.trainer.episode_metrics import by_environment, readable
from megarl.trainer.eval_scores import EvalSample, Scores, of_sources, powers_of_two
from megarl.trainer.scores import EpisodesFailed, RewardsFailed, means_of_scores
from megarl.trainer.state import TrainState

SAMPLED, GREEDY = "eval/reward", "eval/reward_greedy"
"""Metrics: mean reward of responses sampled at --temperature, and of greedy ones."""

RouteRows = Callable[[int], Sequence[int] | None]
"""Number of held-out rows -> engine of each row, without engines that are gone; None if all are there."""

T = TypeVar("T")
Steps = Generator[Future[Any], Any, T]
"""Work that yields each future whose result it needs next, and gets the result back."""


def run(steps: Steps[T]) -> T:
    """Do all steps of some work, waiting for every future, and return its result."""
    value = None
    while True:
        try:
            value = steps.send(value).result()
        except StopIteration as end:
            result: T = end.value
            return result


@dataclass(frozen=True)
class Answering:
    """The roles of an actor that answer held-out rows and score the answers.

    Args:
        ask: rows, whether greedy, and the engine of each row -> future of the samples per rank."""

    ask: Callable[[Mapping[int, int], bool, Sequence[int] | None], Future[list[Sample]]]
    reward: Reward
    route_rows: RouteRows = lambda count: None

    @staticmethod
    def by_all(rollout: Rollout, reward: Reward, route_rows: RouteRows = lambda count: None) -> Answering:
        """Return the roles of an evaluation that all engines take part in, and that everything waits for."""

        def ask(rows: Mapping[int, int], greedy: bool, engines: Sequence[int] | None) -> Future[list[Sample]]:
            return rollout.generate("eval", rows, greedy=greedy, engines=engines)

        return Answering(ask, reward, route_rows)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The responses to the held-out rows in one mode, sampled or greedy."""

    samples: list[EvalSample]
    """In the order of rows, and of the responses to each."""
    records: list[Record]
    """Record of each sample for files: reward, answer, finish reason, and texts where they were asked for."""


def answer_rows(
    by: Answering, sources: Mapping[int, str], config: TrainConfig, greedy: bool, num_logged: int
) -> Steps[HeldOut]:
    """Answer held-out rows and score the answers.

    A sample draws by (seed, row, index, position), the same at every evaluation, in a job and in `megarl
    eval`, whatever the number of samples. Only the weights change the scores.

    Args:
        sources: row -> its data_source.
        num_logged: number of samples, from the first, whose records have texts; -1 is all.
    Raises: RewardsFailed if more rewards failed than --reward-max-failed-share allows."""
    generated = yield from _generate(by, sources, greedy)
    sampled = by_episode(sample for of_rank in generated for sample in of_rank)
    scored = yield by.reward.score("eval", sorted(sampled), num_logged=num_logged)
    num_samples = 1 if greedy else config.run.eval_num_samples
    samples, records = [], []
    in_order = sorted((record for of_rank in scored for record in of_rank), key=lambda one: one["sample_id"])
    for record in in_order:
        row, index = divmod(record["sample_id"], num_samples)
        of_episode = sampled[record["sample_id"]]
        is_truncated = of_episode[0].truncated
        samples.append(
            EvalSample(
                row,
                index,
                sources[row],
                record["reward"],
                record.get("answer"),
                sum(sample.response_length for sample in of_episode),
                is_truncated,
                record.get("failure"),
            )
        )
        reason = "length" if is_truncated else "stop"
        reason = record.get("finish_reason", reason)  # of an episode
        records.append(record | {"row": row, "data_source": sources[row], "finish_reason": reason})
    asked = [(one, record) for one, record in zip(samples, records) if record.get("cause") != SILENT]
    _check_failed(asked, config.data.reward_max_failed_share)
    return HeldOut(samples, records)


def _generate(by: Answering, rows: Iterable[int], greedy: bool) -> Steps[list[list[Sample]]]:
    """Let the engines that are there answer the rows. If one of them leaves meanwhile, the others answer all
    rows again, with the same draws."""
    visits = {row: row for row in rows}
    engines = by.route_rows(len(visits))
    while True:
        generated: list[list[Sample]] = yield by.ask(visits, greedy, engines)
        asked, engines = engines, by.route_rows(len(visits))
        if engines == asked:
            return generated


def _check_failed(samples: list[tuple[EvalSample, Record]], max_share: float) -> None:
    failed = [(sample, record) for sample, record in samples if sample.reward is None]
    if len(failed) > max_share * len(samples):
        first, record = failed[0]
        raise (EpisodesFailed if "cause" in record else RewardsFailed)(
            f"{len(failed)} of {len(samples)} rewards of the evaluation have failed, and "
            f"--reward-max-failed-share ({max_share:g}) allows {int(max_share * len(samples))}. "
            f"The first, of row {first.row}: {first.failure}"
        )


def metrics_of(sampled: HeldOut, greedy: HeldOut, num_samples: int) -> dict[str, float]:
    """Return the metrics of an evaluation in a training job.

    `eval/best_at_k` is pass@k if rewards are 0 and 1. A name says nothing that is wrong of other rewards."""
    scores = Scores(sampled.samples)
    metrics = {SAMPLED: scores.mean.value, GREEDY: Scores(greedy.samples).mean.value}
    metrics |= means_of_scores(sampled.records, "eval/score/")
    metrics |= means_of_scores(greedy.records, "eval/score_greedy/")
    if num_samples > 1:
        metrics |= {f"eval/best_at_{k}": scores.best_at(k).value for k in powers_of_two(num_samples)[1:]}
        if scores.has_answers:
            metrics[f"eval/maj_at_{num_samples}"] = scores.majority.value
    if failed := sum(sample.reward is None for sample in (*sampled.samples, *greedy.samples)):
        metrics["eval/failed"] = float(failed)
    for name, held_out in ((SAMPLED, sampled), (GREEDY, greedy)):
        sources = of_sources(held_out.samples)
        for source, samples in sources.items() if len(sources) > 1 else ():
            metrics[f"{name}/{readable(source)}"] = Scores(samples).mean.value
    return metrics | _metrics_of_environments([*sampled.records, *greedy.records])


def _metrics_of_environments(records: Sequence[Record]) -> dict[str, float]:
    """Return the turns of held-out episodes, and the turns and failures of each environment; {} without
    episodes."""
    turns = [record["num_turns"] for record in records if "num_turns" in record]
    metrics = {"eval/turns": sum(turns) / len(turns)} if turns else {}
    for name, own in by_environment(records).items():
        metrics[f"eval/turns/{name}"] = sum(record["num_turns"] for record in own) / len(own)
        metrics[f"eval/failed/{name}"] = float(sum(record["reward"] is None for record in own))
    return metrics


Evaluated = tuple[dict[str, float], dict[str, Record]]
"""Metrics of an evaluation, and eval/reward and eval/reward_greedy -> the first row's first answer."""


def evaluate_actors(state: TrainState, answering_of: Callable[[str], Answering]) -> Steps[Evaluated]:
    """Evaluate every actor on --eval-data.

    Args:
        answering_of: suffix of an actor -> its roles.

    Raises: ValueError without --eval-data, or without a rule that scores; RewardsFailed."""
    for actor in state.actors.values():
        if not actor.eval_rows:
            raise ValueError(NO_EVAL_DATA)
        if not uses_rule_reward(actor.config):
            raise ValueError(
                "--reward-model: held-out answers are scored by a rule, and with it there is "
                "none. Add --reward auto."
            )
    found: dict[str, dict[str, HeldOut]] = {suffix: {} for suffix in state.actors}
    for name in (SAMPLED, GREEDY):  # one after the other, as actors may play in the same episodes
        for suffix, actor in state.actors.items():
            how = actor.eval_rows, actor.config, name == GREEDY, 1
            found[suffix][name] = yield from answer_rows(answering_of(suffix), *how)
    metrics: dict[str, float] = {}
    answers: dict[str, Record] = {}
    for (suffix, actor), both in zip(state.actors.items(), found.values(), strict=True):
        own = metrics_of(both[SAMPLED], both[GREEDY], actor.config.run.eval_num_samples)
        metrics |= {with_suffix(name, suffix): value for name, value in own.items()}
        answers |= {with_suffix(name, suffix): held_out.records[0] for name, held_out in both.items()}
    return metrics, answers
