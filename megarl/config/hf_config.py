"""Read the shape of a model from the config.json of a Hugging Face folder. Imports no torch.

A key that changes the numbers and that the training model would ignore is an error. A missing key has the
default of transformers' config class."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config.errors import ConfigError, did_you_mean, raise_errors, try_path
from megarl.config.hf_families import (
    FAMILIES,
    Family,
    Json,
    kind_errors,
    missing_keys,
    rope_errors,
    rope_parameters,
    scaling,
    unsupported_keys,
    unsupported_windows,
    value_of,
)
from megarl.config.hf_layers import (
    expert_fields,
    gemma_fields,
    latent_fields,
    unsupported_experts,
    unsupported_gemma,
    unsupported_latents,
)
from megarl.config.installed import is_transformers_model
from megarl.config.role_sections import LoRAConfig

_CHANGE_NOTHING = (
    "eos_token_ids",
    "torch_dtype",
    "max_position_embeddings",
    "num_nextn_predict_layers",
    "value_head",
)
"""Fields of ModelShape that do not change what the weights compute, or that the name of the role implies.

Every other field is compared with a checkpoint's, and so is a field that is added later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The architecture of a model: all sizes and switches that building it needs, with Megatron's names where
    it has them.

    Args:
        head_dim: Megatron's kv_channels.
        vocab_size: rows of the embedding in the folder, unpadded.
        qkv_bias: biases on q, k, v. o_bias, mlp_bias: on o; on gate, up and down.
        qk_layernorm: RMSNorm over the head dimension of q and k.
        rope_scaling: None, or rope_type (linear, llama3, yarn) and its keys, by transformers' names.
        eos_token_ids: of config.json, then those that only generation_config.json has.
        torch_dtype: name of the dtype of the saved weights, e.g. bfloat16.
        num_moe_experts: 0 for a dense model; then the fields up to moe_router_enable_expert_bias mean
            nothing.
        moe_ffn_hidden_size: of one expert; ffn_hidden_size is that of the dense layers. moe_router_topk:
            experts per token.
        norm_topk_prob: the weights of a token's experts sum to 1, before moe_router_topk_scaling_factor.
        dense_layers: the layers of a mixture that have no experts.
        moe_shared_expert_intermediate_size: of all shared experts together, 0: there is none.
            moe_shared_expert_gate: a weight per token.
        moe_router_num_groups: 0, or a token's experts are in moe_router_group_topk of that many groups, the
            best ones by the sum of the scores of their moe_router_group_best best experts.
        moe_router_enable_expert_bias: a correction of the scores (arXiv:2408.15664), which choose experts but
            do not weigh them. Frozen.
        kv_lora_rank: 0, or attention is multi-head latent: head_dim is that of queries and keys, of which the
            last qk_rope_head_dim have rotary embeddings; q_lora_rank 0: queries have no latent.
        num_nextn_predict_layers: layers after the last one of which the folder has weights or not. They are
            left out.
        activation: silu or gelu_tanh, of the MLP's gate.
        sliding_window: None, or how many tokens, itself the last of them, a token sees in the layers that
            sliding_layers says True of.
        local_rope_theta: rotary base of these layers, which have no scaling then; None: as others.
        query_pre_attn_scalar: queries times keys are divided by its square root; None: head_dim.
        zero_centered_norms: norms multiply by 1 + weight. output_norms: attention and MLP have one after them
            as well as before.
        scaled_embeddings: by sqrt(hidden_size).
        value_head: a critic or reward model: `score.weight` [1, hidden_size] in place of the output layer.
            Embeddings are not tied then.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_layernorm: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Json | None
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    torch_dtype: str
    num_moe_experts: int = 0
    moe_ffn_hidden_size: int = 0
    moe_router_topk: int = 0
    norm_topk_prob: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    dense_layers: tuple[int, ...] = ()
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    moe_router_score_function: str = "softmax"
    moe_router_topk_scaling_factor: float = 1.0
    moe_router_num_groups: int = 0
    moe_router_group_topk: int = 0
    moe_router_group_best: int = 0
    moe_router_enable_expert_bias: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_nextn_predict_layers: int = 0
    activation: str = "silu"
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    local_rope_theta: float | None = None
    query_pre_attn_scalar: float | None = None
    zero_centered_norms: bool = False
    output_norms: bool = False
    scaled_embeddings: bool = False
    value_head: bool = False

    @classmethod
    def load(cls, folder: str | Path, value_head: bool = False) -> ModelShape:
        """Return the shape of the model in a Hugging Face folder, from config.json and, if it exists,
        generation_config.json.

        Args:
            value_head: whether to return the shape with a value head. The folder holds a causal language
                model or a sequence classifier with one label.
        Raises: ConfigError listing every key that is missing, wrong or not supported, with the file's name.
        """
        path = Path(folder) / "config.json"
        config = read_json(path)
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None:
            name = str(config.get("model_type", "missing"))
            raise ConfigError([f"model_type ({name}): {_unknown_family(name)} [{path}]"])
        missing = list(missing_keys(config, family))
        if wrong_kinds := list(kind_errors(config)):
            _raise(dict.fromkeys([*wrong_kinds, *missing]), path)
        errors = [*missing, *unsupported_keys(config, family, value_head)]
        if family.is_gemma:
            errors += unsupported_gemma(config)
        else:
            errors += [*unsupported_windows(config, family), *rope_errors(rope_parameters(config))]
        errors += unsupported_experts(config["model_type"], config) if family.is_moe else ()
        errors += unsupported_latents(config) if family.has_latents else ()
        _raise(errors, path)
        eos_token_ids = _eos_token_ids(config, family, path.with_name("generation_config.json"))
        shape = _shape(config, family, eos_token_ids)
        return replace(shape, value_head=True, tie_word_embeddings=False) if value_head else shape

    def padded_vocab_size(self, multiple: int = 64) -> int:
        """Return the vocabulary size rounded up to a multiple: 64 is vLLM's padding, so the shards of
        Megatron and vLLM coincide."""
        return -(-self.vocab_size // multiple) * multiple

    @property
    def is_moe(self) -> bool:
        """Whether the model has mixture-of-experts layers, which are all layers that are not in
        dense_layers."""
        return self.num_moe_experts > 0

    @property
    def is_dense(self) -> bool:
        """Whether no layer is a mixture of experts."""
        return not self.is_moe

    def is_moe_layer(self, layer: int) -> bool:
        return self.is_moe and layer not in self.dense_layers

    def of_layer(self, layer: int) -> ModelShape:
        """Return the shape of a model whose layers are all like one layer of this model, dense or a mixture
        of experts."""
        kind = self if self.is_moe_layer(layer) else replace(self, num_moe_experts=0)
        return replace(kind, dense_layers=()) if self.dense_layers else kind

    @property
    def names_blocks_sparse(self) -> bool:
        """Whether Hugging Face checkpoints name the experts' weights block_sparse_moe.experts.<e>.w1, w3 and
        w2, as Mixtral's do.

        Others have mlp.experts.<e>.gate_proj, up_proj and down_proj."""
        return self.is_moe and self.model_type == "mixtral"

    @property
    def names_experts(self) -> bool:
        return self.is_moe and not self.names_blocks_sparse

    @property
    def shares_experts(self) -> bool:
        """Whether the model has shared experts without a gate, in checkpoints mlp.shared_experts. Qwen2-MoE's
        has a gate and is mlp.shared_expert."""
        return (
            self.is_moe and self.moe_shared_expert_intermediate_size > 0 and not self.moe_shared_expert_gate
        )

    @property
    def gates_shared_expert(self) -> bool:
        return self.is_moe and self.moe_shared_expert_intermediate_size > 0 and self.moe_shared_expert_gate

    @property
    def corrects_scores(self) -> bool:
        return self.is_moe and self.moe_router_enable_expert_bias

    @property
    def is_mla(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def is_gqa(self) -> bool:
        return not self.is_mla

    @property
    def has_query_latent(self) -> bool:
        return self.is_mla and self.q_lora_rank > 0

    @property
    def has_query_projection(self) -> bool:
        """Whether queries are projected from the hidden states directly, and not from a latent of
        q_lora_rank."""
        return not self.has_query_latent

    @property
    def has_plain_query(self) -> bool:
        return self.is_mla and self.has_query_projection

    @property
    def input_norms_only(self) -> bool:
        return not self.output_norms

    @property
    def architecture(self) -> str:
        """Name of the transformers class, for the config.json of an export."""
        family = FAMILIES[self.model_type]
        return family.sequence_classifier if self.value_head else family.architecture


def _raise(errors: Iterable[str], path: Path) -> None:
    """Raise a ConfigError with the errors of a file, if there are any."""
    raise_errors([f"{error} [{path}]" for error in errors])


def read_json(path: Path, flag: str = "--model") -> Json:
    """Return the JSON object in a file of a model folder. Raises: ConfigError naming the folder's flag if the
    file cannot be read or is no JSON object."""
    head = f"{flag} ({path.parent}):"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        otherwise = "Give a folder with config.json and *.safetensors."
        export = path.parent / "hf"  # of a run
        advice = f" Try {export}."
        if not (export / path.name).is_file():
            advice = try_path(path.parent, lambda one: (one / path.name).is_file(), otherwise)
        reason = f"must be a Hugging Face model folder, but {path.name} cannot be read: {error.strerror}."
        raise ConfigError([f"{head} {reason}{advice}"]) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON; brackets in brackets
        raise ConfigError([f"{head} {path.name} is not JSON: {error}."]) from error
    if not isinstance(value, dict):
        raise ConfigError([f"{head} {path.name} must hold a JSON object."])
    return value


def _unknown_family(name: str) -> str:
    """Return the text of the error for a model_type that is not supported, with those that are.

    A similar name is proposed for a typing error only: qwen3_next and qwen4 are other models than qwen3."""
    rule = f"must be one of {', '.join(FAMILIES)}."
    if is_transformers_model(name):
        return f"is another architecture, which is not supported; it {rule}"
    same_version = [family for family in FAMILIES if re.findall(r"\d+", family) == re.findall(r"\d+", name)]
    return rule + did_you_mean(name.lower(), same_version, "", cutoff=0.8)


def _shape(config: Json, family: Family, eos_token_ids: tuple[int, ...]) -> ModelShape:
    heads = config["num_attention_heads"]
    fields = gemma_fields(config) if family.is_gemma else _plain_fields(config, family)
    shape = ModelShape(
        model_type=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads", family.num_key_value_heads) or heads,
        head_dim=config.get("head_dim") or family.head_dim or config["hidden_size"] // heads,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        tie_word_embeddings=bool(config.get("tie_word_embeddings", family.tie_word_embeddings)),
        qkv_bias=family.qkv_bias or bool(config.get("attention_bias")),
        o_bias=bool(config.get("attention_bias")),
        mlp_bias=bool(config.get("mlp_bias")),
        qk_layernorm=family.qk_layernorm,
        rms_norm_eps=float(value_of(config, "rms_norm_eps", family.rms_norm_eps)),
        max_position_embeddings=value_of(config, "max_position_embeddings", family.max_position_embeddings),
        eos_token_ids=eos_token_ids,
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        **fields,
    )
    fields = expert_fields(config["model_type"], config) if family.is_moe else {}
    fields |= latent_fields(config) if family.has_latents else {}
    return replace(shape, **fields)


def _plain_fields(config: Json, family: Family) -> Json:
    """Return the `ModelShape` fields of rotary embeddings and sliding windows, for a model whose layers are
    all alike."""
    rope = rope_parameters(config, family.rope_theta)
    window = config.get("sliding_window", family.sliding_window) if family.sliding_window else None
    return {
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": scaling(rope),
        "sliding_window": window,
        "sliding_layers": (True,) * config["num_hidden_layers"] if window else (),
    }


def _eos_token_ids(config: Json, family: Family, generation_config: Path) -> tuple[int, ...]:
    sources = [config.get("eos_token_id", family.eos_token_id)]
    if generation_config.is_file():
        generation = read_json(generation_config)
        _raise(kind_errors({"eos_token_id": generation.get("eos_token_id")}), generation_config)
        sources.append(generation.get("eos_token_id"))
    ids = []
    for source in sources:
        ids += source if isinstance(source, list) else [] if source is None else [source]
    return tuple(dict.fromkeys(ids))


def function_fields(shape: ModelShape, lora: LoRAConfig | None = None) -> Json:
    """Return the fields of a `ModelShape` on which the model's outputs depend, such as rope_theta, as JSON.

    Checkpoints store these fields, and they are compared before weights are loaded. Adapters are described by
    rank, scale and the layers that have them."""
    fields = {
        field.name: getattr(shape, field.name)
        for field in dataclasses.fields(shape)
        if field.name not in _CHANGE_NOTHING
    }
    if lora is not None and lora.lora_rank:
        fields |= {"lora_rank": lora.lora_rank, "lora_alpha": lora.lora_alpha}
        fields["lora_target_modules"] = sorted(lora.lora_target_modules)
    return json.loads(json.dumps(fields))


def differences(saved: Json, now: Json) -> list[str]:
    """Return a text such as 'rope_theta 10000.0, not 1000000.0' for every field whose saved value (named
    first) differs from the current one. A model without adapters has none of their fields."""
    saved, now = ({"lora_rank": 0} | fields for fields in (saved, now))
    return [
        f"{name} {saved[name]}, not {now.get(name, 'none')}"
        for name in {**now, **saved}
        if name in saved and saved[name] != now.get(name)
    ]


def not_compared(saved: Json, now: Json) -> list[str]:
    """Return the names of the fields that a model has now and that a checkpoint of an earlier version did not
    store.

    Fields whose value now has no effect (0, null, false) are left out."""
    return [name for name, value in now.items() if name not in saved and value]
