"""A table of mistakes, the jobs they are made in, and how a reader follows what a finding proposes. Data for
test_bad_configurations.py."""

from __future__ import annotations

import re
from collections.abc import Iterator

Argv = dict[str, list[str]]
"""Flag without dashes -> its words."""

COMMON = {
    "train-iters": ["3"],
    "nproc-per-node": ["2"],
    "max-prompt-length": ["64"],
    "max-response-length": ["64"],
    "seed": ["1"],
}
RECIPES: dict[str, Argv] = {
    "grpo": {
        "algorithm": ["grpo"],
        **COMMON,
        "num-prompts": ["4"],
        "num-samples-per-prompt": ["4"],
        "global-batch-size": ["8"],
    },
    "ppo": {
        "algorithm": ["ppo"],
        **COMMON,
        "num-prompts": ["4"],
        "num-samples-per-prompt": ["4"],
        "global-batch-size": ["8"],
        "actor-lr": ["1e-4"],
        "critic-lr": ["1e-3"],
        "kl-mode": ["reward"],
        "kl-coef": ["0.01"],
    },
    "sft": {"algorithm": ["sft"], **COMMON, "global-batch-size": ["8"]},
    "lora": {"algorithm": ["grpo"], **COMMON, "lora-rank": ["4"]},
    "experts": {"algorithm": ["grpo"], **COMMON, "expert-model-parallel-size": ["2"]},
    "two": {
        "algorithm": ["grpo"],
        **COMMON,
        "num-actors": ["2"],
        "actor-ranks": ["0"],
        "rollout-ranks": ["0"],
        "actor-2-ranks": ["1"],
        "rollout-2-ranks": ["1"],
    },
}

# recipe -> mistakes: the flag with its bad words, and other flags that the mistake needs after |.
MISTAKES = {
    "grpo": """
        temprature 0.7
        num_prompts 8
        global-batchsize 8
        learning-rate 1e-5
        micro-batch-size 4
        tp 2
        pp 2
        rollout-n 4
        rollout-tp 2
        num-generations 4
        beta 0.1
        max-new-tokens 32
        max-completion-length 32
        train-batch-size 8
        ppo-mini-batch-size 8
        ppo-epochs 2
        n-samples-per-prompt 4
        rollout-batch-size 4
        output-dir run2
        save-steps 5
        num-train-epochs 3
        max-grad-norm 1.0
        warmup-steps 2
        per-device-train-batch-size 2
        gradient-checkpointing true
        tensor-parallel-size 2
        eps-clip 0.2
        init-kl-coef 0.1
        prompt-data train.jsonl
        pretrain model
        model-name-or-path model
        rollout-gpu-memory-utilisation 0.5
        train-iters abc
        train-iters 0
        train-iters -3
        num-prompts 1.5
        lr fast
        lr -1
        lr nan
        lr 1 2
        lr
        min-lr 1 | lr-decay-style cosine
        lr-decay-style cosin
        lr-warmup-iters -1
        lr-decay-iters 2 | lr-warmup-iters 4 ; lr-decay-style linear
        lr-decay-iters 2
        min-lr 1e-07
        adam-beta1 1.0
        adam-eps 0
        clip-grad -1
        global-batch-size 7
        global-batch-size 64
        temperature 0
        temperature -1
        temperature 0.009
        temperature 2.1
        top-p 0.9
        top-p 0
        top-k 5
        max-response-length 4096
        max-prompt-length 2
        tensor-model-parallel-size 3
        tensor-model-parallel-size 8
        pipeline-model-parallel-size 3
        context-parallel-size 0
        context-parallel-size 4
        virtual-pipeline-model-parallel-size 2
        sequence-parallel
        expert-model-parallel-size 2
        moe-z-loss-coeff 0.1
        recompute-granularity full
        recompute-granularity partial
        recompute-num-layers 1
        recompute-modules mlp
        recompute-modules attention
        offload weights
        offload-ahead-bytes 100
        rollout-tensor-parallel-size 3
        rollout-backend sglang
        rollout-tensor-parallel-size 2 | rollout-backend transformers
        rollout-block-size 64 | rollout-backend transformers
        rollout-ranks 0-3
        rollout-ranks x
        actor-ranks 1-0
        rollout-engine in-process | rollout-ranks 0 ; actor-ranks 0-1
        rollout-max-num-seqs 0
        rollout-dtype float8
        staleness -1
        staleness one
        rollout-order window | staleness 1
        weight-update keep
        num-canaries -1
        max-tokens-per-step 64 | staleness 1
        replay nowhere | staleness 1
        min-engines 1 | staleness 1
        eval-engines -1 | staleness 1
        tis-clip 0
        rollout-model x
        rollout-seed 3
        num-layers 4
        hidden-size 64
        fp16
        fp8 hybrid
        load-format dummy
        shuffle true
        kl-coef 0.1
        kl-mode los
        kl-target 3 | kl-mode loss ; kl-coef 0.1
        kl-horizon 99
        overlong-penalty 2
        exit-loss 0.5
        best-metric-mode min
        profile-step-start 1
        profile-step-end 2
        profile-ranks 1
        critic-lr 1e-3
        critic-warmup-iters 2
        gae-lambda 0.9
        lora-alpha 8
        eval-interval 5
        reward gsm9k
        reward-function nowhere.py:f
        reward-function reward
        reward-num-workers -1
        reward-max-failed-share 2
        code-timeout-s 5
        judge-max-tokens 5
        reward-model-weights 1.0
        train-data trian.jsonl
        prompt-key promt
        tokenizer-model nowhere
        model nowhere
        executor inline
        executor dask
        nproc-per-node 0
        reshard-double-buffer
        call-timeout-s 0
        gate-max-abs 0
        num-rollouts-to-log -2
        actor-2-lr 1e-3
    """,
    "ppo": """
        critic-tensor-model-parallel-size 4
        critic-lr-warmup 3
        critic-warmup-iters 3
        critic-min-lr 1 | lr-decay-style linear
        critic-min-lr 1e-07
        gae-gamma 0.9
        gae-lambda 2
        kl-coef 0
        kl-estimator k4
        cliprange 0.2
        value-clip 0.2
        reference-ranks 5
        critic-lora-alpha 4
        critic-model nowhere
    """,
    "sft": """
        kl-coef 0.1
        eval-interval 5
        global-batch-size 7
        exit-loss 0
        num-epochs 3
        temperature 0.7
        num-samples-per-promt 4
        moe-routing-replay policy
        max-response-length 1000
    """,
    "lora": """
        lora-r 8
        lora-target-modules q_proj
        lora-target-modules linear_qkv linear_qkv
        lora-rank -1
        optimizer-cpu-offload
        lora-dropout 0.1
    """,
    "experts": """
        expert-model-parallel-size 3
        expert-model-parallel-size 4
        expert-tensor-parallel-size 3
        tensor-model-parallel-size 2 | expert-model-parallel-size 1
        moe-aux-loss-coeff 0.1
        moe-router-load-balancing-type aux_loss
        fp8 hybrid | bf16
        moe-router-topk 4
        lora-target-modules linear_fc1 | lora-rank 4
    """,
    "two": """
        actor-3-lr 1e-3
        actor-2-train-iters 5
        rollout-2-engine in-process
        num-actors 1
        critic-2-lr 1e-3
    """,
}


