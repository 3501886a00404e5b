"""The shape of a model, read from the config.json of a Hugging Face folder. Torch-free.

What the training model would silently ignore is refused here by name: a key that changes the numbers must be
understood or stop the job. Missing keys have the defaults of transformers' own config classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from megarl.config.errors import ConfigError, did_you_mean, raise_findings
from megarl.config.hf_experts import expert_fields, unsupported_experts
from megarl.config.hf_gemma import ONLY_GEMMA, gemma_fields, unsupported_gemma
from megarl.config.hf_kinds import kind_findings
from megarl.config.hf_latent import latent_fields, unsupported_latents
from megarl.config.installed import is_transformers_model
from megarl.config.near import try_path
from megarl.config.rope import rope_findings, rope_parameters, scaling


@dataclass(frozen=True, slots=True)
class Family:
    """What a model_type means where config.json does not say it."""

    architecture: str
    qkv_bias: bool = False
    qk_layernorm: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    head_dim_is_a_key: bool = True  # False: vLLM ignores the key
    num_key_value_heads: int | None = 32  # None: num_attention_heads
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    eos_token_id: int | None = None
    sliding_window: int | None = None  # not None: every layer slides unless the key says null
    is_moe: bool = False
    has_latents: bool = False  # multi-head latent attention
    is_gemma: bool = False
    tie_word_embeddings: bool = False
    only: dict[str, tuple[tuple[object, ...], str]] = field(default_factory=dict)  # as ONLY, and before it

    @property
    def sequence_classifier(self) -> str:
        """The transformers class with a value head in place of the output layer."""
        stem = (
            "Gemma3Text" if self.is_gemma else self.architecture.removesuffix("ForCausalLM")
        )  # Gemma3For... sees images
        return f"{stem}ForSequenceClassification"


BIASES = {key: ((False, True), "must be true or false") for key in ("attention_bias", "mlp_bias")}
FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, head_dim_is_a_key=False),
    "qwen3": Family("Qwen3ForCausalLM", qk_layernorm=True, head_dim=128),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_layernorm=True, num_key_value_heads=4, is_moe=True),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        qkv_bias=True,
        head_dim_is_a_key=False,
        num_key_value_heads=16,
        is_moe=True,
        only={"qkv_bias": ((True,), "models without it are not supported")},
    ),
    "llama": Family(
        "LlamaForCausalLM",
        num_key_value_heads=None,
        max_position_embeddings=2048,
        eos_token_id=2,
        only=BIASES,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        eos_token_id=2,
        sliding_window=4096,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        eos_token_id=2,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        is_moe=True,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        num_key_value_heads=None,
        max_position_embeddings=2048,
        eos_token_id=2,
        is_moe=True,
        has_latents=True,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        num_key_value_heads=None,
        max_position_embeddings=4096,
        eos_token_id=1,
        is_moe=True,
        has_latents=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        qk_layernorm=True,
        head_dim=256,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        eos_token_id=1,
        is_gemma=True,
        tie_word_embeddings=True,
        only=ONLY_GEMMA,
    ),
}
# Key -> (the values that change nothing, why others are refused). Absent and null are always fine.
ONLY = {
    "hidden_act": (("silu",), "only SwiGLU (silu) is supported"),
    "attention_bias": (
        (False,),
        "it adds a bias to o_proj as well, which transformers and vLLM have together for llama only",
    ),
    "mlp_bias": ((False,), "biases in the MLP are supported for llama only"),
    "qkv_bias": ((False,), "biases that transformers would not load are not supported"),
    "bias": ((False,), "biases that transformers would not load are not supported"),
    "qk_norm": ((False,), "vLLM would normalize q and k and transformers would not"),
    "partial_rotary_factor": ((1, 1.0), "rotary embeddings of a part of each head are not supported"),
    "is_causal": ((True,), "only causal language models are supported"),
    "dual_chunk_attention_config": ((), "dual chunk attention is not supported"),
    "quantization_config": ((), "quantized weights cannot be trained; use the unquantized model"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """All that model building needs to know. Names are Megatron's where it has one.

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
    rope_scaling: dict[str, object] | None
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
        """Read config.json and, if there, generation_config.json.

        Args:
            value_head: of the model with a value head, from the folder of a causal language model or of a
                sequence classifier with one label.
        Raises: ConfigError listing every key that is missing, wrong or not supported, with the file's name.
        """
        path = Path(folder) / "config.json"
        config = _read_json(path)
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None:
            name = str(config.get("model_type", "missing"))
            raise ConfigError([f"model_type ({name}): {_unknown_family(name)} [{path}]"])
        wrong_kinds = list(kind_findings(config))
        raise_findings(
            [
                f"{finding} [{path}]"
                for finding in dict.fromkeys([*wrong_kinds, *_missing(config, family)] if wrong_kinds else ())
            ]
        )
        findings = [*_missing(config, family), *_unsupported(config, family, value_head)]
        findings += (
            unsupported_gemma(config)
            if family.is_gemma
            else [*_unsupported_windows(config, family), *rope_findings(rope_parameters(config))]
        )
        findings += unsupported_experts(config["model_type"], config) if family.is_moe else ()
        findings += unsupported_latents(config) if family.has_latents else ()
        raise_findings([f"{finding} [{path}]" for finding in findings])
        shape = _shape(
            config, family, _eos_token_ids(config, family, path.with_name("generation_config.json"))
        )
        return replace(shape, value_head=True, tie_word_embeddings=False) if value_head else shape

    def padded_vocab_size(self, multiple: int = 64) -> int:
        """Rows of the padded embedding. 64 is vLLM's padding, so that both sides' shards coincide."""
        return -(-self.vocab_size // multiple) * multiple

    @property
    def is_moe(self) -> bool:
        """A layer is a mixture of experts; every layer that is not in dense_layers."""
        return self.num_moe_experts > 0

    @property
    def is_dense(self) -> bool:
        """No layer is a mixture of experts."""
        return not self.is_moe

    def is_moe_layer(self, layer: int) -> bool:
        return self.is_moe and layer not in self.dense_layers

    def of_layer(self, layer: int) -> ModelShape:
        """The shape of a model whose layers are all like this one."""
        kind = self if self.is_moe_layer(layer) else replace(self, num_moe_experts=0)
        return replace(kind, dense_layers=()) if self.dense_layers else kind

    @property
    def names_blocks_sparse(self) -> bool:
        """The checkpoint has block_sparse_moe.experts.<e>.w1, w3 and w2 where others have
        mlp.experts.<e>.gate_proj, up_proj and down_proj."""
        return self.is_moe and self.model_type == "mixtral"

    @property
    def names_experts(self) -> bool:
        return self.is_moe and not self.names_blocks_sparse

    @property
    def shares_experts(self) -> bool:
        """mlp.shared_experts; Qwen2-MoE, where there is a gate, calls them mlp.shared_expert."""
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
        """Multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def is_gqa(self) -> bool:
        return not self.is_mla

    @property
    def has_query_latent(self) -> bool:
        return self.is_mla and self.q_lora_rank > 0

    @property
    def has_query_projection(self) -> bool:
        """Queries are a projection of the hidden states."""
        return not self.has_query_latent

    @property
    def has_plain_query(self) -> bool:
        return self.is_mla and self.has_query_projection

    @property
    def input_norms_only(self) -> bool:
        return not self.output_norms

    @property
    def architecture(self) -> str:
        """The transformers class, for the config.json of an export."""
        family = FAMILIES[self.model_type]
        return family.sequence_classifier if self.value_head else family.architecture


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        advice = try_path(
            path.parent,
            lambda one: (one / path.name).is_file(),
            "Give a folder with config.json and *.safetensors.",
        )
        reason = (
            f"must be a Hugging Face model folder, but {path.name} cannot be read: {error.strerror}.{advice}"
        )
        raise ConfigError([f"--model ({path.parent}): {reason}"]) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON; brackets in brackets
        raise ConfigError([f"--model ({path.parent}): {path.name} is not JSON: {error}."]) from error
    if not isinstance(value, dict):
        raise ConfigError([f"--model ({path.parent}): {path.name} must hold a JSON object."])
    return value


def _unknown_family(name: str) -> str:
    """Why a model_type is refused. A similar name is proposed for a typing error only: neither qwen3_next nor
    qwen4 is qwen3."""
    rule = f"must be one of {', '.join(FAMILIES)}."
    if is_transformers_model(name):
        return f"is another architecture, which is not supported; it {rule}"
    same_version = [family for family in FAMILIES if re.findall(r"\d+", family) == re.findall(r"\d+", name)]
    return rule + did_you_mean(name.lower(), same_version, "", cutoff=0.8)


def _value(config: dict[str, object], key: str, default: object) -> object:
    """null is the same as absent."""
    return default if config.get(key) is None else config[key]


def _missing(config: dict[str, object], family: Family) -> Iterator[str]:
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        if not isinstance(config.get(key), int) or config[key] < 1:
            yield f"{key} ({config.get(key, 'missing')}): must be a positive whole number."
    heads, groups = (
        config.get("num_attention_heads"),
        config.get("num_key_value_heads", family.num_key_value_heads),
    )
    if (
        isinstance(heads, int)
        and groups is not None
        and (not isinstance(groups, int) or groups < 1 or heads % groups)
    ):
        yield f"num_key_value_heads ({groups}): must divide num_attention_heads ({heads})."


def _unsupported(config: dict[str, object], family: Family, value_head: bool) -> Iterator[str]:
    for key, (accepted, reason) in (ONLY | family.only).items():
        if config.get(key) is not None and config[key] not in accepted:
            yield f"{key} ({config[key]}): {reason}."
    head_dim, heads, hidden_size = (
        config.get("head_dim"),
        config.get("num_attention_heads"),
        config.get("hidden_size"),
    )
    if (
        head_dim is not None
        and not family.head_dim_is_a_key
        and heads
        and hidden_size
        and head_dim * heads != hidden_size
    ):
        yield (
            f"head_dim ({head_dim}): must be hidden_size / num_attention_heads ({hidden_size} / "
            f"{heads}); vLLM takes no other for this family."
        )
    yield from _unsupported_architecture(config, family, value_head)


def _unsupported_windows(config: dict[str, object], family: Family) -> Iterator[str]:
    sliding = [kind for kind in config.get("layer_types") or () if kind != "full_attention"]
    if sliding:
        yield f"layer_types ({sliding[0]}): only full_attention is supported."
    window, full_layers = config.get("sliding_window"), _value(config, "max_window_layers", 28)
    if (
        config.get("use_sliding_window")
        and window is not None
        and full_layers < _value(config, "num_hidden_layers", 0)
    ):
        yield (
            f"use_sliding_window (true, sliding_window {window}): vLLM has no sliding window of "
            "some layers for this family."
        )
    if (
        window is not None
        and family.sliding_window is not None
        and (not isinstance(window, int) or window < 1)
    ):
        yield f"sliding_window ({window}): must be a positive whole number, or null."
    if window is not None and config["model_type"] == "llama":
        yield f"sliding_window ({window}): vLLM would slide and transformers would not."
    if window is not None and config["model_type"] == "mixtral":
        yield f"sliding_window ({window}): transformers would slide and vLLM would not."


def _unsupported_architecture(config: dict[str, object], family: Family, value_head: bool) -> Iterator[str]:
    architectures = config.get("architectures") or [family.architecture]
    if value_head and architectures == [family.sequence_classifier]:
        labels = (
            len(config["id2label"]) if config.get("id2label") else _value(config, "num_labels", 2)
        )  # 2 is transformers' default
        if labels != 1:
            yield (
                f"num_labels ({labels}): must be 1, the value. Use a {family.sequence_classifier} "
                f"with num_labels=1, or a {family.architecture}."
            )
    elif architectures != [family.architecture]:
        rule = f"must be {family.architecture}, a causal language model" + (
            f", or {family.sequence_classifier}" if value_head else ""
        )
        yield f"architectures ({', '.join(map(str, architectures))}): {rule}."


def _shape(config: dict[str, object], family: Family, eos_token_ids: tuple[int, ...]) -> ModelShape:
    window, heads = (
        config.get("sliding_window", family.sliding_window) if family.sliding_window else None,
        config["num_attention_heads"],
    )
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
        rms_norm_eps=float(_value(config, "rms_norm_eps", family.rms_norm_eps)),
        max_position_embeddings=_value(config, "max_position_embeddings", family.max_position_embeddings),
        eos_token_ids=eos_token_ids,
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        **(gemma_fields(config) if family.is_gemma else _plain_fields(config, family, window)),
    )
    fields = expert_fields(config["model_type"], config) if family.is_moe else {}
    fields |= latent_fields(config) if family.has_latents else {}
    return replace(shape, **fields)


def _plain_fields(config: dict[str, object], family: Family, window: int | None) -> dict[str, object]:
    """One rotary embedding for all layers, and a window in all of them or in none."""
    rope = rope_parameters(config, family.rope_theta)
    return {
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": scaling(rope),
        "sliding_window": window,
        "sliding_layers": (True,) * config["num_hidden_layers"] if window else (),
    }


def _eos_token_ids(config: dict[str, object], family: Family, generation_config: Path) -> tuple[int, ...]:
    sources = [config.get("eos_token_id", family.eos_token_id)]
    if generation_config.is_file():
        generation = _read_json(generation_config)
        raise_findings(
            [
                f"{finding} [{generation_config}]"
                for finding in kind_findings({"eos_token_id": generation.get("eos_token_id")})
            ]
        )
        sources.append(generation.get("eos_token_id"))
    ids = [
        token
        for source in sources
        if source is not None
        for token in (source if isinstance(source, list) else [source])
    ]
    return tuple(dict.fromkeys(ids))
