"""Map slime's arguments to megarl's flags.

Megatron-LM's own arguments, which slime takes too, have the same names here."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.frameworks.rows import (
    KL_ESTIMATORS,
    KL_FLAGS,
    START,
    STYLES,
    Line,
    Row,
    Settings,
    as_list,
    as_number,
    decaying,
    engine_log_probs,
    key_of,
    model_folder,
    ranks_of_nodes,
    schedule,
    separate_ranks,
    trackers,
    train_iters,
)

ESTIMATORS = {
    "ppo": "ppo",
    "grpo": "grpo",
    "gspo": "grpo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
}
"""advantage-estimator -> --algorithm."""
ESTIMATOR_FLAGS = {name: f"--algorithm {ours}" for name, ours in ESTIMATORS.items()} | {
    "gspo": "--algorithm grpo --policy-loss gspo"
}
"""advantage-estimator -> all flags that it is here."""


def _algorithm(settings: Settings) -> Iterator[Line]:
    name = key_of(settings["advantage-estimator"])
    near = f"the nearest; for {name} write an algorithm: docs/algorithms.md"
    yield Line("algorithm", ESTIMATORS.get(name, "grpo"), "" if name in ESTIMATORS else near)
    if name == "gspo":
        yield Line("policy-loss", "gspo")
    yield model_folder(settings["hf-checkpoint"])
    yield Line("bf16", note="slime trains in bfloat16")
    if name == "ppo":
        yield Line("gamma", settings["gamma"])
        yield Line("gae-lambda", settings["lambd"])
        yield Line("value-clip-eps", settings["value-clip"])
    elif ESTIMATORS.get(name, "grpo") == "grpo" and settings.is_on("disable-grpo-std-normalization"):
        yield Line("normalize-advantages-by-std", False)


def _batch(settings: Settings) -> Iterator[Line]:
    prompts, group = settings.number("rollout-batch-size"), settings.number("n-samples-per-prompt")
    updates = settings.number("num-steps-per-rollout")
    samples = settings.number("global-batch-size")
    yield _known("num-prompts", prompts, "rollout-batch-size")
    yield _known("num-samples-per-prompt", group, "n-samples-per-prompt")
    if samples is None and None not in (prompts, group):
        samples = prompts * group // (updates or 1)
    yield _known("global-batch-size", samples, "global-batch-size")


def _known(flag: str, value: object, name: str) -> Line:
    """Return a flag with its value, or a comment that says which argument of slime is missing."""
    return Line("", note=f"--{flag} N: --{name} is not given") if value is None else Line(flag, value)


def _steps(settings: Settings) -> Iterator[Line]:
    steps, epochs = settings.number("num-rollout"), settings.number("num-epoch")
    if steps is not None or epochs is None:
        yield _known("train-iters", steps, "num-rollout")
    else:
        yield train_iters(epochs, settings.rows, settings.ours.get("num-prompts"), "--num-epoch")


def _updates(settings: Settings) -> int:
    """Return the optimizer updates per rollout."""
    sizes = [settings.ours.get(f) for f in ("num-prompts", "num-samples-per-prompt", "global-batch-size")]
    prompts, group, batch = (size if isinstance(size, int) else 1 for size in sizes)
    return max(1, prompts * group // batch)


def _rate(settings: Settings) -> Iterator[Line]:
    """Yield the flags of the learning-rate schedule. slime's counts optimizer updates, megarl's counts
    steps."""
    yield from decaying("", _schedule(settings))


def _schedule(settings: Settings) -> Iterator[Line]:
    warmup, total = settings.number("lr-warmup-iters"), settings.ours.get("train-iters")
    if warmup:
        warmup = -(-warmup // _updates(settings))
    elif (share := settings.number("lr-warmup-fraction")) and isinstance(total, int):
        warmup = int(share * total)
    yield from schedule("", settings["lr"], settings["lr-decay-style"], warmup)
    if decay := settings.number("lr-decay-iters"):
        yield Line("lr-decay-iters", -(-decay // _updates(settings)))
    if (lowest := settings["min-lr"]) is not None:
        yield Line("min-lr", lowest)


def _kl(settings: Settings) -> Iterator[Line]:
    in_loss = settings.is_on("use-kl-loss")
    factor = settings["kl-loss-coef" if in_loss else "kl-coef"]
    if not as_number(factor):
        yield Line("kl-mode", "none", "the factor is 0" if in_loss else "")
        return
    yield Line("kl-mode", "loss" if in_loss else "reward")
    yield Line("kl-coef", factor)
    yield Line("kl-estimator", KL_ESTIMATORS.get(key_of(settings["kl-loss-type"]), "k3"))


def _loss(settings: Settings) -> Iterator[Line]:
    yield Line(
        "loss-aggregation",
        "token-mean" if settings.is_on("calculate-per-token-loss") else "seq-mean-token-mean",
    )
    low, high = settings["eps-clip"], settings["eps-clip-high"]
    yield Line("clip-eps-low", low)
    yield Line("clip-eps-high", low if high is None else high)


def _old_log_probs(settings: Settings) -> Iterator[Line]:
    if settings.is_on("use-rollout-logprobs"):
        yield engine_log_probs(settings, "--use-rollout-logprobs")


def _importance(settings: Settings) -> Iterator[Line]:
    if settings.is_on("use-tis"):
        yield Line("tis-clip", settings["tis-clip"])


def _ranks(settings: Settings) -> Iterator[Line]:
    """Yield the ranks of trainer and engines, on nodes of the same size.

    slime counts the nodes of the trainer only, and fills nodes of --num-gpus-per-node GPUs with both."""
    nodes, gpus = (
        int(settings.number(f"actor-num-{name}") or default)
        for name, default in (("nodes", 1), ("gpus-per-node", 8))
    )
    actor = nodes * gpus
    engines = 0 if settings.is_on("colocate") else int(settings.number("rollout-num-gpus") or actor)
    if engines:
        engine = int(settings.number("rollout-num-gpus-per-engine") or 1)
        room = max(gpus, int(settings.number("num-gpus-per-node") or 8))
        yield from separate_ranks(actor, engines, engine, room)
    else:
        yield from ranks_of_nodes(nodes, gpus)


def _eval(settings: Settings) -> Iterator[Line]:
    words = as_list(settings["eval-prompt-data"])
    files = [word for word in words if "/" in word or "." in word]
    if files:
        yield Line("eval-data", files)


def _folders(settings: Settings) -> Iterator[Line]:
    yield Line(
        "save", settings["save"], "" if "save" in settings.given else "slime saves nothing without --save"
    )
    if settings["load"]:
        yield Line(
            "load", settings["save"], "a megarl run folder or checkpoint; the run begins if there is none"
        )


def _loggers(settings: Settings) -> Iterator[Line]:
    names = [name for name in ("wandb", "tensorboard") if settings.is_on(f"use-{name}")]
    yield from trackers(names)


TABLE = (
    Row(
        "advantage-estimator",
        "{}",
        ESTIMATOR_FLAGS,
        default="grpo",
        lines=_algorithm,
    ),
    Row("bf16", "--bf16", lines=_algorithm),
    Row("hf-checkpoint", "--model {}", lines=_algorithm),
    Row(
        "gamma",
        "--gamma {}",
        default=1.0,
        instead="rewards are discounted by --algorithm ppo only",
        lines=_algorithm,
    ),
    Row("lambd", "--gae-lambda {}", default=1.0, lines=_algorithm),
    Row("value-clip", "--value-clip-eps {}", default=0.2, lines=_algorithm),
    Row(
        "disable-grpo-std-normalization",
        "--no-normalize-advantages-by-std",
        lines=_algorithm,
    ),
    Row("prompt-data", "--train-data {}"),
    Row("input-key", "--prompt-key {}", default="input"),
    Row("rollout-shuffle", "{}", {"true": "--shuffle", "false": "--no-shuffle"}, default=False),
    Row("rollout-seed", "--seed {}", default=42),
    Row("rollout-max-prompt-len", "--max-prompt-length {}"),
    Row("rollout-max-response-len", "--max-response-length {}", default=1024),
    Row("rollout-batch-size", "--num-prompts {}", lines=_batch),
    Row("n-samples-per-prompt", "--num-samples-per-prompt {}", default=1, lines=_batch),
    Row(
        "num-steps-per-rollout",
        instead="--global-batch-size = --num-prompts x --num-samples-per-prompt / it",
        lines=_batch,
    ),
    Row("global-batch-size", "--global-batch-size {}", lines=_batch),
    Row("num-rollout", "--train-iters {}", lines=_steps),
    Row("num-epoch", instead="--train-iters = epochs x (rows // --num-prompts)", lines=_steps),
    Row("lr", "--lr {}", default=1e-6, lines=_rate),
    Row("lr-decay-style", "--lr-decay-style {}", STYLES, default="linear", lines=_rate),
    Row("lr-warmup-iters", "--lr-warmup-iters {}", lines=_rate),
    Row("lr-warmup-fraction", "--lr-warmup-iters {}", times="train-iters", lines=_rate),
    Row("lr-decay-iters", "--lr-decay-iters {}", lines=_rate),
    Row("min-lr", "--min-lr {}", lines=_rate),
    Row("weight-decay", "--weight-decay {}", default=0.01),
    Row("adam-beta1", "--adam-beta1 {}", default=0.9),
    Row("adam-beta2", "--adam-beta2 {}", default=0.999),
    Row("adam-eps", "--adam-eps {}", default=1e-8),
    Row("clip-grad", "--clip-grad {}", default=1.0),
    Row("eps-clip", "--clip-eps-low {} --clip-eps-high {}", default=0.2, lines=_loss),
    Row("eps-clip-high", "--clip-eps-high {}", lines=_loss),
    Row(
        "calculate-per-token-loss",
        "--loss-aggregation token-mean",
        default=False,
        lines=_loss,
    ),
    Row("eps-clip-c", "--clip-ratio-c {}"),
    Row("entropy-coef", "--entropy-coef {}", default=0.0),
    Row("use-kl-loss", "--kl-mode {}", {"true": "loss", "false": "none"}, default=False, lines=_kl),
    Row("kl-loss-coef", "--kl-coef {} --kl-mode loss", default=0.0, lines=_kl),
    Row("kl-coef", "--kl-coef {}", default=0.0, lines=_kl),
    Row("kl-loss-type", "{}", KL_FLAGS, default="k1", lines=_kl),
    Row("use-tis", "--tis-clip 2.0", default=False, lines=_importance),
    Row("tis-clip", "--tis-clip {}", default=2.0, lines=_importance),
    Row("use-rollout-logprobs", "--old-log-probs engine", lines=_old_log_probs),
    Row("use-rollout-routing-replay", "--moe-routing-replay engine"),
    Row("use-routing-replay", "--moe-routing-replay policy"),
    Row("ref-update-interval", "--reference-update-interval {}"),
    Row(
        "train_async",
        "--staleness 1 --weight-update wait",
        note="train_async.py samples a step ahead, and ends responses before a sync",
    ),
    Row("rollout-temperature", "--temperature {}", default=1.0),
    Row("rollout-top-p", "--top-p {}", default=1.0),
    Row("rollout-top-k", "--top-k {}", {"-1": 0}, default=-1),
    Row("rollout-stop", "--stop {}"),
    Row("rollout-stop-token-ids", "--stop-token-ids {}"),
    *(
        Row(name, f"--{name} {{}}")
        for name in (
            "tensor-model-parallel-size",
            "pipeline-model-parallel-size",
            "context-parallel-size",
            "expert-model-parallel-size",
            "expert-tensor-parallel-size",
            "recompute-granularity",
            "recompute-method",
            "recompute-num-layers",
            "recompute-modules",
            "optimizer-offload-fraction",
            "moe-router-load-balancing-type",
            "moe-aux-loss-coeff",
            "moe-z-loss-coeff",
            "save-interval",
            "eval-interval",
        )
    ),
    *(
        Row(name, "{}", {"true": f"--{name}", "false": f"--no-{name}"})
        for name in ("sequence-parallel", "optimizer-cpu-offload", "overlap-grad-reduce")
    ),
    Row("num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size {}"),
    Row(
        "max-tokens-per-gpu",
        "--max-tokens-per-micro-batch {}",
        times="context-parallel-size",
    ),
    Row("actor-num-gpus-per-node", "--nproc-per-node {}", lines=_ranks),
    Row("num-gpus-per-node", "--nproc-per-node {}", default=8, lines=_ranks),
    Row("actor-num-nodes", "--nnodes {}", note=START, lines=_ranks),
    Row(
        "colocate", instead="roles share ranks unless --actor-ranks and the like say otherwise", lines=_ranks
    ),
    Row("rollout-num-gpus", instead="--rollout-ranks 4-7", lines=_ranks),
    Row("rollout-num-gpus-per-engine", "--rollout-tensor-parallel-size {}", default=1),
    Row(
        "sglang-mem-fraction-static",
        "--rollout-gpu-memory-utilization {}",
        note="vLLM's share of all memory in place of SGLang's",
    ),
    Row("sglang-max-running-requests", "--rollout-max-num-seqs {}"),
    Row("eval-prompt-data", "--eval-data {}", lines=_eval),
    Row(
        "custom-rm-path",
        "--reward-function {}",
        note="path/to/file.py:function, called as in docs/data_and_rewards.md",
    ),
    Row("save", "--save {}", default="runs/slime", lines=_folders),
    Row("load", "--load {}", lines=_folders),
    Row("use-wandb", "--log-with wandb", lines=_loggers),
    Row("use-tensorboard", "--log-with tensorboard", lines=_loggers),
    Row("wandb-project", "--log-project {}"),
    Row("wandb-group", "--log-name {}"),
    # From here on: nothing to set.
    Row(
        "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers",
        instead="stages with different numbers of layers are not supported",
    ),
    Row("update-weight-*", instead="--reshard-* says how weights get into the engines"),
    Row("update-weights-interval", instead="the engines get the weights of every step"),
    Row(
        "use-opd opd-*",
        instead="--algorithm distill --reference-model TEACHER learns from the teacher's log-probs alone",
    ),
    Row("mtp-* enable-mtp-training", instead="layers for multi-token prediction are not supported"),
    Row(
        "ref-load ref-ckpt-step",
        instead="a Megatron checkpoint; --reference-model names a Hugging Face folder (default: --model)",
    ),
    Row(
        "label-key apply-chat-template tool-key metadata-key",
        instead="docs/data_and_rewards.md lists the columns",
    ),
    Row("rm-type", instead="--reward math, gsm8k or code, or your own --reward-function"),
    Row(
        "use-dynamic-batch-size balance-data micro-batch-size seq-length log-probs-max-tokens-per-gpu "
        "ref-micro-batch-size",
        instead="sequences are packed up to --max-tokens-per-micro-batch tokens, whatever their number",
    ),
    Row("n-samples-per-eval-prompt", "--eval-num-samples {}", default=1),
    Row(
        "eval-max-response-len eval-top-p eval-temperature eval-top-k "
        "eval-input-key eval-label-key skip-eval-before-train",
        instead="an evaluation decodes greedily, and samples at --temperature; megarl eval takes --top-p too",
    ),
    Row(
        "num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups "
        "kv-channels normalization swiglu rotary-* use-rotary-position-embeddings qk-layernorm norm-epsilon "
        "vocab-size disable-bias-linear add-qkv-bias untie-embeddings-and-output-weights num-experts moe-*",
        instead="the shape comes from --model's config.json",
    ),
    Row(
        "attention-dropout hidden-dropout accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 "
        "attention-backend optimizer use-distributed-optimizer use-precision-aware-optimizer "
        "overlap-cpu-optimizer-d2h-h2d no-* make-vocab-size-divisible-by",
        instead="nothing to set: megarl decides it",
    ),
    Row(
        "partial-rollout mask-offpolicy-in-partial-rollout",
        instead="--staleness 1: unfinished responses go on over a weight sync (docs/asynchronous.md)",
    ),
    Row(
        "over-sampling-batch-size dynamic-sampling-filter-path",
        instead="--dynamic-sampling leaves out prompts with equal rewards, and samples others",
    ),
    Row(
        "rollout-function-path custom-generate-function-path",
        instead="--env FILE.py:CLASS or --agent-command make episodes of your own (docs/agents.md)",
    ),
    Row("custom-loss-function-path", instead="--policy-loss FILE.py:FUNCTION (docs/algorithms.md)"),
    Row("custom-advantage-function-path", instead="--advantage FILE.py:FUNCTION (docs/algorithms.md)"),
    Row("custom-tis-function-path", instead="--tis-clip, --tis-level and --mis-level weigh or mask tokens"),
    Row(
        "custom-rollout-log-function-path dump-details",
        instead="--num-rollouts-to-log N writes samples of each step to --save/rollouts",
    ),
    Row("megatron-to-hf-mode", instead="--model is read directly"),
    Row("train-backend", instead="Megatron trains; --use-megatron-fsdp is its FSDP"),
    Row("sglang-*", instead="the engine is vLLM: --rollout-NAME for its arguments"),
    Row("wandb-* tensorboard-dir", instead="trackers are set up by their own environment variables"),
    Row("custom-* debug-*", instead="no counterpart"),
)
