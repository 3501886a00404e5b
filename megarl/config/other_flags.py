"""Find flags outside the schema: vLLM's engine arguments and fields of Megatron's TransformerConfig.

Engine arguments have the prefix --rollout-. They and the fields of TransformerConfig are checked against the
installed class. A field that megarl sets itself is refused, with the flag that decides it."""

from __future__ import annotations

import ast
import builtins
import functools
import re
import typing
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from megarl.config.flags import Flag, Kind, flag_name, kind_of_hint
from megarl.config.installed import InstalledClass, engine_args, syntax_tree, transformer_config

# Reason why engine arguments cannot be set -> patterns of the arguments. The first match counts.
ENGINE_REFUSED = {
    "the engine runs the actor's model. Set --model.": """
        model model_weights hf_config_path hf_overrides config_format model_class_overrides revision
        code_revision hf_token download_dir""",
    "the model is a folder, and no code from it is run.": "trust_remote_code",
    "the engine takes its weights from the actor, not from files.": """
        load_format model_loader_extra_config ignore_patterns safetensors_* use_tqdm_on_load
        pt_load_map_location weight_transfer_config""",
    "megarl tokenizes. Set --tokenizer-model.": """
        tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init""",
    "every sample gets a key of its own from --seed.": "seed",
    (
        "speculative decoding is not supported yet: which drafts it accepts is not drawn by a sample's key."
    ): """
        speculative_config spec_*""",
    "a store of keys and values outside the engine would serve prefixes of old weights.": """
        kv_transfer_config kv_offloading_* ec_transfer_config""",
    "it is --max-prompt-length + --max-response-length.": "max_model_len",
    "the trainer needs processed_logprobs: after the temperature, over the sampled distribution.": """
        logprobs_mode""",
    "sampling is set by --temperature, --top-p, --top-k and --stop.": """
        generation_config override_generation_config""",
    "the engine runs inside megarl's workers.": """
        distributed_executor_backend worker_cls worker_extension_cls""",
    "--rollout-ranks places the engines.": """
        master_addr master_port nnodes node_rank device_ids data_parallel_*""",
    "the engine generates text.": "runner convert enable_prompt_embeds pooler_config",
    "a sync writes the experts in the order of vLLM's Triton kernels, which megarl sets.": """
        moe_backend kernel_config""",
    "quantized rollout weights are not supported yet.": """
        quantization quantization_config allow_deprecated_quantization""",
    "the engine gets adapters merged: train them with --lora-rank.": """
        enable_lora lora_* max_loras max_lora_rank""",
    "megarl releases the KV cache and never moves the weights. Set --rollout-release-kv-cache.": """
        enable_sleep_mode enable_cumem_allocator sleep_*""",
    "an engine can split over tensor-parallel ranks only, in this version.": """
        pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size
        enable_expert_parallel""",
}

# Key of config.json -> the flags of Megatron with the same meaning. They are refused even with an equal
# value, because the shape has one source.
_SHAPE_KEYS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups group_query_attention",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "layernorm_epsilon norm_epsilon",
    "rope_theta": "rotary_base",
    "rope_scaling": "use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor",
    "hidden_act": "activation_func swiglu gated_linear_unit",
    "tie_word_embeddings": "untie_embeddings_and_output_weights",
    "sliding_window": "window_size",
}

