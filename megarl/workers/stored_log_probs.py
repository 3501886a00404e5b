"""Keep log-probs of samples in files, found by the samples' content, so that they are computed once.

    ref_log_probs/index.json                 what the log-probs are of, see `trainer/stored_reference.py`
    ref_log_probs/3f2a....safetensors        samples [B, 32] uint8, their keys; lengths [B]; log_probs [N] fp32

A file appears whole or not at all. Its name depends on its samples, so files of several ranks, and those of
an interrupted job with another layout, lie beside each other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.batch import Batch
from megarl.files.writing import writing
from megarl.invariants import InvariantError
from megarl.reshard.export_folder import save_tensors


def sample_keys(batch: Batch) -> list[bytes]:
    """Return the SHA-256 of each sample's token ids and of which of them are response tokens."""
    bounds = batch.cu_seqlens.tolist()
    tokens, mask = batch.tokens.numpy(), batch.response_mask.numpy()
    return [
        hashlib.sha256(tokens[begin:end].tobytes() + mask[begin:end].tobytes()).digest()
        for begin, end in zip(bounds, bounds[1:])
    ]


class StoredLogProbs:
    """The log-probs of the response tokens of samples, in memory and in the files of a folder."""

    def __init__(self, folder: Path) -> None:
        """Read all files of the folder. Raises InvariantError for a damaged one."""
        self.folder = folder
        self._of_sample: dict[bytes, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._read(path)

    @property
    def _advice(self) -> str:
        # A single file is not computed again: the index says that all log-probs are there.
        return f"Remove the folder {self.folder}, to compute all of them anew"

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                samples, lengths, log_probs = map(file.get_tensor, ("samples", "lengths", "log_probs"))
                digest = (file.metadata() or {}).get("sha256")
        except (SafetensorError, OSError) as error:
            raise InvariantError(f"{path} cannot be read: {error}. {self._advice}") from error
        if digest != _digest(log_probs):
            raise InvariantError(f"{path} is damaged: its digest does not fit. {self._advice}")
        self._of_sample |= zip(map(bytes, samples.tolist()), log_probs.split(lengths.tolist()), strict=True)

    def lacks(self, batch: Batch) -> bool:
        """Return whether the log-probs of a sample of the batch are missing."""
        return not all(key in self._of_sample for key in sample_keys(batch))

    def values(self, batch: Batch) -> torch.Tensor:
        """Return the [N] fp32 log-probs of the batch's response tokens. Raises InvariantError for a sample
        that was not scored."""
        keys = sample_keys(batch)
        missing = [
            one
            for one, key in zip(batch.sample_ids.tolist(), keys, strict=True)
            if key not in self._of_sample
        ]
        if missing:
            raise InvariantError(
                f"{self.folder} has no log-probs of sample {missing[0]}: a file was removed or damaged, or "
                f"the sample's row has changed. {self._advice}"
            )
        return torch.cat([torch.zeros(0), *(self._of_sample[key] for key in keys)])

    def write(self, batch: Batch, log_probs: torch.Tensor) -> None:
        """Add a file with the [N] log-probs of the batch's response tokens."""
        keys = sample_keys(batch)
        if not keys:
            return
        path = self.folder / f"{hashlib.sha256(b''.join(keys)).hexdigest()[:32]}.safetensors"
        partial = path.with_suffix(f".partial_{os.getpid()}")
        tensors = {
            "samples": torch.tensor([list(key) for key in keys], dtype=torch.uint8),
            "lengths": batch.response_lengths,
            "log_probs": log_probs,
        }
        try:
            save_tensors(tensors, partial, {"sha256": _digest(log_probs)})
            with writing(path):
                with open(partial, "rb") as file:
                    os.fsync(file.fileno())
                partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)  # of a full disk


def _digest(log_probs: torch.Tensor) -> str:
    return hashlib.sha256(log_probs.numpy().tobytes()).hexdigest()


def digest_of_rows(rows: Sequence[Sequence[object]]) -> str:
    """Return the SHA-256 of all samples of the training rows, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode())
    return digest.hexdigest()
