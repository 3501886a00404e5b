"""Derive the limits of the log-prob gate from the rounding errors of a log-probability.

The log-prob gate compares the log-probs of trainer and engine at every step. Both compute the same function
with another order of additions. Every layer adds a rounding error of about one unit of the coarser dtype, and
the errors of different layers are independent. So all limits are multiples of

    u = eps(dtype) * sqrt(layers)     eps: 2^-23 in fp32, 2^-7 where either side computes in bf16 or fp16

The width of the hidden states and the size of the vocabulary hardly matter, since matrix products are summed
in blocks. The size of the log-probs matters: the error of a logit is proportional to the logit, and it
reaches the log-prob only where the model is unsure. The mean difference is therefore some u times the mean
log-prob, even where the entropy has fallen to 0.001. It does not exceed the error of the logits where the
model knows nothing. The difference of one token has a long tail, up to hundreds of u at one token in a
million. The maximum over more and more tokens has no limit that would still detect a fault. The gate
therefore judges three statistics:

    mismatch/clipped_abs     the mean of the differences, each clipped to the outlier level;
                             detects a fault at many tokens
                             accepted: (mean * min(mean log-prob + 0.01, unsure) + 4 * outlier / tokens) * u
    mismatch/outliers        the number of tokens that differ by more than outlier * u;
                             detects a fault at some tokens
                             accepted: 4 + outlier_share * tokens
    mismatch/max_abs         the largest difference; detects a fault at a single token
                             accepted: maximum * u

docs/reliability.md lists the values of healthy jobs, and the smallest faults that exceed the limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config.hf_config import ModelShape
from megarl.config.schema import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiples:
    """The factors by which the limits of the log-prob gate exceed the rounding unit u of the model."""

    mean: float
    unsure: float
    outlier: float
    outlier_share: float
    maximum: float


FP32 = Multiples(mean=256, unsure=1, outlier=1024, outlier_share=1e-4, maximum=65536)
"""Factors for fp32. Healthy jobs reach 31 in the mean, and 700 at a single token."""
FP32_EXPERTS = Multiples(mean=256, unsure=1, outlier=1024, outlier_share=1e-2, maximum=math.inf)
"""Factors for mixtures of experts in fp32.

Where two experts are a rounding error apart, trainer and engine may choose differently. The rest of that
response then differs by as much as the experts do."""
HALF = Multiples(mean=16, unsure=1 / 16, outlier=64, outlier_share=1e-3, maximum=math.inf)
"""Factors for bf16 and fp16. No maximum is judged.

