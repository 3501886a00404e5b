"""Mix rows of --sft-data into the updates of an actor that learns from samples: the `ce` stream of the loss.

Each optimizer update has a mini-batch of samples and one of rows. Their micro-batches follow one another, so
both add to the same gradient, and each loss is divided by the count of its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megarl.algorithms.cross_entropy import cross_entropy
from megarl.batch import MicroBatch
from megarl.config.schema import TrainConfig
from megarl.data.encoder import PromptEncoder, load_rows
from megarl.data.tokenizer import tokenizer_of
from megarl.packing import MiniBatch
from megarl.workers.row_samples import batch_of_rows
from megarl.workers.store import BatchShard

Loss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


class SftStream:
    """The rows of --sft-data on one rank, and those of the running step.

    Raises: ValueError naming a row that is longer than the model takes.

    Args:
        longest: tokens that the model takes."""

    def __init__(self, config: TrainConfig, longest: int) -> None:
        self._coef = config.sft.sft_coef
        tokenizer = tokenizer_of(config.model)
        dataset = load_rows(config, config.sft.sft_data, "response", "--sft-data")
        self._rows = PromptEncoder(tokenizer, dataset).answers(range(len(dataset)), flag="--sft-data")
        for row, (length, _) in enumerate(self.sizes):
            if length > longest:
                raise ValueError(
                    f"--sft-data: {dataset.places([row])[0]} has {length} tokens, and the model takes {longest} "
                    "(max_position_embeddings). Take the row out."
                )
        self._shard: BatchShard | None = None
        self._beside: dict[tuple, MiniBatch] = {}
        """Micro-batches of a mini-batch of samples -> the mini-batch of rows in the same update."""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(length, response length) of every row."""
        return [(len(one.prompt) + len(one.response), one.num_trained) for one in self._rows]

    def begin_step(
        self,
        visits: Mapping[int, int],
        rows: Sequence[MiniBatch],
        samples: Sequence[MiniBatch],
        dp_rank: int,
    ) -> None:
        """Take the rows of a step.

        Args:
            visits: visit -> row. The visit is the id of its sample.
            rows, samples: mini-batches of rows, and of the samples that they are mixed with."""
        self._beside = {of_samples.micro_batches: one for of_samples, one in zip(samples, rows, strict=True)}
        ids = [visit for mini_batch in rows for visit in mini_batch.samples_of(dp_rank)]
        batch = batch_of_rows(ids, [self._rows[visits[visit]] for visit in ids])
        self._shard = BatchShard(batch, list(rows))

    def mixed(self, mini_batch: MiniBatch, loss: Loss, dp_rank: int) -> tuple[list[MicroBatch], Loss]:
        """Return this rank's micro-batches of rows for the update on a mini-batch of samples, and the loss of
        samples and rows, given the loss of samples.

        Metrics: sft/loss, the mean negative log-prob of the rows' response tokens; sft/tokens, their
            number."""
        assert self._shard is not None, "begin_step was called"
        rows, coef = self._beside[mini_batch.micro_batches], self._coef
        micro_batches = [self._shard.micro_batch(ids) for ids in rows.micro_batches[dp_rank]]
        batches = {id(micro.batch) for micro in micro_batches}

        def of_both(micro: MicroBatch, part: slice, **outputs: torch.Tensor):
            if id(micro.batch) not in batches:
                return loss(micro, part, **outputs)
            log_probs = outputs["log_probs"]
            value = cross_entropy(log_probs, rows.num_tokens)
            count = value.new_tensor(float(len(log_probs)))
            return coef * value, {"sft/loss": value.detach(), "sft/tokens": count}

        return micro_batches, of_both
