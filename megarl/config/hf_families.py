"""List the supported families of models, and check the values of a Hugging Face config.json.

Rotary embeddings are read in the spellings of all versions of transformers. A value is accepted if
transformers and vLLM compute the same with it; `megatron/rope.py` has the formulas. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megarl.config.errors import Errors

Json = dict[str, object]
"""A JSON object, such as the content of config.json."""


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a model_type, and the defaults of keys that its config.json may leave out."""

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
    switched_window: int | None = None  # the window of layers that use_sliding_window lets slide
    is_moe: bool = False
    has_latents: bool = False  # multi-head latent attention
    is_gemma: bool = False
    tie_word_embeddings: bool = False
    only: dict[str, tuple[tuple[object, ...], str]] = field(default_factory=dict)  # as ONLY, and before it

    @property
    def sequence_classifier(self) -> str:
        """Name of the transformers class with a value head in place of the output layer."""
        if self.is_gemma:  # Gemma3ForSequenceClassification takes images too
            return "Gemma3TextForSequenceClassification"
        return self.architecture.removesuffix("ForCausalLM") + "ForSequenceClassification"


ONLY_GEMMA = {
    "hidden_act": (("gelu_pytorch_tanh",), "Gemma 3 names it hidden_activation"),
    "hidden_activation": (("gelu_pytorch_tanh",), "only gelu_pytorch_tanh is supported"),
    "final_logit_softcapping": ((), "capped logits are not supported"),
    "attn_logit_softcapping": ((), "capped attention is not supported"),
    "use_bidirectional_attention": ((False,), "only causal language models are supported"),
}
_NO_WINDOW = {"use_sliding_window": ((False,), "sliding windows are not supported for this family")}
BIASES = {key: ((False, True), "must be true or false") for key in ("attention_bias", "mlp_bias")}
FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, head_dim_is_a_key=False, switched_window=4096),
    "qwen3": Family("Qwen3ForCausalLM", qk_layernorm=True, head_dim=128, switched_window=4096),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", qk_layernorm=True, num_key_value_heads=4, is_moe=True, only=_NO_WINDOW
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        qkv_bias=True,
        head_dim_is_a_key=False,
        num_key_value_heads=16,
        is_moe=True,
        only=_NO_WINDOW | {"qkv_bias": ((True,), "models without it are not supported")},
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

_MOST_LAYERS = 10_000


def is_whole(value: object, at_least: int = 0, at_most: int = 2**31 - 1) -> bool:
    return type(value) is int and at_least <= value <= at_most  # a bool is an int to isinstance


def _is_number(value: object, above: float = 0) -> bool:
    return type(value) in (int, float) and above < value <= 1e300


def _are_tokens(value: object) -> bool:
    return all(map(is_whole, value if isinstance(value, list) else [value]))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "must be a positive whole number": (
        is_whole,
        """hidden_size intermediate_size num_attention_heads vocab_size head_dim max_position_embeddings
        original_max_position_embeddings sliding_window num_labels max_window_layers
        num_nextn_predict_layers""",
    ),
    "must be a whole number above 0": (lambda value: is_whole(value, at_least=1), "sliding_window_pattern"),
    f"must be a positive whole number, at most {_MOST_LAYERS}": (
        lambda value: is_whole(value, at_most=_MOST_LAYERS),
        "num_hidden_layers",
    ),
    "must be a number": (lambda value: _is_number(value, -1e300), "query_pre_attn_scalar"),
    "must be a positive number": (
        _is_number,
        "rms_norm_eps rope_theta rope_local_base_freq routed_scaling_factor",
    ),
    "must be true or false": (
        lambda value: isinstance(value, bool),
        "tie_word_embeddings use_sliding_window rope_interleave",
    ),
    "must be a list of names": (_are_texts, "layer_types architectures"),
    "must be an object": (lambda value: isinstance(value, dict), "rope_scaling rope_parameters id2label"),
    "must be a token id, or a list of them": (_are_tokens, "eos_token_id"),
}
"""Rule -> (test of a value, the keys that the rule is for). Whether a key may be 0 is checked elsewhere."""
_OF_ROPE = ("rope_theta", "original_max_position_embeddings")


