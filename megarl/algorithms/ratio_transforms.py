"""Define the ratio transforms (--policy-loss): how a token's loss depends on the ratio of its probabilities
now and before the step. Off-policy corrections are chosen apart from them, see corrections.py.

With d = log pi - log pi_old, limited to +-20, the ratio exp(d), and the advantage A, times a correction if
there is one:

    ppo         max(-A ratio, -A clip(ratio, 1 - low, 1 + high)); dual clip: at most -A c where A < 0
    cispo       -A stop_gradient(clip(ratio, 1 - low, 1 + high)) log pi
    reinforce   -A log pi
    sapo        -A (4 / tau) sigmoid(tau (ratio - 1)), tau by the sign of A
    dppo-tv     -A ratio, 0 where (pi - mu) sign(A) > threshold          mu: the engine's probability
    dppo-kl     -A ratio, 0 where (pi - mu) A > 0 and KL(Bernoulli(mu), Bernoulli(pi)) > threshold
    gspo        ppo's loss of s = exp(mean of d over the response)
    gspo-token  the same, of stop_gradient(s) pi / stop_gradient(pi)
    clip-cov    ppo's loss, 0 at the tokens that token_selection.py selects
    kl-cov      -A ratio, and coef |d| more at the tokens that it selects
    gmpo        -A exp(mean of clip(d, -low, high)), the clip only where it lowers A times the ratio

All but clip-cov have the gradient -A of log pi where pi = pi_old = mu. ppo and cispo are one kernel with
everything that is added to them (policy_loss.py); of the others autograd has the gradient. A function gets
tensors [N] and needs no import of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megarl.algorithms.token_selection import Choose, drawn_within_bounds, largest_covariance

if TYPE_CHECKING:
    from torch import Tensor


class TransformFlags(Protocol):
    """The fields of an algorithm that ratio transforms read. A field is None if the chosen --policy-loss does
    not read it."""

    clip_eps_low: float
    clip_eps_high: float
    sapo_tau_pos: float
    sapo_tau_neg: float
    dppo_threshold: float
    cov_kl_coef: float


class Tokens(NamedTuple):
    """The values of N response tokens that a ratio transform reads, [N] fp32 each."""

    log_probs: Tensor
    """Of the policy now; carries the gradient, as do the next two."""
    log_ratio: Tensor
    """log_probs - old_log_probs, limited to +-20."""
    ratio: Tensor
    advantages: Tensor
    rollout_log_probs: Tensor
    """Of the engine that sampled."""
    selected: Tensor | None
    """1 at the tokens that the transform's `choose` has selected, else 0; None without it."""
    response_mean: Callable[[Tensor], Tensor]
    """Replace each of [N] values by their mean over its response. Only for a transform of sequences."""


Loss = tuple["Tensor", "Tensor | None"]
"""Loss of each token, and whether the clip or mask took its gradient away (None: there is none)."""
Formula = Callable[[Tokens, TransformFlags], Loss]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transform:
    """A ratio transform, which is one value of --policy-loss, with its paper, its loss and its defaults."""

    paper: str
    """Number on arXiv."""
    summary: str
    loss: Formula | None = None
    """None: the kernel of policy_loss.py."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Field of the algorithm that the transform reads -> its default."""
    optional: tuple[str, ...] = ()
    """Further fields that it reads, None by default."""
    token_level: bool = True
    """Whether a token's loss depends on that token alone."""
    has_ratio: bool = True
    """Whether the loss sees that the policy has moved since the step began."""
    choose: Choose | None = None
    """Which of the step's tokens `Tokens.selected` marks; None: it marks none."""

    @property
    def fields(self) -> set[str]:
        """Fields of the algorithm that the transform reads."""
        return {*self.defaults, *self.optional}


_CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}
_GSPO_CLIP = {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}

TRANSFORMS: dict[str, Transform] = {}
"""--policy-loss -> its formula, its paper and the flags that it reads."""


def transform(name: str, paper: str, **options: Any) -> Callable[[Formula], Formula]:
    """Add the decorated function to TRANSFORMS as the loss of one value of --policy-loss. Its docstring is the
    summary that `megarl algorithms` prints.

    Args:
        options: further fields of `Transform`."""

    def add(loss: Formula) -> Formula:
        TRANSFORMS[name] = Transform(paper=paper, summary=loss.__doc__ or "", loss=loss, **options)
        return loss

    return add


def _pessimistic(tokens: Tokens, ratio: Tensor, flags: TransformFlags) -> Loss:
    """Return the loss of the ratio or of the clipped ratio, whichever is larger."""
    loss = -tokens.advantages * ratio
    bounds = 1 - flags.clip_eps_low, 1 + flags.clip_eps_high
    clipped = -tokens.advantages * ratio.clamp(*bounds)
    return loss.maximum(clipped), clipped > loss


