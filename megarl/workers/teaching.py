"""Let the reference teach: write what the policy learns from at each sampled token.

With a hint (--teacher-hint-key) the teacher reads another prompt than the policy: the row's, extended by the
hint. The response follows it unchanged, so what it says of response token t belongs to the policy's token
t."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megarl.batch import Batch, MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.schema import TrainConfig
from megarl.data.encoder import PromptEncoder, load_rows
from megarl.data.hints import hinted_rows
from megarl.data.tokenizer import tokenizer_of
from megarl.invariants import InvariantError

from megarl.workers.policy import PolicyRole

if TYPE_CHECKING:
    from megarl.megatron.teacher import HeadInputs, Teaching


Teacher = TypeVar("Teacher", bound=PolicyRole)
Passes = Callable[[PolicyRole, list[MicroBatch]], "list[torch.Tensor] | None"]
"""Function that runs a policy over micro-batches, and returns the values of their response tokens; None
before the last stage."""


class HintedPrompts:
    """The prompts that the teacher reads, as token ids."""

    def __init__(self, config: TrainConfig, key: str) -> None:
        """Read and encode all training rows. Raises ValueError for a row without a hint, and for one that is
        too long for the teacher."""
        flag = f"--teacher-hint-key ({key})"
        rows = hinted_rows(load_rows(config, config.data.train_data), key)
        tokenizer = tokenizer_of(config.model)
        self._encoder = PromptEncoder(tokenizer, rows)
        longest = max(len(ids) for ids in self._encoder.prompts(range(len(rows))))
        limit = ModelShape.load(config.model.reference_folder).max_position_embeddings
        wanted = longest + config.max_sampled_length
        if wanted > limit:
            raise ValueError(
                f"{flag}: the longest prompt with its hint has {longest} tokens, and with a response {wanted}; the "
                f"teacher takes {limit} (max_position_embeddings). Shorten the hints."
            )

    def extended(self, batch: Batch, rows: Mapping[int, int]) -> Batch:
        """Return the batch with the teacher's prompts.

        Args:
            rows: sample id -> row of the data."""
        ids = batch.sample_ids.tolist()
        prompts = self._encoder.prompts([rows[sample] for sample in ids])
        tokens, masks = [], []
        for index, (begin, end) in enumerate(zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:])):
            first = begin + int(batch.response_mask[begin:end].int().argmax())
            prompt = torch.tensor(prompts[index], dtype=torch.int64)
            tokens.append(torch.cat([prompt, batch.tokens[first:end]]))
            of_prompt = torch.zeros(len(prompt), dtype=torch.bool)
            masks.append(torch.cat([of_prompt, batch.response_mask[first:end]]))
        lengths = torch.tensor([0, *map(len, tokens)], dtype=torch.int64)
        nothing = batch.tokens[:0], batch.response_mask[:0]
        return Batch(
            sample_ids=batch.sample_ids,
            tokens=torch.cat([nothing[0], *tokens]),
            cu_seqlens=lengths.cumsum(0),
            response_mask=torch.cat([nothing[1], *masks]),
        )


class TeacherPasses:
    """The passes of a policy that teaches, for this rank's samples.

    Args:
        others: data source -> the policies that teach its rows in place of this one, with their weights."""

    def __init__(
        self, policy: PolicyRole, others: Mapping[str, Mapping[PolicyRole, float]] = MappingProxyType({})
    ) -> None:
        self.policy, self._others, self._sources = policy, others, []
        key, config = policy.algorithm.teacher_hint_key, policy.config
        self._hints = None if key is None else HintedPrompts(config, key)
        if others:
            self._sources = [row.data_source for row in load_rows(config, config.data.train_data)]

    def write_log_probs(self, rows: Mapping[int, int]) -> None:
        """Write the column ref_log_probs. `rows`: sample id -> row of the data."""
        temperature = self.policy.config.sampling.temperature
        passes = lambda policy, micro_batches: policy.model.log_probs(micro_batches, temperature)
        self.policy.write_column("ref_log_probs", self._by_teacher(passes, rows), largest=0.0)

    def _by_teacher(self, passes: Passes, rows: Mapping[int, int]) -> list[torch.Tensor] | None:
        """Return the values of the response tokens of each of this rank's micro-batches, those of each sample by its
        teacher, or the weighted mean of several; None before the last stage. Every teacher makes all passes, of the
        samples that are its own."""
        micro_batches = self.policy.micro_batches(self.policy.shard.mini_batches)
        if self._hints is not None:
            micro_batches = [
                MicroBatch.of(self._hints.extended(micro.batch, rows)) for micro in micro_batches
            ]
        if not self._others:
            return passes(self.policy, micro_batches)
        of_samples: list[dict[int, torch.Tensor]] = [{} for _ in micro_batches]
        for teacher in (self.policy, *teachers_in(self._others)):
            parts = [MicroBatch.of(self._samples_of(teacher, micro.batch, rows)) for micro in micro_batches]
            values = passes(teacher, parts)
            if values is None:
                continue
            for found, part, of_part in zip(of_samples, parts, values, strict=True):
                lengths = part.batch.response_lengths.tolist()
                for sample, of_sample in zip(
                    part.batch.sample_ids.tolist(), of_part.split(lengths), strict=True
                ):
                    weighted = of_sample * self._teachers(rows[sample])[teacher]
                    found[sample] = found[sample] + weighted if sample in found else weighted
        if values is None:
            return None
        return [
            torch.cat([values[0][:0], *(found[sample] for sample in micro.batch.sample_ids.tolist())])
            for found, micro in zip(of_samples, micro_batches, strict=True)
        ]

    def _samples_of(self, teacher: PolicyRole, batch: Batch, rows: Mapping[int, int]) -> Batch:
        ids = batch.sample_ids.tolist()
        return batch.select([at for at, sample in enumerate(ids) if teacher in self._teachers(rows[sample])])

    def _teachers(self, row: int) -> Mapping[PolicyRole, float]:
        """Return the teachers of a row of the data, with their weights."""
        return self._others.get(self._sources[row], {self.policy: 1.0})

    def write_hidden_states(self, rows: Mapping[int, int]) -> None:
        """Write the column teacher_hidden. `rows`: sample id -> row of the data."""
        from megarl.megatron.teacher import last_hidden

        self._write("teacher_hidden", last_hidden, rows)

    def write_top_tokens(self, rows: Mapping[int, int]) -> None:
        """Write the column teacher_top_k. `rows`: sample id -> row of the data."""
        from megarl.megatron.teacher import top_tokens

        vocab_size = ModelShape.load(self.policy.config.model.model).vocab_size
        k = self.policy.algorithm.teacher_top_k
        self._write("teacher_top_k", functools.partial(top_tokens, k=k, vocab_size=vocab_size), rows)

    def _write(
        self, column: str, outputs: Callable[[HeadInputs], torch.Tensor], rows: Mapping[int, int]
    ) -> None:
        policy, shard = self.policy, self.policy.shard
        temperature = policy.config.sampling.temperature
        passes = lambda policy, micro_batches: policy.model.outputs(micro_batches, outputs, temperature)
        of_tokens = self._by_teacher(passes, rows)
        if of_tokens is None:
            return
        values = torch.cat(of_tokens)
        if not values.isfinite().all():
            raise InvariantError(f"{policy.name}: {column} has a value that is not finite")
        whole = torch.zeros(len(shard.batch.tokens), *values.shape[1:], dtype=values.dtype)
        whole[shard.batch.response_mask] = values
        shard.set_column(column, whole)


def teachers_in(others: Mapping[str, Mapping[Teacher, float]]) -> list[Teacher]:
    """Return the teachers of all data sources, each once."""
    return [*dict.fromkeys(teacher for of_source in others.values() for teacher in of_source)]


def teaching_of(policy: PolicyRole) -> Teaching | None:
    """Return what the policy of this rank learns from a teacher; None if nothing, or before the last
    stage."""
    from megarl.megatron.teacher import Teaching, teacher_head

    algorithm, config, model = policy.algorithm, policy.config, policy.model
    divergence = algorithm.teacher_divergence()
    if divergence is None or not model.is_last_stage:
        return None
    if algorithm.teacher_column != "teacher_hidden":
        return Teaching(divergence, None)
    tp, shape = model.groups.tp, policy.shape
    dtype = torch.bfloat16 if config.model.bf16 else torch.float32
    num_rows = shape.padded_vocab_size() // tp.size()
    weight = teacher_head(
        config.model.reference_folder, num_rows, tp.rank(), shape.vocab_size, dtype, model.device
    )
    return Teaching(divergence, weight)


def wide_formats(algorithm: Any, config: TrainConfig) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return column -> dtype and shape of a token's row, for the column that a teacher writes."""
    if algorithm.teacher_column is None:
        return {}
    if algorithm.teacher_column == "teacher_top_k":
        return {"teacher_top_k": (torch.float32, (2 * algorithm.teacher_top_k,))}
    hidden = ModelShape.load(config.model.reference_folder).hidden_size
    return {"teacher_hidden": (torch.bfloat16 if config.model.bf16 else torch.float32, (hidden,))}
