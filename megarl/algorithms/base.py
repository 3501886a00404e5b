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

from megarl.algorithms.kl_controller import AdaptiveKLController, FixedKLController
from megarl.algorithms.reference_inputs import ReferenceColumn, ReferenceInputs
from megarl.algorithms.several_scores import StepScores
from megarl.algorithms.turn_rewards import TurnRewards
from megarl.config.errors import Section
from megarl.config.roles import configs_of_actors
from megarl.flow import Flow, symbolic_roles
from megarl.role_names import actor_suffix, kind_and_suffix

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.config.schema import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """What `compute_advantages` reads: rewards of all S episodes of a step, and columns of the N response
    tokens of this rank's B samples. An episode is one sample, or the several samples of an agent's conversation
    with branches, which may be on different ranks.

    Example: samples 0 and 2 of three are here, with responses of 3 and 2 tokens; the reward of sample 1
        failed: AdvantageInputs(rewards=[1.0, nan, 0.0], group_ids=[7, 7, 7], rows=[2, 0],
        response_lengths=[2, 3],
                        values=<5 values>, ...)
    """

    rewards: Tensor
    """[S] fp32, the rewards of all episodes of the step, the same on every rank; NaN where the reward
    failed."""
    group_ids: Tensor
    """[S] int64, equal for the episodes of one prompt: its visit. Visits are counted over the run, so they may
    be large."""
    rows: Tensor
    """[B] int64, the episode of each sample on this rank, in the order of its tokens. Each sample is on one
    data-parallel rank."""
    response_lengths: Tensor
    """[B] int64, response tokens of each sample on this rank."""
    kl_coef: float
    """Factor of the KL to the reference at this step: the KL controller's."""
    sum_over_ranks: Callable[[Tensor], Tensor]
    """All-reduce over the data-parallel ranks: a collective, so an algorithm calls it equally often on every
    rank, also where B is 0. May overwrite its argument."""
    sample_lengths: Tensor | None = None
    """[S] int64, response tokens of all episodes of the step."""
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
    old_scores: Tensor | None = None
    """[N] fp32, of a reward model in training; N is then B."""
    turns: Sequence[TurnRewards | None] | None = None
    """With --turn-rewards: the answers of each of the S episodes; None where the reward failed."""
    scores: StepScores | None = None
    """If `takes_scores`: the single scores of the S episodes."""

    @property
    def counted_rows(self) -> Tensor:
        """[<= B] int64, the episodes that this rank counts: each of the S is counted on one rank, which has its
        first sample."""
        return self.rows if self.branches is None else self.rows[self.branches == 0]

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
    """What the policy loss reads: columns of the N response tokens of one micro-batch on one rank. Samples
    whose reward failed are not among them.

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
    sequence_ids: Tensor | None = None
    """[N] int64, equal for the tokens of one sample of the micro-batch; they are next to each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLossInputs:
    """What the critic's loss reads: columns of the N response tokens of one micro-batch on one rank. Counts
    and samples are as in `LossInputs`."""

    values: Tensor
    """[N] fp32, of the critic now; carries the gradient."""
    old_values: Tensor
    """[N] fp32, of the critic before the first update on these samples."""
    returns: Tensor
    """[N] fp32, of `compute_advantages`."""
    response_lengths: Tensor
    """[N] int64, as in `LossInputs`."""
    num_tokens: int
    num_sequences: int
    max_response_length: int
    sequence_ids: Tensor | None = None
    """[N] int64, as in `LossInputs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreLossInputs:
    """What the loss of a reward model in training reads: one number per sample of one micro-batch on one rank,
    B of them. Counts are as in `LossInputs`."""

    scores: Tensor
    """[B] fp32, of the model now, at each sample's last token; carries the gradient."""
    old_scores: Tensor
    """[B] fp32, of the model before the update."""
    advantages: Tensor
    """[B] fp32, of `compute_advantages`."""
    response_lengths: Tensor
    """[B] int64, all 1: of a sample only the last token is trained on."""
    num_tokens: int
    num_sequences: int
    max_response_length: int
    sequence_ids: Tensor | None = None
    """[B] int64, as in `LossInputs`."""


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
    has_correction: ClassVar[bool] = False
    """The loss accounts for the difference to the policy that sampled."""
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
    trains_scores: ClassVar[bool] = False
    """The trained model is a reward model: it has a score head, and learns from `score_loss`."""
    early_stop_kl: ClassVar[float | None] = None
    """Mean of the metric policy/kl of an epoch above which the actor makes no further epoch in the step."""
    needs_critic: ClassVar[bool] = False
    """A critic gives `values` and learns from `value_loss`."""
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
    def samples_per_row(self) -> int:
        """Without a rollout: the number of samples that a row of the data is."""
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
        actor, critic, reference, reward = symbolic_roles("actor critic reference reward", present=roles)
        models = symbolic_roles(" ".join(role for role in roles if role.startswith("reward_model")))
        is_without_pass = self.takes_engine_log_probs
        return (
            actor.rollout()
            .join(
                reward.score,
                *(model.score for model in models),
                None if is_without_pass else actor.log_probs,
                reference.log_probs,
                critic.values,
            )
            .advantages(self)
            .update(critic)
            .update(actor, reads=("tokens", *self.loss_reads) if is_without_pass else None)
        )

    def step_errors(self, num_samples: int) -> Iterable[str]:
        """Return one error message per flag that does not fit a step of so many samples, or none."""
        return ()

    def build_kl_controller(self) -> FixedKLController | AdaptiveKLController:
        """Return the KL controller of a new run. Its owner passes `coef` on as `kl_coef`, and updates the
        controller with the metric MEASURED_KL after each step."""
        return FixedKLController(0.0)

    def compute_advantages(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the columns of `advantage_writes`, [N] fp32 each, and this rank's part of the metrics (see
        `loss`).

        A sample whose reward failed has advantage 0 and returns NaN. Collective over the data-parallel ranks.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no advantages (needs_rollout is {self.needs_rollout})"
        )

    def shaped_reward(self, reward: float, length: int, max_response_length: int) -> float:
        """Return the reward of a response of `length` tokens that the advantages are computed from. Metrics
        have the reward as it was given."""
        return reward

    def is_left_out(self, truncated: bool) -> bool:
        """Return whether the policy's loss and its denominators leave a response out. `truncated`:
        --max-response-length cut it."""
        return False

    def left_out(self, inputs: AdvantageInputs) -> Tensor | None:
        """Return [S] bool, which samples of the step the policy's loss and its denominators leave out because of
        their rewards; None: none. The same on every rank."""
        return None

    def compute_corrections(self, inputs: AdvantageInputs) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the column correction_weights, [N] fp32, if the loss reads it, and this rank's part of the
        metrics. Collective over the data-parallel ranks."""
        return {}, {}

    def select_tokens(
        self, inputs: AdvantageInputs, advantages: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the column selected_tokens, [N] fp32, if the loss reads it, and this rank's part of the metrics.
        Collective over the data-parallel ranks.

        Args:
            advantages: [N] fp32, of `compute_advantages`."""
        return {}, {}

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


