"""The proximal policy of decoupled PPO without a pass of its own (A-3PO, arXiv:2512.06547).

Decoupled PPO (AReaL, arXiv:2505.24298) clips the ratio to a proximal policy, and weighs a token by the ratio
of the proximal policy to the one that sampled:

    min(pi_prox / mu, C) max(-A pi / pi_prox, -A clip(pi / pi_prox, 1 - low, 1 + high))

By default pi_prox is the policy before the step, by a forward pass, and --tis-clip is C. Here it is
interpolated:

    log pi_prox = w log mu + (1 - w) log pi without gradient        w = 1 / max(age, 1)

The age of a token is the number of versions between the weights that sampled it and those before the step.
Tokens of the newest weights are compared with the engine's log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.config.errors import FieldRules

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algorithms.base import LossInputs


def behavior_weights(versions: Tensor, version: int) -> Tensor:
    """Return w of each token, fp32.

    Args:
        versions: version of the weights that sampled each token.
        version: that of the weights before the step."""
    return 1 / (version - versions).clamp(min=1).float()


def proximal_log_probs(inputs: LossInputs) -> Tensor:
    """Return the [N] log-probs of the proximal policy, without gradient."""
    assert inputs.rollout_log_probs is not None and inputs.behavior_weights is not None
    return inputs.log_probs.detach().lerp(inputs.rollout_log_probs, inputs.behavior_weights)


def old_log_probs_rules(
    value: str, has_correction: bool, has_correction_column: bool, reads_old: bool
) -> FieldRules:
    """Return the rules of --old-log-probs.

    Args:
        reads_old: whether rewards, advantages, selected tokens or the end of the epochs depend on the
            log-probs of before the step."""
    engine = (
        "with engine, corrections by the ratio of trainer and engine (--tis-clip, --mis-level, --token-veto) do "
        "nothing. Leave them out, or try trainer."
    )
    column = (
        "with interpolated, nothing is computed before the step that --tis-level sequence, --mis-level or "
        "--token-veto could judge. Leave them out, or try trainer."
    )
    reads = (
        "with interpolated, no pass computes the log-probs of before the step, which --kl-mode reward, "
        "--algorithm distill, --policy-loss clip-cov and kl-cov, and --early-stop-kl read. Leave them out, or "
        "try trainer."
    )
    yield value != "engine" or not has_correction, "old_log_probs", engine
    yield value != "interpolated" or not has_correction_column, "old_log_probs", column
    yield value != "interpolated" or not reads_old, "old_log_probs", reads