def kind_errors(config: Json) -> Errors:
    """Yield an error per key whose value has the wrong type. null is the same as absent."""
    for rule, (holds, keys) in KINDS.items():
        for key in keys.split():
            if config.get(key) is not None and not holds(config[key]):
                yield f"{key} ({config[key]!s:.80}): {rule}."
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        for inner in (rope, *rope.values()) if isinstance(rope, dict) else ():
            if isinstance(inner, dict):
                yield from kind_errors({key: inner.get(key) for key in _OF_ROPE})
                if inner.get("rope_theta", 0) is None:  # here transformers fails on null
                    yield "rope_theta (null): must be a positive number, or be left out."


def value_of(config: Json, key: str, default: object) -> object:
    """Return the value of a key of config.json, or `default` if the key is absent or null."""
    return default if config.get(key) is None else config[key]


def num_labels(config: Json) -> int:
    """Return the number of labels as in transformers: the number of their names, else num_labels, else 2."""
    return len(config.get("id2label") or ()) or value_of(config, "num_labels", 2)


def missing_keys(config: Json, family: Family) -> Errors:
    """Yield an error per required size, such as hidden_size, that is missing or cannot be right."""
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        if not isinstance(config.get(key), int) or config[key] < 1:
            yield f"{key} ({config.get(key, 'missing')}): must be a positive whole number."
    heads = config.get("num_attention_heads")
    groups = config.get("num_key_value_heads", family.num_key_value_heads)
    if isinstance(heads, int) and groups is not None:
        if not isinstance(groups, int) or groups < 1 or heads % groups:
            yield f"num_key_value_heads ({groups}): must divide num_attention_heads ({heads})."


def unsupported_keys(config: Json, family: Family, value_head: bool) -> Errors:
    """Yield an error per value in config.json that the training model does not implement. Keys of windows,
    experts and latents are checked elsewhere."""
    for key, (accepted, reason) in (ONLY | family.only).items():
        if config.get(key) is not None and config[key] not in accepted:
            yield f"{key} ({config[key]}): {reason}."
    head_dim, heads, size = (config.get(k) for k in ("head_dim", "num_attention_heads", "hidden_size"))
    if head_dim is not None and not family.head_dim_is_a_key and heads and size and head_dim * heads != size:
        yield (
            f"head_dim ({head_dim}): must be hidden_size / num_attention_heads ({size} / {heads}); vLLM "
            "takes no other for this family."
        )
    architectures = config.get("architectures") or [family.architecture]
    classifier = family.sequence_classifier
    if value_head and architectures == [classifier]:
        if (labels := num_labels(config)) != 1:
            yield (
                f"num_labels ({labels}): must be 1, the value. Use a {classifier} with num_labels=1, or a "
                f"{family.architecture}."
            )
    elif architectures != [family.architecture]:
        rule = f"must be {family.architecture}, a causal language model"
        rule += f", or {classifier}" if value_head else ""
        yield f"architectures ({', '.join(map(str, architectures))}): {rule}."


def unsupported_windows(config: Json, family: Family) -> Errors:
    """Yield an error per setting of sliding windows that is not supported, for a family whose layers are all
    alike."""
    sliding = [kind for kind in config.get("layer_types") or () if kind != "full_attention"]
    if sliding:
        yield f"layer_types ({sliding[0]}): only full_attention is supported."
    is_switched_on = family.switched_window is not None and config.get("use_sliding_window")
    window = config.get("sliding_window", family.switched_window if is_switched_on else None)
    if window is None:
        return
    some_slide = value_of(config, "max_window_layers", 28) < value_of(config, "num_hidden_layers", 0)
    if is_switched_on and some_slide:
        yield (
            f"use_sliding_window (true, sliding_window {window}): vLLM has no sliding window of some layers "
            "for this family."
        )
    if family.sliding_window is not None and (not isinstance(window, int) or window < 1):
        yield f"sliding_window ({window}): must be a positive whole number, or null."
    if config["model_type"] == "llama":
        yield f"sliding_window ({window}): vLLM would slide and transformers would not."
    if config["model_type"] == "mixtral":
        yield f"sliding_window ({window}): transformers would slide and vLLM would not."