def promised_weight(
    algorithm: Algorithm, loss: Literal["loss", "value_loss", "score_loss"], *counts: int
) -> float | None:
    """Return the `weight_sum` that belongs to one of the algorithm's losses, or None if a subclass has
    replaced the loss but not the sum."""
    if loss == "score_loss":  # its tokens are samples, whose weights are the algorithm's to choose
        return None
    sum_name = {"loss": "weight_sum", "value_loss": "value_weight_sum"}[loss]
    classes = type(algorithm).__mro__
    of_loss, of_sum = (next(cls for cls in classes if name in vars(cls)) for name in (loss, sum_name))
    return getattr(algorithm, sum_name)(*counts) if issubclass(of_sum, of_loss) else None


def advantage_metrics(inputs: AdvantageInputs, advantages: Tensor) -> dict[str, float]:
    """Return this rank's part of the metrics advantage/max_abs and reward/failed (number of failed
    rewards)."""
    return {
        "advantage/max_abs": advantages.abs().max().item() if len(advantages) else 0.0,
        "reward/failed": float(inputs.rewards[inputs.counted_rows].isnan().sum()),
    }


def flow_of_actors(config: TrainConfig, roles: Iterable[str]) -> Flow:
    """Return the calls of one training step of all actors of a job, each by its own algorithm. `roles`: names
    of all roles of the job."""
    roles, flows = list(roles), []
    for suffix, of_actor in configs_of_actors(config).items():
        mine = [role for role in roles if actor_suffix(role, roles) == suffix]
        flows.append(
            of_actor.algorithm.flow([kind_and_suffix(role)[0] for role in mine] if suffix else mine).of_actor(
                suffix
            )
        )
    flow, staleness = flows[0].beside(*flows[1:]), config.streaming.staleness
    return flow.with_staleness(staleness) if staleness else flow
