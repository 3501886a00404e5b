"""Implement the actor of supervised fine-tuning: the same updates, on responses from the dataset."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.data.encoder import PromptEncoder, load_rows
from megarl.data.prompts import PromptDataset
from megarl.data.rendering import RowSample
from megarl.data.tokenizer import Tokenizer, tokenizer_of
from megarl.flow.job_roles import Actor
from megarl.packing import MiniBatch
from megarl.workers.actor import ActorRole
from megarl.workers.implements import implements
from megarl.workers.row_samples import batch_of_rows
from megarl.workers.random_state import RandomStateOfRank
from megarl.workers.run_folder import RunFolderOfRank
from megarl.workers.store import BatchShard
from megarl.workers.stored_log_probs import digest_of_rows


@implements(Actor)
class SFTActorRole(ActorRole, RandomStateOfRank, RunFolderOfRank):
    """An actor that learns the responses of its dataset, for supervised fine-tuning."""

    rows: list[list[RowSample]]
    """Samples of every row of the training data."""

    def load_dataset(self) -> list[list[tuple[int, int, float | None]]] | None:
        """Tokenize the training rows. The mesh's first rank returns (length, response length, reward) of the
        samples of every row; other ranks return None."""
        config = self.config
        tokenizer = tokenizer_of(config.model)
        dataset = load_rows(config, config.data.train_data, self.algorithm.row_needs)
        self.rows = self.read_rows(dataset, PromptEncoder(tokenizer, dataset), tokenizer)
        if self.mesh.ranks[0] != self.rank:
            return None
        return [
            [(len(one.prompt) + len(one.response), one.num_trained, one.reward) for one in row]
            for row in self.rows
        ]

    def digest_rows(self) -> str:
        """Return a digest of the samples of all training rows, which `load_dataset` has tokenized."""
        return digest_of_rows(self.rows)

    def read_rows(
        self, dataset: PromptDataset, encoder: PromptEncoder, tokenizer: Tokenizer
    ) -> list[list[RowSample]]:
        """Return the samples of every row of the data: here one, the row's response, without a reward.

        Raises: ValueError naming a row that cannot be trained on as the chat template writes it."""
        return [[one] for one in encoder.answers(range(len(dataset)), turns=self.algorithm.train_turns)]

    def receive_rows(self, visits: Mapping[int, int], mini_batches: list[MiniBatch]) -> None:
        """Make the dataset rows that this rank trains on in a step its training batch.

        Args:
            visits: visit -> dataset row. The n samples of visit v have the ids n v, n v + 1, ..."""
        dp_rank = self.mesh.coordinates(self.rank)["dp"]  # the model may not be built yet
        samples = [sample for mini_batch in mini_batches for sample in mini_batch.samples_of(dp_rank)]
        batch = batch_of_rows(samples, [self.row_sample(visits, sample) for sample in samples])
        self.store.release_batch(self.shard_key)
        self.store.set_batch(self.shard_key, BatchShard(batch, mini_batches))

    def row_sample(self, visits: Mapping[int, int], sample: int) -> RowSample:
        """Return the token ids and the reward of a sample of the step, by its id."""
        visit, index = divmod(sample, self.algorithm.samples_per_row)
        return self.rows[visits[visit]][index]