TRANSFORMS["ppo"] = Transform(
    paper="1707.06347",
    summary="a clipped token has no gradient",
    defaults=_CLIP,
    optional=("clip_ratio_c",),
)
TRANSFORMS["cispo"] = Transform(
    paper="2506.13585",
    summary="the clip only bounds the ratio that weighs a token's gradient",
    defaults=_CLIP,
)


@transform("reinforce", "2402.14740", has_ratio=False)
def reinforce(tokens: Tokens, flags: TransformFlags) -> Loss:
    """no ratio: the log-prob, weighted by the advantage"""
    return -tokens.advantages * tokens.log_probs, None


@transform("sapo", "2511.20347", defaults={"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05})
def sapo(tokens: Tokens, flags: TransformFlags) -> Loss:
    """a smooth gate around ratio 1 in place of a clip"""
    is_positive = tokens.advantages > 0
    tau = flags.sapo_tau_pos * is_positive + flags.sapo_tau_neg * ~is_positive
    gate = (tau * (tokens.ratio - 1)).sigmoid() * 4 / tau
    return -tokens.advantages * gate, None


@transform("dppo-tv", "2602.04879", defaults={"dppo_threshold": 0.15})
def dppo_tv(tokens: Tokens, flags: TransformFlags) -> Loss:
    """no gradient where the probability has moved too far from the engine's"""
    moved = tokens.log_probs.detach().exp() - tokens.rollout_log_probs.exp()
    is_held = moved * tokens.advantages.sign() > flags.dppo_threshold
    return -tokens.advantages * tokens.ratio * ~is_held, is_held


@transform("dppo-kl", "2602.04879", defaults={"dppo_threshold": 0.05})
def dppo_kl(tokens: Tokens, flags: TransformFlags) -> Loss:
    """the same, by the KL of token against all others"""
    log_pi, log_mu = tokens.log_probs.detach(), tokens.rollout_log_probs
    pi, mu = log_pi.exp(), log_mu.exp()
    # 1 - probability is at least the spacing of fp32 numbers below 1.
    rest_pi, rest_mu = (1 - pi).clamp(min=6e-8), (1 - mu).clamp(min=6e-8)
    divergence = mu * (log_mu - log_pi) + (1 - mu) * (rest_mu.log() - rest_pi.log())
    is_held = ((pi - mu) * tokens.advantages > 0) & (divergence > flags.dppo_threshold)
    return -tokens.advantages * tokens.ratio * ~is_held, is_held


@transform(
    "clip-cov",
    "2505.22617",
    defaults=_CLIP | {"cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    choose=drawn_within_bounds,
)
def clip_cov(tokens: Tokens, flags: TransformFlags) -> Loss:
    """ppo's clip, and no gradient at some tokens whose log-prob and advantage covary most"""
    loss, is_clipped = _pessimistic(tokens, tokens.ratio, flags)
    assert tokens.selected is not None and is_clipped is not None
    is_selected = tokens.selected > 0
    return loss * ~is_selected, is_clipped | is_selected


@transform(
    "kl-cov", "2505.22617", defaults={"cov_share": 2e-3, "cov_kl_coef": 1.0}, choose=largest_covariance
)
def kl_cov(tokens: Tokens, flags: TransformFlags) -> Loss:
    """no clip, and a penalty of moving the tokens whose log-prob and advantage covary most"""
    assert tokens.selected is not None
    penalty = flags.cov_kl_coef * tokens.selected * tokens.log_ratio.abs()
    return -tokens.advantages * tokens.ratio + penalty, None


@transform("gspo", "2507.18071", defaults=_GSPO_CLIP, token_level=False)
def gspo(tokens: Tokens, flags: TransformFlags) -> Loss:
    """ppo's clip of one ratio per response, the geometric mean of its tokens'"""
    return _pessimistic(tokens, tokens.response_mean(tokens.log_ratio).exp(), flags)


@transform("gspo-token", "2507.18071", defaults=_GSPO_CLIP, token_level=False)
def gspo_token(tokens: Tokens, flags: TransformFlags) -> Loss:
    """gspo's value and clip, each token's gradient by its own advantage"""
    mean = tokens.response_mean(tokens.log_ratio.detach())
    return _pessimistic(tokens, (mean + tokens.log_probs - tokens.log_probs.detach()).exp(), flags)


@transform("gmpo", "2507.20673", defaults={"clip_eps_low": 0.4, "clip_eps_high": 0.4}, token_level=False)
def gmpo(tokens: Tokens, flags: TransformFlags) -> Loss:
    """geometric mean of ratios that are clipped one by one, in log space"""
    clipped = tokens.log_ratio.clamp(-flags.clip_eps_low, flags.clip_eps_high)
    is_held = (tokens.log_ratio - clipped) * tokens.advantages > 0
    mean = tokens.response_mean(clipped.where(is_held, tokens.log_ratio))
    return -tokens.advantages * mean.exp(), is_held


OPTIONS = frozenset().union(*(one.fields for one in TRANSFORMS.values()))
"""Fields of the algorithm that some transform reads."""
