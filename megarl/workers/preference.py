"""Implement the actor that learns from pairs of answers, or labelled ones, in the dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset
from megarl.data.rendering import RowSample, Turns
from megarl.data.tokenizer import Tokenizer
from megarl.flow.job_roles import Actor
from megarl.packing import MiniBatch, Sample
from megarl.workers.implements import implements
from megarl.workers.offload_manager import needs
from megarl.workers.sft import SFTActorRole
from megarl.workers.store import BatchLayout


@implements(Actor)
class PreferenceActorRole(SFTActorRole):
    """An actor whose samples are two answers per row: the chosen and the rejected one, in this order, or the
    row's completion and that of a row with another prompt."""

    turns: Turns = "last"

    def read_rows(
        self, dataset: PromptDataset, encoder: PromptEncoder, tokenizer: Tokenizer
    ) -> list[list[RowSample]]:
        """Return both answers of every row. Their rewards are the scores of the row, else 1 and 0; the label
        for both, if there are labels."""
        if self.algorithm.row_needs == "labelled":
            return _labelled(dataset, encoder)
        rows = range(len(dataset))
        sides = (encoder.answers(rows, column, self.turns) for column in ("chosen", "rejected"))
        return [
            [
                chosen._replace(reward=1.0 if row.score_chosen is None else row.score_chosen),
                rejected._replace(reward=0.0 if row.score_rejected is None else row.score_rejected),
            ]
            for row, chosen, rejected in zip(dataset, *sides, strict=True)
        ]

    def receive_rows(self, visits: Mapping[int, int], mini_batches: list[MiniBatch]) -> None:
        super().receive_rows(visits, mini_batches)
        samples = {}
        for visit in visits:
            for sample in range(2 * visit, 2 * visit + 2):
                one = self.row_sample(visits, sample)
                length = len(one.prompt) + len(one.response)
                samples[sample] = Sample(sample, length, one.num_trained, group=visit)
        self.store.layouts[self.shard_key] = BatchLayout("train", mini_batches, samples)

    @needs("parameters")
    def log_probs(self, version: int | None = None, canaries: bool = False) -> dict[str, float]:
        """Write the column old_log_probs. There is no engine to compare with, so there are no metrics."""
        self.write_log_probs("old_log_probs")
        return {}


def _labelled(dataset: PromptDataset, encoder: PromptEncoder) -> list[list[RowSample]]:
    """Return, for every row, its completion, and the completion of a row with another prompt."""
    samples = encoder.answers(range(len(dataset)))
    others = rows_of_other_prompts([one.prompt for one in samples])
    return [
        [one._replace(reward=label), one._replace(response=samples[other].response, reward=label)]
        for one, other, label in zip(samples, others, (float(row.label) for row in dataset), strict=True)
    ]


def rows_of_other_prompts(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return, for every row, a row with another prompt: the first from half the dataset away on. It is the
    row itself if all prompts are the same.

    The search begins half the dataset away because neighbours often answer the same prompt."""
    count = len(prompts)
    next_prompt = list(range(count))
    """The first row after each row, in a circle, whose prompt differs from the row's."""
    for position in reversed(range(2 * count)):  # the second round knows what follows the last row
        row, following = position % count, (position + 1) % count
        is_same = prompts[row] == prompts[following]
        next_prompt[row] = next_prompt[following] if is_same else following
    found = []
    for row, prompt in enumerate(prompts):
        other = (row + count // 2) % count
        if prompts[other] == prompt:
            other = next_prompt[other]
        found.append(row if prompts[other] == prompt else other)
    return found
