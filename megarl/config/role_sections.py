"""Define the sections of the configuration tree that belong to roles: parallelism, training and sampling.

Each field is one flag, see schema.py."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Annotated, Literal, get_args

from megarl.config.errors import (
    Count,
    Decay,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    PositiveFraction,
    Rule,
    Seconds,
    Section,
    at_least,
    section,
)

_VLLM_TEMPERATURE = Rule(lambda t: not t > 2, "must be at most 2, as vLLM samples at no higher one. Try 1.0.")
_Temperature = Annotated[
    NonNegative,
    Rule(lambda t: not 0 < t < 0.01, "must be at least 0.01, to which vLLM raises it. Try 0.01."),
    _VLLM_TEMPERATURE,
]
_RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp")
RecomputeModules = Annotated[
    tuple[str, ...],
    Rule(
        lambda modules: modules and {*modules} <= {*_RECOMPUTE_MODULES},
        f"must be one or more of {', '.join(_RECOMPUTE_MODULES)}. Try {' '.join(_RECOMPUTE_MODULES)}.",
    ),
]
OffloadPart = Literal["parameters", "gradients", "optimizer"]
OFFLOAD_PARTS: tuple[str, ...] = get_args(OffloadPart)
"""Parts in the order in which an update uses them."""
LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
LORA_TARGETS: tuple[str, ...] = get_args(LoraTarget)
LoraTargets = Annotated[
    tuple[LoraTarget, ...],
    Rule(
        lambda targets: 0 < len(targets) == len({*targets}),
        f"must name one or more of {', '.join(LORA_TARGETS)}, each once. Leave it out.",
    ),
]
Transport = Literal["auto", "direct", "shared-memory", "cuda-ipc", "messages"]
TRANSPORTS: tuple[str, ...] = get_args(Transport)


@section
class ParallelConfig(Section):
    """parallelism (of every Megatron role; for one: --critic-tensor-model-parallel-size and so on)"""

    tensor_model_parallel_size: Count = 1
    """Ranks that split each layer's matrices."""
    pipeline_model_parallel_size: Count = 1
    """Ranks that split the stack of layers."""
    virtual_pipeline_model_parallel_size: Count = 1
    """Parts of the stack that each pipeline stage holds (Megatron-LM's
    --num-virtual-stages-per-pipeline-rank). Above 1 the schedule is interleaved 1F1B: the pipeline bubble is
    that many times smaller, and there are that many times more messages."""
    context_parallel_size: Count = 1
    """Ranks that split the tokens of every sequence, for sequences that are too long for one rank. They hold
    the same weights and belong to one data-parallel replica. --max-tokens-per-micro-batch counts the tokens
    of all of them."""
    expert_model_parallel_size: Count = 1
    """Ranks of one pipeline stage over which the experts of each mixture-of-experts layer are distributed.
    With tensor parallelism Megatron needs --sequence-parallel as well."""
    expert_tensor_parallel_size: Count | None = None
    """Ranks of the same pipeline stage that split each expert's matrices. Default:
    --tensor-model-parallel-size."""
    qkv_layout: Literal["grouped", "stacked"] = "grouped"
    """Order of linear_qkv's rows. grouped: Megatron's, each group's query heads, key and value together.
    stacked: all query heads, all keys, all values, as vLLM has them: then a sync at equal tensor parallelism
    moves no bytes. Same numbers either way."""
    sequence_parallel: bool = False
    """Split the activations of norms and residuals along the sequence over the tensor-parallel ranks."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers (full), or --recompute-modules (selective)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full recompute: recompute every --recompute-num-layers block of layers, or only the first that
    many."""
    recompute_num_layers: Count | None = None
    """With full recompute: layers per recomputed block."""
    recompute_modules: RecomputeModules | None = None
    """With selective recompute: modules to recompute, of core_attn, layernorm, mlp."""
    offload: tuple[OffloadPart, ...] = ()
    """Parts of a role that leave the device while other roles compute: the parameters, the gradients (which
    are freed), the optimizer state with its fp32 master weights. A frozen model has parameters only."""


@section
class MoEConfig(Section):
    """mixtures of experts (of every role that is trained)"""

    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """Balancing loss: E * sum over experts of (share of the choices) * (mean probability), 1 where all are
    equal, with shares taken within each packed micro-batch (aux_loss; depends on the packing), each sample
    (seq_aux_loss), or the mini-batch (global_aux_loss; one more forward pass per update). The mean over all
    tokens, or samples, of the mini-batch, prompts included."""
    moe_aux_loss_coeff: NonNegative = 0.0
    """Factor of the balancing loss. Every layer adds its own, as in Megatron."""
    moe_z_loss_coeff: NonNegative = 0.0
    """Factor of the router z-loss, the mean over the mini-batch's tokens of (log sum exp of the router's
    logits)^2 in each layer; 0 is off."""

    moe_routing_replay: Literal["none", "policy", "engine"] = "none"
    """Experts to which the actor's updates send each token. none: the router's current choice. policy: the
    choice of the pass that computed the old log-probs. engine: the choice of the engine that sampled, also
    for the pass of the old log-probs (needs a GPU and the prefix cache; not run yet). The experts' weights
    are always the router's current ones."""


