"""Bring a teacher's distribution to the output layer of the policy that learns from it.

    outputs of the teacher's pass         last_hidden, top_tokens: functions of its last hidden states
    Teaching.teacher                      what the policy's chunks of logits are compared with

A whole distribution takes 2 H bytes per token (bf16): the teacher's hidden state. Its product with the
teacher's output layer, of which each tensor-parallel rank of the policy holds the rows of its own columns, is
the teacher's logits. So the two models may be split differently. Of the k most likely tokens only ids and
log-probs are moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from safetensors import safe_open

from megarl.batch import MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.kernels.divergence import Divergence, Teacher, TeacherHead, TeacherTopK, teacher_top_k
from megarl.reshard.atlas import EMBEDDING, OUTPUT
from megarl.reshard.hf_folder import read_folder


@dataclass(frozen=True)
class HeadInputs:
    """Inputs of a model's output layer on its last stage: [n, H] hidden states, this rank's weight
    [V_tp, H], [n] targets."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    group: dist.ProcessGroup | None
    temperature: float


def last_hidden(inputs: HeadInputs) -> torch.Tensor:
    """Return the hidden states themselves, [n, H]."""
    return inputs.hidden


def top_tokens(inputs: HeadInputs, k: int, vocab_size: int) -> torch.Tensor:
    """Return the ids and then the log-probs of the k most likely of the first `vocab_size` tokens, [n, 2 k]
    fp32.

    Ids below 2^24 are exact in fp32."""
    ids, log_probs = teacher_top_k(
        inputs.hidden,
        inputs.weight,
        inputs.targets,
        k,
        vocab_size=vocab_size,
        group=inputs.group,
        temperature=inputs.temperature,
    )
    return torch.cat([ids.float(), log_probs.float()], 1)


def teacher_head(
    folder: str, num_rows: int, rank: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the rows [rank x num_rows, ...) of the output layer of a Hugging Face folder, [num_rows, H].

    Args:
        vocab_size: tokens that the policy knows. Rows from there on are 0."""
    shape = ModelShape.load(folder)
    name = EMBEDDING if shape.tie_word_embeddings else OUTPUT
    stored = read_folder(folder)[name]
    begin, end = (min(at * num_rows, vocab_size) for at in (rank, rank + 1))
    weight = torch.zeros(num_rows, shape.hidden_size, dtype=dtype, device=device)
    with safe_open(stored.path, framework="pt") as file:
        weight[: end - begin] = file.get_slice(name)[begin:end].to(device, dtype)
    return weight


@dataclass(frozen=True)
class Teaching:
    """The divergence from a teacher that a policy learns from, and the teacher's output layer if it is
    needed."""

    divergence: Divergence
    weight: torch.Tensor | None
    """[V_tp, H_teacher]; None if the teacher's most likely tokens are known."""

    def has_read(self, part: MicroBatch) -> bool:
        """Return whether the teacher has read the samples of a micro-batch. It reads no rows of --sft-data."""
        return getattr(part.batch, "teacher_top_k" if self.weight is None else "teacher_hidden") is not None

    def teacher(self, part: MicroBatch, inputs: HeadInputs, vocab_size: int) -> Teacher:
        """Return the teacher at the response tokens of a micro-batch."""
        device = inputs.hidden.device
        if self.weight is not None:
            hidden = part.column("teacher_hidden").to(device, self.weight.dtype)
            return TeacherHead(
                hidden,
                self.weight,
                inputs.targets,
                self.divergence,
                vocab_size=vocab_size,
                group=inputs.group,
                temperature=inputs.temperature,
            )
        ids, log_probs = part.column("teacher_top_k").to(device).chunk(2, dim=1)
        rank = 0 if inputs.group is None else dist.get_rank(inputs.group)
        return TeacherTopK(ids.long() - rank * len(inputs.weight), log_probs, self.divergence)
