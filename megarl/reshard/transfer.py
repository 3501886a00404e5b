"""Executes a reshard plan, and moves weights between Hugging Face folders and live shards.

Between two ranks, everything that one needs of the other travels as one message: rectangles are packed into a flat buffer in
the dtype of their destination, sent over torch.distributed, and unpacked. Within a rank they are copied in place."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import OUTPUT, Atlas, Piece, Sizes, hf_atlas, hf_sizes
from megarl.reshard.copier import CONVERSIONS, CopyPlan
from megarl.reshard.plan import RectCopy, ReshardPlan, make_plan

_WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ALIGNMENT = 16  # bytes


class Transfer:
    """The part of a plan that one rank plays; built once, run for every new version of the weights.

    Args:
        plan: from `make_plan` over atlases of *global* ranks; the same on every rank.
        rank: this process.
        src_tensors, dst_tensors: local parameters by the names of the atlases, each a [rows, cols] view of the live weight
            (vectors [n, 1]). What this rank does not send or receive may be absent.
        group: process group of the messages. Default: the world.
        dtype: of everything that is written, if every rank knows it. Default: receivers tell their senders when this is built.
    Raises: ValueError naming a tensor that is missing or has another shape than the plan needs.

    Building (without `dtype`) and running are collective over `plan.ranks`. Views and buffers are kept, so a parameter must not
    move in memory; build a new Transfer if it does."""

    def __init__(self, plan: ReshardPlan, rank: int, src_tensors: dict[str, Tensor], dst_tensors: dict[str, Tensor],
                 group: dist.ProcessGroup | None = None, dtype: torch.dtype | None = None) -> None:  # fmt: skip
        self.plan, self.rank, self._group = plan, rank, group
        send_pairs = {dst: copies for (src, dst), copies in plan.copies.items() if src == rank != dst}
        receive_pairs = {src: copies for (src, dst), copies in plan.copies.items() if dst == rank != src}
        sources = {peer: [_src_view(c, src_tensors) for c in copies] for peer, copies in send_pairs.items()}
        destinations = {peer: [_dst_view(c, dst_tensors) for c in copies] for peer, copies in receive_pairs.items()}
        wire = self._agree_on_dtypes(sources, destinations, dtype)
        self._sends = {peer: _Message.like(views, wire[peer]) for peer, views in sources.items()}
        self._receives = {peer: _Message.like(views, [v.dtype for v in views]) for peer, views in destinations.items()}
        here = plan.copies.get((rank, rank), ())
        self._pack = _Copies((view, buffer) for peer, views in sources.items() for view, buffer in zip(views, self._sends[peer].views))
        self._local = _Copies((_src_view(c, src_tensors), _dst_view(c, dst_tensors)) for c in here)
        self._unpack = _Copies((buffer, view) for peer, views in destinations.items()
                               for view, buffer in zip(views, self._receives[peer].views))  # fmt: skip
        self.bytes: int = self._local.bytes + self._unpack.bytes
        """Bytes that one run writes on this rank."""

    def _agree_on_dtypes(self, sources: dict[int, list[Tensor]], destinations: dict[int, list[Tensor]],
                         dtype: torch.dtype | None) -> dict[int, list[torch.dtype]]:  # fmt: skip
        """Peer -> dtype of each rectangle that goes to it. Receivers send their peers one code per rectangle."""
        if dtype is not None:
            return {peer: [dtype] * len(views) for peer, views in sources.items()}
        told = {peer: torch.tensor([_WIRE_DTYPES.index(v.dtype) for v in views], dtype=torch.uint8, device=views[0].device)
                for peer, views in destinations.items()}  # fmt: skip
        heard = {peer: torch.empty(len(views), dtype=torch.uint8, device=views[0].device) for peer, views in sources.items()}
        self._exchange(told, heard)
        return {peer: [_WIRE_DTYPES[code] for code in codes.tolist()] for peer, codes in heard.items()}

    def _exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor], meanwhile: Callable[[], None] | None = None) -> None:
        """Send and receive one tensor per peer. `meanwhile` runs while they travel."""
        operations = [dist.P2POp(dist.irecv, tensor, peer, self._group) for peer, tensor in sorted(receives.items())]
        operations += [dist.P2POp(dist.isend, tensor, peer, self._group) for peer, tensor in sorted(sends.items())]
        requests = dist.batch_isend_irecv(operations) if operations else []
        if meanwhile is not None:
            meanwhile()
        for request in requests:
            request.wait()

    def run(self) -> int:
        """Carry the sources' current values over. When it returns, this rank's sources may change again.

        Returns: bytes written on this rank."""
        self._pack.run()
        sends, receives = ({peer: message.buffer for peer, message in side.items()} for side in (self._sends, self._receives))
        self._exchange(sends, receives, meanwhile=self._local.run)
        self._unpack.run()
        return self.bytes


@dataclass(frozen=True)
class _Message:
    """What travels between one pair of ranks: bytes, and a [rows, cols] view of them per rectangle."""

    buffer: Tensor
    views: list[Tensor]

    @classmethod
    def like(cls, rectangles: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> _Message:
        starts, total = [], 0
        for rectangle, dtype in zip(rectangles, dtypes, strict=True):
            starts.append(total)
            total += -(-rectangle.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.empty(total, dtype=torch.uint8, device=rectangles[0].device)
        return cls(buffer, [buffer[start : start + r.numel() * dtype.itemsize].view(dtype).view(r.shape)
                            for start, r, dtype in zip(starts, rectangles, dtypes, strict=True)])  # fmt: skip


class _Copies:
    """(source, destination) pairs: a CopyPlan, and PyTorch for the conversions that it does not know (to and from fp16)."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        # What is contiguous on both sides is one row.
        flat = [(src.view(-1), dst.view(-1)) if src.is_contiguous() and dst.is_contiguous() else (src, dst) for src, dst in pairs]
        known = [src.dtype == dst.dtype or (src.dtype, dst.dtype) in CONVERSIONS for src, dst in flat]
        planned = [pair for pair, is_known in zip(flat, known, strict=True) if is_known]
        self._others = [pair for pair, is_known in zip(flat, known, strict=True) if not is_known]
        self._plan = CopyPlan([dst for _, dst in planned], [src for src, _ in planned])
        self.bytes: int = sum(dst.numel() * dst.element_size() for _, dst in flat)

    def run(self) -> None:
        self._plan.run()
        for src, dst in self._others:
            dst.copy_(src)