# rope_type -> (keys that it needs, keys that it may have). Keys of other types change nothing.
TYPES = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
REFUSED_TYPES = {
    "dynamic": "transformers scales by the length of each sequence, vLLM by the longest possible one",
    "longrope": "two sets of frequencies, by the length of the sequence, are not supported",
    "proportional": "frequencies that differ over the heads' parts are not supported",
}
_KEYS = {
    *("rope_theta", "rope_type", "type", "partial_rotary_factor"),
    *(key for needed, optional in TYPES.values() for key in (*needed, *optional)),
}


def rope_parameters(config: Json, theta: float = 10000.0) -> Json:
    """Return the rotary parameters of config.json as transformers 5 writes them: one object with rope_type,
    rope_theta and the keys of its scaling.

    Older versions write rope_theta and rope_scaling as two keys.

    Args:
        theta: default of rope_theta."""
    return standard(config.get("rope_scaling") or config.get("rope_parameters") or {}, config, theta)


def standard(parameters: Json, config: Json, theta: float) -> Json:
    """Return the rotary `parameters` with defaults, and with rope_theta and original_max_position_embeddings
    where config.json has them outside."""
    rope = dict(parameters)
    if rope.get("attention_factor") is None:  # null is the same as absent, in vLLM too
        rope.pop("attention_factor", None)
    rope.setdefault("rope_theta", theta if config.get("rope_theta") is None else config["rope_theta"])
    rope.setdefault("rope_type", rope.get("type", "default"))
    if "original_max_position_embeddings" in TYPES.get(str(rope["rope_type"]), ((),))[0]:
        if config.get("original_max_position_embeddings") is not None:  # transformers prefers it
            rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return rope


def scaling(rope: Json) -> Json | None:
    """Return rope_type and those keys of `rope_parameters` that scale frequencies; None if nothing is
    scaled."""
    needed, optional = TYPES[rope["rope_type"]]
    return {key: rope[key] for key in ("rope_type", *needed, *optional) if key in rope} if needed else None


def rope_errors(rope: Json) -> Errors:
    """Yield an error per rotary parameter that is not supported."""
    kind = str(rope["rope_type"])
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        yield (
            f"rope_parameters ({', '.join(nested)}): different rotary embeddings per kind of "
            "layer are not supported."
        )
        return
    if kind not in TYPES:
        yield (
            f"rope_type ({kind}): {REFUSED_TYPES.get(kind, 'is not known')}; must be one of "
            f"{', '.join(TYPES)}."
        )
        return
    if rope.get("type", kind) != kind:
        yield f"type ({rope['type']}): contradicts rope_type ({kind}). Write one of them."
    if unknown := sorted(rope.keys() - _KEYS):
        yield (
            f"rope_parameters ({', '.join(unknown)}): keys that change the rotary embedding in a "
            "way that is not supported."
        )
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        yield (
            f"partial_rotary_factor ({rope['partial_rotary_factor']}): rotary embeddings of a "
            "part of each head are not supported."
        )
    yield from _scaling_errors(kind, rope)


def _scaling_errors(kind: str, rope: Json) -> Errors:
    needed, optional = TYPES[kind]
    if missing := [key for key in needed if not _is_number(rope.get(key))]:
        yield f"rope_type ({kind}): needs {' and '.join(missing)}."
        return
    for key in (key for key in optional if key in rope):
        if key == "truncate" and not isinstance(rope[key], bool):
            yield f"rope_type ({kind}): truncate ({rope[key]}) must be true or false."
        elif key != "truncate" and not _is_number(rope[key]):
            yield f"rope_type ({kind}): {key} ({rope[key]}) must be a positive number."
    if needed and rope["factor"] < 1:
        yield f"factor ({rope['factor']}): must be at least 1."
    elif kind == "linear" and isinstance(rope["factor"], int):
        yield (
            f"factor ({rope['factor']}): vLLM takes it as a number with a point only. Write "
            f"{float(rope['factor'])}."
        )
    if kind == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        yield (
            f"high_freq_factor ({rope['high_freq_factor']}): must be above low_freq_factor "
            f"({rope['low_freq_factor']})."
        )
