"""The configuration tree. Each field is one Megatron-style flag, its default is written here and nowhere
else, and the string under it is its `--help`. `loader.py` turns the tree into flags and back; `check.py`
holds the rules across fields.

Names are Megatron's for training, vLLM's for the engine (`--rollout-...`) and the papers' for algorithms. The
shape of the model is never a flag: it is read from the Hugging Face config in `--model`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megarl.config.checkpoint_flags import CheckpointConfig
from megarl.config.errors import require
from megarl.config.values import RankCount

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp")
OFFLOAD_PARTS = ("parameters", "gradients", "optimizer")
"""In the order in which an update uses them."""
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
TRANSPORTS = ("auto", "direct", "shared-memory", "cuda-ipc", "messages")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """model"""

    model: str
    """Folder of the Hugging Face model to start from: config.json, *.safetensors, tokenizer files."""
    tokenizer_model: str | None = None
    """Folder with a Hugging Face tokenizer, or a SentencePiece *.model file. Default: the --model folder."""
    random_init: bool = False
    """Start from random weights with the shape in --model's config.json instead of loading *.safetensors."""
    critic_model: str | None = None
    """Folder of the Hugging Face model that the critic starts from, with the actor's vocabulary: a language
    model, whose value head starts at zero, or a sequence classifier with one label, whose `score` it takes
    over. Default: --model."""
    bf16: bool = False
    """Train in bfloat16 with fp32 master weights and fp32 gradients. Default: fp32."""

    def __post_init__(self) -> None:
        require(self, rules=[(self.model != "", "model", "must name a folder.")])


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """parallelism (of every Megatron role; of one with its name in front:
    --critic-tensor-model-parallel-size)"""

    tensor_model_parallel_size: int = 1
    """Ranks that split each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Ranks that split the stack of layers."""
    virtual_pipeline_model_parallel_size: int = 1
    """Parts of the stack that each pipeline stage holds (Megatron-LM's
    --num-virtual-stages-per-pipeline-rank). Above 1 the stages take turns (interleaved 1F1B): they idle that
    many times less at the ends of a step, and send that many times more messages."""
    context_parallel_size: int = 1
    """Ranks that split every sequence's tokens, for sequences too long for one. Each keeps the same weights,
    so they are ranks of one data-parallel replica; --max-tokens-per-micro-batch counts the tokens of them
    all."""
    expert_model_parallel_size: int = 1
    """Ranks over which the experts of each mixture-of-experts layer are dealt out; they are ranks of one
    pipeline stage. With tensor parallelism Megatron wants --sequence-parallel as well."""
    expert_tensor_parallel_size: int | None = None
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
    recompute_num_layers: int | None = None
    """With full recompute: layers per recomputed block."""
    recompute_modules: tuple[str, ...] | None = None
    """With selective recompute: modules to recompute, of core_attn, layernorm, mlp."""
    offload: tuple[Literal["parameters", "gradients", "optimizer"], ...] = ()
    """What is in host memory while the device works for others: the parameters, the gradients (they are
    freed), the optimizer state with its fp32 master weights. A frozen model has parameters only."""

    def __post_init__(self) -> None:
        require(
            self,
            at_least={
                "tensor_model_parallel_size": 1,
                "pipeline_model_parallel_size": 1,
                "virtual_pipeline_model_parallel_size": 1,
                "context_parallel_size": 1,
                "expert_model_parallel_size": 1,
                "expert_tensor_parallel_size": 1,
                "recompute_num_layers": 1,
            },
            rules=[
                (
                    self.recompute_modules is None
                    or 0 < len(self.recompute_modules)
                    and {*RECOMPUTE_MODULES} >= {*self.recompute_modules},
                    "recompute_modules",
                    f"must be one or more of {', '.join(RECOMPUTE_MODULES)}. Try "
                    f"{' '.join(RECOMPUTE_MODULES)}.",
                )
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """mixtures of experts (of every role that is trained)"""

    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """Balancing loss: E * sum over experts of (share of the choices) * (mean probability), 1 where all are
    equal, with shares taken within each packed micro-batch (aux_loss; depends on the packing), each sample
    (seq_aux_loss), or the mini-batch (global_aux_loss; one more forward pass per update). The mean over all
    tokens, or samples, of the mini-batch, prompts included."""
    moe_aux_loss_coeff: float = 0.0
    """Factor of the balancing loss. Every layer adds its own, as in Megatron."""
    moe_z_loss_coeff: float = 0.0
    """Factor of the router z-loss, the mean over the mini-batch's tokens of (log sum exp of the router's
    logits)^2 in each layer; 0 is off."""

    moe_routing_replay: Literal["none", "policy", "engine"] = "none"
    """Experts that the actor's updates send each token to. none: those that the router favours now. policy:
    those of the pass that made the old log-probs. engine: those of the engine that sampled, for that pass too
    (needs one on a GPU with its prefix cache; not run yet). Their weights are always the router's of now."""

    def __post_init__(self) -> None:
        require(self, at_least={"moe_aux_loss_coeff": 0, "moe_z_loss_coeff": 0})


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConfig:
    """placement"""

    nproc_per_node: RankCount = RankCount(1)
    """Ranks that `megarl train` starts on this machine, each on a GPU of its own if there are GPUs. A range,
    e.g. 1-8, takes as many of them as there are GPUs, and the most on a machine without. Under torchrun,
    torchrun's own count holds."""
    executor: Literal["torchrun", "inline"] = "torchrun"
    """torchrun: a driver process and one worker per rank. inline: everything in one process, for pdb."""
    num_actors: int = 1
    """Actors that learn side by side, each with engines, optimizer, critic and reference of its own: the
    second's roles are actor_2, critic_2 and so on. What is not said of them is as the first's; --actor-2-lr,
    --critic-2-ranks, --rollout-2-dtype set one role, and any flag that has no form per role is the second
    actor's as --actor-2-seed, --actor-2-model, --actor-2-kl-coef."""
    pools: tuple[str, ...] = ()
    """Names for lists of ranks, e.g. --pools train=0-3 serve=4-7: a --<role>-ranks flag takes them in place
    of a list."""
    actor_ranks: str | None = None
    """Ranks of the actor, e.g. 0-3 or 0,2. Default: all."""
    critic_ranks: str | None = None
    """Ranks of the critic. Default: all."""
    reference_ranks: str | None = None
    """Ranks of the reference. Default: the actor's."""
    reward_ranks: tuple[str, ...] = ()
    """Ranks of the reward models: one list for all of them, or one each. Default: all."""
    rollout_ranks: str | None = None
    """Ranks of the rollout engines. Default: all. Rules score a response where it was sampled."""
    rollout_engine: Literal["auto", "in-process", "out-of-process"] = "auto"
    """in-process: vLLM runs in the worker of each rollout rank, which must be all ranks. out-of-process: it
    runs in processes of its own, started by the first rank of each engine, and pulls the weights. auto:
    in-process if the rollout ranks are all ranks and there is one actor, as vLLM has room for one engine in a
    process."""
    offload_ahead_bytes: int = 0
    """With --offload: bytes of what the next call needs that a device may hold beyond what the running call
    needs; they are on their way while that computes. 0: what a call needs comes when it begins."""
    call_timeout_s: float = 1800.0
    """Seconds that one call on a role may take before the job is stopped and the ranks that did not answer
    are named."""

    def __post_init__(self) -> None:
        require(
            self,
            at_least={"nproc_per_node": 1, "num_actors": 1, "offload_ahead_bytes": 0},
            at_most={"num_actors": 64, "nproc_per_node": 1024},
            above={"call_timeout_s": 0},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """batch"""

    train_iters: int
    """Steps. One step is one rollout of --num-prompts prompts and all updates on it (SFT: one optimizer
    update)."""
    num_prompts: int = 16
    """Prompts per step."""
    num_samples_per_prompt: int = 8
    """Responses sampled per prompt; they form a group."""
    global_batch_size: int = 64
    """Samples per optimizer update, over all ranks. A step makes num_prompts * num_samples_per_prompt /
    global_batch_size updates per epoch."""
    num_epochs: int = 1
    """Passes over the samples of a step."""
    max_tokens_per_micro_batch: int = 16384
    """Tokens that one rank packs into one forward pass, at most (a longer single sequence still gets its
    own)."""
    seed: int = 0
    """Seed of everything random: initial weights, data order, sampling, mini-batches."""

    def __post_init__(self) -> None:
        require(
            self,
            at_least={
                "train_iters": 1,
                "num_prompts": 1,
                "num_samples_per_prompt": 1,
                "global_batch_size": 1,
                "num_epochs": 1,
                "max_tokens_per_micro_batch": 1,
                "seed": 0,
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """optimizer (of actor and critic; for one: --actor-lr, --critic-lr and so on)"""

    lr: float = 1e-6
    """Peak learning rate of Adam."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    lr_warmup_iters: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    lr_decay_iters: int | None = None
    """Steps until the learning rate reaches --min-lr. Default: --train-iters."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices (not of norms and biases)."""
    adam_beta1: float = 0.9
    """Adam's beta1."""
    adam_beta2: float = 0.95
    """Adam's beta2."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""
    use_distributed_optimizer: bool = True
    """Shard Adam's states and the master weights over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass goes on."""
    use_megatron_fsdp: bool = False
    """Let Megatron-FSDP shard over the data-parallel ranks what --data-parallel-sharding-strategy says, in
    place of Megatron's DDP and distributed optimizer."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = (
        "optim_grads"
    )
    """With --use-megatron-fsdp: optim shards Adam's states and the master weights, optim_grads the gradients
    too (ZeRO-2)."""
    optimizer_cpu_offload: bool = False
    """Megatron's hybrid optimizer: Adam's states and the master weights are always in host memory, and the
    CPU makes the step. Needs a GPU and --use-distributed-optimizer. To have them there between updates only:
    --offload optimizer."""
    optimizer_offload_fraction: float = 1.0
    """With --optimizer-cpu-offload: share of the parameters whose states are in host memory."""

    def __post_init__(self) -> None:
        require(
            self,
            at_least={
                "lr": 0,
                "min_lr": 0,
                "lr_warmup_iters": 0,
                "lr_decay_iters": 1,
                "weight_decay": 0,
                "adam_beta1": 0,
                "adam_beta2": 0,
                "clip_grad": 0,
                "optimizer_offload_fraction": 0,
            },
            at_most={"optimizer_offload_fraction": 1},
            above={"adam_eps": 0},
            below={"adam_beta1": 1, "adam_beta2": 1},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAConfig:
    """LoRA (of actor and critic; for one: --actor-lora-rank, --critic-lora-rank and so on)"""

    lora_rank: int = 0
    """Rank of the adapters that are trained in place of the weights; the engines get both, merged. 0: all
    weights are trained."""
    lora_alpha: float = 32.0
    """What an adapter adds is multiplied by --lora-alpha / --lora-rank."""
    lora_target_modules: tuple[Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], ...] = (
        LORA_TARGETS
    )
    """Megatron's names of the layers that get one: of q, k and v, of o, of gate and up, and of down. Experts
    get none."""

    def __post_init__(self) -> None:
        targets = self.lora_target_modules or ()
        require(
            self,
            at_least={"lora_rank": 0},
            above={"lora_alpha": 0},
            rules=[
                (
                    0 < len(targets) == len({*targets}),
                    "lora_target_modules",
                    f"must name one or more of {', '.join(LORA_TARGETS)}, each once. Leave it out.",
                )
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """sampling"""

    max_prompt_length: int = 1024
    """Tokens of a prompt; a longer one is an error before training starts."""
    max_response_length: int = 1024
    """Tokens of a response; a longer one is cut there (counted in response/truncated)."""
    temperature: float = 1.0
    """Sampling temperature, at least 0.01: vLLM raises a lower one to that. The trainer's log-probs use the
    same."""
    top_p: float = 1.0
    """Nucleus sampling. Training needs 1.0: otherwise the sampled distribution is not the policy's."""
    top_k: int = 0
    """Top-k sampling; 0 is off. Training needs 0, for the same reason."""
    stop: tuple[str, ...] = ()
    """Strings after which generation stops (kept in the response)."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids after which generation stops, besides the model's end-of-sequence ids."""

    def __post_init__(self) -> None:
        require(
            self,
            at_least={"max_prompt_length": 1, "max_response_length": 1, "temperature": 0, "top_k": 0},
            above={"top_p": 0},
            at_most={"top_p": 1},
            rules=[
                (
                    not 0 < self.temperature < 0.01,
                    "temperature",
                    "must be at least 0.01, to which vLLM raises it. Try 0.01.",
                ),
                ("" not in (self.stop or ()), "stop", "must hold no empty string."),
                (min(self.stop_token_ids or (0,)) >= 0, "stop_token_ids", "must not be negative."),
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """rollout engine (vLLM's own argument names after --rollout-; any other vLLM engine argument works the
    same way)"""

    tensor_parallel_size: int = 1
    """Ranks of one vLLM engine. The rollout ranks form as many engines as fit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations of the engine. auto: as the actor trains."""
    max_num_seqs: int = 256
    """Sequences that an engine decodes at once."""
    max_num_batched_tokens: int | None = None
    """Tokens per engine step. Default: vLLM's."""
    gpu_memory_utilization: float = 0.5
    """Share of GPU memory for weights and KV cache of the engine. Not used on CPU."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of KV cache. Default: on CPU enough for every sequence of a step at full length, at most 1 GiB;
    on GPU by gpu_memory_utilization."""
    block_size: int | None = None
    """Tokens per KV-cache block. Default: vLLM's (128 on CPU)."""
    enforce_eager: bool | None = None
    """No torch.compile and no CUDA graphs in the engine. Default: true on CPU, false on GPU."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of equal prompt prefixes; it is reset whenever the weights change."""
    engine_args: dict[str, object] = field(default_factory=dict)
    """Every other --rollout-<name>: vLLM engine arguments by their own names."""

    def __post_init__(self) -> None:
        require(
            self,
            at_least={
                "tensor_parallel_size": 1,
                "max_num_seqs": 1,
                "max_num_batched_tokens": 1,
                "kv_cache_memory_bytes": 1,
                "block_size": 1,
            },
            above={"gpu_memory_utilization": 0},
            at_most={"gpu_memory_utilization": 1},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardConfig:
    """weight sync (from the actor's layout into the engines')"""

    reshard_alias: bool = True
    """Where layout and dtype agree, let an in-process engine's parameter be the trainer's own memory: nothing
    is copied or held twice."""
    reshard_transport: Literal["auto", "direct", "shared-memory", "cuda-ipc", "messages"] = "auto"
    """How weights get from an actor rank to an engine. auto: within a process direct copies, on one node
    shared memory (CPU) or CUDA IPC (GPU), else messages of torch.distributed. Anything else must work for
    every pair of ranks."""
    reshard_timeout_s: float = 600.0
    """Seconds that one sync may take before it fails and the late rank is named."""
    reshard_double_buffer: bool | None = None
    """Write a version beside the one that generates, and switch when it is complete: the engine goes on
    meanwhile, and a failed sync leaves the old version. Costs the engine's weights again. Default: true for
    an out-of-process engine without CUDA graphs."""
    check_weight_sync: bool = False
    """Compare every byte of every sync by checksum, not only samples of every tensor."""

    def __post_init__(self) -> None:
        require(self, above={"reshard_timeout_s": 0})


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """data and rewards"""

    train_data: tuple[str, ...]
    """Training files, *.jsonl or *.parquet, in verl's columns: prompt, data_source, reward_model.ground_truth
    (SFT: prompt and response, or messages)."""
    eval_data: tuple[str, ...] = ()
    """Held-out files in the same columns."""
    shuffle: bool = True
    """Shuffle the training rows anew in every pass over them."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of {role, content} messages, or a string."""
    reward_function: str | None = None
    """Your own reward, path/to/file.py:function, called as function(data_source=, solution_str=,
    ground_truth=, extra_info=) -> float."""
    reward: Literal["auto", "gsm8k", "math", "code"] | None = None
    """Built-in rule reward. auto: by data_source (gsm8k for */gsm8k and megarl/sums, math for the MATH
    family). code: the response's program is run on the row's tests, in a sandbox. Default: auto, but none
    with --reward-model."""
    reward_num_workers: int | None = None
    """Processes per engine that call the rule or function. 0: none; it is called in the worker itself, for
    pdb, and nothing can stop it. Default: this rank's share of the cores, at most 8."""
    reward_timeout_s: float = 60.0
    """Seconds that the reward of one response may take; then its process is killed and the reward has
    failed."""
    reward_memory_limit_bytes: int = 4 * 2**30
    """Memory that one such process may allocate; beyond it an allocation fails, and with it the reward."""
    reward_max_failed_share: float = 0.1
    """Share of a step's rewards that may fail, of a rule, function, model or judge: those samples are masked.
    More end the run."""
    code_timeout_s: float = 10.0
    """With --reward code: seconds that the program may take for each test of a row, of CPU and of the
    clock."""
    code_memory_limit_bytes: int = 2**30
    """With --reward code: memory of the program."""
    allow_unsandboxed_code: bool = False
    """With --reward code: run programs even where this machine cannot keep them from its network and
    files."""

    def __post_init__(self) -> None:
        require(
            self,
            at_least={
                "reward_num_workers": 0,
                "reward_memory_limit_bytes": 1,
                "reward_max_failed_share": 0,
                "code_memory_limit_bytes": 1,
            },
            above={"reward_timeout_s": 0, "code_timeout_s": 0},
            at_most={"reward_max_failed_share": 1},
            rules=[
                (self.train_data != (), "train_data", "must name at least one file."),
                (self.prompt_key != "", "prompt_key", "must name a column."),
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """run folder, evaluation and checks"""

    save: str
    """Run folder: resolved.args, metrics.jsonl, tensorboard/, rollouts/, checkpoints/, hf/, hf_critic/,
    timeline.json. Refused if it already holds a run, unless --load says to go on there."""
    eval_interval: int = 0
    """Evaluate on --eval-data every so many steps, and before the first and after the last; 0 is never."""
    eval_num_prompts: int | None = None
    """Rows of --eval-data to use. Default: all."""
    export_interval: int = 0
    """Export hf/, and with a critic hf_critic/, every so many steps; 0 is at the end only."""
    log_with: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Trackers that get metrics, samples and flags beside metrics.jsonl, rollouts/ and the console. wandb and
    mlflow are set up by their own environment variables (WANDB_MODE=offline, MLFLOW_TRACKING_URI=...). The
    flag without a name: no tracker."""
    log_project: str = "megarl"
    """Project in Weights & Biases, experiment in MLflow."""
    log_name: str | None = None
    """Name of the run in Weights & Biases and MLflow. Default: the name of --save's folder."""
    num_rollouts_to_log: int = 8
    """Samples per step written to rollouts/step_*.jsonl and to --log-with; -1 is all, 0 none."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What becomes of an update whose loss or gradient is not finite: the job ends, or the update is left
    out, on all ranks alike, and counted (policy/updates_skipped, critic/updates_skipped); more than 10 in a
    row end the job. Weights and optimizer stay unchanged either way."""
    exit_loss: float | None = None
    """SFT: stop as soon as the loss of a step falls below this."""
    gate_max_abs: float | None = None
    """Gate: largest |trainer log-prob - engine log-prob| of a sampled token that is accepted, before the
    first update and after every later step. Default: a rule for how many tokens may be outliers and how far
    one may be off, see docs/debugging.md; inf accepts all."""
    gate_mean_abs: float | None = None
    """Gate: largest mean of the same difference that is accepted, at the same times. Default: a rule that
    follows the size of the log-probs; inf accepts all."""
    warn_after_zero_reward_steps: int = 10
    """Say so when every reward has been 0 for so many steps in a row; 0 is never."""

    def __post_init__(self) -> None:
        require(
            self,
            at_least={
                "eval_interval": 0,
                "eval_num_prompts": 1,
                "export_interval": 0,
                "num_rollouts_to_log": -1,
                "warn_after_zero_reward_steps": 0,
            },
            above={"exit_loss": 0, "gate_max_abs": 0, "gate_mean_abs": 0},
            rules=[(self.save != "", "save", "must name a folder.")],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelConfig:
    """reward models"""

    reward_model: tuple[str, ...] = ()
    """Folders of reward models: sequence classifiers with one label, or language models that judge. Their
    scores are summed, and the rule reward is added if --reward or --reward-function is given too. Default:
    none."""
    reward_model_weights: tuple[float, ...] | None = None
    """What each model's score is multiplied by, one number per model. Default: 1 each. A rule reward counts
    1."""
    reward_model_backend: tuple[Literal["auto", "megatron", "transformers", "judge"], ...] = ("auto",)
    """What runs the models, one word for all or one per model. megatron: a classifier of a family that megarl
    trains, split as a role is. transformers: any classifier, whole on each rank. judge: a language model in
    vLLM that is asked for a score. auto: by config.json."""
    judge_template: str | None = None
    """Text file of what a judge is asked, with {prompt}, {response} and {ground_truth}. Default: the template
    that ships with megarl."""
    judge_score_pattern: str = r"(?i)\bscore\b[\s*:=]*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the number, that finds the score in a judge's answer; the last match
    counts."""
    judge_score_range: tuple[float, ...] = (0.0, 10.0)
    """Lowest and highest score a judge can give; scaled to 0..1. A number outside, like an answer without
    one, is a failed reward."""
    judge_max_tokens: int = 512
    """Tokens of a judge's answer, at most."""
    judge_temperature: float = 0.0
    """Sampling temperature of judges; 0 is greedy."""
    judge_max_model_len: int | None = None
    """Tokens of question and answer together, at most; a longer question is a failed reward. Default:
    --judge-max-tokens, the template's characters and twice --max-prompt-length and --max-response-length, or
    what the judge can take if that is less."""
    judge_gpu_memory_utilization: float = 0.3
    """Share of GPU memory for weights and KV cache of a judge. Not used on CPU."""

    def __post_init__(self) -> None:
        require(
            self,
            at_least={"judge_max_tokens": 1, "judge_temperature": 0, "judge_max_model_len": 2},
            above={"judge_gpu_memory_utilization": 0},
            at_most={"judge_gpu_memory_utilization": 1},
            rules=[("" not in (self.reward_model or ()), "reward_model", "must name folders.")],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything one job needs. `algorithm` is the dataclass of the chosen algorithm (megarl/algorithms)."""

    algorithm: object
    model: ModelConfig
    actor: ParallelConfig = field(default_factory=ParallelConfig)
    critic: ParallelConfig | None = None
    """None here and in the roles below: this job has no such role."""
    reference: ParallelConfig | None = None
    reward: ParallelConfig | None = None
    """Of the reward models that run on Megatron."""
    experts: MoEConfig = field(default_factory=MoEConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    batch: BatchConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The actor's."""
    critic_optimizer: OptimizerConfig | None = None
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """The actor's."""
    critic_lora: LoRAConfig | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    data: DataConfig
    reward_models: RewardModelConfig = field(default_factory=RewardModelConfig)
    run: RunConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    transformer: dict[str, object] = field(default_factory=dict)
    """Every other flag that is a field of the installed Megatron TransformerConfig, by its own name."""
    others: tuple[TrainConfig, ...] = ()
    """Of the second actor, the third, ...: the whole configuration as each of them sees it, its number left
    out."""
