"""Check what an algorithm, its policy loss and its correction require of the way in which a job trains.

CONDITIONS is the one table of these requirements. Everything that it reads of an algorithm is declared by the
algorithm itself (`has_ratio`, `has_correction`, `is_on_policy`, `needs_critic`), so no algorithm is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.config.errors import Errors
from megarl.config.flags import algorithm_name, refuse_set
from megarl.config.rules_layout import Job
from megarl.config.schema import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A way to train that an algorithm does not allow, or that has a drawback.

    Args:
        is_error: whether the job is refused; else `megarl check` prints a note.
        applies: whether a configuration is concerned.
        text: flag, value, reason and what to try, with the fields of `_facts` in braces."""

    is_error: bool
    applies: Callable[[TrainConfig], bool]
    text: str


def num_updates(config: TrainConfig) -> int:
    """Return the number of optimizer updates of a step."""
    batch = config.batch
    return batch.num_prompts * batch.num_samples_per_prompt // batch.global_batch_size * batch.num_epochs


def _is_stale(config: TrainConfig) -> bool:
    return config.streaming.staleness > 0


def _has_several_updates(config: TrainConfig) -> bool:
    return num_updates(config) > 1


def _without_ratio(config: TrainConfig, has_correction: bool) -> bool:
    return not config.algorithm.has_ratio and config.algorithm.has_correction == has_correction


def _overlong_buffer(config: TrainConfig) -> int | None:
    return getattr(config.algorithm, "overlong_buffer", None)


def _takes_engine_log_probs(config: TrainConfig) -> bool:
    return config.algorithm.takes_engine_log_probs


CONDITIONS: tuple[Condition, ...] = (
    Condition(
        is_error=True,
        applies=lambda c: _takes_engine_log_probs(c) and _is_stale(c),
        text="--old-log-probs (engine): leaves out a forward pass, which with --staleness {staleness} also "
        "scores the canaries. Only these distinguish a fault of the engine from older weights. Try "
        "--old-log-probs trainer.",
    ),
    Condition(
        is_error=True,
        applies=lambda c: _takes_engine_log_probs(c) and c.experts.moe_routing_replay == "policy",
        text="--old-log-probs (engine): leaves out a forward pass, and --moe-routing-replay policy replays "
        "the experts of that pass. Try --moe-routing-replay engine.",
    ),
    Condition(
        is_error=True,
        applies=lambda c: (
            _takes_engine_log_probs(c)
            and not c.algorithm.token_level
            and (c.model.bf16 or c.rollout.dtype in ("bfloat16", "float16"))
        ),
        text="--old-log-probs (engine): --policy-loss {policy_loss} clips the ratio of a whole response at less "
        "than what rounding in bf16 or fp16 moves it by. Try --old-log-probs trainer.",
    ),
    Condition(
        is_error=True,
        applies=lambda c: c.algorithm.interpolates_old and not _is_stale(c),
        text="--old-log-probs (interpolated): without --staleness the weights before the step have sampled every "
        "token, so there is nothing to interpolate. Try --old-log-probs engine, or --staleness 1.",
    ),
    Condition(
        is_error=True,
        applies=lambda c: c.algorithm.interpolates_old and _is_stale(c) and not c.streaming.num_canaries,
        text="--num-canaries (0): with --old-log-probs interpolated only the canaries compare trainer and engine. "
        "Try --num-canaries 4.",
    ),
    Condition(
        is_error=True,
        applies=lambda c: c.algorithm.interpolates_old and c.experts.moe_routing_replay == "policy",
        text="--old-log-probs (interpolated): --moe-routing-replay policy replays the experts of the pass that it "
        "saves. Try --moe-routing-replay engine.",
    ),
    Condition(
        is_error=True,
        applies=lambda c: c.algorithm.interpolates_old and not c.algorithm.token_level,
        text="--old-log-probs (interpolated): is made for ratios of single tokens, and --policy-loss {policy_loss} "
        "has one per response. Try --policy-loss ppo, or --old-log-probs trainer.",
    ),
    Condition(
        is_error=True,
        applies=lambda c: _is_stale(c) and _without_ratio(c, has_correction=False),
        text="--policy-loss ({policy_loss}): has no ratio, so with --staleness {staleness} nothing in the "
        "loss "
        "corrects for the older weights that sampled. Try --tis-clip 2, or --policy-loss cispo.",
    ),
    Condition(
        is_error=True,
        applies=lambda c: _has_several_updates(c) and _without_ratio(c, has_correction=False),
        text="--policy-loss ({policy_loss}): has no ratio, so the last of {updates} updates per step would "
        "be "
        "made as if the policy had not moved since the first. Try --policy-loss cispo, or one update per "
        "step: "
        "--global-batch-size {samples} and --num-epochs 1.",
    ),
    Condition(
        is_error=True,
        applies=lambda c: _has_several_updates(c) and c.algorithm.one_update,
        text="--algorithm ({algorithm}): the loss of a pair is derived from the model's output before the step, "
        "so a step makes one update, and here it would make {updates}. Try --global-batch-size {samples} and "
        "--num-epochs 1.",
    ),
    Condition(
        is_error=True,
        applies=lambda c: (_overlong_buffer(c) or 0) >= c.max_sampled_length,
        text="--overlong-buffer ({overlong_buffer}): must be below {longest_flags} ({longest}), or "
        "every "
        "response is penalised. Try {tenth}.",
    ),
    Condition(
        is_error=True,
        applies=lambda c: c.algorithm.early_stop_kl is not None and c.batch.num_epochs == 1,
        text="--early-stop-kl ({early_stop_kl:g}): a step has one epoch, so there is none to leave out. "
        "Leave it "
        "out, or try --num-epochs 4.",
    ),
    Condition(
        is_error=False,
        applies=lambda c: _has_several_updates(c) and _without_ratio(c, has_correction=True),
        text="--policy-loss ({policy_loss}): has no ratio. The correction accounts for the policy that "
        "sampled, "
        "and not for the {updates} updates of the step.",
    ),
    Condition(
        is_error=False,
        applies=lambda c: c.algorithm.is_on_policy and (_is_stale(c) or _has_several_updates(c)),
        text="--algorithm ({algorithm}): its baseline is derived for exact on-policy training, and this job "
        "has "
        "--staleness {staleness} and {updates} updates per step. It is no longer the one of least variance.",
    ),
    Condition(
        is_error=False,
        applies=lambda c: _is_stale(c) and getattr(c.algorithm, "kl_mode", "none") == "reward",
        text="--kl-mode (reward): every estimate of the KL (k1 too) is unbiased for tokens that the current "
        "weights sampled. With --staleness {staleness} it is biased. --kl-mode loss is judged by the same "
        "tokens, "
        "but its gradient is that of the current weights.",
    ),
    Condition(
        is_error=False,
        applies=lambda c: _is_stale(c) and c.algorithm.is_taught and c.algorithm.teacher_column is None,
        text="--algorithm ({algorithm}): the log-probs of sampled tokens measure the KL to the teacher where the "
        "current weights sampled them. With --staleness {staleness} the advantages are biased.",
    ),
    Condition(
        is_error=False,
        applies=lambda c: _is_stale(c) and c.algorithm.needs_critic,
        text="--algorithm ({algorithm}): with --staleness {staleness} GAE sums what older weights did, so "
        "advantages and returns are biased towards that policy. A smaller --gae-lambda is less biased.",
    ),
)