@section
class OptimizerConfig(Section):
    """optimizer (of actor and critic; for one: --actor-lr, --critic-lr and so on)"""

    lr: NonNegative = 1e-6
    """Peak learning rate of Adam."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    lr_warmup_iters: Natural = 0
    """Steps over which the learning rate rises linearly from 0."""
    lr_decay_iters: Count | None = None
    """Steps until the learning rate reaches --min-lr. Default: --train-iters."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices (not of norms and biases)."""
    adam_beta1: Decay = 0.9
    """Adam's beta1."""
    adam_beta2: Decay = 0.95
    """Adam's beta2."""
    adam_eps: Positive = 1e-8
    """Adam's epsilon."""
    clip_grad: NonNegative = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""
    use_distributed_optimizer: bool = True
    """Shard Adam's states and the master weights over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass goes on."""
    use_megatron_fsdp: bool = False
    """Use Megatron-FSDP in place of Megatron's DDP and distributed optimizer.
    --data-parallel-sharding-strategy says what it shards over the data-parallel ranks."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = (
        "optim_grads"
    )
    """With --use-megatron-fsdp: optim shards Adam's states and the master weights, optim_grads the gradients
    too (ZeRO-2)."""
    optimizer_cpu_offload: bool = False
    """Megatron's hybrid optimizer: Adam's states and the master weights are always in host memory, and the
    CPU computes the update. Needs a GPU and --use-distributed-optimizer. With --offload optimizer they are in
    host memory between updates only."""
    optimizer_offload_fraction: Fraction = 1.0
    """With --optimizer-cpu-offload: share of the parameters whose states are in host memory."""


@section
class LoRAConfig(Section):
    """LoRA (of actor and critic; for one: --actor-lora-rank, --critic-lora-rank and so on)"""

    lora_rank: Natural = 0
    """Rank of the adapters that are trained in place of the weights; the engines get both, merged. 0: all
    weights are trained."""
    lora_alpha: Positive = 32.0
    """The output of an adapter is multiplied by --lora-alpha / --lora-rank."""
    lora_target_modules: LoraTargets = LORA_TARGETS
    """Layers with adapters, by Megatron's names: q, k and v; o; gate and up; down. Experts have no
    adapters."""


@section
class SamplingConfig(Section):
    """sampling"""

    max_prompt_length: Count = 1024
    """Tokens of a prompt; a longer one is an error before training starts."""
    max_response_length: Count = 1024
    """Tokens of a sampled response, which is cut there (response/truncated). With --env of each answer. SFT
    learns responses whole."""
    max_turns: Count = 10
    """With --env: answers of the model in an episode, at most."""
    max_context_length: Count | None = None
    """With --env: tokens of a whole episode, the environment's messages included. An episode that is as long
    ends. Default: --max-prompt-length + --max-response-length."""
    temperature: _Temperature = 1.0
    """Sampling temperature, from 0.01 to 2: vLLM raises a lower one to that and refuses a higher one. The
    trainer's log-probs use the same. 1 for algorithms that learn from answers in the data."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling. Training needs 1.0: otherwise the sampled distribution is not the policy's."""
    eval_temperature: _Temperature | None = None
    """--temperature of evaluations. Default: that of training."""
    eval_top_p: PositiveFraction | None = None
    """--top-p of evaluations, which may be below 1. Default: that of training."""
    eval_max_response_length: Count | None = None
    """--max-response-length of evaluations. Default: that of training."""
    top_k: Natural = 0
    """Top-k sampling; 0 is off. Training needs 0, for the same reason."""
    stop: Annotated[tuple[str, ...], Rule(all, "must hold no empty string.")] = ()
    """Strings after which generation stops (kept in the response)."""
    stop_token_ids: Annotated[
        tuple[int, ...], Rule(lambda ids: min(ids, default=0) >= 0, "must not be negative.")
    ] = ()
    """Token ids after which generation stops, besides the model's end-of-sequence ids."""

    def of(self, purpose: str) -> SamplingConfig:
        """Return the values for "train", or for "eval", where those of --eval-... count."""
        if purpose != "eval":
            return self
        given = {
            name: getattr(self, f"eval_{name}") for name in ("temperature", "top_p", "max_response_length")
        }
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def arguments(self) -> dict[str, float]:
        """How the tokens of a request are drawn."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    @property
    def max_engine_length(self) -> int:
        """The largest number of tokens of a sequence in an engine, of training or of an evaluation."""
        return max(self.max_length, self.of("eval").max_length)

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a sample: prompt and response together, or a whole episode."""
        return self.max_context_length or self.max_prompt_length + self.max_response_length


