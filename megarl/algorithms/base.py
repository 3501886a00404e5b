"""Define the base class of algorithms: a frozen dataclass whose fields are its flags, with pure functions of
tensors.

An algorithm sees the response tokens of one micro-batch of one rank, flat, N of them, and knows nothing of
meshes, engines or micro-batches. What it returns is already divided by counts of the whole mini-batch, so
that adding up over micro-batches and data-parallel ranks gives the loss, its gradient and the metrics,
whatever the split.

This file and the algorithms import torch inside their functions only: the configuration is read in processes
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from megarl.algorithms.kl_controller import FixedKLController
from megarl.algorithms.lagrange import LagrangeMultiplier
from megarl.algorithms.reference_inputs import ReferenceColumn, ReferenceInputs
from megarl.algorithms.several_scores import StepScores
from megarl.algorithms.turn_rewards import TurnRewards
from megarl.algorithms.value_inputs import ScoreLossInputs, ValueLossInputs
from megarl.config.errors import Section
from megarl.flow import Flow, symbolic_roles

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.config.schema import TrainConfig
    from megarl.kernels.divergence import Divergence


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """Inputs of `compute_advantages`: rewards of all S episodes, and columns of the N tokens of this rank's B
    samples. An episode is one sample, or the several samples of an agent's conversation with branches, which
    may be on different ranks.

    Example: samples 0 and 2 of three are here, with responses of 3 and 2 tokens; the reward of sample 1
        failed: AdvantageInputs(rewards=[1.0, nan, 0.0], group_ids=[7, 7, 7], rows=[2, 0],
        response_lengths=[2, 3],
                        values=<5 values>, ...)
    """

    rewards: Tensor
    """[S] fp32, the rewards of all episodes of the step, the same on every rank; NaN where the reward
    failed."""
    group_ids: Tensor
    """[S] int64, equal for the episodes of one prompt: its visit. Visits are counted over the run, so they
    may be large."""
    rows: Tensor
    """[B] int64, the episode of each sample on this rank, in the order of its tokens. Each sample that is
    trained on is on one data-parallel rank."""
    response_lengths: Tensor
    """[B] int64, response tokens of each sample on this rank."""
    kl_coef: float
    """Factor of the KL to the reference at this step: the KL controller's."""
    sum_over_ranks: Callable[[Tensor], Tensor]
    """All-reduce over the data-parallel ranks: a collective, so an algorithm calls it equally often on every
    rank, also where B is 0. May overwrite its argument."""
    given_rewards: Tensor | None = None
    """[S] fp32, the rewards before `shaped_reward`; None: they are the same."""
    sample_lengths: Tensor | None = None
    """[S] int64, response tokens of all episodes of the step."""
    is_untrained: Tensor | None = None
    """[S] bool, which episodes are scored and not trained on; they are on no rank. None: none."""
    branches: Tensor | None = None
    """[B] int64, number of each sample among those of its episode; None if all episodes are one sample."""
    rollout_log_probs: Tensor | None = None
    """[N] fp32, of the engine that sampled."""
    old_log_probs: Tensor | None = None
    """[N] fp32. This and the next two are there if `advantage_reads` names them."""
    ref_log_probs: Tensor | None = None
    """[N] fp32, of the reference policy."""
    values: Tensor | None = None
    """[N] fp32, the critic's V of the state in which the token was chosen."""
    cost_values: Tensor | None = None
    """[N] fp32, the same by the cost critic."""
    old_scores: Tensor | None = None
    """[N] fp32, of a reward model in training; N is then B."""
    mini_batches: Tensor | None = None
    """[S] int64, number of the mini-batch that each episode is in; -1 for episodes that are not trained
    on."""
    turns: Sequence[TurnRewards | None] | None = None
    """With --turn-rewards: the answers of each of the S episodes; None where the reward failed."""
    scores: StepScores | None = None
    """If `takes_scores`: the single scores of the S episodes."""

    @property
    def counted_rows(self) -> Tensor:
        """[<= B] int64, the episodes that this rank counts: each that is trained on is counted on one rank,
        which has its first sample."""
        return self.rows if self.branches is None else self.rows[self.branches == 0]

    @property
    def num_trained(self) -> int:
        """Number of episodes of the step that are trained on, whether or not their reward failed."""
        return len(self.rewards) - (0 if self.is_untrained is None else int(self.is_untrained.sum()))

    @property
    def num_scored(self) -> int:
        """Number of episodes of the step that are trained on and have a reward."""
        is_scored = ~self.rewards.isnan()
        return int((is_scored if self.is_untrained is None else is_scored & ~self.is_untrained).sum())

    def spread(self, per_sample: Tensor) -> Tensor:
        """Return [N] values for this rank's tokens, given [S] numbers per episode: each token gets the number
        of its episode."""
        return per_sample[self.rows].repeat_interleave(self.response_lengths)

    def sum_per_sample(self, per_token: Tensor) -> Tensor:
        """Return [S] fp64 sums of [N] token values over each episode's tokens, also those on other ranks.
        Collective over the data-parallel ranks."""
        rows = self.rows.repeat_interleave(self.response_lengths)
        return self.sum_over_ranks(
            per_token.double().new_zeros(len(self.rewards)).index_add_(0, rows, per_token.double())
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """Inputs of the policy loss: columns of the N response tokens of one micro-batch on one rank, without
    samples whose reward failed.

    Example: two responses of 3 and 2 tokens here, two more of 4 and 1 elsewhere:
        LossInputs(log_probs=<5 values>, response_lengths=[3, 3, 3, 2, 2], num_tokens=10, num_sequences=4,
        ...)
    """

    log_probs: Tensor
    """[N] fp32, of the policy now; carries the gradient."""
    response_lengths: Tensor
    """[N] int64, response tokens of the episode that the token belongs to, in all of its samples."""
    num_tokens: int
    """Response tokens of the whole mini-batch, above 0: all micro-batches and data-parallel ranks, without
    samples whose reward failed."""
    num_sequences: int
    """Episodes of the whole mini-batch, likewise. An episode is one sample, but for agents with branches."""
    max_response_length: int
    """Most response tokens that sampling allows an episode."""
    kl_coef: float
    """Factor of the KL to the reference at this step: the KL controller's."""
    entropy: Tensor | None = None
    """[N] fp32, of the policy now, with gradient; if `needs_entropy`."""
    divergence: Tensor | None = None
    """[N] fp32, of the policy now from its teacher, with gradient; if there is a `teacher_column`."""
    old_log_probs: Tensor | None = None
    """[N] fp32, of the policy before the first update on these samples; if `needs_rollout`, as the two
    below."""
    rollout_log_probs: Tensor | None = None
    """[N] fp32, of the engine that sampled."""
    advantages: Tensor | None = None
    """[N] fp32, of `compute_advantages`."""
    ref_log_probs: Tensor | None = None
    """[N] fp32, of the reference policy; if `needs_reference`."""
    correction_weights: Tensor | None = None
    """[N] fp32, of `compute_corrections`."""
    selected_tokens: Tensor | None = None
    """[N] fp32, 1 at the tokens of `select_tokens`, else 0."""
    ce_weights: Tensor | None = None
    """[N] fp32, of `cross_entropy_weights`."""
    behavior_weights: Tensor | None = None
    """[N] fp32; if `interpolates_old`: weight of the policy that sampled in the policy that ratios compare
    with."""
    sequence_ids: Tensor | None = None
    """[N] int64, equal for the tokens of one sample of the micro-batch; they are next to each other."""


_TEACHER_METHODS = {None: "log_probs", "teacher_hidden": "hidden_states", "teacher_top_k": "top_tokens"}
"""The reference's method that writes each `teacher_column`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm(Section):
    """Base of all algorithms. A new one is a file with a subclass and a line in REGISTRY."""

    paper: ClassVar[str] = ""
    """Number of the paper on arXiv."""
    advantage_formula: ClassVar[str] = ""
    """The advantage in one line, for `megarl algorithms`; r is the reward."""
    is_on_policy: ClassVar[bool] = False
    """The paper derives the advantage for exact on-policy training: one update per step, no staleness."""
    has_ratio: ClassVar[bool] = True
    """The loss sees that the policy has moved since the step began."""
    one_update: ClassVar[bool] = False
    """The loss is derived from the model's output before the step, so that a step makes one update."""
    has_correction: ClassVar[bool] = False
    """The loss accounts for the difference to the policy that sampled."""
    needs_correction: ClassVar[bool] = True
    """Without a correction the loss is wrong for samples of older weights. False: it is right whoever
    sampled."""
    takes_scores: ClassVar[bool] = False
    """The advantages are computed from the single scores of a response, not from their sum."""
    takes_turn_rewards: ClassVar[bool] = False
    """The advantages can tell the rewards of an episode's answers apart (--turn-rewards)."""
    needs_rollout: ClassVar[bool] = True
    """Responses are sampled and scored. False: they come from the data set."""
    row_needs: ClassVar[Literal["response", "pair", "scored_pair", "labelled"]] = "response"
    """Without a rollout: the part of a row that is trained on, a response, a pair of answers, which may need
    scores, or a completion with a label."""
    is_taught: ClassVar[bool] = False
    """The reference is a teacher: another model than the policy starts from."""
    takes_engine_log_probs: ClassVar[bool] = False
    """The engine's log-probs stand for those of the policy before the step, and no pass computes them."""
    teacher_column: ClassVar[str | None] = None
    """Column with the reference's distribution, if the loss compares with it: teacher_hidden or
    teacher_top_k."""
    teacher_top_k: ClassVar[int | None] = None
    teacher_hint_key: ClassVar[str | None] = None
    """Text of a row's extra_info that ends the reference's prompt."""
    precompute_ref_log_probs: ClassVar[bool] = False
    """Without a rollout: the reference scores all rows before training, and is then removed from memory."""
    interpolates_old: ClassVar[bool] = False
    """The policy that ratios compare with lies between the one that sampled and the one that is trained, and
    no pass computes it."""
    trains_scores: ClassVar[bool] = False
    """The trained model is a reward model: it has a score head, and learns from `score_loss`."""
    early_stop_kl: ClassVar[float | None] = None
    """Mean of the metric policy/kl of an epoch above which the actor makes no further epoch in the step."""
    greedy_samples: ClassVar[int] = 0
    """Number of further responses to each prompt that are drawn greedily and scored, and not trained on."""
    needs_critic: ClassVar[bool] = False
    """A critic gives `values` and learns from `value_loss`."""
    needs_cost_critic: ClassVar[bool] = False
    """A second critic gives `cost_values`, and learns the column cost_returns from `value_loss`."""
    critic_warmup_iters: ClassVar[int] = 0
    """Number of first steps that update the critic alone."""
    relative_to_group: ClassVar[bool] = False
    """Advantages compare the samples of one prompt with each other, so they are 0 where all of these have the
    same reward."""
    token_level: ClassVar[bool] = True
    """The loss is a sum over tokens, each from its own inputs: `loss` is called for any part of a
    micro-batch's tokens, and saves a quarter of the output layer's work. False: it sees whole sequences, all
    tokens of a micro-batch at once."""

    @property
    def makes_one_update(self) -> bool:
        """Whether a second update of a step would be made as if the policy had not moved."""
        return self.one_update or not (self.has_ratio or self.has_correction)

    @property
    def samples_per_row(self) -> int:
        """Number of samples that one row of the data becomes, for an algorithm without a rollout."""
        return 1 if self.row_needs == "response" else 2

    @property
    def needs_reference(self) -> bool:
        """Whether the job needs a frozen copy of the starting policy, which gives `ref_log_probs`."""
        return False

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the entropy of the policy at each token."""
        return False

    @property
    def advantage_reads(self) -> tuple[str, ...]:
        """Names of the columns that `compute_advantages` reads."""
        return ("rewards",)

    @property
    def loss_reads(self) -> tuple[str, ...]:
        """Names of the columns that `loss` reads."""
        return ("old_log_probs", "advantages", *(("ref_log_probs",) if self.needs_reference else ()))

    @property
    def advantage_writes(self) -> tuple[str, ...]:
        """Names of the columns that `compute_advantages` returns."""
        return ("advantages", "returns") if self.needs_critic else ("advantages",)

    def flow(self, roles: Iterable[str]) -> Flow:
        """Return the calls of one training step and their dependencies. Calls of roles that are not in
        `roles`, those of the job, are left out."""
        names = "actor critic cost_critic reference reward"
        actor, critic, cost_critic, reference, reward = symbolic_roles(names, present=roles)
        models = symbolic_roles(" ".join(role for role in roles if role.startswith("reward_model")))
        is_without_pass = self.takes_engine_log_probs
        teach = getattr(reference, _TEACHER_METHODS[self.teacher_column])
        return (
            actor.rollout()
            .join(
                reward.score,
                *(model.score for model in models),
                None if is_without_pass else actor.log_probs,
                teach,
                critic.values,
                cost_critic.values,
            )
            .advantages(self)
            .update(critic)
            .update(cost_critic)
            .update(
                actor, reads=("tokens", *self.loss_reads) if is_without_pass or self.teacher_column else None
            )
        )

    def step_errors(self, num_samples: int) -> Iterable[str]:
        """Return one error message per flag that does not fit a step of `num_samples` samples, or none."""
        return ()

    def build_kl_controller(self) -> FixedKLController:
        """Return the KL controller of a new run. The run passes the controller's `coef` to the loss as
        `kl_coef`, and updates the controller with the metric MEASURED_KL after each step."""
        return FixedKLController(0.0)

    def build_multiplier(self) -> LagrangeMultiplier | None:
        """Return the multiplier of a new run, if costs are held below a limit. Its owner passes `value` on
        with the scores, and updates it with the metric MEAN_COST after each step."""
        return None

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the columns of `advantage_writes`, [N] fp32 each, and this rank's part of the metrics (see
        `loss`).

        A sample whose reward failed has advantage 0 and returns NaN. Collective over the data-parallel ranks.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no advantages (needs_rollout is {self.needs_rollout})"
        )

    def teacher_divergence(self) -> Divergence | None:
        """Return the divergence that a loss with a `teacher_column` reads."""
        return None

    def shaped_reward(self, reward: float, length: int, max_response_length: int) -> float:
        """Return the reward of a response of `length` tokens from which the advantages are computed. Metrics
        report the original reward.

        Args:
            max_response_length: most tokens that the response may have; of an episode all its answers
                count."""
        return reward

    def is_left_out(self, truncated: bool) -> bool:
        """Return whether a response is left out of the policy's loss and of its denominators. `truncated`:
        whether --max-response-length cut the response."""
        return False

    def left_out(self, inputs: AdvantageInputs) -> Tensor | None:
        """Return [S] bool, true for the samples of the step that their rewards exclude from the policy's loss
        and its denominators, or None to exclude none. The result is the same on every rank."""
        return None

    def compute_corrections(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the column correction_weights, [N] fp32, if the loss reads it, and this rank's part of the
        metrics. Collective over the data-parallel ranks."""
        return {}, {}

    def select_tokens(
        self, inputs: AdvantageInputs, advantages: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the column selected_tokens, [N] fp32, if the loss reads it, and this rank's part of the
        metrics. Collective over the data-parallel ranks.

        Args:
            advantages: [N] fp32, of `compute_advantages`."""
        return {}, {}

    def cross_entropy_weights(
        self, inputs: AdvantageInputs, given: Tensor, left_out: Tensor
    ) -> dict[str, Tensor]:
        """Return the column ce_weights, [N] fp32, if the loss reads it.

        Args:
            given: [S] fp32, the rewards before `shaped_reward`; NaN where the reward failed.
            left_out: [S] bool, which samples the policy's loss leaves out."""
        return {}

    def reference_sums(self, inputs: ReferenceInputs) -> list[float] | None:
        """Return the numbers that `reference_advantages` needs summed over all ranks, or None if it needs
        none.

        The same number of numbers, or None, on every rank."""
        return None

    def reference_advantages(self, inputs: ReferenceInputs, sample: int) -> dict[str, ReferenceColumn] | None:
        """Recompute the columns of `advantage_writes` for one sample on this rank, in plain Python and
        independently of `compute_advantages`; None if the algorithm has no reference.

        At every step each rank compares some of its samples with it, and the run ends if they differ by more
        than rounding. None: this algorithm has no reference, and nothing compares."""
        return None

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's part of the policy loss, a scalar with gradient, and of the metrics,
        scalars without gradient.

        Shares are summed over micro-batches and data-parallel ranks, but for metrics ending in `_max`: of
        those the maximum counts.
        """
        raise NotImplementedError

    def value_loss(self, inputs: ValueLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's part of the critic's loss, a scalar with gradient, and of its metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no critic")

    def score_loss(self, inputs: ScoreLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's part of the loss of a reward model, a scalar with gradient, and of its
        metrics."""
        raise NotImplementedError(f"{type(self).__name__} trains no reward model")

    def weight_sum(self, num_tokens: int, num_sequences: int, max_response_length: int) -> float | None:
        """Return what the weights of all tokens of a mini-batch in `loss` must add up to, or None for no
        check.

        In each step's first update the weights are measured: the slope of the loss where all log-probs are
        equal, all advantages -1 and the KL's factor 0. The run ends if they do not add up to this over all
        ranks. Where a subclass has a loss of its own, only a sum of its own counts.
        """
        return None

    def value_weight_sum(self, num_tokens: int, num_sequences: int, max_response_length: int) -> float | None:
        """Return what the weights of all tokens of a mini-batch in `value_loss` must add up to, or None for
        no check."""
        return None


def algorithm_of(config: TrainConfig) -> Algorithm:
    """Return a job's algorithm, which the configuration holds without its type."""
    assert isinstance(config.algorithm, Algorithm)
    return config.algorithm


def advantage_metrics(inputs: AdvantageInputs, advantages: Tensor) -> dict[str, float]:
    """Return this rank's part of the metrics advantage/max_abs and reward/failed (number of failed
    rewards)."""
    return {
        "advantage/max_abs": advantages.abs().max().item() if len(advantages) else 0.0,
        "reward/failed": float(inputs.rewards[inputs.counted_rows].isnan().sum()),
    }
