"""Implement what all policy gradient algorithms share: the policy loss, and the KL to a reference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megarl.algorithms.aggregation import LossAggregation, token_weights, total_weight
from megarl.algorithms.base import AdvantageInputs, Algorithm, LossInputs
from megarl.algorithms.corrections import MIS_BOUNDS, correction_rules, correction_weights
from megarl.algorithms.cross_entropy import POSITIVE_NLL, POSITIVE_SHARE, nll_weights
from megarl.algorithms.kl_controller import FixedKLController, build_kl_controller, horizon_errors, kl_rules
from megarl.algorithms.proximal import old_log_probs_rules, proximal_log_probs
from megarl.algorithms.ratio_transforms import OPTIONS, Transform
from megarl.algorithms.token_selection import select_tokens
from megarl.algorithms.transformed_loss import transformed_loss
from megarl.algorithms.user_policy_loss import transform_of, transform_or_reason
from megarl.config.errors import Count, FieldRules, Fraction, NonNegative, Positive, Rule
from megarl.config.errors import above, at_least, below

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.kernels.policy_loss import PolicyLossOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradient(Algorithm):
    """policy gradient"""

    policy_loss: str = "ppo"
    """How the ratio of a token's probabilities, now and before the step, enters its loss: ppo, cispo,
    reinforce, sapo, dppo-tv, dppo-kl, clip-cov, kl-cov, gspo, gspo-token or gmpo, which `megarl algorithms`
    lists with their papers, or path/to/file.py:function, a function of your own. ppo: a clipped token has no
    gradient. cispo: the clip only bounds the ratio that weighs a token's gradient. reinforce: no ratio."""
    clip_eps_low: Fraction | None = None
    """The policy ratio is clipped at 1 - this (gmpo: its log at -this). Default: ppo, cispo, clip-cov 0.2,
    gspo, gspo-token 3e-4, gmpo 0.4."""
    clip_eps_high: NonNegative | None = None
    """The policy ratio is clipped at 1 + this (gmpo: its log at this). Default: ppo, cispo, clip-cov 0.2,
    gspo, gspo-token 4e-4, gmpo 0.4."""
    clip_ratio_c: Annotated[float, above(1)] | None = None
    """Dual clip of ppo: bound of the ratio where the advantage is negative, above 1, e.g. 3. Default:
    none."""
    sapo_tau_pos: Positive | None = None
    """For --policy-loss sapo: how fast a token's weight falls as its ratio leaves 1, where the advantage is
    positive. Default: 1."""
    sapo_tau_neg: Positive | None = None
    """The same where the advantage is negative. Default: 1.05."""
    dppo_threshold: Positive | None = None
    """For --policy-loss dppo-tv and dppo-kl: a token has no gradient once its probability differs from the
    engine's by more than this in the direction of the update. Default: dppo-tv 0.15 (difference of the
    probabilities), dppo-kl 0.05 (nats)."""
    cov_share: Annotated[float, above(0), below(1)] | None = None
    """For --policy-loss clip-cov, kl-cov: share of the step's tokens that the covariance of log-prob and
    advantage selects. Default: clip-cov 2e-4, kl-cov 2e-3."""
    cov_low: float | None = None
    """For --policy-loss clip-cov: tokens are drawn from those with a covariance above this. Default: 1."""
    cov_high: float | None = None
    """The same, below this. Default: 5."""
    cov_kl_coef: Positive | None = None
    """For --policy-loss kl-cov: factor of |log pi - log pi_old| of a selected token. Default: 1."""
    old_log_probs: Literal["trainer", "engine", "interpolated"] = "trainer"
    """Log-probs to which the ratio compares the current ones. trainer: a forward pass before the updates
    computes them. engine: the engine's, which saves the pass; the log-prob gate then judges a step's first
    mini-batch in its update. interpolated: with --staleness, between these by the age of the weights (A-3PO),
    without a pass."""
    loss_aggregation: LossAggregation = "token-mean"
    """token-mean: tokens count the same. seq-mean-*: sequences do, by their tokens' mean or sum. dr-grpo: sum
    / --max-response-length."""
    kl_mode: Literal["none", "loss", "reward"] = "none"
    """Where the KL to the reference policy is counted: nowhere, in the loss, or taken off the reward (ppo: of
    each token, grpo: of each response)."""
    kl_coef: Annotated[float, at_least(0), below(math.inf)] = 0.0
    """Factor of that KL; above 0 unless --kl-mode none. With --kl-controller adaptive, where it starts."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """KL estimate per token. k1 is meant for --kl-mode reward: in the loss its gradient is zero on average,
    so it holds nothing back."""
    kl_straight_through: bool = False
    """In the loss, give every estimate the gradient of k2, which is that of the KL."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: after each step --kl-coef is raised if the KL of a response is above --kl-target, and lowered
    if it is below."""
    kl_target: Annotated[float, above(0), below(math.inf)] = 6.0
    """For --kl-controller adaptive: nats per response, by --kl-estimator."""
    kl_horizon: Annotated[int, above(0)] = 10000
    """For --kl-controller adaptive: number of samples over which --kl-coef adapts. A step of n samples
    changes it by at most the fraction 0.2 n / this."""
    entropy_coef: Annotated[float, above(-math.inf), below(math.inf)] = 0.0
    """Factor of the mean entropy, which is subtracted from the loss."""
    tis_clip: Annotated[float, Rule(lambda clip: clip > 0, "must be above 0. Try 2, or none.")] | None = None
    """Truncated importance sampling: each token's loss is weighted by min(trainer's probability / engine's,
    this); none turns it off. Default: 2 with --staleness above 0, else none."""
    tis_level: Literal["token", "sequence"] = "token"
    """For --tis-clip: weigh each token by its own ratio, or all tokens of a response by the product of
    theirs."""
    mis_level: Literal["none", "token", "sequence", "geometric"] = "none"
    """Masked importance sampling: tokens get weight 0 where trainer's probability / engine's is outside
    --mis-low to --mis-high. token: each by its own ratio (IcePop); sequence: whole responses, by the product;
    geometric: by the geometric mean, which does not depend on the length."""
    mis_low: Positive | None = None
    """Smallest ratio that --mis-level keeps. Default: token, sequence 0.5, geometric 0.99."""
    mis_high: Positive | None = None
    """Largest ratio that --mis-level keeps. Default: token 5, sequence 2, geometric 1.01."""
    token_veto: Annotated[float, above(0), below(1)] | None = None
    """A response gets weight 0 if trainer's probability / engine's of some token is below this, e.g. 1e-4.
    Default: none."""

    positive_nll_coef: NonNegative = 0.0
    """Factor of the mean negative log-prob of the tokens of right answers, which is added to the policy's
    loss (VAPO: 0.1)."""
    positive_nll_above: float = 0.0
    """For --positive-nll-coef: an answer is right if its reward is above this."""
    early_stop_kl: Positive | None = None
    """With --num-epochs above 1: the actor makes no further epoch in a step once the mean policy/kl of an
    epoch is above this, e.g. 0.02 nats per token. Default: none."""
    overlong_buffer: Count | None = None
    """Overlong shaping of DAPO: the reward falls over the last so many tokens before --max-response-length,
    with --env before that times --max-turns, by up to --overlong-penalty. Metrics of rewards do not count it.
    Default: none."""
    overlong_penalty: Positive = 1.0
    """For --overlong-buffer: what a response of the largest length loses."""
    overlong_filter: bool = False
    """Leave responses that --max-response-length cut out of the policy's loss and its denominators. Their
    rewards still count in their group."""

    def __post_init__(self) -> None:
        """Replace None by the default of --policy-loss and --mis-level, then check the rules."""
        transform, _ = transform_or_reason(self.policy_loss)
        defaults = dict(transform.defaults) if transform else {}
        if self.mis_level in MIS_BOUNDS:
            defaults |= zip(("mis_low", "mis_high"), MIS_BOUNDS[self.mis_level])
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        Algorithm.__post_init__(self)

    def field_rules(self) -> FieldRules:
        transform, reason = transform_or_reason(self.policy_loss)
        yield transform is not None, "policy_loss", reason
        for name in sorted(OPTIONS - transform.fields) if transform else ():
            unread = f"is not for --policy-loss {self.policy_loss}. Leave it out."
            yield getattr(self, name) is None, name, unread
        yield from correction_rules(self)
        for low, high in (("mis_low", "mis_high"), ("cov_low", "cov_high")):
            least, most = getattr(self, low), getattr(self, high)
            rule = f"must be above --{low.replace('_', '-')} ({least}). Leave both out."
            yield None in (least, most) or least < most, high, rule
        yield from old_log_probs_rules(
            self.old_log_probs,
            has_correction=self.has_correction,
            has_correction_column=self.has_correction_column,
            reads_old=self.kl_mode == "reward"
            or self.is_taught
            or self.early_stop_kl is not None
            or (transform is not None and transform.choose is not None),
        )
        is_used = self.positive_nll_coef > 0 or self.positive_nll_above == 0
        needs_coef = "needs --positive-nll-coef. Leave it out, or try --positive-nll-coef 0.1."
        yield is_used, "positive_nll_above", needs_coef
        yield from kl_rules(self)

    @property
    def _transform(self) -> Transform:
        """The ratio transform of a --policy-loss that has passed the rules."""
        transform = transform_of(self.policy_loss)
        assert transform is not None
        return transform

    @property
    def needs_reference(self) -> bool:
        return self.kl_mode != "none"

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0

    @property
    def token_level(self) -> bool:
        return self._transform.token_level

    @property
    def takes_engine_log_probs(self) -> bool:
        return self.old_log_probs == "engine"

    @property
    def interpolates_old(self) -> bool:
        return self.old_log_probs == "interpolated"

    @property
    def has_ratio(self) -> bool:
        return self._transform.has_ratio

    @property
    def has_correction(self) -> bool:
        return self.tis_clip is not None or self.has_correction_column

    @property
    def has_correction_column(self) -> bool:
        """Whether the correction needs a column of weights, because the loss cannot compute it from each
        token alone."""
        is_of_sequence = self.tis_clip is not None and self.tis_level == "sequence"
        return is_of_sequence or self.mis_level != "none" or self.token_veto is not None

    @property
    def advantage_reads(self) -> tuple[str, ...]:
        reads_old = self.needs_reference or self.has_correction or self._transform.choose is not None
        return ("rewards", *(self._old_column if reads_old else ()), *self._ref_column)

    @property
    def advantage_writes(self) -> tuple[str, ...]:
        return ("advantages", *(("returns",) if self.needs_critic else ()), *self._other_columns)

    @property
    def loss_reads(self) -> tuple[str, ...]:
        return (*self._old_column, "advantages", *self._ref_column, *self._other_columns)

    @property
    def _old_column(self) -> tuple[str, ...]:
        """The name of the column with log-probs before the updates, as a tuple; () if the engine's log-probs
        replace it."""
        return () if self.takes_engine_log_probs else ("old_log_probs",)

    @property
    def _ref_column(self) -> tuple[str, ...]:
        return ("ref_log_probs",) if self.needs_reference else ()

    @property
    def _other_columns(self) -> tuple[str, ...]:
        """Columns of terms that few jobs have, written beside the advantages and read by the loss."""
        needed = {
            "correction_weights": self.has_correction_column,
            "selected_tokens": self._transform.choose is not None,
            "ce_weights": self.positive_nll_coef > 0,
            "behavior_weights": self.interpolates_old,
        }
        return tuple(name for name, is_needed in needed.items() if is_needed)

    def shaped_reward(self, reward: float, length: int, max_response_length: int) -> float:
        """Return the reward less DAPO's penalty of long responses (arXiv:2503.14476, eq. 13)."""
        if self.overlong_buffer is None:
            return reward
        over = length - (max_response_length - self.overlong_buffer)
        return reward - self.overlong_penalty * min(max(over / self.overlong_buffer, 0.0), 1.0)

    def is_left_out(self, truncated: bool) -> bool:
        return self.overlong_filter and truncated

    def compute_corrections(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        if self.interpolates_old or not self.has_correction:
            return {}, {}  # interpolated: the loss computes the weights anew in each update
        return correction_weights(self, inputs)

    def select_tokens(
        self, inputs: AdvantageInputs, advantages: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        choose = self._transform.choose
        return ({}, {}) if choose is None else select_tokens(self, choose, inputs, advantages)

    def cross_entropy_weights(
        self, inputs: AdvantageInputs, given: Tensor, left_out: Tensor
    ) -> dict[str, Tensor]:
        if not self.positive_nll_coef:
            return {}
        is_right = (given > self.positive_nll_above) & ~left_out & (inputs.mini_batches >= 0)
        weights = nll_weights(is_right, inputs.sample_lengths, inputs.mini_batches)
        return {"ce_weights": inputs.spread(weights)}

    def step_errors(self, num_samples: int) -> Iterable[str]:
        return horizon_errors(self, num_samples)

    def build_kl_controller(self) -> FixedKLController:
        return build_kl_controller(self)

    def weight_sum(self, num_tokens: int, num_sequences: int, max_response_length: int) -> float:
        total = total_weight(self.loss_aggregation, num_tokens, num_sequences, max_response_length)
        return total if self._token_tis is None else min(self._token_tis, 1.0) * total

    @property
    def _token_tis(self) -> float | None:
        """The upper bound of the importance weight that the loss computes for each token; None without such a
        weight."""
        return self.tis_clip if self.tis_level == "token" else None

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return policy loss + kl_coef * KL - entropy_coef * entropy, and metrics. All terms have the same
        token weights; corrections (TIS and others) multiply the policy loss only.

        Metrics: policy/loss; per-token means policy/clip_fraction (the clip or mask took the gradient away;
        cispo: bounded it), policy/kl (k3 of KL(old || now)), policy/dual_clip_fraction, policy/entropy
        (without `needs_entropy` -rollout_log_probs, the sampled estimate for the engine), if used
        policy/ref_kl and policy/tis_weight; policy/ratio_deviation_max, of |ratio - 1|.
        """
        from megarl.kernels.policy_loss import PolicyLossColumns, policy_loss

        formula, advantages = self._transform.loss, inputs.advantages
        if formula is None and inputs.correction_weights is not None:
            advantages = advantages * inputs.correction_weights  # the kernel's loss is proportional to them
        columns = PolicyLossColumns(
            log_probs=inputs.log_probs,
            old_log_probs=proximal_log_probs(inputs) if self.interpolates_old else inputs.old_log_probs,
            advantages=advantages,
            weights=token_weights(self.loss_aggregation, inputs),
            rollout_log_probs=inputs.rollout_log_probs,
            ref_log_probs=inputs.ref_log_probs if self.kl_mode != "none" else None,
            entropy=inputs.entropy if self.needs_entropy else -inputs.rollout_log_probs,
        )
        options = self._loss_options(inputs.kl_coef)
        if formula is None:
            loss, stats = policy_loss(**columns._asdict(), options=options)
        else:
            loss, stats = transformed_loss(formula, self, columns, options, inputs)
        totals = {
            "clip_fraction": stats.num_clipped,
            "dual_clip_fraction": stats.num_dual_clipped,
            "kl": stats.kl_sum,
            "entropy": stats.entropy_sum,
            "ref_kl": stats.ref_kl_sum,
            "tis_weight": stats.tis_weight_sum,
        }
        n = inputs.num_tokens
        metrics = {f"policy/{name}": total / n for name, total in totals.items() if total is not None}
        metrics |= {"policy/loss": loss.detach(), "policy/ratio_deviation_max": stats.ratio_deviation_max}
        if inputs.ce_weights is not None:
            nll = -(inputs.log_probs * inputs.ce_weights).sum()
            loss, metrics[POSITIVE_NLL] = loss + self.positive_nll_coef * nll, nll.detach()
            metrics[POSITIVE_SHARE] = inputs.ce_weights.sum()  # of an update 1, or 0 without a right answer
        return loss, metrics

    def _loss_options(self, kl_coef: float) -> PolicyLossOptions:
        """Return the options of the policy loss, of which a ratio transform without a kernel has the corrections, the
        KL and the entropy."""
        from megarl.kernels.policy_loss import PolicyLossOptions

        return PolicyLossOptions(
            kind="cispo" if self.policy_loss == "cispo" else "ppo",
            clip_eps_low=self.clip_eps_low,
            clip_eps_high=self.clip_eps_high,
            clip_ratio_c=self.clip_ratio_c,
            tis_clip=self._token_tis,
            kl_coef=kl_coef if self.kl_mode == "loss" else 0.0,
            kl_estimator=self.kl_estimator,
            kl_straight_through=self.kl_straight_through,
            entropy_coef=self.entropy_coef,
        )
