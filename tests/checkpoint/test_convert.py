"""`megarl convert` in every direction: bit-equal tensors, what lies beside them, bounded memory, and errors
that say what is wrong."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.checkpoint import stream
from megarl.checkpoint.load import Checkpoint
from megarl.checkpoint.manifest import CheckpointError
from megarl.checkpoint.rectangles import whole
from megarl.checkpoint.tensor_file import Entry, write_tensors
from megarl.checkpoint.torch_dist import megatron_folder
from megarl.config.errors import ConfigError
from megarl.convert import main, shard_bytes
from tests.checkpoint.cases import MEGATRON_CASES
from megarl.trainer import launch
from tests.checkpoint.tiny import COMMON, make_folder
from tests.launch import run, succeed


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("convert") / "model", "qwen3")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of a Hugging Face folder, or of a checkpoint."""
    if (folder / "checkpoint.json").exists():
        reader = Checkpoint(folder)
        return {
            name: reader.read("weights", name, whole(t.shape)).view(t.shape)
            for name, t in reader.tensors("weights").items()
        }
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def same(a: Path, b: Path, dtype: torch.dtype = torch.float32) -> bool:
    """b has the tensors of a, in a dtype, and nothing else."""
    before, after = weights(a), weights(b)
    return before.keys() == after.keys() and all(
        before[n].to(dtype).equal(after[n]) and after[n].dtype == dtype for n in before
    )


