"""Define the batch of a training step: samples concatenated without padding, with typed columns per token.

The alignment rule: column[i] belongs to token i, so log_probs[i] is the log-probability *of* token i. The
shift to the position that predicts token i happens in `MicroBatch.predict_positions`, nowhere else.

Example: prompt (5, 6) with response (7, 1), and prompt (8,) with response (9, 9, 1):
    tokens          5 6 7 1 8 9 9 1
    cu_seqlens      0 4 8
    response_mask   0 0 1 1 0 1 1 1

A multi-turn sample has several runs of sampled tokens. The mask has holes where the environment's messages
are. Everywhere in this module response tokens are the sampled ones, and prompt tokens are all others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, make_dataclass

import torch

from megarl.flow.columns import BATCH_COLUMNS, COLUMNS, TOKEN_COLUMNS, WIDE_COLUMNS
from megarl.packing import Sample, run_lengths

_Columns = make_dataclass(
    "_Columns",
    [(name, torch.Tensor | None, field(default=None)) for name in BATCH_COLUMNS],
    kw_only=True,
)
"""Base class with a field for every optional column in the table of megarl/flow/columns.py."""


@dataclass
class Batch(_Columns):
    """B samples with T tokens in all, concatenated without padding. All tensors are on the CPU of the rank
    that holds them.

    The token columns of megarl/flow/columns.py are fields too (`batch.old_log_probs`). A column that is not
    computed yet is None."""

    sample_ids: torch.Tensor
    """[B] int64 ids, unique in the step. The driver plans with these ids."""
    tokens: torch.Tensor
    """[T] int64, prompt and response of each sample, one sample after another."""
    cu_seqlens: torch.Tensor
    """[B + 1] int64, the first index of each sample in tokens."""
    response_mask: torch.Tensor
    """[T] bool, true on tokens that the policy produced (SFT: should produce)."""

    @staticmethod
    def from_samples(
        sample_ids: list[int],
        prompts: list[list[int]],
        responses: list[list[int]],
        rollout_log_probs: list[list[float]] | None = None,
        holes: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> Batch:
        """Return a batch of these prompts and responses (lists of token ids).

        Args:
            rollout_log_probs: of the sampled tokens of each response.
            holes: (start, end) in each response of the tokens that were not sampled. Default: none."""
        runs = [
            run_lengths(len(prompt), len(response), of_sample)
            for prompt, response, of_sample in zip(
                prompts, responses, holes or [()] * len(prompts), strict=True
            )
        ]
        tokens = torch.tensor(
            [t for p, r in zip(prompts, responses, strict=True) for ids in (p, r) for t in ids],
            dtype=torch.int64,
        )
        segments = torch.tensor([length for of_sample in runs for length in of_sample], dtype=torch.int64)
        mask = torch.tensor([False, True]).repeat(len(segments) // 2).repeat_interleave(segments)
        batch = Batch(
            torch.tensor(sample_ids, dtype=torch.int64),
            tokens,
            _cumulative(torch.tensor([sum(of_sample) for of_sample in runs], dtype=torch.int64)),
            mask,
        )
        if rollout_log_probs is not None:
            batch.rollout_log_probs = batch.scatter([x for row in rollout_log_probs for x in row])
        return batch

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def lengths(self) -> torch.Tensor:
        """[B] int64, number of tokens of each sample."""
        return self.cu_seqlens.diff()

    @property
    def sample_of_token(self) -> torch.Tensor:
        """[T] int64, index within the batch of the sample that each token belongs to."""
        return torch.arange(len(self)).repeat_interleave(self.lengths)

    @property
    def response_lengths(self) -> torch.Tensor:
        """[B] int64, number of response tokens of each sample."""
        return self.tokens_per_sample(self.response_mask)

    def tokens_per_sample(self, mask: torch.Tensor) -> torch.Tensor:
        """Return [B] int64: how many of each sample's tokens a [T] bool mask covers."""
        return _cumulative(mask)[self.cu_seqlens].diff()

    def scatter(
        self, response_values: Iterable[float] | torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return a [T] column with these [N] values on the response tokens, in order, and 0 elsewhere."""
        column = torch.zeros(len(self.tokens), dtype=dtype)
        column[self.response_mask] = torch.as_tensor(response_values, dtype=dtype)
        return column

    def spread(self, sample_values: torch.Tensor) -> torch.Tensor:
        """Return a [T] fp32 column in which each response token has the value of its sample; 0 elsewhere."""
        return sample_values.float().repeat_interleave(self.lengths) * self.response_mask

    @property
    def columns(self) -> dict[str, torch.Tensor]:
        """The optional columns that the batch has, by name."""
        return {name: column for name in BATCH_COLUMNS if (column := getattr(self, name)) is not None}

    def set_column(self, name: str, column: torch.Tensor) -> None:
        """Store a [T] token column on the CPU, without its gradient. Raises ValueError for another name,
        shape or dtype than the column table has."""
        if name in WIDE_COLUMNS and column.shape[:1] == self.tokens.shape:
            setattr(self, name, column.detach().cpu())
            return
        check_column_names([name])
        dtype = column_dtype(name)
        if column.shape != self.tokens.shape or column.dtype != dtype:
            raise ValueError(
                f"column {name} ({list(column.shape)} {column.dtype}) must be one {dtype} per token, "
                f"{list(self.tokens.shape)}. Batch.scatter makes it from values of the response tokens."
            )
        setattr(self, name, column.detach().cpu())

    def set_versions(self, samples: Sequence[Sample]) -> None:
        """Store the column weight_versions, which says by which weights each response token was sampled.

        Args:
            samples: the driver's records of the samples of the batch, in the same order."""
        runs = torch.tensor([run for sample in samples for run in sample.runs], dtype=torch.int32)
        versions, counts = runs.view(-1, 2).unbind(1)
        self.weight_versions = self.scatter(versions.repeat_interleave(counts), torch.int32)

    def select(self, rows: list[int]) -> Batch:
        """Return a batch of the samples at these positions, in this order."""
        starts, lengths = self.cu_seqlens[:-1][rows], self.lengths[rows]
        # token index = position inside the selection, moved from the sample's new start to its old start
        new_cu = _cumulative(lengths)
        index = torch.arange(int(new_cu[-1])) + (starts - new_cu[:-1]).repeat_interleave(lengths)
        columns = {name: column[index] for name, column in self.columns.items()}
        return Batch(self.sample_ids[rows], self.tokens[index], new_cu, self.response_mask[index], **columns)

    def select_samples(self, sample_ids: Iterable[int]) -> Batch:
        """Return a batch of the samples with these ids, in this order."""
        where = {sample: row for row, sample in enumerate(self.sample_ids.tolist())}
        return self.select([where[sample] for sample in sample_ids])

    @staticmethod
    def cat(batches: list[Batch]) -> Batch:
        """Return one batch with all samples of the batches, in order. Raises ValueError for a column that
        only some of them have."""
        present = batches[0].columns.keys()
        if odd := sorted({name for b in batches for name in b.columns.keys() ^ present}):
            raise ValueError(
                f"column {odd[0]} is in some of the {len(batches)} batches only. Set it in all of "
                "them, or in none."
            )
        parts = {
            name: torch.cat([getattr(b, name) for b in batches])
            for name in ("sample_ids", "tokens", "response_mask", *present)
        }
        return Batch(cu_seqlens=_cumulative(torch.cat([b.lengths for b in batches])), **parts)


def expert_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype that holds the expert ids of a model with so many experts: uint8 or int16."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def column_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a token column that has one number per token."""
    return getattr(torch, COLUMNS[name].dtype)


def check_column_names(names: Iterable[str]) -> None:
    """Raise ValueError unless each name is that of a column with one number per token, such as "values", or
    of a teacher's column."""
    for name in names:
        if name not in (*TOKEN_COLUMNS, *WIDE_COLUMNS):
            raise ValueError(f"column ({name!r}) must be one of {', '.join(TOKEN_COLUMNS)}.")


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


@dataclass
class MicroBatch:
    """The input of one forward pass: a Batch, and the positions of its N response tokens.

    With context parallelism the positions may be those of one rank."""

    batch: Batch
    response_positions: torch.Tensor
    """[N] int64, indices into batch.tokens, ascending."""

    @staticmethod
    def of(batch: Batch) -> MicroBatch:
        return MicroBatch(batch, batch.response_mask.nonzero()[:, 0])

    @property
    def predict_positions(self) -> torch.Tensor:
        """[N] int64: the position whose logits predict each response token, which is the position before it.

        A sampled token never starts a sample."""
        return self.response_positions - 1

    @property
    def targets(self) -> torch.Tensor:
        """[N] int64, token ids of the response tokens."""
        return self.batch.tokens[self.response_positions]

    def column(self, name: str) -> torch.Tensor | None:
        """Return the [N] values of a token column on the response tokens, or None if the batch lacks the
        column."""
        column = getattr(self.batch, name)
        return None if column is None else column[self.response_positions]

    @property
    def response_length_of_token(self) -> torch.Tensor:
        """[N] int64: for each response token the response length of its sample."""
        rows = torch.searchsorted(self.batch.cu_seqlens, self.response_positions, right=True) - 1
        return self.batch.response_lengths[rows]
