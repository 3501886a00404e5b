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


@implements(Actor)
class SFTActorRole(ActorRole, RandomStateOfRank, RunFolderOfRank):
    """An actor that learns the responses of its dataset, for supervised fine-tuning."""

    def load_dataset(self) -> list[tuple[int, int]] | None:
        """Tokenize the training rows. The mesh's first rank returns (length, response length) of every row;
        other ranks return None."""
        config = self.config
        tokenizer = load_tokenizer(config.model.tokenizer_model or config.model.model)
        dataset = PromptDataset.load(
            config.data.train_data, prompt_key=config.data.prompt_key, needs="response"
        )
        encoder, rows = PromptEncoder(tokenizer, dataset), range(len(dataset))
        self.prompts = encoder.prompts(rows)
        self.responses = [[*ids, tokenizer.eos_token_id] for ids in encoder.responses(rows)]
        if self.mesh.ranks[0] != self.rank:
            return None
        return [(len(p) + len(r), len(r)) for p, r in zip(self.prompts, self.responses, strict=True)]

    def receive_rows(self, visits: Mapping[int, int], mini_batches: list[MiniBatch]) -> None:
        """Make the dataset rows that this rank trains on in a step its training batch.

        Args:
            visits: visit -> dataset row; the visit is the sample id."""
        dp_rank = self.model.groups.dp.rank()
        samples = [sample for mini_batch in mini_batches for sample in mini_batch.samples_of(dp_rank)]
        rows = [visits[sample] for sample in samples]
        prompts, responses = [self.prompts[row] for row in rows], [self.responses[row] for row in rows]
        batch = Batch.from_samples(samples, prompts, responses)
        self.store.release_batch(self.shard_key)
        self.store.set_batch(self.shard_key, BatchShard(batch, mini_batches))