def _src_view(copy: RectCopy, tensors: dict[str, Tensor]) -> Tensor:
    return _rectangle("source", tensors, copy.src_name, copy.src_row, copy.src_col, copy.rows, copy.cols)


def _dst_view(copy: RectCopy, tensors: dict[str, Tensor]) -> Tensor:
    return _rectangle("destination", tensors, copy.dst_name, copy.dst_row, copy.dst_col, copy.rows, copy.cols)


def _rectangle(side: str, tensors: dict[str, Tensor], name: str, row: int, col: int, rows: int, cols: int) -> Tensor:
    if name not in tensors:
        raise ValueError(f"{side} tensor {name} is in the plan but not among the {len(tensors)} given: {sorted(tensors)[:8]} ...")
    tensor = tensors[name]
    if tensor.dim() != 2 or tensor.shape[0] < row + rows or tensor.shape[1] < col + cols:
        raise ValueError(f"{side} tensor {name} has shape {list(tensor.shape)}; the plan uses [{row}:{row + rows}, "
                         f"{col}:{col + cols}] of it.")
    return tensor[row : row + rows, col : col + cols]


# ------------------------------------------------------------------ Hugging Face folders

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Buffers that old checkpoints carry; transformers ignores them too."""
_COPIED_FILES = ("generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
                 "chat_template*", "*.model")  # fmt: skip
MAX_SHARD_BYTES = 5 * 10**9


@torch.no_grad()
def load_hf(folder: str | os.PathLike, atlas: Atlas, tensors: dict[str, Tensor], shape: ModelShape | None = None) -> None:
    """Fill this rank's shards from the *.safetensors files of `folder`, reading no byte that is not needed. Not collective.

    Args:
        atlas: what this rank holds; tensors: its parameters by the same names, each a [rows, cols] view. Padding becomes 0;
            values are converted to each parameter's dtype.
        shape: if given, tensors of the folder that this model does not have are an error too.
    Raises: ValueError listing tensors that are missing, unexpected or of another size; FileNotFoundError without weights."""
    file_of = weight_files(folder)
    needed = {piece.hf_name for param in atlas.values() for piece in param.pieces}
    problems = [f"{name} is missing" for name in sorted(needed - file_of.keys())]
    if shape is not None:
        known = {*hf_sizes(shape), OUTPUT}  # a tied checkpoint may repeat its embedding as lm_head.weight
        problems += [f"{name} is not a tensor of a {shape.model_type} model" for name in sorted(file_of.keys() - known)
                     if not name.endswith(_IGNORED_SUFFIXES)]  # fmt: skip
    if problems:
        raise ValueError(f"the weights in {folder} do not fit its config.json: {'; '.join(problems)}.")
    files = {path: safe_open(path, framework="pt") for path in {file_of[name] for name in needed}}
    for name, param in atlas.items():
        if param.padding_rows:
            tensors[name][param.rows - param.padding_rows :].zero_()
        for piece in param.pieces:
            part = _read(files[file_of[piece.hf_name]].get_slice(piece.hf_name), piece, folder)
            row, col = piece.local_row, piece.local_col
            tensors[name][row : row + part.shape[0], col : col + part.shape[1]].copy_(part)


def _read(stored, piece: Piece, folder: str | os.PathLike) -> Tensor:
    """The piece's rectangle of a safetensors slice, [rows, cols]."""
    size = stored.get_shape()
    rows, cols = (*size, 1)[:2]
    if piece.row_end > rows or piece.col_end > cols:
        raise ValueError(f"{piece.hf_name} in {folder} has shape {size}, but by config.json it has at least {piece.row_end} rows and "
                         f"{piece.col_end} columns.")
    if len(size) == 1:
        return stored[piece.row_start : piece.row_end].unsqueeze(1)
    if (piece.col_start, piece.col_end) == (0, cols):
        return stored[piece.row_start : piece.row_end]
    return stored[piece.row_start : piece.row_end, piece.col_start : piece.col_end]


