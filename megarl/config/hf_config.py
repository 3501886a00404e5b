"""The shape of a model, read from the config.json of a Hugging Face folder. Torch-free.

What the training model would silently ignore is refused here by name: a key that changes the numbers must be understood or stop
the job. Missing keys have the defaults of transformers' own config classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from megarl.config.errors import ConfigError, did_you_mean, raise_findings
from megarl.config.hf_gemma import ONLY_GEMMA, gemma_fields, unsupported_gemma
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
    eos_token_id: int | None = None
    sliding_window: int | None = None  # not None: every layer slides unless the key says null
    is_moe: bool = False
    is_gemma: bool = False
    tie_word_embeddings: bool = False
    only: dict[str, tuple[tuple[object, ...], str]] = field(default_factory=dict)  # as ONLY, and before it

    @property
    def sequence_classifier(self) -> str:
        """The transformers class with a value head in place of the output layer."""
        stem = "Gemma3Text" if self.is_gemma else self.architecture.removesuffix("ForCausalLM")  # Gemma3For... sees images
        return f"{stem}ForSequenceClassification"


BIASES = {key: ((False, True), "must be true or false") for key in ("attention_bias", "mlp_bias")}
FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, head_dim_is_a_key=False),
    "qwen3": Family("Qwen3ForCausalLM", qk_layernorm=True, head_dim=128),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_layernorm=True, num_key_value_heads=4, is_moe=True),
    "llama": Family("LlamaForCausalLM", num_key_value_heads=None, max_position_embeddings=2048, eos_token_id=2, only=BIASES),
    "mistral": Family("MistralForCausalLM", num_key_value_heads=8, max_position_embeddings=131072, eos_token_id=2, sliding_window=4096),
    "gemma3_text": Family("Gemma3ForCausalLM", qk_layernorm=True, head_dim=256, num_key_value_heads=4, max_position_embeddings=131072,
                          eos_token_id=1, is_gemma=True, tie_word_embeddings=True, only=ONLY_GEMMA),
}
# Key -> (the values that change nothing, why others are refused). Absent and null are always fine.
ONLY = {
    "hidden_act": (("silu",), "only SwiGLU (silu) is supported"),
    "attention_bias": ((False,), "it adds a bias to o_proj as well, which transformers and vLLM have together for llama only"),
    "mlp_bias": ((False,), "biases in the MLP are supported for llama only"),
    "qkv_bias": ((False,), "biases that transformers would not load are not supported"),
    "bias": ((False,), "biases that transformers would not load are not supported"),
    "qk_norm": ((False,), "vLLM would normalize q and k and transformers would not"),
    "partial_rotary_factor": ((1, 1.0), "rotary embeddings of a part of each head are not supported"),
    "is_causal": ((True,), "only causal language models are supported"),
    "dual_chunk_attention_config": ((), "dual chunk attention is not supported"),
    "quantization_config": ((), "quantized weights cannot be trained; use the unquantized model"),
    "decoder_sparse_step": ((1,), "every layer must be a mixture of experts"),
    "mlp_only_layers": (([],), "every layer must be a mixture of experts"),
    "shared_expert_intermediate_size": ((0,), "shared experts are not supported"),
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
        num_moe_experts: 0 for a dense model; then the three fields that follow mean nothing, otherwise ffn_hidden_size does not.
        moe_ffn_hidden_size: of one expert. moe_router_topk: experts per token.
        norm_topk_prob: the weights of a token's experts sum to 1.
        activation: silu or gelu_tanh, of the MLP's gate.
        sliding_window: None, or how many tokens, itself the last of them, a token sees in the layers that sliding_layers says True of.
        local_rope_theta: rotary base of these layers, which have no scaling then; None: as others.
        query_pre_attn_scalar: queries times keys are divided by its square root; None: head_dim.
        zero_centered_norms: norms multiply by 1 + weight. output_norms: attention and MLP have one after them as well as before.
        scaled_embeddings: by sqrt(hidden_size).
        value_head: a critic or reward model: `score.weight` [1, hidden_size] in place of the output layer. Embeddings are not tied then.
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
            value_head: of the model with a value head, from the folder of a causal language model or of a sequence classifier with
                one label.
        Raises: ConfigError listing every key that is missing, wrong or not supported, with the file's name.
        """
        path = Path(folder) / "config.json"
        config = _read_json(path)
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None:
            name = str(config.get("model_type", "missing"))
            raise ConfigError([f"model_type ({name}): must be one of {', '.join(FAMILIES)}.{did_you_mean(name, FAMILIES, '')} [{path}]"])
        findings = [*_missing(config, family), *_unsupported(config, family, value_head)]
        findings += unsupported_gemma(config) if family.is_gemma else [*_unsupported_windows(config, family), *rope_findings(rope_parameters(config))]
        findings += _unsupported_experts(config) if family.is_moe else ()
        raise_findings([f"{finding} [{path}]" for finding in findings])
        shape = _shape(config, family, _eos_token_ids(config, family, path.with_name("generation_config.json")))
        return replace(shape, value_head=True, tie_word_embeddings=False) if value_head else shape

    def padded_vocab_size(self, multiple: int = 64) -> int:
        """Rows of the padded embedding. 64 is vLLM's padding, so that both sides' shards coincide."""
        return -(-self.vocab_size // multiple) * multiple

    @property
    def is_moe(self) -> bool:
        """Every layer is a mixture of experts."""
        return self.num_moe_experts > 0

    @property
    def is_dense(self) -> bool:
        return not self.is_moe

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
        reason = f"must be a Hugging Face model folder, but {path.name} cannot be read: {error.strerror}."
        raise ConfigError([f"--model ({path.parent}): {reason}"]) from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise ConfigError([f"--model ({path.parent}): {path.name} is not JSON: {error}."]) from error
    if not isinstance(value, dict):
        raise ConfigError([f"--model ({path.parent}): {path.name} must hold a JSON object."])
    return value


def _value(config: dict[str, object], key: str, default: object) -> object:
    """null is the same as absent."""
    return default if config.get(key) is None else config[key]


def _missing(config: dict[str, object], family: Family) -> Iterator[str]:
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        if not isinstance(config.get(key), int) or config[key] < 1:
            yield f"{key} ({config.get(key, 'missing')}): must be a positive whole number."
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads", family.num_key_value_heads)
    if isinstance(heads, int) and groups is not None and (not isinstance(groups, int) or groups < 1 or heads % groups):
        yield f"num_key_value_heads ({groups}): must divide num_attention_heads ({heads})."


def _unsupported(config: dict[str, object], family: Family, value_head: bool) -> Iterator[str]:
    for key, (accepted, reason) in (ONLY | family.only).items():
        if config.get(key) is not None and config[key] not in accepted:
            yield f"{key} ({config[key]}): {reason}."
    head_dim, heads, hidden_size = config.get("head_dim"), config.get("num_attention_heads"), config.get("hidden_size")
    if head_dim is not None and not family.head_dim_is_a_key and heads and hidden_size and head_dim * heads != hidden_size:
        yield f"head_dim ({head_dim}): must be hidden_size / num_attention_heads ({hidden_size} / {heads}); vLLM takes no other for this family."
    yield from _unsupported_architecture(config, family, value_head)


def _unsupported_windows(config: dict[str, object], family: Family) -> Iterator[str]:
    sliding = [kind for kind in config.get("layer_types") or () if kind != "full_attention"]
    if sliding:
        yield f"layer_types ({sliding[0]}): only full_attention is supported."
    window, full_layers = config.get("sliding_window"), _value(config, "max_window_layers", 28)
    if config.get("use_sliding_window") and window is not None and full_layers < _value(config, "num_hidden_layers", 0):
        yield f"use_sliding_window (true, sliding_window {window}): vLLM has no sliding window of some layers for this family."
    if window is not None and family.sliding_window is not None and (not isinstance(window, int) or window < 1):
        yield f"sliding_window ({window}): must be a positive whole number, or null."
    if window is not None and config["model_type"] == "llama":
        yield f"sliding_window ({window}): vLLM would slide and transformers would not."


def _unsupported_architecture(config: dict[str, object], family: Family, value_head: bool) -> Iterator[str]:
    architectures = config.get("architectures") or [family.architecture]
    if value_head and architectures == [family.sequence_classifier]:
        labels = len(config["id2label"]) if config.get("id2label") else _value(config, "num_labels", 2)  # 2 is transformers' default
        if labels != 1:
            yield f"num_labels ({labels}): must be 1, the value. Use a {family.sequence_classifier} with num_labels=1, or a {family.architecture}."
    elif architectures != [family.architecture]:
        rule = f"must be {family.architecture}, a causal language model" + (f", or {family.sequence_classifier}" if value_head else "")
        yield f"architectures ({', '.join(map(str, architectures))}): {rule}."


_EXPERT_DEFAULTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False}


