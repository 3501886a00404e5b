"""What is read from the source of vLLM and Megatron, compared with the real classes and with vLLM's own
parser, which a process of its own imports.

    pytest tests/config/test_installed.py"""

import ast
import fnmatch
import json

import pytest

from megarl.config.flags import Kind, section_flags
from megarl.config.installed import engine_args, transformer_config
from megarl.config.other_flags import (
    ENGINE_REFUSED,
    TRANSFORMER_REFUSED,
    find_library_flag,
    kind_of_annotation,
)
from megarl.config.schema import RolloutConfig
from tests.launch import succeed

REAL = """
import argparse, dataclasses, json
from megatron.core.transformer.transformer_config import TransformerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
flags = {a.dest: (isinstance(a, argparse.BooleanOptionalAction), a.nargs in ("+", "*"), [c for c in a.choices or () if c is not None])
         for a in parser._actions if a.dest != "help"}
print(json.dumps([[f.name for f in dataclasses.fields(EngineArgs)], [f.name for f in dataclasses.fields(TransformerConfig)], flags]))
"""
# Where the parser of vLLM is not its annotation: flags it gives another form, and lists it takes as text.
OWN_FORM = {
    "data_parallel_multi_port_external_lb",
    "disable_log_stats",
    "aggregate_engine_logging",
    "device_ids",
    "all2all_backend",
    "data_parallel_backend",
}
NOT_VLLMS = {"backend", "free_gpu_memory_fraction", "release_kv_cache"}
"""Fields of the rollout section that vLLM has nothing for."""


@pytest.fixture(scope="module")
def real():
    done = succeed("-c", REAL, timeout=240, preloaded=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_fields_are_those_of_the_installed_classes(real):
    engine, transformer, _ = real
    assert set(engine_args().annotations) == {name for name in engine if not name.startswith("_")}
    assert set(transformer_config().annotations) == {name for name in transformer if not name.startswith("_")}
    fields = {f.targets[0][1] for f in section_flags("rollout", RolloutConfig)}
    assert fields - NOT_VLLMS <= set(engine), "the schema's other names are vLLM's own"


def test_types_are_those_of_the_parser_of_vllm(real):
    """Same booleans, same lists, and no choices but vLLM's (an enumeration of vLLM's is text here, which the
    engine checks)."""
    flags, compared = real[2], 0
    for name in engine_args().annotations.keys() & flags.keys() - OWN_FORM:
        (is_bool, many, choices), installed = flags[name], engine_args()
        kind = kind_of_annotation(installed.annotations[name], installed.aliases)
        assert kind.is_bool == is_bool and (kind.many is not None) == many, name
        if kind.choices:
            assert sorted(map(str, kind.choices)) == sorted(map(str, choices)), name
            compared += 1
    assert compared > 20


def test_every_engine_argument_is_usable_or_refused():
    for name in engine_args().annotations:
        assert find_library_flag("rollout-" + name.replace("_", "-")) is not None, name
    for name in transformer_config().annotations:
        assert find_library_flag(name.replace("_", "-")) is not None, name


def test_every_refusal_is_of_something():
    """A refused name exists in the library, or is an argument of Megatron's own scripts."""
    scripts = [
        "vocab_size",
        "max_position_embeddings",
        "norm_epsilon",
        "apply_layernorm_1p",
        "disable_bias_linear",
        "swiglu",
        "rotary_base",
        "rope_type",
        "use_rope_scaling",
        "rope_scaling_factor",
        "rotary_seq_len_interpolation_factor",
        "use_rotary_position_embeddings",
        "position_embedding_type",
        "group_query_attention",
        "untie_embeddings_and_output_weights",
        "num_experts",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "make_vocab_size_divisible_by",
        "micro_batch_size",
        "seq_length",
        "decoder_seq_length",
        "data_path",
        "train_data_path",
        "load",
        "tokenizer_type",
        "vocab_file",
        "merge_file",
        "use_torch_fsdp2",
        "use_pytorch_profiler",
        "record_memory_history",
        "memory_snapshot_path",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    ]
    for table, names in (
        (ENGINE_REFUSED, engine_args().annotations),
        (TRANSFORMER_REFUSED, [*transformer_config().annotations, *scripts]),
    ):
        for pattern in " ".join(table.values()).split():
            assert fnmatch.filter(names, pattern), pattern


@pytest.mark.parametrize(
    "annotation, kind",
    [
        ("int", Kind(bases=("int",))),
        ("int | None", Kind(bases=("int",), optional=True)),
        ("Optional[float]", Kind(bases=("float",), optional=True)),
        ("Union[int, str]", Kind(bases=("int", "str"))),
        ("Literal['a', 'b'] | None", Kind(choices=("a", "b"), optional=True)),
        ("list[int]", Kind(bases=("int",), many=list)),
        ("Optional[Union[int, List[int]]]", Kind(bases=("int",), many=list, one_or_many=True, optional=True)),
        ("Tuple[int, int]", Kind(bases=("int",), many=tuple)),
        ("dict[str, Any]", Kind(bases=("json",))),
        ("SomeConfig | None", Kind(bases=("json",), optional=True)),
        ("'str | None'", Kind(optional=True)),
        ("Callable", None),
        ("torch.dtype", None),
        ("Optional[Callable]", None),
        ("Callable[[torch.Tensor], torch.Tensor]", None),
        ("str | type[Executor]", Kind()),
    ],
)
def test_annotations(annotation, kind):
    assert kind_of_annotation(ast.parse(annotation, mode="eval").body) == kind
