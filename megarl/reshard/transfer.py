"""Executes a reshard plan, and moves weights between Hugging Face folders and live shards.

Between two ranks, what one needs of the other travels over torch.distributed in chunks, in the dtype of its
destination. A large rectangle without gaps is sent from where it is and received where it belongs; the rest,
columns of a matrix and small rectangles, goes through a staging buffer of bounded size. Within a rank
everything is copied in place."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.hf_config import ModelShape
from megarl.files.writing import writing
from megarl.reshard.atlas import KEPT_IN_FP32, VALUE_HEAD, Atlas, Piece, Sizes, hf_atlas, hf_sizes
from megarl.reshard.copier import CopyPlan
from megarl.reshard.hf_folder import (
    INDEX,
    is_sequence_classifier,
    misfit,
    prediction_layers,
    read_folder,
    tensor_problems,
)
from megarl.reshard.plan import RectCopy, ReshardPlan, make_plan

logger = logging.getLogger(__name__)
_WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ALIGNMENT = 16  # bytes


class Transfer:
    """The part of a plan that one rank plays; built once, run for every new version of the weights.

    Args:
        plan: from `make_plan` over atlases of *global* ranks; the same on every rank.
        rank: this process.
        src_tensors, dst_tensors: local parameters by the names of the atlases, each a [rows, cols] view of
            the live weight (vectors [n, 1]). What this rank does not send or receive may be absent.
        group: process group of the messages. Default: the world.
        dtype: of everything that is written, if every rank knows it. Default: receivers tell their senders
            when this is built.
    Raises: ValueError naming a tensor that is missing or has another shape than the plan needs.

    Building (without `dtype`) and running are collective over `plan.ranks`. Views and buffers are kept; where
    a storage has moved in memory, with all its views, call `follow`."""

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        src_tensors: dict[str, Tensor],
        dst_tensors: dict[str, Tensor],
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.plan, self.rank, self._group = plan, rank, group
        send_pairs = {dst: copies for (src, dst), copies in plan.copies.items() if src == rank != dst}
        receive_pairs = {src: copies for (src, dst), copies in plan.copies.items() if dst == rank != src}
        sources = {peer: [src_view(c, src_tensors) for c in copies] for peer, copies in send_pairs.items()}
        destinations = {
            peer: [dst_view(c, dst_tensors) for c in copies] for peer, copies in receive_pairs.items()
        }
        wire = self._agree_on_dtypes(sources, destinations, dtype)
        limit = _chunk_bytes(plan)
        self._sends = {peer: _chunks(views, wire[peer], limit) for peer, views in sources.items()}
        self._receives = {
            peer: _chunks(views, [view.dtype for view in views], limit)
            for peer, views in destinations.items()
        }
        self._here = [
            (src_view(c, src_tensors), dst_view(c, dst_tensors)) for c in plan.copies.get((rank, rank), ())
        ]
        self.follow()
        self.bytes: int = self._local.bytes + sum(
            chunk.bytes for chunks in self._receives.values() for chunk in chunks
        )
        """Bytes that one run writes on this rank."""

    def follow(self) -> None:
        """Read the addresses of all tensors again. Not collective."""
        self._rounds = _rounds(self._sends, self._receives)
        self._local = plan_copies(self._here)

    def _agree_on_dtypes(
        self,
        sources: dict[int, list[Tensor]],
        destinations: dict[int, list[Tensor]],
        dtype: torch.dtype | None,
    ) -> dict[int, list[torch.dtype]]:
        """Return peer -> dtype of each rectangle that goes to it. Receivers send their peers one code per
        rectangle."""
        if dtype is not None:
            return {peer: [dtype] * len(views) for peer, views in sources.items()}
        told = {
            peer: torch.tensor(
                [_WIRE_DTYPES.index(v.dtype) for v in views], dtype=torch.uint8, device=views[0].device
            )
            for peer, views in destinations.items()
        }
        heard = {
            peer: torch.empty(len(views), dtype=torch.uint8, device=views[0].device)
            for peer, views in sources.items()
        }
        _finish(self._start(told, heard))
        return {peer: [_WIRE_DTYPES[code] for code in codes.tolist()] for peer, codes in heard.items()}

    def _start(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> list[dist.Work]:
        """Send and receive one tensor per peer."""
        operations = [
            dist.P2POp(dist.irecv, tensor, peer, self._group) for peer, tensor in sorted(receives.items())
        ]
        operations += [
            dist.P2POp(dist.isend, tensor, peer, self._group) for peer, tensor in sorted(sends.items())
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def run(self) -> int:
        """Copy the sources' current values to the destinations. When it returns, this rank's sources may
        change again.

        Returns: bytes written on this rank."""
        travelling: tuple[list[dist.Work], CopyPlan | None] = [], None
        for number, part in enumerate(self._rounds):
            part.pack.run()
            requests = self._start(part.sends, part.receives)
            if number == 0:
                self._local.run()
            _finish(*travelling)  # the next round needs its half of the staging buffer
            travelling = requests, part.unpack
        _finish(*travelling)
        return self.bytes


def _finish(requests: list[dist.Work], unpack: CopyPlan | None = None) -> None:
    for request in requests:
        request.wait()
    if unpack is not None:
        unpack.run()


# ------------------------------------------------------------------ messages

STAGING_BYTES = 32 << 20
"""Most staging memory of one rank; half of it is filled or emptied while the other half travels. A longer
row still travels in one message."""


def _chunk_bytes(plan: ReshardPlan) -> int:
    """Return the size of a chunk, the same on every rank: the rank with the most messages must have room
    for one of each, twice."""
    messages = Counter(rank for pair in plan.copies if pair[0] != pair[1] for rank in pair)
    return STAGING_BYTES // (2 * max(messages.values(), default=1))


@dataclass
class _Chunk:
    """One message between two ranks: local views, and the dtypes in which they travel."""

    views: list[Tensor]
    dtypes: list[torch.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the message, without the gaps between rows."""
        return sum(view.numel() * dtype.itemsize for view, dtype in zip(self.views, self.dtypes, strict=True))

    @property
    def starts(self) -> list[int]:
        """Return the byte at which each view begins, and where the message ends."""
        sizes = (
            -(-view.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            for view, dtype in zip(self.views, self.dtypes, strict=True)
        )
        return list(accumulate(sizes, initial=0))

    def in_place(self) -> Tensor | None:
        """Return the message itself, uint8, if this end needs no staging. The other end decides for
        itself."""
        if len(self.views) == 1 and self.views[0].is_contiguous() and self.views[0].dtype == self.dtypes[0]:
            message = self.views[0].detach().view(-1).view(torch.uint8)
            return message if message.numel() == self.starts[-1] else None
        return None

    def staged(self, buffer: Tensor) -> list[Tensor]:
        """Return views of `buffer`, which holds the message, in the form of `views`."""
        return [
            buffer[start : start + view.numel() * dtype.itemsize].view(dtype).view(view.shape)
            for start, view, dtype in zip(self.starts, self.views, self.dtypes, strict=False)
        ]


def _chunks(views: Sequence[Tensor], dtypes: Sequence[torch.dtype], limit: int) -> list[_Chunk]:
    """Cut rectangles, in order, by rows into chunks of at most `limit` bytes. Shapes and dtypes alone decide,
    so both ends agree.

    What has a quarter of the limit or more is alone in its chunk, so that it need not be staged."""
    chunks: list[_Chunk] = []
    open_chunk: _Chunk | None = None
    for view, dtype in zip(views, dtypes, strict=True):
        row_bytes = view.shape[1] * dtype.itemsize
        for part in view.split(max(1, limit // row_bytes)):
            size = part.numel() * dtype.itemsize
            if 4 * size >= limit:
                chunks.append(_Chunk([part], [dtype]))
                continue
            if open_chunk is None or open_chunk.starts[-1] + size > limit:
                open_chunk = _Chunk([], [])
                chunks.append(open_chunk)
            open_chunk.views.append(part)
            open_chunk.dtypes.append(dtype)
    return chunks


@dataclass(frozen=True)
class _Round:
    """One round: a message per peer and direction, and the copies before and after."""

    pack: CopyPlan
    sends: dict[int, Tensor]
    receives: dict[int, Tensor]
    unpack: CopyPlan


def _rounds(sends: dict[int, list[_Chunk]], receives: dict[int, list[_Chunk]]) -> list[_Round]:
    """Return the rounds, at least one. Chunk i of every pair of ranks travels in round i of both, so no
    two ranks wait for each other."""
    count = max((len(chunks) for chunks in (*sends.values(), *receives.values())), default=1)
    halves: list[Tensor | None] = [None, None]
    needed = [
        sum(
            chunks[i].starts[-1]
            for side in (sends, receives)
            for chunks in side.values()
            if i < len(chunks) and chunks[i].in_place() is None
        )
        for i in range(count)
    ]
    rounds = []
    for i in range(count):
        copies: dict[str, list[tuple[Tensor, Tensor]]] = {"pack": [], "unpack": []}
        messages: dict[str, dict[int, Tensor]] = {"sends": {}, "receives": {}}
        at = 0
        for kind, side in (("sends", sends), ("receives", receives)):
            for peer, chunks in side.items():
                if i >= len(chunks):
                    continue
                chunk, message = chunks[i], chunks[i].in_place()
                if message is None:
                    if halves[i % 2] is None:
                        halves[i % 2] = torch.empty(
                            max(needed[i % 2 :: 2]), dtype=torch.uint8, device=chunk.views[0].device
                        )
                    message = halves[i % 2][at : at + chunk.starts[-1]]
                    at += chunk.starts[-1]
                    staged = chunk.staged(message)
                    if kind == "sends":
                        copies["pack"].extend(zip(chunk.views, staged, strict=True))
                    else:
                        copies["unpack"].extend(zip(staged, chunk.views, strict=True))
                messages[kind][peer] = message
        rounds.append(
            _Round(
                plan_copies(copies["pack"]),
                messages["sends"],
                messages["receives"],
                plan_copies(copies["unpack"]),
            )
        )
    return rounds


def plan_copies(pairs: Iterable[tuple[Tensor, Tensor]]) -> CopyPlan:
    """Plan the copies of (source, destination) pairs. What is contiguous on both sides becomes one row."""
    flat = [
        (src.view(-1), dst.view(-1)) if src.is_contiguous() and dst.is_contiguous() else (src, dst)
        for src, dst in pairs
    ]
    return CopyPlan([dst for _, dst in flat], [src for src, _ in flat], torch.get_num_threads())


def src_view(copy: RectCopy, tensors: dict[str, Tensor]) -> Tensor:
    return _rectangle("source", tensors, copy.src_name, copy.src_row, copy.src_col, copy.rows, copy.cols)


def dst_view(copy: RectCopy, tensors: dict[str, Tensor]) -> Tensor:
    return _rectangle("destination", tensors, copy.dst_name, copy.dst_row, copy.dst_col, copy.rows, copy.cols)


def _rectangle(
    side: str, tensors: dict[str, Tensor], name: str, row: int, col: int, rows: int, cols: int
) -> Tensor:
    if name not in tensors:
        raise ValueError(
            f"{side} tensor {name} is in the plan but not among the {len(tensors)} given: "
            f"{sorted(tensors)[:8]} ..."
        )
    tensor = tensors[name]
    if tensor.dim() != 2 or tensor.shape[0] < row + rows or tensor.shape[1] < col + cols:
        raise ValueError(
            f"{side} tensor {name} has shape {list(tensor.shape)}; the plan uses [{row}:{row + rows}, "
            f"{col}:{col + cols}] of it."
        )
    return tensor[row : row + rows, col : col + cols]


# ------------------------------------------------------------------ Hugging Face folders

_COPIED_FILES = (
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
)
MAX_SHARD_BYTES = 5 * 10**9


@torch.no_grad()
def load_hf(
    folder: str | os.PathLike, atlas: Atlas, tensors: dict[str, Tensor], shape: ModelShape | None = None
) -> None:
    """Fill this rank's shards from the *.safetensors files of `folder`, reading no byte that is not needed.
    Not collective.

    A value head is read from the folder of a sequence classifier. From that of a causal language model, which
    has none, it starts at zero: every value is then 0, and a critic's advantages begin as discounted returns.

    Args:
        atlas: what this rank holds; tensors: its parameters by the same names, each a [rows, cols] view.
            Padding becomes 0; values are converted to each parameter's dtype.
        shape: if given, tensors of the folder that this model does not have, or that are of another size, are
            an error too.
    Raises: ValueError listing tensors that are missing, unexpected or of another size, or naming a file that
        is damaged; FileNotFoundError without weights."""
    stored = read_folder(folder)
    if not is_sequence_classifier(folder):
        atlas = _without_value_head(atlas, tensors)
    needed = {piece.hf_name for param in atlas.values() for piece in param.pieces}
    problems = [f"{name} is missing" for name in sorted(needed - stored.keys())]
    if shape is not None:
        problems = tensor_problems(folder, stored, shape)
        note_prediction_tensors(folder, stored, shape)
    if problems:
        raise ValueError(misfit(folder, problems))
    file_of = {name: tensor.path for name, tensor in stored.items()}
    files = {path: safe_open(path, framework="pt") for path in {file_of[name] for name in needed}}
    for name, param in atlas.items():
        if param.padding_rows:
            tensors[name][param.rows - param.padding_rows :].zero_()
        for piece in param.pieces:
            part = _read(files[file_of[piece.hf_name]].get_slice(piece.hf_name), piece, folder)
            row, col = piece.local_row, piece.local_col
            tensors[name][row : row + part.shape[0], col : col + part.shape[1]].copy_(part)


def note_prediction_tensors(folder: str | os.PathLike, names: Iterable[str], shape: ModelShape) -> None:
    """Log on rank 0 which tensors of the folder are left out because their layers predict further tokens."""
    layers = prediction_layers(shape)
    found = [name for name in names if name.startswith(layers)]
    if found and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "%s: the %d tensors of %s predict further tokens. They are left out: neither trained "
            "nor exported.",
            folder,
            len(found),
            " and ".join(f"{layer}*" for layer in layers),
        )


def _without_value_head(atlas: Atlas, tensors: dict[str, Tensor]) -> Atlas:
    """Set the value head, if there is one, to 0, and return what is left to load."""
    heads = {
        name for name, param in atlas.items() if any(piece.hf_name == VALUE_HEAD for piece in param.pieces)
    }
    for name in heads:
        tensors[name].zero_()
    return {name: param for name, param in atlas.items() if name not in heads}


def _read(stored, piece: Piece, folder: str | os.PathLike) -> Tensor:
    """Read a piece's rectangle from a safetensors slice, [rows, cols]."""
    size = stored.get_shape()
    rows, cols = (*size, 1)[:2]
    if piece.row_end > rows or piece.col_end > cols:
        raise ValueError(
            f"{piece.hf_name} in {folder} has shape {size}, but by config.json it has at least "
            f"{piece.row_end} rows and "
            f"{piece.col_end} columns."
        )
    if len(size) == 1:
        return stored[piece.row_start : piece.row_end].unsqueeze(1)
    if (piece.col_start, piece.col_end) == (0, cols):
        return stored[piece.row_start : piece.row_end]
    return stored[piece.row_start : piece.row_end, piece.col_start : piece.col_end]


def checkpoint_sizes(folder: str | os.PathLike) -> Sizes:
    """Return (rows, cols) of every tensor in the *.safetensors files of `folder`; a vector of n is (n, 1).

    Raises: ValueError naming a tensor of more dimensions; FileNotFoundError without weights."""
    stored = read_folder(folder)
    for name, tensor in stored.items():
        if not 1 <= len(tensor.entry.shape) <= 2:
            raise ValueError(
                f"{name} in {folder} has shape {list(tensor.entry.shape)}: only vectors and "
                "matrices can be transferred."
            )
    return {name: tensor.size for name, tensor in stored.items()}


@torch.no_grad()
def save_hf(
    folder: str | os.PathLike,
    source_folder: str | os.PathLike,
    shape: ModelShape,
    atlases: dict[int, Atlas],
    tensors: dict[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model that the ranks of `atlases` hold as a Hugging Face folder. Collective over those ranks.

    The lowest rank collects one tensor after the other and writes; it holds at most one shard file of full
    tensors. The folder appears at once and complete: a new one replaces an old export.

    Args:
        source_folder: where config.json (a value head makes it that of a sequence classifier with one label),
            generation_config.json and the tokenizer files are copied from.
        tensors: this rank's [rows, cols] parameters by the names of its atlas.
        dtype: of the files, but of `KEPT_IN_FP32`. Default: that of the parameters.
    Raises: FileExistsError if `folder` holds something that is not an export; WriteError naming a file that
        cannot be written."""
    root, rank = min(atlases), dist.get_rank() if dist.is_initialized() else 0
    example = next(iter(tensors.values()))
    dtype, folder = dtype or example.dtype, Path(folder)
    sizes = hf_sizes(shape)
    plans = _plan_per_tensor(make_plan(atlases, {root: hf_atlas(shape)}))
    shards = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size[0] * size[1] * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    partial = start_folder(folder, Path(source_folder), shape, dtype) if rank == root else None
    with removed_if_failed(partial):
        _save_shards(shards, partial, plans, sizes, tensors, dtype, group)
    if rank == root:
        publish(partial, folder)


def _save_shards(
    shards: StateDictSplit,
    partial: Path | None,
    plans: dict[str, ReshardPlan],
    sizes: Sizes,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> None:
    """Collect and write one file after the other, and their index if there are several. `partial` is the
    folder; None: this rank only sends."""
    rank, device = dist.get_rank() if dist.is_initialized() else 0, next(iter(tensors.values())).device
    for file, names in shards.filename_to_tensors.items():
        full: dict[str, Tensor] = {}
        for name in names:
            kept = torch.float32 if name.endswith(KEPT_IN_FP32) else dtype
            target = {} if partial is None else {name: torch.empty(sizes[name], dtype=kept, device=device)}
            if rank in plans[name].ranks:
                Transfer(plans[name], rank, tensors, target, group, dtype=kept).run()
            if partial is not None:
                full[name] = (target[name].flatten() if sizes[name][1] == 1 else target[name]).cpu()
        if partial is not None:
            save_tensors(full, partial / file)
    if partial is not None and shards.is_sharded:
        write_text(
            partial / INDEX,
            json.dumps({"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}, indent=2)
            + "\n",
        )


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises: WriteError naming it; the library's own error is no OSError and names
    no file."""
    with writing(path):
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            code = re.search(r"os error (\d+)", str(error))
            raise (
                OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(errno.EIO, str(error))
            ) from error


def write_text(path: Path, text: str) -> None:
    """Write a small file. Raises: WriteError naming it."""
    with writing(path):
        path.write_text(text)


@contextlib.contextmanager
def removed_if_failed(partial: Path | None) -> Iterator[None]:
    """Remove the partial folder on failure, so that a full disk gets its space back."""
    try:
        yield
    except BaseException:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _plan_per_tensor(plan: ReshardPlan) -> dict[str, ReshardPlan]:
    """Return one plan per destination tensor."""
    per_tensor: dict[str, dict[tuple[int, int], list[RectCopy]]] = {}
    for pair, copies in plan.copies.items():
        for copy in copies:
            per_tensor.setdefault(copy.dst_name, {}).setdefault(pair, []).append(copy)
    return {
        name: ReshardPlan({pair: tuple(copies) for pair, copies in pairs.items()})
        for name, pairs in per_tensor.items()
    }


def start_folder(folder: Path, source: Path, shape: ModelShape, dtype: torch.dtype) -> Path:
    """Create a temporary folder beside `folder` with everything but the weights."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise FileExistsError(
            f"{folder} exists and is not an exported model: it has no config.json. Choose another "
            "folder or remove it."
        )
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    with writing(partial):
        partial.mkdir(parents=True)
    with removed_if_failed(partial):
        for path in {path for pattern in _COPIED_FILES for path in source.glob(pattern)}:
            with writing(partial / path.name):
                shutil.copy2(path, partial)
        config = json.loads((source / "config.json").read_text())
        config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
        if shape.value_head:  # transformers reads num_labels off the labels
            config |= {
                "architectures": [shape.architecture],
                "id2label": {"0": "LABEL_0"},
                "label2id": {"LABEL_0": 0},
            }
            config.pop("num_labels", None)
        if shape.num_nextn_predict_layers:
            logger.warning(
                "%s has none of the layers for multi-token prediction of %s: "
                "num_nextn_predict_layers is 0 in its config.json",
                folder,
                source,
            )
            config["num_nextn_predict_layers"] = 0
        write_text(partial / "config.json", json.dumps(config, indent=2) + "\n")
    return partial


def publish(partial: Path, folder: Path) -> None:
    """Rename the folder to its final name. A reader sees the old export or the new one, except for an
    instant in which there is none."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
