"""Implement the actor that is a reward model in training: it gives every answer of the data one score."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from megarl.algorithms.base import ScoreLossInputs
from megarl.config.hf_config import ModelShape
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset
from megarl.data.rendering import RowSample, scored
from megarl.data.tokenizer import Tokenizer, pad_of
from megarl.flow.job_roles import Actor
from megarl.packing import MiniBatch
from megarl.workers.implements import implements
from megarl.workers.objective import Objective
from megarl.workers.offload_manager import needs
from megarl.workers.preference import PreferenceActorRole

if TYPE_CHECKING:
    from megarl.megatron.loss_check import LossCheck, PassLimit
    from megarl.megatron.value_model import ScoreModel


@implements(Actor)
class RewardTrainingRole(PreferenceActorRole):
    """A reward model that learns from pairs, on one rank. It starts from the language model of --model, with
    a score head of zeros.

    Only one token of an answer is trained on, which has the score."""

    turns = "score"

    objective = Objective(
        loss="score_loss",
        inputs=ScoreLossInputs,
        columns={"old_scores": "old_scores", "advantages": "advantages"},
        target="advantages",
        output="scores",
        before="old_scores",
        what="score",
    )

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.load(self.folder, value_head=True)

    def build(self) -> ScoreModel:
        from megarl.megatron.value_model import ScoreModel

        return self.build_as(ScoreModel)

    def read_rows(
        self, dataset: PromptDataset, encoder: PromptEncoder, tokenizer: Tokenizer
    ) -> list[list[RowSample]]:
        """Return both answers of every row, as the chat template writes the conversations. The last token
        that is no padding is scored."""
        pad = pad_of(self.folder, tokenizer)
        return [[scored(one, pad) for one in pair] for pair in super().read_rows(dataset, encoder, tokenizer)]

    @needs("parameters")
    def scores(self) -> None:
        """Write the column old_scores: the model's score of every sample of this rank."""
        self.write_column("old_scores", self.model.values(self.micro_batches(self.shard.mini_batches)))

    def _update_once(
        self, mini_batch: MiniBatch, check: LossCheck | None, kl_coef: float
    ) -> dict[str, float]:
        loss = self.loss_of_update(mini_batch, check)
        return self.model.update(
            self.micro_batches([mini_batch]),
            lambda micro, scores: loss(micro, slice(None), scores=scores),
            check,
        )

    def pass_limit(self) -> PassLimit | None:
        from megarl.workers.pass_limit import value_limit

        return value_limit(self.model.device) if self.has_own("old_scores") else None