# The same for TransformerConfig, with names of Megatron's own training arguments too.
TRANSFORMER_REFUSED = {
    f"the shape comes from --model's config.json, where it is {key}. Change it there, or use another "
    "--model.": fields
    for key, fields in _SHAPE_KEYS.items()
} | {
    "the shape comes from --model's config.json. Change it there, or use another --model.": """
        num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size
        vocab_size max_position_embeddings normalization layernorm_epsilon norm_epsilon
        layernorm_zero_centered_gamma apply_layernorm_1p add_bias_linear disable_bias_linear
        add_qkv_bias gated_linear_unit swiglu activation_func* glu_linear_offset qk_layernorm
        qk_l2_norm rotary_* rope_* use_rotary_position_embeddings position_embedding_type
        no_rope_freq mrope_section window_size window_attn_skip_freq softmax_scale softmax_type
        attention_output_gate apply_residual_connection_post_layernorm group_query_attention
        untie_embeddings_and_output_weights multi_latent_attention make_vocab_size_divisible_by use_mup
        mup_*""",
    (
        "it is alltoall: allgather needs as many tokens on every rank, which packed sequences have "
        "not, and flex was never tried."
    ): """
        moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend""",
    "every token goes to all of its experts: a dropped one would have other log-probs in the engine.": """
        moe_expert_capacity_factor moe_token_dropping moe_token_drop_policy
        moe_pad_expert_input_to_capacity""",
    "norms and matrix products are in the dtype of the weights. Leave it out.": "fp32_residual_connection",
    "megarl computes the gradient of the output layer itself. Leave it out.": """
        defer_embedding_wgrad_compute wgrad_deferral_limit""",
    "the router sees what the engine's sees.": "moe_input_jitter_eps moe_router_force_load_balancing",
    "set --moe-routing-replay.": "moe_enable_routing_replay",
    "the experts come from --model's config.json.": "num_moe_experts num_experts moe_*",
    "overlapping the experts' communication is not supported yet.": """
        overlap_moe_* overlap_dispatch_* high_priority_a2a_comm_stream delay_wgrad_compute ep_overlap_*""",
    "this kind of layer is not supported yet.": """
        mtp_* experimental_attention_variant dsa_* linear_* is_hybrid_model mamba_* use_mamba_*
        heterogeneous_block_specs""",
    (
        "keys and values of packed sequences go round the ranks of --context-parallel-size in one way "
        "only (p2p)."
    ): """
        hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel
        cp_comm_type""",
    "set --virtual-pipeline-model-parallel-size, the number of model chunks per stage.": """
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank""",
    "a pipeline whose stages differ in their number of layers is not supported yet.": """
        pipeline_model_parallel_layout num_layers_in_*_pipeline_stage
        account_for_*_in_pipeline_split""",
    "the pipeline's schedule decides it.": """
        microbatch_group_size_per_vp_stage overlap_p2p_* batch_p2p_* use_ring_exchange_p2p""",
    "float16 training is not supported. Use --bf16, or fp32.": "fp16",
    (
        "weights stay in bf16, which the sync reads, and attention too; fp4 training is not supported "
        "yet. Set --fp8 alone."
    ): """
        fp8_param* fp8_quantizer_factory fp8_dot_product_attention fp8_multi_head_attention fp4*
        use_kitchen* kitchen_*""",
    (
        "PyTorch's FSDP takes its groups from the process's global parallel_state, and a role has a "
        "mesh of its own. Megatron's shards the same: --use-megatron-fsdp."
    ): """
        use_torch_fsdp2""",
    (
        "all micro-batches are recomputed alike. Set --recompute-granularity full with --recompute-method "
        "block."
    ): """
        num_microbatches_with_partial_activation_checkpoints""",
    (
        "Megatron splits them over the ranks of the process's global parallel_state, and a role has a mesh "
        "of its own. Set --sequence-parallel, with which each rank keeps its part too."
    ): """
        distribute_saved_activations""",
    "activation offload is not supported yet.": """
        cpu_offloading* fine_grained_* offload_modules min_offloaded_tensor_size
        activation_offload_fraction delay_offload_* delta_offload_*""",
    "CUDA graphs of the actor are not supported yet.": "enable_cuda_graph external_cuda_graph cuda_graph_*",
    "--bf16 decides the precision.": "params_dtype pipeline_dtype enable_autocast autocast_dtype",
    "weights come from --model; --random-init has its own recipe.": """
        init_method* output_layer_init_method embedding_init_method*""",
    "megarl decides it, by the device and because sequences are packed.": """
        perform_initialization use_cpu_initialization init_model_with_meta_device
        calculate_per_token_loss variable_seq_lengths test_mode transformer_impl config_logger_dir
        flash_decode inference_* use_inference_optimized_layers symmetric_ar_type
        nccl_all_reduce_for_prefill""",
    (
        "only Megatron's training script acts on it, after each update, and megarl has no such step. Leave "
        "it out."
    ): """
        qk_clip* log_max_attention_logit""",
    "megarl computes log-probs and losses itself, on a GPU in fused kernels. Leave it out.": """
        cross_entropy_* fp8_output_proj""",
    "only Megatron's own inference reads it, and vLLM or transformers samples. Leave it out.": """
        mlp_chunks_for_prefill""",
    "syncs and checkpoints know the plain layers' weights, whole or split by tensor parallelism alone.": """
        *gtp_weight_remat_size *tensor_parallel_num_weight_shards use_grouped_gemm_for_*
        use_transformer_engine_op_fuser""",
    "checkpoints have a format of megarl's own. Leave it out.": "hetereogenous_dist_checkpoint",
    "sequences are packed, not padded. Set --max-tokens-per-micro-batch.": """
        micro_batch_size seq_length decoder_seq_length""",
    "set --train-data.": "data_path train_data_path",
    "set --profile torch, nsys or memory.": """
        use_pytorch_profiler record_memory_history memory_snapshot_path barrier_with_L1_time""",
    "set --model, a Hugging Face folder.": "load",
    "set --tokenizer-model.": "tokenizer_type vocab_file merge_file",
}