def mistakes() -> Iterator[tuple[str, str, list[str], Argv]]:
    """(recipe, flag, its bad words, other flags)."""
    for recipe, text in MISTAKES.items():
        for line in filter(None, map(str.strip, text.splitlines())):
            mistake, _, needs = line.partition(" | ")
            flag, *words = mistake.split()
            yield (
                recipe,
                flag,
                words,
                {name: rest for name, *rest in (need.split() for need in needs.split(" ; ") if need)},
            )


def words_of(argv: Argv) -> list[str]:
    return [word for flag, words in argv.items() for word in (f"--{flag}", *words)]


def remedies(finding: str, flag: str) -> list[tuple[str, list[str] | None]]:
    """What the finding proposes, as a reader takes it: [(flag, words)] to set together, None: leave it out.
    One list per proposal."""
    text = re.sub(r" \[[^\]]*\]$", "", finding)
    out: list[list[tuple[str, list[str] | None]]] = []
    for tried, instead in re.findall(r"[Tt]ry (.+?)( instead)?(?:\.(?=\s|$)|, or |; |$)", text):
        if tried.startswith("--"):
            out.append([*([(flag, None)] if instead else []), *_flags(tried)])
        else:
            out += [[(flag, value.split())] for value in tried.split(" or ")]
    for meant in re.findall(r"Did you mean (\S+)\?", text):
        out.append(
            [(flag, None), (meant.removeprefix("--"), ["same"])]
            if meant.startswith("--")
            else [(flag, [meant])]
        )
    for left in re.findall(r"[Ll]eave (it|--[\w-]+) out", text):
        out.append([(flag if left == "it" else left.removeprefix("--"), None)])
    for added in re.findall(r"Add ((?:--[\w-]+)(?: [\w.]+)?)", text):
        out.append(_flags(added))
    for switch in re.findall(r"Write (--[\w-]+) or --no-[\w-]+\.", text):
        out.append(_flags(switch))
    return out


def _flags(text: str) -> list[tuple[str, list[str] | None]]:
    return [(words[0], words[1:]) for part in f" {text}".split(" --")[1:] if (words := part.split())]


def apply(argv: Argv, changes: list[tuple[str, list[str] | None]], bad: str) -> Argv:
    new = {name: list(words) for name, words in argv.items()}
    for name, words in changes:
        if words is None:
            new.pop(name, None)
        elif words == ["same"]:  # only the flag's name was wrong
            new[name] = argv[bad] if not name.startswith("no-") else []
        else:
            new.pop(f"no-{name}", None)
            new.pop(name.removeprefix("no-") if name.startswith("no-") else "", None)
            new[name] = words
    return new