@section
class RolloutConfig(Section):
    """rollout engine (vLLM's argument names after --rollout-; its other arguments work the same way)"""

    backend: Literal["vllm", "transformers"] = "vllm"
    """Library that samples. transformers: the Hugging Face model itself, whole on each rank, with a small
    scheduler of megarl's: slower, for machines without vLLM and as a second opinion on its log-probs. Judges
    need vLLM with either."""
    tensor_parallel_size: Count = 1
    """Ranks of one vLLM engine. The rollout ranks form as many engines as fit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations of the engine. auto: as the actor trains."""
    max_num_seqs: Count = 256
    """Sequences that an engine decodes at once."""
    max_num_batched_tokens: Count | None = None
    """Tokens per engine step. Default: vLLM's."""
    release_kv_cache: bool | None = None
    """Free the GPU memory of the KV cache while roles train, and take it back before the next rollout; the
    weights stay. Unfinished responses compute their prefixes anew. Default: true for an in-process engine on
    a GPU."""
    free_gpu_memory_fraction: PositiveFraction | None = None
    """Share of the GPU memory for the KV cache, of what models, engine weights, activations and CUDA graphs
    leave free during a rollout. Needs --rollout-release-kv-cache. Default: 0.9, but without turns no more than
    a step's sequences can fill, unless one of the next two flags sets the size."""
    gpu_memory_utilization: PositiveFraction | None = None
    """Share of all GPU memory for weights, activations and KV cache of the engine, as in vLLM; it must be
    free when the engine starts. Not used on CPU. Default: 0.5 if the KV cache is not released."""
    kv_cache_memory_bytes: Count | None = None
    """Bytes of KV cache. Default: on CPU enough for every sequence of a step at full length, at most 1 GiB;
    on GPU by one of the two flags before."""
    block_size: Count | None = None
    """Tokens per KV-cache block. Default: vLLM's (128 on CPU)."""
    enforce_eager: bool | None = None
    """No torch.compile and no CUDA graphs in the engine. Default: true on CPU, false on GPU."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of equal prompt prefixes; it is reset whenever the weights change."""
    engine_args: dict[str, object] = field(default_factory=dict)
    """Every other --rollout-<name>: vLLM engine arguments by their own names."""


@section
class ReshardConfig(Section):
    """weight sync (from the actor's layout into the engines')"""

    reshard_alias: bool = True
    """Where layout and dtype agree, let an in-process engine's parameter be the trainer's own memory: nothing
    is copied or held twice."""
    reshard_transport: Transport = "auto"
    """How weights get from an actor rank to an engine. auto: within a process direct copies, on one node
    shared memory (CPU) or CUDA IPC (GPU), else messages of torch.distributed. Anything else must work for
    every pair of ranks."""
    reshard_timeout_s: Seconds = 600.0
    """Seconds that one sync may take before it fails and the late rank is named."""
    reshard_double_buffer: bool | None = None
    """Write a version beside the one that generates, and switch when it is complete: the engine goes on
    meanwhile, and a failed sync leaves the old version. Costs the engine's weights again, and needs an
    out-of-process engine without CUDA graphs. Default: true for such an engine on a CPU, false on a GPU."""
    check_weight_sync: bool = False
    """Compare every byte of every sync by checksum, not only samples of every tensor."""


@section
class RewardModelConfig(Section):
    """reward models"""

    reward_model: Annotated[tuple[str, ...], Rule(all, "must name folders.")] = ()
    """Folders of reward models: sequence classifiers with one label, or language models that judge. Their
    scores are summed, and the rule reward is added if --reward or --reward-function is given too. Default:
    none."""
    reward_model_weights: tuple[float, ...] | None = None
    """Weights of the models' scores in their sum, one number per model. Default: 1 each. The weight of a
    rule reward is 1."""
    reward_model_backend: tuple[Literal["auto", "megatron", "transformers", "judge"], ...] = ("auto",)
    """Backend of the models, one word for all or one per model. megatron: a classifier of a family that
    megarl trains, split as other roles are. transformers: any classifier, whole on each rank. judge: a
    language model in vLLM that is asked for a score. auto: by config.json."""
    judge_template: str | None = None
    """Text file with the question to a judge, which contains {prompt}, {response} and {ground_truth}.
    Default: the template that ships with megarl."""
    judge_score_pattern: str = r"(?i)\bscore\b[\s*:=]*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the number, that finds the score in a judge's answer; the last match
    counts."""
    judge_score_range: tuple[float, ...] = (0.0, 10.0)
    """Lowest and highest score a judge can give; scaled to 0..1. A number outside, like an answer without
    one, is a failed reward."""
    judge_max_tokens: Count = 512
    """Tokens of a judge's answer, at most."""
    judge_temperature: Annotated[NonNegative, _VLLM_TEMPERATURE] = 0.0
    """Sampling temperature of judges, at most 2; 0 is greedy."""
    judge_max_model_len: Annotated[int, at_least(2)] | None = None
    """Tokens of question and answer together, at most; a longer question is a failed reward. Default:
    --judge-max-tokens, the template's characters and twice --max-prompt-length and --max-response-length, or
    what the judge can take if that is less."""
    judge_gpu_memory_utilization: PositiveFraction = 0.3
    """Share of GPU memory for weights and KV cache of a judge. Not used on CPU."""