ALIASES = {"fp8_format": "fp8"}
"""Megatron's own spelling of an argument -> the field of TransformerConfig."""

_OBJECTS = re.compile(
    r"\b(?:(?:[Tt]ype|Callable|ContextManager)\b(?:\[[^\[\]]*\])?"
    r"|torch\.dtype|PipelineParallelLayerLayout|RecipeConfig|AttnBackend\b)"
)
"""Types in annotations whose values no flag can carry."""


class Library(NamedTuple):
    """A library, vLLM or Megatron-Core, whose fields can be set by flags of the same names."""

    name: str
    prefix: str
    section: str
    installed: Callable[[], InstalledClass | None]
    refused: dict[str, str]


LIBRARIES = (
    Library("vLLM", "rollout-", "engine_args", engine_args, ENGINE_REFUSED),
    Library("Megatron-Core", "", "transformer", transformer_config, TRANSFORMER_REFUSED),
)


def find_library_flag(name: str) -> Flag | str | None:
    """Return the flag of a vLLM engine argument (--rollout-<name>) or of a field of Megatron's
    TransformerConfig; the reason if it is refused, None if there is no such field."""
    if "_" in name:  # --num_layers is an unknown flag; the nearest name is suggested
        return None
    library = next(library for library in LIBRARIES if name.startswith(library.prefix))
    field = name.removeprefix(library.prefix).replace("-", "_")
    field = ALIASES.get(field, field)
    for reason, patterns in library.refused.items():
        if any(fnmatchcase(field, pattern) for pattern in patterns.split()):
            return reason
    if (installed := library.installed()) is None:
        return f"cannot be checked, as {library.name} is not installed." if library.prefix else None
    if field not in installed.annotations:
        return None
    kind = kind_of_annotation(installed.annotations[field], installed.aliases)
    if kind is None:
        return f"takes a Python object of {library.name}, which no flag can carry."
    return Flag(name=flag_name(field, library.prefix), targets=((library.section, field),), kind=kind)


@functools.cache
def passthrough_names() -> list[str]:
    """Return the names of all flags for vLLM's engine arguments and Megatron's fields that are not refused,
    to propose them for a misspelled name."""
    names = [
        flag_name(field, library.prefix)
        for library in LIBRARIES
        if (installed := library.installed()) is not None
        for field in installed.annotations
    ]
    return [name for name in names if isinstance(find_library_flag(name), Flag)]


def kind_of_annotation(node: ast.expr, aliases: Mapping[str, Path] = {}) -> Kind | None:
    """Return the `Kind` that parses the values of a field with this annotation; None if no flag can carry
    them.

    The annotation is evaluated with stand-ins for the library's classes, because the library is not imported.

    Args:
        aliases: name that may stand for Literal[...] -> the file that defines it."""
    text = node.value if isinstance(node, ast.Constant) else ast.unparse(node)
    names = _Names(lambda name: aliases.get(name))
    try:
        return kind_of_hint(eval(_OBJECTS.sub("Never", text), {"__builtins__": {}}, names))
    except (AttributeError, TypeError):  # e.g. torch.Tensor in a Callable
        return None


class _Names(dict):
    """Maps the names in an annotation to types.

    A name that is neither Python's nor typing's is an alias of Literal[...] or a class. A class becomes dict
    (JSON) if its name ends as those of dataclasses do, else str, the form of an enumeration's value."""

    def __init__(self, file_of: Callable[[str], Path | None]) -> None:
        super().__init__(vars(builtins) | vars(typing))
        self.file_of = file_of

    def __missing__(self, name: str) -> object:
        file = self.file_of(name)
        if file is not None and (literal := _literal(name, file)) is not None:
            return literal
        return dict if name.endswith(("Config", "Overrides", "Args")) else str


def _literal(name: str, path: Path) -> object | None:
    """Return the Literal of `name = Literal[...]` in a file, None if there is none.

    The Literal may contain other names of the file."""
    for node in syntax_tree(path).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=found)], value=ast.Subscript(value=ast.Name(id="Literal")))
                | ast.AnnAssign(target=ast.Name(id=found), value=ast.Subscript(value=ast.Name(id="Literal")))
            ) if found == name:
                literal = eval(ast.unparse(node.value), {"__builtins__": {}}, _Names(lambda _: path))
                return None if any(isinstance(choice, type) for choice in literal.__args__) else literal
    return None
