"""Describe the result of an evaluation: a JSON object, a table for people, and the samples as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence

from megarl.config.schema import TrainConfig
from megarl.role_names import with_suffix
from megarl.trainer.eval_scores import EvalSample, Estimate, Scores, of_sources, powers_of_two
from megarl.trainer.evaluation import GREEDY, SAMPLED, HeldOut

_NO_ANSWERS = "the reward function names no answers to vote on"


def as_json(config: TrainConfig, model: str, sampled: HeldOut | None, greedy: HeldOut) -> dict[str, object]:
    """Return the result of an evaluation as an object for programs.

    Args:
        model: --model as the user gave it.
        sampled: None at temperature 0, where all samples are the greedy one."""
    held_out = [one for one in (sampled, greedy) if one is not None]
    everything = [sample for one in held_out for sample in one.samples]
    is_accuracy = Scores(everything).is_right_or_wrong
    sources = of_sources(greedy.samples)
    sampling = config.sampling.of("eval")
    failures = [sample.failure for sample in everything if sample.reward is None]
    return {
        "model": model,
        "eval_data": list(config.data.eval_data),
        "rows": len({sample.row for sample in greedy.samples}),
        "num_samples": config.run.eval_num_samples,
        "temperature": sampling.temperature,
        "max_response_length": sampling.max_response_length,
        "seed": config.batch.seed,
        "rewards_are_right_or_wrong": is_accuracy,
        "all": _scores(sampled, greedy, None, config.run.eval_num_samples, is_accuracy),
        "sources": {
            source: _scores(sampled, greedy, source, config.run.eval_num_samples, is_accuracy)
            for source in (sources if len(sources) > 1 else ())
        },
        "first_failure": failures[0] if failures else None,
    }


def _scores(
    sampled: HeldOut | None, greedy: HeldOut, source: str | None, num_samples: int, is_accuracy: bool
) -> dict[str, object]:
    """Return the scores of one data source, or of all rows for None."""

    def of_source(samples: Sequence[EvalSample]) -> list[EvalSample]:
        return [sample for sample in samples if source in (None, sample.source)]

    of_greedy = Scores(of_source(greedy.samples))
    scores: dict[str, object] = {"rows": len(of_greedy.by_row)}
    if sampled is not None:
        of_samples = Scores(of_source(sampled.samples))
        scores["reward"] = _estimate(of_samples.mean)
        at, value = ("pass_at", of_samples.pass_at) if is_accuracy else ("best_at", of_samples.best_at)
        scores |= {f"{at}_{k}": _estimate(value(k)) for k in powers_of_two(num_samples)}
        if num_samples > 1:
            scores[f"maj_at_{num_samples}"] = (
                _estimate(of_samples.majority) if of_samples.has_answers else None
            )
    scores["reward_greedy"] = _estimate(of_greedy.mean)
    for suffix, one in (("", of_samples if sampled is not None else None), ("_greedy", of_greedy)):
        if one is not None:
            scores[f"failed{suffix}"] = len(one.failed)
            scores[f"truncated{suffix}"] = one.truncated
            scores[f"length{suffix}"] = one.mean_length
    return scores


def _estimate(estimate: Estimate) -> dict[str, float | int | None]:
    """Return an estimate with its 95 % confidence interval; null stands for a number that does not exist."""
    value, margin = estimate.value, estimate.margin
    return {
        "value": None if math.isnan(value) else value,
        "standard_error": estimate.standard_error,
        "low": None if margin is None else value - margin,
        "high": None if margin is None else value + margin,
        "rows": estimate.num_prompts,
    }


def table(result: Mapping[str, object]) -> str:
    """Return the result of an evaluation as a table with a column for all rows and one per data source.

    Args:
        result: of `as_json`."""
    samples = result["num_samples"]
    how = (
        f"{samples} sample{'s' if samples > 1 else ''} per row at temperature {result['temperature']:g}, and "
    )
    how = how if result["temperature"] else ""
    lines = [
        f"model   {result['model']}",
        f"data    {' '.join(result['eval_data'])}: {result['rows']} rows",
        f"answers {how}one greedy, of at most {result['max_response_length']} tokens; seed {result['seed']}",
        "",
    ]
    columns = {"all rows": result["all"], **result["sources"]}
    grid = [[""] + list(columns)]
    if result["sources"]:
        grid.append(["rows", *(str(scores["rows"]) for scores in columns.values())])
    grid += _rows_of_table(result, list(columns.values()))
    widths = [max(len(row[column]) for row in grid) for column in range(len(columns) + 1)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in grid]
    lines += ["", *_notes(result)]
    return "\n".join(lines) + "\n"


def _rows_of_table(
    result: Mapping[str, object], columns: Sequence[Mapping[str, object]]
) -> Iterator[list[str]]:
    kind = "accuracy" if result["rewards_are_right_or_wrong"] else "mean reward"
    n = result["num_samples"]
    titles = {"reward": kind if n == 1 else f"{kind} (mean@{n})"}
    for name in columns[0]:
        if name.startswith(("pass_at_", "best_at_")) and n > 1:
            titles[name] = name.replace("_at_", "@")
    titles |= {f"maj_at_{n}": f"maj@{n}", "reward_greedy": f"{kind}, greedy"}
    for name, title in titles.items():
        if columns[0].get(name) is not None:
            yield [title, *(_cell(scores[name]) for scores in columns)]
    for name, title, form in (
        ("length", "tokens per response", "{:.1f}"),
        ("truncated", "cut at the limit", "{:.1%}"),
    ):
        name = name if name in columns[0] else f"{name}_greedy"
        yield [title, *(form.format(scores[name]) for scores in columns)]


def _cell(estimate: Mapping[str, float | None] | None) -> str:
    if estimate is None or estimate["value"] is None:
        return "-"
    if estimate["standard_error"] is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} ± {estimate['high'] - estimate['value']:.3f}"


def _notes(result: Mapping[str, object]) -> Iterator[str]:
    scores, n = result["all"], result["num_samples"]
    yield "± is a 95 % confidence interval over rows (1.96 standard errors, clustered by row)."
    if not result["rewards_are_right_or_wrong"]:
        yield "Rewards are not only 0 and 1, so their mean is no accuracy, and there is no pass@k."
    if n > 1 and scores.get(f"maj_at_{n}", ...) is None:
        yield f"No maj@{n}: {_NO_ANSWERS} (docs/evaluation.md)."
    failed = {"sampled": scores.get("failed", 0), "greedy": scores["failed_greedy"]}
    for kind, count in failed.items():
        if count:
            yield f"{count} {kind} responses have no reward, and count in no number above."
    if result["first_failure"] is not None:
        yield f"first failure: {result['first_failure']}"


def sample_lines(sampled: HeldOut | None, greedy: HeldOut, suffix: str = "") -> Iterator[str]:
    """Yield one JSON object per sample of an actor, in the form of a run's rollouts/eval.jsonl."""
    for name, held_out in ((SAMPLED, sampled), (GREEDY, greedy)):
        for record in held_out.records if held_out is not None else ():
            of_actor = {"actor": f"actor{suffix}"} if suffix else {}
            named = {"name": with_suffix(name, suffix), **of_actor, **record}
            yield json.dumps(named, ensure_ascii=False)
