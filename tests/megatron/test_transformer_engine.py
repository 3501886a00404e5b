"""Which layers a machine with a GPU builds: Transformer Engine's if it imports, else Megatron's own with our
attention.

There is no GPU here and no Transformer Engine. Packages that are broken as wrong builds are take its place,
and torch.cuda.is_available says yes while the question is asked.

    pytest tests/megatron/test_transformer_engine.py"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.doctor import facts
from megarl.megatron import model as megatron_model
from megarl.megatron.transformer_config import transformer_config
from megarl.megatron import transformer_engine
from megarl.megatron.latent_attention import LatentAttention
from megarl.megatron.modules import PackedAttention, RMSNorm
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.workers import worker
from megarl.workers.megatron_role import MeshSpec
from megarl.workers.megatron_role import megatron_atlases as atlases_of_role
from tests.launch import succeed
from tests.reshard.cuts import make_shape

BROKEN = "raise OSError('libcublas.so.13: undefined symbol\\nmore')\n"
"""What `import transformer_engine.pytorch` runs into if it was built for another CUDA: not an ImportError."""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """package(code) installs a transformer_engine whose part `pytorch` runs `code` as it is imported, beside
    a GPU."""

    def make(code: str) -> None:
        (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
        (tmp_path / "transformer_engine" / "__init__.py").touch()
        (tmp_path / "transformer_engine" / "pytorch" / "__init__.py").write_text(code)
        (tmp_path / "transformer_engine-2.11.0.dist-info").mkdir()
        (tmp_path / "transformer_engine-2.11.0.dist-info" / "METADATA").write_text(
            "Name: transformer-engine\nVersion: 2.11.0\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
        importlib.invalidate_caches()

    transformer_engine.transformer_engine_problem.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield make
    transformer_engine.transformer_engine_problem.cache_clear()
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    sys.modules["transformer_engine"] = None  # as on every machine without a GPU


def layer_spec():
    shape = make_shape("qwen3", layers=1)
    config = transformer_config(shape, ModelConfig(model="x"), ParallelConfig(), {})
    return megatron_model._layer_spec(config, shape, "grouped", is_moe=False)


def names(shape=None) -> set[str]:
    shape = shape or make_shape("qwen3", layers=1)
    return set(atlases_of_role(shape, MeshSpec((0,)), ParallelConfig())[0])


def test_a_gpu_without_transformer_engine_builds_megatrons_own_layers(package, monkeypatch):
    monkeypatch.delitem(sys.modules, "transformer_engine")
    assert transformer_engine.transformer_engine_problem() == "not installed"
    attention = layer_spec().submodules.self_attention.submodules
    assert attention.core_attention is PackedAttention and attention.q_layernorm is RMSNorm
    shape = make_shape("qwen3", layers=1)
    assert names(shape) == set(megatron_atlases(shape, MeshSpec((0,)))[0])
    assert facts.features()["Transformer Engine"] == (False, "not installed: pip install 'megarl[te]'")


def test_transformer_engine_that_imports_is_used_and_the_atlas_says_so(package):
    package("")
    assert (
        transformer_engine.uses_transformer_engine()
        and transformer_engine.transformer_engine_version() == "2.11.0"
    )
    shape = make_shape("qwen3", layers=1)
    assert (
        names(shape)
        == set(megatron_atlases(shape, MeshSpec((0,)), te_spec=True)[0])
        != set(megatron_atlases(shape, MeshSpec((0,)))[0])
    )


def test_a_broken_build_is_named_once_and_hidden_from_megatron(package, caplog, monkeypatch):
    package(BROKEN)
    assert (
        transformer_engine.transformer_engine_problem()
        == "does not import: OSError: libcublas.so.13: undefined symbol"
    )
    assert layer_spec().submodules.self_attention.submodules.core_attention is PackedAttention
    assert facts.features()["Transformer Engine"] == (
        False,
        "does not import: OSError: libcublas.so.13: undefined symbol",
    )
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        caplog.clear()
        transformer_engine.hide_unusable()
        assert len(caplog.records) == lines
    assert "OSError: libcublas.so.13: undefined symbol. Megatron's own layers are used instead" in caplog.text
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine.pytorch")


IMPORT_MEGATRON = """
import torch
torch.cuda.is_available = lambda: True
from megarl.megatron.transformer_engine import transformer_engine_problem
transformer_engine_problem()
torch.cuda.is_available = lambda: False
from megarl.megatron.cpu_shim import cpu_megatron
with cpu_megatron():
    import megatron.core.models.gpt.gpt_layer_specs as specs
    import megatron.core.optimizer as optimizer
print(specs.HAVE_TE, optimizer.USING_PYTORCH_OPTIMIZER)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("broken", ["transformer_engine/pytorch", "transformer_engine"])
def test_megatron_imports_beside_a_broken_build(tmp_path, broken):
    """Megatron's own question catches ImportError only, and its parts ask for different modules."""
    for folder in ("transformer_engine", "transformer_engine/pytorch"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(BROKEN if folder == broken else "")
    done = succeed("-P", "-c", IMPORT_MEGATRON, environment={"PYTHONPATH": str(tmp_path)}, timeout=120)
    assert done.stdout == "False True\n" and done.stderr.count("Megatron's own layers are used instead") == 1


@pytest.mark.parametrize(
    "others, error",
    [
        ([(False, "on a: no GPU"), (False, "on b: not installed")], None),
        (
            [(False, "on a: no GPU"), (True, "on b: 2.11.0")],
            "rank 1 on b: 2.11.0; rank 0 on a: no GPU. Install it where it is missing",
        ),
    ],
)
def test_ranks_that_would_build_other_layers_do_not_start(monkeypatch, others, error):
    def gather(value, kind):
        assert value == (False, f"on {worker.socket.gethostname()}: no GPU")
        return others

    monkeypatch.setattr(worker, "all_gather_messages", gather)
    if error is None:
        return worker._check_that_ranks_agree()
    with pytest.raises(
        RuntimeError, match="^Transformer Engine must be usable on all ranks or on none: " + error
    ):
        worker._check_that_ranks_agree()


def test_replicated_weights_of_latent_attention_count_once_in_the_gradient_norm():
    """transformer_engine/pytorch/module/linear.py marks every weight as split over tensor-parallel ranks."""

    class MarkedLinear(torch.nn.Linear):
        def __init__(self, input_size, output_size, **_):
            super().__init__(input_size, output_size, bias=False)
            self.weight.tensor_model_parallel, self.weight.partition_dim, self.weight.partition_stride = (
                True,
                0,
                1,
            )

    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

    attention = SimpleNamespace(config=SimpleNamespace(init_method=None))
    weight = LatentAttention._down(attention, MarkedLinear, 4, 2, "kv_down_proj").weight
    counted = [
        param_is_not_tensor_parallel_duplicate(weight, SimpleNamespace(rank=lambda rank=rank: rank))
        for rank in range(4)
    ]
    assert counted == [True, False, False, False]