def _expert_sizes(config: dict[str, object]) -> dict[str, object]:
    """The keys of a mixture of experts. transformers 5 also writes num_experts as num_local_experts."""
    found = {key: _value(config, key, default) for key, default in _EXPERT_DEFAULTS.items()}
    return found | {"num_experts": _value(config, "num_experts", _value(config, "num_local_experts", 128))}


def _unsupported_experts(config: dict[str, object]) -> Iterator[str]:
    sizes = _expert_sizes(config)
    experts, per_token = sizes["num_experts"], sizes["num_experts_per_tok"]
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if not isinstance(sizes[key], int) or sizes[key] < 1:
            yield f"{key} ({sizes[key]}): must be a positive whole number."
    if not isinstance(sizes["norm_topk_prob"], bool):
        yield f"norm_topk_prob ({sizes['norm_topk_prob']}): must be true or false."
    if isinstance(experts, int) and isinstance(per_token, int) and per_token > experts:
        yield f"num_experts_per_tok ({per_token}): must be at most num_experts ({experts})."
    if per_token == 1 and sizes["norm_topk_prob"]:
        yield "norm_topk_prob (true): with num_experts_per_tok 1 every weight is 1 and the router learns nothing. Write false."


def _shape(config: dict[str, object], family: Family, eos_token_ids: tuple[int, ...]) -> ModelShape:
    window, heads, experts = config.get("sliding_window", family.sliding_window) if family.sliding_window else None, config["num_attention_heads"], _expert_sizes(config) if family.is_moe else None
    return ModelShape(
        model_type=config["model_type"], num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"],
        num_attention_heads=heads, num_query_groups=config.get("num_key_value_heads", family.num_key_value_heads) or heads,
        head_dim=config.get("head_dim") or family.head_dim or config["hidden_size"] // heads,
        ffn_hidden_size=config["intermediate_size"], vocab_size=config["vocab_size"],
        tie_word_embeddings=bool(config.get("tie_word_embeddings", family.tie_word_embeddings)), qkv_bias=family.qkv_bias or bool(config.get("attention_bias")), o_bias=bool(config.get("attention_bias")),
        mlp_bias=bool(config.get("mlp_bias")), qk_layernorm=family.qk_layernorm,
        rms_norm_eps=float(_value(config, "rms_norm_eps", 1e-6)),
        max_position_embeddings=_value(config, "max_position_embeddings", family.max_position_embeddings), eos_token_ids=eos_token_ids,
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        num_moe_experts=experts["num_experts"] if experts else 0, moe_ffn_hidden_size=experts["moe_intermediate_size"] if experts else 0,
        moe_router_topk=experts["num_experts_per_tok"] if experts else 0, norm_topk_prob=bool(experts and experts["norm_topk_prob"]),
        **(gemma_fields(config) if family.is_gemma else _plain_fields(config, window)),
    )  # fmt: skip


def _plain_fields(config: dict[str, object], window: int | None) -> dict[str, object]:
    """One rotary embedding for all layers, and a window in all of them or in none."""
    rope = rope_parameters(config)
    return {"rope_theta": float(rope["rope_theta"]), "rope_scaling": scaling(rope), "sliding_window": window,
            "sliding_layers": (True,) * config["num_hidden_layers"] if window else ()}  # fmt: skip


def _eos_token_ids(config: dict[str, object], family: Family, generation_config: Path) -> tuple[int, ...]:
    sources = [config.get("eos_token_id", family.eos_token_id)]
    if generation_config.is_file():
        sources.append(_read_json(generation_config).get("eos_token_id"))
    ids = [token for source in sources if source is not None for token in (source if isinstance(source, list) else [source])]
    return tuple(dict.fromkeys(ids))
