"""The gate: trainer and engine must give the sampled tokens the same log-probabilities.

If they do not, training goes on without any error and is silently wrong: stale or misplaced weights, another temperature,
dropout, labels off by one, padded vocabulary in one softmax and not in the other."""

from __future__ import annotations

from megarl.config.schema import TrainConfig


class GateError(RuntimeError):
    """Trainer and engine disagree."""

    def __init__(self, finding: str, worst_tokens: list[dict[str, float]]) -> None:
        rows = [
            f"  sample {t['sample_id']}, token {t['token']} at position {t['position']}: trainer {t['trainer']:.6f}, engine {t['engine']:.6f}"
            for t in sorted(worst_tokens, key=lambda t: -abs(t["trainer"] - t["engine"]))[:5]
        ]
        super().__init__("\n".join([finding, *rows]))


def gate_finding(mismatch: dict[str, float], config: TrainConfig) -> str | None:
    """What is wrong with the differences |trainer log-prob - engine log-prob|, or None.

    fp32 judges the largest: a correct pair stays below 5e-5, the smallest known fault (padded vocabulary) is at 3e-2. With
    bf16 on either side single tokens differ by 0.1 in a correct pair, so the mean is judged."""
    in_bf16 = config.model.bf16 or config.rollout.dtype in ("bfloat16", "float16")
    name, flag, limit = (
        ("mismatch/mean_abs", "--gate-mean-abs", config.run.gate_mean_abs)
        if in_bf16
        else ("mismatch/max_abs", "--gate-max-abs", config.run.gate_max_abs)
    )
    value = mismatch[name]
    if value <= limit:  # also false for NaN
        return None
    return (
        f"trainer and engine disagree on the sampled tokens: {name} ({value:.3g}) is above {flag} ({limit:g}). Training would be "
        "silently wrong. Is dropout on, a weight not synchronised, or an engine argument changing the distribution?"
    )