def _facts(config: TrainConfig) -> dict[str, Any]:
    batch = config.batch
    return {
        "policy_loss": getattr(config.algorithm, "policy_loss", ""),
        "algorithm": algorithm_name(type(config.algorithm)),
        "staleness": config.streaming.staleness,
        "updates": num_updates(config),
        "samples": batch.num_prompts * batch.num_samples_per_prompt,
        "early_stop_kl": config.algorithm.early_stop_kl,
        "overlong_buffer": _overlong_buffer(config),
        "longest": config.max_sampled_length,
        "longest_flags": "--max-response-length" + " x --max-turns" * config.episodes.has_turns,
        "tenth": max(config.max_sampled_length // 10, 1),
    }


def dynamic_sampling(job: Job) -> Errors:
    """Yield an error per reason for which the job cannot keep and drop prompts by their rewards."""
    config, batch, head = job.config, job.config.batch, "--dynamic-sampling"
    if not batch.dynamic_sampling:
        yield from refuse_set(
            batch,
            "has no effect without --dynamic-sampling. Leave it out, or set --dynamic-sampling.",
            "max_sampling_rounds",
        )
        return
    if not config.algorithm.relative_to_group:
        yield (
            f"{head}: --algorithm {algorithm_name(type(config.algorithm))} does not compare the samples of a "
            "prompt, so it learns from equal rewards too. Leave it out, or try --algorithm grpo."
        )
        return
    if config.algorithm.takes_scores:
        yield (
            f"{head}: drops prompts by the sums of their scores, and --algorithm "
            f"{algorithm_name(type(config.algorithm))} learns from single scores, which may differ where the sums "
            "are equal. Leave it out, or try --algorithm grpo."
        )
    if batch.num_samples_per_prompt + config.algorithm.greedy_samples == 1:
        yield (
            "--num-samples-per-prompt (1): with --dynamic-sampling every prompt would be dropped, as one "
            "sample's rewards are all equal. Try 8."
        )
    if config.streaming.staleness:
        yield (
            f"{head}: is not built for asynchronous training, --staleness {config.streaming.staleness}. Try "
            "--staleness 0, or leave --dynamic-sampling out."
        )
    if config.reward_models.reward_model:
        yield (
            f"{head}: is not built for --reward-model, whose scores are practically never equal. Leave "
            "--dynamic-sampling out."
        )


def cost_score(job: Job) -> Errors:
    """Yield an error if the score that an algorithm holds below a limit counts in the reward too."""
    config, algorithm = job.config, job.config.algorithm
    if not algorithm.needs_cost_critic:
        return
    name, weights = algorithm.cost_score, config.data.weights_of_scores
    if weights.get(name, 1.0) != 0:
        yield (
            f"--score-weights ({' '.join(config.data.score_weights)}): must give {name}=0, as --algorithm "
            f"{algorithm_name(type(algorithm))} holds this score below --cost-limit, and it is no part of the reward. "
            f"Try --score-weights correct=1 {name}=0, with the names of the other scores."
        )


def _broken(config: TrainConfig, is_error: bool) -> Errors:
    if config.algorithm.needs_rollout:
        for condition in CONDITIONS:
            if condition.is_error == is_error and condition.applies(config):
                yield condition.text.format_map(_facts(config))


def conditions(job: Job) -> Errors:
    """Yield an error for each requirement in CONDITIONS that the job does not fulfil."""
    return _broken(job.config, is_error=True)


def condition_notes(config: TrainConfig) -> Errors:
    """Yield a note for each drawback in CONDITIONS that concerns the job."""
    return _broken(config, is_error=False)
