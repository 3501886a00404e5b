"""Implement the actor of supervised fine-tuning: the same updates, on responses from the dataset."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.batch import Batch
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.flow.job_roles import Actor
from megarl.packing import MiniBatch
from megarl.workers.actor import ActorRole
from megarl.workers.implements import implements
from megarl.workers.random_state import RandomStateOfRank
from megarl.workers.run_folder import RunFolderOfRank
from megarl.workers.store import BatchShard

RowSample = tuple[list[int], list[int], float | None]
"""Prompt, response with end-of-sequence, and reward of one sample of a row of the data."""


@implements(Actor)
class SFTActorRole(ActorRole, RandomStateOfRank, RunFolderOfRank):
    """An actor that learns the responses of its dataset, for supervised fine-tuning."""

    rows: list[list[RowSample]]
    """Samples of every row of the training data."""

    def load_dataset(self) -> list[list[tuple[int, int, float | None]]] | None:
        """Tokenize the training rows. The mesh's first rank returns (length, response length, reward) of the
        samples of every row; other ranks return None."""
        config = self.config
        tokenizer = load_tokenizer(config.model.tokenizer_model or config.model.model)
        dataset = PromptDataset.load(
            config.data.train_data, prompt_key=config.data.prompt_key, needs=self.algorithm.row_needs
        )
        self.rows = self.read_rows(dataset, PromptEncoder(tokenizer, dataset), tokenizer.eos_token_id)
        if self.mesh.ranks[0] != self.rank:
            return None
        return [[(len(p) + len(r), len(r), reward) for p, r, reward in row] for row in self.rows]

    def read_rows(self, dataset: PromptDataset, encoder: PromptEncoder, eos: int) -> list[list[RowSample]]:
        """Return the samples of every row of the data: here one, the row's response, without a reward."""
        rows = range(len(dataset))
        prompts, responses = encoder.prompts(rows), encoder.responses(rows)
        return [[(prompt, [*ids, eos], None)] for prompt, ids in zip(prompts, responses, strict=True)]

    def receive_rows(self, visits: Mapping[int, int], mini_batches: list[MiniBatch]) -> None:
        """Make the dataset rows that this rank trains on in a step its training batch.

        Args:
            visits: visit -> dataset row. The n samples of visit v have the ids n v, n v + 1, ..."""
        dp_rank = self.model.groups.dp.rank()
        samples = [sample for mini_batch in mini_batches for sample in mini_batch.samples_of(dp_rank)]
        of_samples = [self.row_sample(visits, sample) for sample in samples]
        prompts, responses = [prompt for prompt, *_ in of_samples], [ids for _, ids, _ in of_samples]
        batch = Batch.from_samples(samples, prompts, responses)
        self.store.release_batch(self.shard_key)
        self.store.set_batch(self.shard_key, BatchShard(batch, mini_batches))

    def row_sample(self, visits: Mapping[int, int], sample: int) -> RowSample:
        """Return the content of a sample of the step."""
        visit, index = divmod(sample, self.algorithm.samples_per_row)
        return self.rows[visits[visit]][index]
