"""Define the columns of a step's data, e.g. old_log_probs, in one table, and the ways in which flows name
columns.

To add a token column, write a row of COLUMNS, and declare the column in `writes=` of the role method that
computes it (megarl/flow/job_roles.py). The worker stores the column with `write_column` or
`BatchShard.set_column`. Batches then hold the column, exchanges move it between meshes, and flows know which
node writes it.

A flow names columns in four ways:

    old_log_probs    a column of the table, or of a user's own
    values?          an optional read: the column is read if a node writes it
    scores*          the column of every role that writes it
    scores:judge_2   the column of the second role of a kind, where the first one writes `scores` too

and state, which outlives the step:

    weights:actor    a node that reads it before another node writes it sees the last step's state
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One named quantity of the samples of a step, with one value per token or per sample.

    Example: `Column(name="values", holds="...")` has one float32 per token, on the ranks.
    """

    name: str
    holds: str
    """Meaning of a number in the column, in words."""
    dtype: str = "float32"
    """Name of the torch dtype. Alternatives are separated by a bar; the model decides between them."""
    row: tuple[str, ...] = ()
    """Names of the sizes of one token's row. Empty: one number per token."""
    per: Literal["token", "sample"] = "token"
    on: Literal["ranks", "driver"] = "ranks"
    """Place of the values. The driver reads its columns before it issues a call that needs them."""
    is_sampled: bool = False
    """Whether the engine makes the column together with the tokens, which then represent it in flows."""
    is_recorded: bool = False
    """Whether the driver's records of the samples hold the values. Each rank fills the column from them, and
    no message has it."""


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column(
            name="tokens",
            dtype="int64",
            is_sampled=True,
            holds="Prompt and response of each sample, one sample after another.",
        ),
        Column(
            name="response_mask",
            dtype="bool",
            is_sampled=True,
            holds="True on tokens that the policy produced (SFT: that it should produce).",
        ),
        Column(
            name="rollout_log_probs",
            is_sampled=True,
            holds="Log-probability under the engine that sampled the token.",
        ),
        Column(
            name="weight_versions",
            dtype="int32",
            is_sampled=True,
            is_recorded=True,
            holds="Version of the weights that sampled the token; only with --staleness.",
        ),
        Column(
            name="old_log_probs",
            holds="Log-probability under the policy before this step's updates.",
        ),
        Column(name="ref_log_probs", holds="Log-probability under the reference policy."),
        Column(
            name="teacher_hidden",
            dtype="float32|bfloat16",
            row=("hidden",),
            holds="Last hidden state of the teacher where it predicts the token; its output layer makes logits of it.",
        ),
        Column(
            name="teacher_top_k",
            row=("2 k",),
            holds="Ids of the teacher's k most likely tokens in place of this one, and their log-probabilities.",
        ),
        Column(name="values", holds="The critic's value of the state in which the token was chosen."),
        Column(name="cost_values", holds="The cost critic's value of that state."),
        Column(
            name="old_scores",
            holds="Score by the reward model in training before this step's update, on the last token.",
        ),
        Column(name="advantages", holds="Advantage; NaN where the sample's reward failed."),
        Column(
            name="correction_weights",
            holds="Weight of the token in the policy loss that corrects for the policy that sampled.",
        ),
        Column(
            name="selected_tokens",
            holds="1 where the policy loss treats the token by itself (clip-cov, kl-cov), else 0.",
        ),
        Column(
            name="ce_weights",
            holds="Weight of the token's negative log-prob beside the policy loss (--positive-nll-coef).",
        ),
        Column(
            name="behavior_weights",
            holds="Weight of the policy that sampled in the one that ratios compare with (--old-log-probs "
            "interpolated).",
        ),
        Column(
            name="returns",
            holds="What the critic learns to predict; NaN where the sample's reward failed.",
        ),
        Column(
            name="cost_returns",
            holds="What the cost critic learns to predict; NaN where the sample's reward failed.",
        ),
        Column(
            name="routed_experts",
            dtype="uint8|int16",
            row=("layers", "topk"),
            is_sampled=True,
            holds="Experts that the engine sent the token to in each layer; anything in dense layers.",
        ),
        Column(
            name="lengths",
            dtype="int64",
            per="sample",
            on="driver",
            holds="Tokens of prompt and response.",
        ),
        Column(name="rewards", per="sample", on="driver", holds="Reward by the rule; None: it failed."),
        Column(
            name="scores",
            per="sample",
            on="driver",
            holds="Score by a reward model; None: it failed. Scores count among the rewards.",
        ),
    )
}

BATCH_COLUMNS = tuple(
    name
    for name, column in COLUMNS.items()
    if column.per == "token" and name not in ("tokens", "response_mask")
)
"""Token columns that a batch may lack."""
TOKEN_COLUMNS = tuple(name for name in BATCH_COLUMNS if not COLUMNS[name].row)
"""Batch columns with one number per token. The number is 0 on tokens that are not part of the response."""
COMPUTED_COLUMNS = tuple(name for name in TOKEN_COLUMNS if not COLUMNS[name].is_sampled)
"""Token columns that a role computes from the samples. Exchanges move them between meshes."""
WIDE_COLUMNS = tuple(name for name in BATCH_COLUMNS if COLUMNS[name].row and not COLUMNS[name].is_sampled)
"""Columns with several numbers per token that a role computes from the samples; exchanges move them too."""
SAMPLED_COLUMNS = tuple(
    name
    for name, column in COLUMNS.items()
    if column.is_sampled and not column.row and not column.is_recorded
)
"""Token columns that every sample has when it comes from the engine."""
DRIVER_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.on == "driver")
"""Columns whose values return to the driver. A call that reads one waits for the values."""


def is_state(column: str) -> bool:
    """Return whether the column is a role's weights, e.g. "weights:actor", which outlive the step."""
    return column.startswith("weights:")


def base(column: str) -> str:
    """Return the name of a column in COLUMNS: `scores` for scores, scores?, scores* and
    scores:reward_model_2."""
    return column.split(":")[0].rstrip("?*")


def any_in_driver(columns: Iterable[str]) -> bool:
    """Return whether the driver holds the values of one of these columns."""
    return any(base(column) in DRIVER_COLUMNS for column in columns)
