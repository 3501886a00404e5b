"""Implement the actor of supervised fine-tuning: the same updates, on responses from the dataset."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.data.encoder import PromptEncoder, load_rows
from megarl.data.columns import CALLS_AS_TEXT, Prompt
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.episodes.chat import Chat
from megarl.episodes.session import Session
from megarl.flow.job_roles import Actor
from megarl.packing import MiniBatch
from megarl.workers.actor import ActorRole
from megarl.workers.implements import implements
from megarl.workers.row_samples import RowSample, batch_of_rows, last_turns
from megarl.workers.random_state import RandomStateOfRank
from megarl.workers.run_folder import RunFolderOfRank
from megarl.workers.store import BatchShard
from megarl.workers.stored_log_probs import digest_of_rows


def encode_turns(chat: Chat, tokenizer: Tokenizer, row: Prompt) -> RowSample:
    """Return the token ids of a row, in which every turn of the assistant is trained on, except a turn that
    no prompt precedes. Each turn ends with the end of sequence, as the model will write it.

    Raises: ValueError if the chat template refuses the messages, or if one to train on has tool calls."""
    assert row.response is not None
    if isinstance(row.messages, str):
        (prompt,) = tokenizer.encode_prompts([row.messages])
        (ids,) = tokenizer.encode_responses([row.response])
        return RowSample(prompt, [*ids, tokenizer.eos_token_id])
    messages = [*row.messages, {"role": "assistant", "content": row.response}]
    turns = [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]
    session, parent, start = Session(chat), None, 0
    for at in turns:
        if calls := messages[at].get("tool_calls"):
            raise ValueError(f"message {at} has tool_calls ({str(calls)[:80]}), wanted {CALLS_AS_TEXT}")
        (turn,) = session.open(messages[start:at], parent)
        session.add([turn])
        (ids,) = tokenizer.encode_responses([messages[at]["content"]])
        ids = [*ids, tokenizer.eos_token_id]
        session.answer(turn, ids, [0.0] * len(ids), [0] * len(ids))
        parent, start = turn, at + 1
    (branch,) = session.branches()
    return RowSample(branch.prompt, branch.response, holes=tuple(branch.holes))


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

        Raises: ValueError naming a row that the chat template refuses."""
        if self.algorithm.train_turns == "last":
            return [[one] for one in last_turns(encoder, len(dataset), tokenizer.eos_token_id)]
        chat = Chat(tokenizer, (*self.shape.eos_token_ids, tokenizer.eos_token_id))
        encoded = []
        for row, prompt in enumerate(dataset):
            try:
                encoded.append([encode_turns(chat, tokenizer, prompt)])
            except ValueError as error:
                where = dataset.places([row])[0]
                raise ValueError(f"--train-turns (all): {where} of --train-data: {error}") from error
        return encoded

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