Healthy jobs reach 3.1 in the mean, and 43 at a single token, which is as much as most faults."""
FEW = 4
"""Number of outliers that are accepted in a step of any size."""
LEAST_LOG_PROB = 0.01
"""Added to the mean log-prob, because log-probs near 0 are themselves rounded to multiples of eps."""


_EXPONENT = {False: 23, True: 7}


def rounding_unit(is_half: bool, num_layers: int) -> float:
    """Return u, the rounding error to expect of a log-prob in nats: eps of the dtype times sqrt(layers)."""
    return 2.0 ** -_EXPONENT[is_half] * math.sqrt(num_layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class GateLimits:
    """Limits of a step's differences |trainer log-prob - engine log-prob|, above which the job stops.

    Args:
        unit: u in nats.
        unit_text: the derivation of `unit`, for messages.
        mean_abs, max_abs: numbers that replace the rule, or None; see --gate-mean-abs and --gate-max-abs."""

    unit: float
    unit_text: str
    multiples: Multiples
    mean_abs: float | None
    max_abs: float | None

    @classmethod
    def of(cls, config: TrainConfig, shape: ModelShape) -> GateLimits:
        """Return the limits for an actor and its engine, from their dtypes, number of layers and flags."""
        is_half = config.model.bf16 or config.rollout.dtype in ("bfloat16", "float16")
        chooses_experts = shape.is_moe and config.experts.moe_routing_replay != "engine"
        return cls(
            unit=rounding_unit(is_half, shape.num_layers),
            unit_text=f"2^-{_EXPONENT[is_half]} x sqrt({shape.num_layers} layers)",
            multiples=HALF if is_half else FP32_EXPERTS if chooses_experts else FP32,
            mean_abs=config.run.gate_mean_abs,
            max_abs=config.run.gate_max_abs,
        )

    @property
    def outlier(self) -> float:
        """Level in nats above which a token is an outlier."""
        return self.multiples.outlier * self.unit

    @property
    def largest(self) -> float:
        """Largest difference of a token in nats that is accepted."""
        return self.multiples.maximum * self.unit if self.max_abs is None else self.max_abs

    def accepted(self, mismatch: Mapping[str, float]) -> dict[str, float]:
        """Return name -> largest accepted value for each statistic that is judged, e.g. "clipped_abs" and
        "max_abs".

        Args:
            mismatch: metrics of a step with the prefix mismatch/. Only tokens and log_prob_abs are read."""
        rule, num_tokens = self.multiples, max(mismatch["mismatch/tokens"], 1)
        limits = {}
        if self.mean_abs is None:
            # This number comes first in `min`: min(NaN, 1) is NaN, and min(1, NaN) is 1.
            log_prob = mismatch["mismatch/log_prob_abs"] + LEAST_LOG_PROB
            limits["clipped_abs"] = (
                rule.mean * min(log_prob, rule.unsure) + FEW * rule.outlier / num_tokens
            ) * self.unit
        else:
            limits["mean_abs"] = self.mean_abs
        if self.max_abs is None:
            limits["outliers"] = FEW + rule.outlier_share * num_tokens
        return limits | {"max_abs": self.largest}

    def describe(self) -> str:
        """Return one line that explains how the limits are derived."""
        rule = self.multiples
        log_prob = f"min(mean log-prob + {LEAST_LOG_PROB}, {rule.unsure:g})"
        mean = f"({rule.mean:g} x {log_prob} + {FEW} x {rule.outlier:g} / tokens) u"
        outliers = (
            f"{FEW} + {rule.outlier_share:g} x tokens above {rule.outlier:g} u = "
            f"{self.outlier:.3g}, at most {rule.maximum:g} u"
        )
        return (
            f"{mean if self.mean_abs is None else '--gate-mean-abs'}; "
            f"{outliers if self.max_abs is None else '--gate-max-abs'}; "
            f"u = {self.unit_text} = {self.unit:.3g}"
        )


def exceeded(mismatch: Mapping[str, float], limits: GateLimits) -> list[str]:
    """Return the names of the log-prob statistics of a step that are above their limits or not finite, e.g.
    "mean_abs".

    Args:
        mismatch: metrics of the step, each with the prefix mismatch/, see `ActorRole.log_probs`."""
    return [
        name
        for name, limit in limits.accepted(mismatch).items()
        if not (math.isfinite(value := mismatch[f"mismatch/{name}"]) and value <= limit)
    ]


def gate_error(mismatch: Mapping[str, float], limits: GateLimits) -> str | None:
    """Return the error message if a step's differences |trainer log-prob - engine log-prob| are too large,
    else None.

    Args:
        mismatch: as in `exceeded`."""
    above = exceeded(mismatch, limits)
    if not above:
        return None
    statistics = [
        f"  mismatch/{name} {mismatch[f'mismatch/{name}']:.9g}, accepted "
        f"{limit:.9g}{': TOO LARGE' if name in above else ''}"
        for name, limit in limits.accepted(mismatch).items()
    ]
    rule = (
        f"  accepted by the rule {limits.describe()}; mean log-prob "
        f"-{mismatch['mismatch/log_prob_abs']:.4g}. --gate-mean-abs and --gate-max-abs replace the rule."
    )
    return "\n".join([_DISAGREE.format(mismatch["mismatch/tokens"]), *statistics, rule])


_DISAGREE = (
    "trainer and engine disagree on {:.0f} sampled tokens by more than rounding. Training would be silently "
    "wrong. Is dropout on, a weight not synchronised, or an engine argument changing the distribution?"
)