def convert(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_to_a_checkpoint_and_back(model, tmp_path, capsys):
    assert (
        convert("--model", model, "--save", tmp_path / "a", "--to", "checkpoint", "--max-shard-size", "100KB")
        == 0
    )
    assert (
        len(Checkpoint(tmp_path / "a").manifest.files) > 2
        and Checkpoint(tmp_path / "a").state["dtype"] == "float32"
    )
    files = {
        name: t for path in (tmp_path / "a").glob("*.safetensors") for name, t in load_file(path).items()
    }
    assert all(
        t.equal(files[name]) for name, t in weights(model).items()
    )  # whole, under their own names: any reader has them
    assert convert("--model", model, "--load", tmp_path / "a", "--save", tmp_path / "b") == 0
    assert same(model, tmp_path / "b")
    assert {path.name for path in (tmp_path / "b").iterdir()} == {path.name for path in model.iterdir()}
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == json.loads(
        (model / "config.json").read_text()
    )
    assert (
        capsys.readouterr().out
        == f"47 tensors in torch.float32: {tmp_path / 'a'}\n47 tensors in torch.float32: {tmp_path / 'b'}\n"
    )
    assert not [path for path in tmp_path.iterdir() if path.name not in ("a", "b")]


def test_shards_with_an_index_in_another_dtype_are_what_transformers_loads(model, tmp_path):
    from transformers import AutoModelForCausalLM

    (tmp_path / "out").mkdir()  # empty is as good as absent
    assert (
        convert(
            "--model", model, "--save", tmp_path / "out", "--dtype", "bfloat16", "--max-shard-size", "0.1MB"
        )
        == 0
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights(model).keys() and len({*index["weight_map"].values()}) > 2
    assert max(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) < 1.05e5
    assert same(model, tmp_path / "out", torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(p.equal(weights(model)[name].bfloat16()) for name, p in loaded.named_parameters())
    assert convert("--model", tmp_path / "out", "--save", tmp_path / "again") == 0  # from shards
    assert same(tmp_path / "out", tmp_path / "again", torch.bfloat16)


@pytest.mark.parametrize(
    "checkpoint, family",
    [
        ("qwen3-pp2_vpp2", "qwen3"),
        ("qwen3_moe-ep2+sharded", "qwen3_moe"),
        ("qwen2-dp2+sharded+bf16", "qwen2"),
        ("qwen3_critic-pp2", "qwen3_critic"),
    ],
)
def test_trained_checkpoints_become_folders(saved, tmp_path, checkpoint, family):
    """Of any layout; in the dtype of the model, not of its masters; a critic becomes a sequence
    classifier."""
    assert convert("--model", saved / family, "--load", saved / checkpoint, "--save", tmp_path / "out") == 0
    reader = Checkpoint(saved / checkpoint)
    dtype = getattr(torch, reader.state["dtype"])
    assert same(saved / checkpoint, tmp_path / "out", dtype)
    assert not same(saved / family, tmp_path / "out", dtype)  # it was trained
    architecture = json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0]
    assert architecture.endswith("ForSequenceClassification" if "critic" in family else "ForCausalLM")


@pytest.mark.parametrize(
    "family, source, arguments, dtype",
    [
        (
            "qwen3_moe",
            "qwen3_moe-ep2+sharded",
            (
                "--tensor-model-parallel-size",
                2,
                "--expert-model-parallel-size",
                2,
                "--expert-tensor-parallel-size",
                1,
            ),
            torch.float32,
        ),
        (
            "qwen3",
            "qwen3",
            ("--pipeline-model-parallel-size", 2, "--to", "checkpoint", "--dtype", "bfloat16"),
            torch.bfloat16,
        ),
    ],
)
def test_through_megatrons_shards(saved, tmp_path, family, source, arguments, dtype):
    """On two ranks that megarl starts; it compares too, and says so."""
    files = ("--model", saved / family, "--load", saved / source, "--save", "out")
    command = ("-m", "megarl.cli", "convert", *files, *arguments)
    done = run(*command, folder=tmp_path, timeout=120, preloaded=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    tensors, forward = done.stdout.splitlines()
    assert tensors.endswith(f" tensors, equal to {saved / source} in {dtype}: out")
    assert (
        float(
            re.fullmatch(
                r"log-probs of 92 tokens by Megatron and by transformers differ by up to (\S+)", forward
            )[1]
        )
        < 1e-4
    )
    assert not list(tmp_path.glob(".*"))
    assert (
        convert(
            "--model",
            saved / family,
            "--load",
            saved / source,
            "--save",
            tmp_path / "streamed",
            "--dtype",
            str(dtype)[6:],
        )
        == 0
    )
    assert same(tmp_path / "streamed", tmp_path / "out", dtype)


@pytest.mark.parametrize(
    "fault",
    [
        "",
        "swapped key and value",
        *(pytest.param(f, marks=pytest.mark.nightly) for f in ("swapped gate and up", "swapped heads")),
    ],
)
def test_a_fault_of_the_mapping_is_found_by_what_the_model_computes(saved, tmp_path, fault):
    """Loading and writing share the mapping, so every tensor comes back as it was."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    files = ("--model", saved / "qwen3", "--save", "out")
    command = (*launcher, Path(__file__).with_name("faulty_convert.py"), fault, *files)
    tp2 = ("--tensor-model-parallel-size", 2)
    done = run(*command, *tp2, folder=tmp_path, timeout=120, preloaded=True)
    assert f" tensors, equal to {saved / 'qwen3'} in torch.float32: out\n" in done.stdout
    assert (done.returncode != 0) == bool(fault)
    assert ("a tensor is not where the model reads it; this is a bug in megarl" in done.stderr) == bool(
        fault
    ), done.stderr


# ------------------------------------------------------------------ Megatron's checkpoints


@pytest.mark.parametrize("family, layout", MEGATRON_CASES)
def test_what_megatron_saved_becomes_the_folder_again(saved, tmp_path, family, layout):
    source = saved / f"megatron-{family}-{layout}"
    assert convert("--model", saved / family, "--load", source, "--save", tmp_path / "out") == 0
    assert same(saved / family, tmp_path / "out")


def rewrite_metadata(source: Path, target: Path, change) -> Path:
    """A copy of a Megatron checkpoint with other metadata."""
    shutil.copytree(source, target)
    metadata = pickle.loads((source / ".metadata").read_bytes())
    change(metadata)
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    return target


def rename(metadata, new_name) -> None:
    """Tensors, by a function of their names that gives None to drop one."""
    tensors, places = metadata.state_dict_metadata, {}
    metadata.state_dict_metadata = {
        new: stored for name, stored in tensors.items() if (new := new_name(name)) is not None
    }
    for index, place in metadata.storage_data.items():
        if (new := new_name(index.fqn)) is not None:
            places[type(index)(new, index.offset, index.index)] = place
    metadata.storage_data = places


def test_names_of_other_versions_and_specs(saved, tmp_path):
    """Transformer Engine's mixtures keep pre_mlp_layernorm; the folder above iter_... is found by its last
    iteration."""
    source = saved / "megatron-qwen3_moe-tp2_sp_ep2"
    other = {"decoder.layers.mlp.linear_fc1.layer_norm_weight": "decoder.layers.pre_mlp_layernorm.weight"}
    rewrite_metadata(
        source,
        tmp_path / "all" / "iter_0000003",
        lambda metadata: rename(metadata, lambda name: other.get(name, name)),
    )
    (tmp_path / "all" / "latest_checkpointed_iteration.txt").write_text("3\n")
    assert (
        convert("--model", saved / "qwen3_moe", "--load", tmp_path / "all", "--save", tmp_path / "out") == 0
    )
    assert same(saved / "qwen3_moe", tmp_path / "out")


QKV = "decoder.layers.self_attention.linear_qkv.weight"


class Reaches:
    """As older Pythons write a member of an enum, and as one reaches further from what is allowed."""

    def __reduce__(self):
        return getattr, (torch.Size, "numel")


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: rename(m, lambda name: None if name == QKV else name), f"{QKV} is missing"),
        (
            lambda m: rename(m, lambda name: "decoder.layers.mamba.weight" if name == QKV else name),
            "decoder.layers.mamba.weight is not a tensor of this model",
        ),
        (
            lambda m: m.state_dict_metadata[QKV].__dict__.update(size=torch.Size((4, 256, 63))),
            f"{QKV} is 4x256x63 there, and number 0 should be 256x64",
        ),
        (
            lambda m: m.state_dict_metadata[QKV].__dict__.update(size=torch.Size((3, 256, 64))),
            f"{QKV} is 3x256x64 there, and number 3 should be 256x64",
        ),
        (lambda m: m.storage_data.clear(), "does not say where the part of"),
        (lambda m: m.__dict__.update(planner_data=os.system), "is refused: its .metadata wants posix.system"),
        (
            lambda m: m.__dict__.update(planner_data=Reaches()),
            "is refused: its .metadata wants attribute numel of",
        ),
    ],
)
def test_other_models_and_dangerous_files_are_refused(saved, tmp_path, capsys, change, reason):
    source = rewrite_metadata(saved / "megatron-qwen3-pp2", tmp_path / "a", change)
    assert convert("--model", saved / "qwen3", "--load", source, "--save", tmp_path / "out") in (1, 2)
    assert reason in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_damaged_files_of_megatron_are_named(saved, tmp_path, capsys):
    shutil.copytree(saved / "megatron-qwen3-pp2", tmp_path / "a")
    for path in (tmp_path / "a").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert convert("--model", saved / "qwen3", "--load", tmp_path / "a", "--save", tmp_path / "out") == 1
    assert ".distcp: " in (told := capsys.readouterr().err) and "cut short or damaged" in told
    (tmp_path / "a" / ".metadata").write_bytes(b"nothing")
    assert convert("--model", saved / "qwen3", "--load", tmp_path / "a", "--save", tmp_path / "out") == 2
    assert f"{tmp_path / 'a' / '.metadata'} cannot be read" in capsys.readouterr().err
    (tmp_path / "a" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert convert("--model", saved / "qwen3", "--load", tmp_path / "a", "--save", tmp_path / "out") == 2
    assert "in the format zarr; only torch_dist can be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------ memory


MEASURE = """
import resource, sys
from megarl.convert import main
from megarl.checkpoint import sources, stream
stream.BLOCK_BYTES = 4 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model, folder = sys.argv[1:]
assert main(["--model", model, "--to", "checkpoint", "--save", folder + "/a", "--dtype", "bfloat16"]) == 0
assert main(["--model", model, "--load", folder + "/a", "--save", folder + "/b"]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.fixture(scope="module")
def many_layers(tmp_path_factory) -> Path:
    """40 layers, 173 MB in one file; the largest tensor has 1.5 MB."""
    folder = make_folder(
        tmp_path_factory.mktemp("large") / "model",
        "qwen3",
        num_hidden_layers=1,
        hidden_size=384,
        intermediate_size=1024,
    )
    one = {
        name: t.clone() for name, t in weights(folder).items()
    }  # the library maps the file, which is written anew
    tensors = {name: t for name, t in one.items() if "layers.0." not in name}
    tensors |= {
        name.replace("layers.0.", f"layers.{i}."): t
        for i in range(40)
        for name, t in one.items()
        if "layers.0." in name
    }
    write_tensors(
        folder / "model.safetensors",
        [Entry(name, t.dtype, tuple(t.shape), lambda t=t: [t]) for name, t in tensors.items()],
    )
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 40}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_memory_does_not_grow_with_the_model(many_layers, tmp_path):
    """Both ways; the whole model would be four times the limit."""
    assert (many_layers / "model.safetensors").stat().st_size > 150e6
    done = succeed("-c", MEASURE, many_layers, tmp_path, timeout=120)
    assert int(done.stdout.splitlines()[-1]) < 40_000  # KiB, beside tensors of 150 MB
    assert same(many_layers, tmp_path / "b", torch.bfloat16)


# ------------------------------------------------------------------ bad input


def make_classifier(folder: Path) -> Path:
    """A sequence classifier, as a reward model or an exported critic is."""
    from transformers import AutoModelForSequenceClassification, Qwen3Config

    torch.manual_seed(len(folder.name))
    config = Qwen3Config(**COMMON, vocab_size=150, head_dim=32, num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("target", ("hf", "checkpoint"))
def test_weights_of_another_classifier(tmp_path, target):
    """--load names a Hugging Face folder: its own config.json says that there is a value head."""
    one, other = (make_classifier(tmp_path / name) for name in ("cls", "other"))
    assert convert("--model", one, "--load", other, "--save", tmp_path / "out", "--to", target) == 0
    assert same(other, tmp_path / "out") and not same(one, tmp_path / "out")
    assert convert("--model", one, "--save", tmp_path / "own", "--to", target) == 0
    assert same(one, tmp_path / "own")


@pytest.mark.parametrize("target", ("hf", "checkpoint"))
def test_a_link_to_an_empty_folder_is_refused_with_the_folder(model, tmp_path, capsys, target):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert convert("--model", model, "--save", tmp_path / "link", "--to", target) == 2
    told = capsys.readouterr().err
    assert told == (
        f"--save ({tmp_path / 'link'}): is a link to a folder, and must be the folder itself, which the "
        f"result replaces. Try --save {tmp_path / 'empty'}.\n"
    )
    assert convert("--model", model, "--save", tmp_path / "empty", "--to", target) == 0
    assert same(model, tmp_path / "link")


TP1 = ("--tensor-model-parallel-size", 1)


@pytest.fixture
def no_ranks(monkeypatch) -> None:
    """Ranks that are started fail the test."""
    monkeypatch.setattr(launch, "launch_ranks", lambda *_: pytest.fail("ranks were started"))


def test_what_is_wrong_with_weights_for_ranks_is_one_line_before_they_start(
    model, tmp_path, capsys, no_ranks
):
    assert convert("--model", model, "--save", tmp_path / "a", "--to", "checkpoint") == 0
    (file,) = (tmp_path / "a").glob("weights*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert convert("--model", model, "--load", tmp_path / "a", "--save", tmp_path / "out", *TP1) == 1
    damaged = f"megarl convert: {file} is damaged: its SHA-256 is not the one that was written.\n"
    assert capsys.readouterr().err == damaged
    file.write_bytes(content[:-1])
    assert convert("--model", model, "--load", tmp_path / "a", "--save", tmp_path / "out", *TP1) == 2
    assert capsys.readouterr().err.splitlines()[0].startswith(f"megarl convert: {file} is damaged: it has ")


def test_a_megatron_checkpoint_for_ranks_is_refused_before_they_start(saved, tmp_path, capsys, no_ranks):
    source = saved / "megatron-qwen3-pp2"
    assert convert("--model", saved / "qwen3", "--load", source, "--save", tmp_path / "out", *TP1) == 2
    assert capsys.readouterr().err == (
        f"megarl convert: --load ({source}): Megatron's checkpoints are converted without ranks. Leave the "
        "parallel sizes out, or convert it first.\n"
    )


@pytest.mark.parametrize("target", ("hf", "checkpoint"))
def test_a_disk_without_room_is_found_before_ranks_start(
    model, tmp_path, capsys, monkeypatch, no_ranks, target
):
    monkeypatch.setattr(stream.shutil, "disk_usage", lambda path: namedtuple("usage", "free")(100_000))
    assert convert("--model", model, "--save", tmp_path / "out", "--to", target, *TP1) == 1
    assert "No space left on device: 0.00 GB are to be written" in capsys.readouterr().err


def test_a_model_of_another_kind_is_an_error_of_the_flags(tmp_path):
    """The command line shows it, with exit code 2."""
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt_neox"}')
    for sizes in ((), TP1):
        with pytest.raises(ConfigError, match="gpt_neox"):
            convert("--model", folder, "--save", tmp_path / "out", *sizes)


def test_an_error_of_a_file_on_a_rank_is_one_line(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")

    def fail(arguments):
        raise OSError(28, "No space left on device", "out")

    monkeypatch.setattr("megarl.convert.convert_on_ranks", fail)
    assert convert("--model", model, "--save", tmp_path / "out", *TP1) == 1
    assert capsys.readouterr().err == "megarl convert: [Errno 28] No space left on device: 'out'\n"


def test_weights_that_are_not_this_models(model, tmp_path, capsys):
    other = make_folder(tmp_path / "other", "qwen3", num_hidden_layers=5, intermediate_size=64)
    assert convert("--model", model, "--load", other, "--save", tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert (
        f"megarl convert: the weights in {other} do not fit the model: "
        "model.layers.4.input_layernorm.weight is not a tensor of this model" in told
    )
    assert convert("--model", other, "--load", model, "--save", tmp_path / "out") == 2
    assert "model.layers.4.input_layernorm.weight is missing" in capsys.readouterr().err
    small = make_folder(tmp_path / "small", "qwen3", intermediate_size=64)
    assert convert("--model", model, "--load", small, "--save", tmp_path / "out") == 2
    assert "mlp.gate_proj.weight is 64x64 there and 96x64 by config.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_folders_that_hold_nothing(model, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert convert("--model", model, "--load", tmp_path / "empty", "--save", tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith(
        f"megarl convert: {tmp_path / 'empty'} holds no weights that can be read: neither checkpoint.json"
    )
    shutil.copytree(model, tmp_path / "cut")
    path = tmp_path / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert convert("--model", tmp_path / "cut", "--save", tmp_path / "out") == 2
    assert f"{path} is cut short" in capsys.readouterr().err
    path.unlink()  # it would count, and the index would not
    path = path.with_name("model-00001-of-00001.safetensors")
    shutil.copy(model / "model.safetensors", path)
    for index, reason in (
        (
            '{"weight_map": {"x": "other.safetensors"}}',
            "other.safetensors is missing; the folder's index names it",
        ),
        ("{}", "is not an index"),
        (
            '{"weight_map": {"x": "model-00001-of-00001.safetensors"}}',
            f"x is not in {path}, where the folder's index says",
        ),
    ):
        (tmp_path / "cut" / "model.safetensors.index.json").write_text(index)
        assert convert("--model", tmp_path / "cut", "--save", tmp_path / "out") == 2
        assert reason in capsys.readouterr().err


def test_a_checkpoint_of_another_function_is_refused(model, tmp_path, capsys):
    """Its tensors fit; config.json of --model says that they compute something else."""
    assert convert("--model", model, "--save", tmp_path / "a", "--to", "checkpoint") == 0
    shutil.copytree(model, tmp_path / "other")
    config = json.loads((model / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    capsys.readouterr()
    assert convert("--model", tmp_path / "other", "--load", tmp_path / "a", "--save", tmp_path / "out") == 2
    assert (
        f"{tmp_path / 'a'} is of another model: it has rope_theta 10000.0, not 12345.0."
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_named_before_anything_is_written(model, tmp_path, capsys):
    assert convert("--model", model, "--save", tmp_path / "a", "--to", "checkpoint") == 0
    (file,) = (tmp_path / "a").glob("weights*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert convert("--model", model, "--load", tmp_path / "a", "--save", tmp_path / "out") == 1
    assert (
        f"{file} is damaged: its SHA-256 is not the one that was written" in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )


@pytest.mark.parametrize("target", ("hf", "checkpoint"))
def test_a_full_disk(model, tmp_path, capsys, monkeypatch, target):
    """Before: by what is free. Within: nothing is left."""
    monkeypatch.setattr(stream.shutil, "disk_usage", lambda path: namedtuple("usage", "free")(100_000))
    assert convert("--model", model, "--save", tmp_path / "out", "--to", target) == 1
    assert capsys.readouterr().err == (
        f"megarl convert: {tmp_path / 'out'}: No space left on device: 0.00 GB are to be written "
        "and 0.00 GB are "
        "free there.\n"
    )
    monkeypatch.undo()

    def fail(path, entries):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(stream, "write_tensors", fail)
    assert convert("--model", model, "--save", tmp_path / "out", "--to", target) == 1
    assert "No space left on device" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_flags_that_cannot_work_are_all_reported(model, tmp_path, capsys):
    assert (
        convert(
            "--model",
            model,
            "--load",
            tmp_path / "absent",
            "--save",
            model,
            "--max-shard-size",
            "5TB",
            "--to",
            "checkpoint",
            "--dtype",
            "float16",
            "--tensor-model-parallel-size",
            3,
            "--expert-model-parallel-size",
            2,
        )
        == 2
    )
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in told] == [
        "--save",
        "--load",
        "--dtype",
        "--max-shard-size",
        *["--tensor-model-parallel-size"] * 2,
        "--expert-model-parallel-size",
    ], told
    assert told[0] == f"--save ({model}): exists and is not empty. Try --save {model}-2."
    assert told[1] == f"--load ({tmp_path / 'absent'}): there is no such folder."
    assert told[3] == "--max-shard-size (5TB): must be a number and KB, MB or GB. Try 5GB."
    assert (
        told[-1]
        == "--expert-model-parallel-size (2): needs a mixture of experts, and qwen3 is none. Leave it out."
    )


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    (
        (
            "latest_checkpointed_iteration.txt",
            "1e3",
            "has to hold the number of an iteration, or release, and holds '1e3'",
        ),
        ("metadata.json", "[", "is not a Megatron checkpoint's: JSONDecodeError"),
        ("metadata.json", "[]", "is not a Megatron checkpoint's: TypeError"),
    ),
)
def test_files_of_megatron_that_say_nothing_are_named(tmp_path, name, content, reason):
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=f"{tmp_path / name} {reason}"):
        megatron_folder(tmp_path)


def test_a_size_of_shards_is_a_size():
    assert [shard_bytes(text) for text in ("500MB", "0.5kb", "5", "9" * 400 + "GB")] == [
        500_000_000,
        500,
        None,
        None,
    ]