def weight_files(folder: str | os.PathLike) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no *.safetensors in {folder}. --random-init starts without weights; convert *.bin files first.")
    return {name: path for path in paths for name in safe_open(path, framework="pt").keys()}  # noqa: SIM118 (not a dict)


def checkpoint_sizes(folder: str | os.PathLike) -> Sizes:
    """Tensor name -> (rows, cols) of every tensor in the *.safetensors files of `folder`; a vector of n is (n, 1).

    Raises: ValueError naming a tensor of more dimensions; FileNotFoundError without weights."""
    sizes: Sizes = {}
    for name, path in weight_files(folder).items():
        with safe_open(path, framework="pt") as file:
            size = file.get_slice(name).get_shape()
        if not 1 <= len(size) <= 2:
            raise ValueError(f"{name} in {folder} has shape {size}: only vectors and matrices can be transferred.")
        sizes[name] = (size[0], size[1] if len(size) == 2 else 1)
    return sizes


@torch.no_grad()
def save_hf(folder: str | os.PathLike, source_folder: str | os.PathLike, shape: ModelShape, atlases: dict[int, Atlas],
            tensors: dict[str, Tensor], *, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None,
            max_shard_bytes: int = MAX_SHARD_BYTES) -> None:  # fmt: skip
    """Write the model that the ranks of `atlases` hold as a Hugging Face folder. Collective over those ranks.

    The lowest rank collects one tensor after the other and writes; it holds at most one shard file of full tensors. The folder
    appears at once and complete: a new one replaces an old export.

    Args:
        source_folder: where config.json, generation_config.json and the tokenizer files are copied from.
        tensors: this rank's [rows, cols] parameters by the names of its atlas.
        dtype: of the files. Default: that of the parameters.
    Raises: FileExistsError if `folder` holds something that is not an export."""
    root, rank = min(atlases), dist.get_rank() if dist.is_initialized() else 0
    example = next(iter(tensors.values()))
    dtype, folder = dtype or example.dtype, Path(folder)
    sizes = hf_sizes(shape)
    plans = _plan_per_tensor(make_plan(atlases, {root: hf_atlas(shape)}))
    shards = split_state_dict_into_shards_factory(
        sizes, get_storage_size=lambda size: size[0] * size[1] * dtype.itemsize, filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes)  # fmt: skip
    if rank == root:
        partial = _start_folder(folder, Path(source_folder), dtype)
    for file, names in shards.filename_to_tensors.items():
        full: dict[str, Tensor] = {}
        for name in names:
            target = {name: torch.empty(sizes[name], dtype=dtype, device=example.device)} if rank == root else {}
            if rank in plans[name].ranks:
                Transfer(plans[name], rank, tensors, target, group, dtype=dtype).run()
            if rank == root:
                full[name] = (target[name].flatten() if sizes[name][1] == 1 else target[name]).cpu()
        if rank == root:
            save_file(full, partial / file, metadata={"format": "pt"})
    if rank == root:
        if shards.is_sharded:
            index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        _publish(partial, folder)


def _plan_per_tensor(plan: ReshardPlan) -> dict[str, ReshardPlan]:
    """One plan per destination tensor."""
    per_tensor: dict[str, dict[tuple[int, int], list[RectCopy]]] = {}
    for pair, copies in plan.copies.items():
        for copy in copies:
            per_tensor.setdefault(copy.dst_name, {}).setdefault(pair, []).append(copy)
    return {name: ReshardPlan({pair: tuple(copies) for pair, copies in pairs.items()}) for name, pairs in per_tensor.items()}


def _start_folder(folder: Path, source: Path, dtype: torch.dtype) -> Path:
    """A temporary folder beside `folder` with everything but the weights."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise FileExistsError(f"{folder} exists and is not an exported model: it has no config.json. Choose another folder or remove it.")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    for path in {path for pattern in _COPIED_FILES for path in source.glob(pattern)}:
        shutil.copy2(path, partial)
    config = json.loads((source / "config.json").read_text())
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return partial


def _publish(partial: Path, folder: Path) -> None:
    """Rename into place. A reader sees the old export or the new one, except for an instant in which there is none."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
