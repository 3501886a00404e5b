"""Our safetensors files against the library `safetensors`, and files that are not what they say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint.tensor_file import DTYPES, Entry, TensorFile, TensorFileError, write_tensors

TENSORS = {
    "matrix": torch.arange(24.0).view(6, 4),
    "half": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "vector": torch.arange(7, dtype=torch.int64),
    "deep": torch.arange(24, dtype=torch.uint8).view(2, 3, 4),
    "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
}


def entries(tensors: dict[str, torch.Tensor], rows: int = 2) -> list[Entry]:
    return [Entry(name, t.dtype, tuple(t.shape), lambda t=t: t.split(rows)) for name, t in tensors.items()]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))
    )


def test_the_library_reads_what_we_write(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    size, digest = write_tensors(path, entries(TENSORS))
    read = load_file(path)
    assert read.keys() == TENSORS.keys() and all(
        equal(read[name], tensor) for name, tensor in TENSORS.items()
    )
    assert (size, digest) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def test_we_read_what_the_library_writes(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    file = TensorFile(path)
    assert {*file.keys()} == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert file.dtype(name) == tensor.dtype and file.shape(name) == tuple(tensor.shape)
        assert equal(file.read(name), tensor.reshape(tensor.shape[0], -1))
        assert equal(file.read(name, 1, 2), tensor.reshape(tensor.shape[0], -1)[1:2])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_goes_through(tmp_path: Path, dtype):
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    write_tensors(tmp_path / "a", entries({"x": tensor}))
    assert equal(TensorFile(tmp_path / "a").read("x"), tensor) and equal(
        load_file(tmp_path / "a")["x"], tensor
    )


def test_values_are_converted_as_pytorch_does(tmp_path: Path):
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    write_tensors(tmp_path / "a", [Entry("x", torch.bfloat16, (4, 3), lambda: [values])])
    assert equal(load_file(tmp_path / "a")["x"], values.bfloat16())


@pytest.mark.parametrize("length", (0, 5, 8, 40, -1))
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, length):
    write_tensors(tmp_path / "a", entries(TENSORS))
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:length])
    with pytest.raises(TensorFileError, match=f"{tmp_path / 'b'} (is cut short|has no safetensors header)"):
        TensorFile(tmp_path / "b")


@pytest.mark.parametrize(
    "header",
    (
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
        {"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [2]}},
        {"x": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 16]}},
        {"x": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}},
        {"x": [1]},
        [1],
    ),
    ids=str,
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header):
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(TensorFileError):
        TensorFile(tmp_path / "a")


def test_a_header_of_brackets_in_brackets_is_refused(tmp_path: Path):
    (tmp_path / "a").write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    with pytest.raises(TensorFileError, match="RecursionError"):
        TensorFile(tmp_path / "a")


def test_what_is_not_in_it_is_named(tmp_path: Path):
    write_tensors(tmp_path / "a", entries({"x": torch.zeros(3, 2)}))
    with pytest.raises(TensorFileError, match=f"{tmp_path / 'a'} has no y"):
        TensorFile(tmp_path / "a").read("y")
    with pytest.raises(TensorFileError, match="x has 3 rows, not rows 2 to 4"):
        TensorFile(tmp_path / "a").read("x", 2, 4)


def test_too_few_rows_are_an_error(tmp_path: Path):
    with pytest.raises(TensorFileError, match="x: 8 bytes came for a tensor of 16"):
        write_tensors(tmp_path / "a", [Entry("x", torch.float32, (4,), lambda: [torch.zeros(2)])])
