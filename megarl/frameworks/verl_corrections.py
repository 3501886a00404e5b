"""Make the lines of an args file for verl's rollout correction, which weighs or leaves out samples by the
ratio of the trainer's and the engine's probabilities.

verl 0.6.1 and later have these settings in algorithm.rollout_correction, 0.6.0 in algorithm. Older releases
have actor.tis_imp_ratio_cap."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.frameworks.rows import (
    Line,
    Row,
    Settings,
    as_list,
    as_number,
    engine_log_probs,
    key_of,
)

SECTION = "algorithm.rollout_correction"
CAP = "actor_rollout_ref.actor.tis_imp_ratio_cap"
MASKS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
"""rollout_correction.rollout_rs -> --mis-level. Its bounds are those of engine / trainer."""
OLD_MASKS = ("token", "sequence", "geometric")
"""The same before January 2026, whose bounds are those of trainer / engine."""
NO_MASK = (
    "--mis-level token, sequence and geometric are token_k1, seq_sum_k1 and seq_mean_k1; bypass_mode with "
    "ppo_clip, which is --old-log-probs engine, has none here"
)


def loss_mode(settings: Settings) -> str:
    """Return actor.policy_loss.loss_mode, or the loss that bypass_mode puts in its place."""
    if not settings.is_on(f"{SECTION}.bypass_mode"):
        return key_of(settings["actor_rollout_ref.actor.policy_loss.loss_mode"])
    is_reinforce = key_of(settings[f"{SECTION}.loss_type"]) == "reinforce"
    return "gpg" if is_reinforce or settings.is_on(f"{SECTION}.use_policy_gradient") else "vanilla"


def corrections(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the weights and the masks.

    With bypass_mode the loss itself has the ratio of trainer and engine, so verl applies no weights to it."""
    if settings.is_on(f"{SECTION}.bypass_mode") and loss_mode(settings) == "vanilla":
        yield engine_log_probs(settings, "bypass_mode")
        return
    yield from _weights(settings)
    yield from _masks(settings)
    if (veto := settings.number(f"{SECTION}.rollout_token_veto_threshold")) is not None:
        yield Line("token-veto", veto)


def _weights(settings: Settings) -> Iterator[Line]:
    """Yield the truncated weights of the first release whose settings turn them on."""
    cap = settings.number(CAP)
    level, clip = settings[f"{SECTION}.rollout_is"], settings[f"{SECTION}.rollout_is_threshold"]
    if level is None and settings.is_on("algorithm.rollout_is"):
        level, clip = settings["algorithm.rollout_is_level"], settings["algorithm.rollout_is_threshold"]
    elif level is None and cap is not None and cap > 0:
        level, clip = "token", cap
    if level in ("token", "sequence") and clip is not None:
        yield Line("tis-clip", clip)
        yield Line("tis-level", level)


def _masks(settings: Settings) -> Iterator[Line]:
    """Yield the bounds of the ratio outside of which tokens or responses are left out."""
    names = as_list(settings[f"{SECTION}.rollout_rs"])
    thresholds = as_list(settings[f"{SECTION}.rollout_rs_threshold"])
    thresholds = thresholds * len(names) if len(thresholds) == 1 else thresholds
    known = [(name, text) for name, text in zip(names, thresholds, strict=False) if name in MASKS]
    if names and names[0] in OLD_MASKS:
        least = settings.number(f"{SECTION}.rollout_rs_threshold_lower")
        most = as_number(thresholds[0] if thresholds else settings[f"{SECTION}.rollout_is_threshold"])
        yield from _bounds(names[0], least, most)
    elif known:
        name, text = known[0]
        low, _, high = text.rpartition("_")
        yield from _bounds(MASKS[name], _inverse(as_number(high)), _inverse(as_number(low)))
        for other in names:
            if other != name:
                yield Line("", note=f"rollout_rs={other}: --mis-level takes one criterion, {name} here")


def _bounds(level: str, least: float | None, most: float | None) -> Iterator[Line]:
    """Yield the flags of a mask. One bound is the inverse of the other if it is not given."""
    least, most = least or _inverse(most), most or _inverse(least)
    if least and most:
        yield Line("mis-level", level)
        yield Line("mis-low", least)
        yield Line("mis-high", most)


def _inverse(number: float | None) -> float | None:
    return float(f"{1 / number:.6g}") if number else None


ROWS = (
    Row(f"{SECTION}.rollout_is", "--tis-level {} --tis-clip 2.0", lines=corrections),
    Row(f"{SECTION}.rollout_is_threshold", "--tis-clip {}", default=2.0, lines=corrections),
    Row("algorithm.rollout_is_threshold", "--tis-clip {}", lines=corrections),
    Row("algorithm.rollout_is", "--tis-clip 2.0", default=False, lines=corrections),
    Row(
        "algorithm.rollout_is_level",
        "--tis-level {} --tis-clip 2.0",
        default="token",
        instead="--tis-level is token or sequence",
        lines=corrections,
    ),
    Row(
        "algorithm.rollout_is_mode algorithm.rollout_is_veto_threshold",
        instead="--mis-level and --token-veto",
    ),
    Row(
        CAP,
        "--tis-clip {}",
        {"-1": None},
        instead="there is no correction without --tis-clip",
        lines=corrections,
    ),
    Row(f"{SECTION}.rollout_rs", "--mis-level {}", MASKS, instead=NO_MASK, lines=corrections),
    Row(
        f"{SECTION}.rollout_rs_threshold",
        instead="--mis-low and --mis-high bound trainer / engine, low_high of *_k1 engine / trainer",
        lines=corrections,
    ),
    Row(f"{SECTION}.rollout_rs_threshold_lower", "--mis-low {}", lines=corrections),
    Row(f"{SECTION}.rollout_token_veto_threshold", "--token-veto {}", lines=corrections),
    Row(
        f"{SECTION}.bypass_mode",
        "--old-log-probs {}",
        {"true": "engine", "false": "trainer"},
        default=False,
        lines=corrections,
    ),
)
"""Rows of the table in verl.py."""
