"""Every rule across fields: a job that breaks it, with the words of the finding, and the same job put right
as the finding says.

pytest tests/config/test_check.py"""

import dataclasses

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.check import check
from megarl.config.errors import ConfigError, raise_errors
from megarl.config.hf_config import ModelShape
from megarl.config.loader import load_config
from megarl.config.mesh import MeshSpec, role_meshes
from megarl.config.roles import parse_ranks
from megarl.config.rules_streaming import correction_warnings


@pytest.fixture
def findings(job, tmp_path):
    """findings("--flag value ...", world_size, shape fields to change...) of the job with these flags on
    top."""

    def find(flags="", world_size=2, **shape):
        config = load_config([job, *flags.split()], REGISTRY)
        return check(config, dataclasses.replace(ModelShape.load(tmp_path / "model"), **shape), world_size)

    return find


def test_the_job_is_right(findings):
    assert findings() == [] and findings("--algorithm sft") == []


def test_a_size_that_no_model_allows_is_not_blamed_on_the_number_of_ranks(findings):
    found = findings("--tensor-model-parallel-size 3")
    assert found and not any("nproc" in finding for finding in found)


EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_router_topk": 2}
# flags, world size -> the finding; flags of the job put right.
RULES = {
    "heads": (
        "--tensor-model-parallel-size 8",
        8,
        {},
        "--tensor-model-parallel-size (8): must divide the model's attention heads (4). Try 2 or 4.",
        "--tensor-model-parallel-size 2",
    ),
    "key-value heads": (
        "--tensor-model-parallel-size 4",
        4,
        {"num_attention_heads": 24, "num_query_groups": 6, "ffn_hidden_size": 96},
        "--tensor-model-parallel-size (4): must divide the model's key-value heads (6), or be a "
        "multiple of them. Try 1 or 2.",
        "--tensor-model-parallel-size 2",
    ),
    "stacked rows of shared keys": (
        "--tensor-model-parallel-size 4 --qkv-layout stacked",
        4,
        {},
        "--qkv-layout (stacked): needs whole key-value heads on each rank: "
        "--tensor-model-parallel-size (4) must divide the model's (2).",
        "--tensor-model-parallel-size 4",
    ),
    "ffn": (
        "--tensor-model-parallel-size 2",
        2,
        {"ffn_hidden_size": 255},
        "--tensor-model-parallel-size (2): must divide the model's intermediate_size (255). Try 1.",
        "--tensor-model-parallel-size 1",
    ),
    "a profile that begins after the last step": (
        "--profile torch --train-iters 10",
        2,
        {},
        "--profile-step-start (10): must be below --train-iters (10). Try --profile-step-start 9 "
        "--profile-step-end 10.",
        "--profile torch --train-iters 10 --profile-step-start 9 --profile-step-end 10",
    ),
    "a profile that ends after the last step": (
        "--profile memory --train-iters 11",
        2,
        {},
        "--profile-step-end (12): must be at most --train-iters (11), the last step. Try "
        "--profile-step-end 11.",
        "--profile memory --train-iters 11 --profile-step-end 11",
    ),
    "a profile without steps": (
        "--profile torch --train-iters 20 --profile-step-end 10",
        2,
        {},
        "--profile-step-end (10): must be above --profile-step-start (10), because the profiled steps are "
        "those after it. Try --profile-step-end 11.",
        "--profile torch --train-iters 20 --profile-step-end 11",
    ),
    "a profile of a rank that does not exist": (
        "--profile nsys --train-iters 20 --profile-ranks 1 2",
        2,
        {},
        "--profile-ranks (1 2): rank 2 is not among the job's ranks, 0 to 1. Try --profile-ranks 1.",
        "--profile nsys --train-iters 20 --profile-ranks 1",
    ),
    "a profile of a rank twice": (
        "--profile torch --train-iters 20 --profile-ranks 1 1",
        2,
        {},
        "--profile-ranks (1 1): must name each rank once. Try --profile-ranks 1.",
        "--profile torch --train-iters 20 --profile-ranks 0 1",
    ),
    "a profile of no rank": (
        "--profile torch --train-iters 20 --profile-ranks",
        2,
        {},
        "--profile-ranks (): must name at least one rank. Try --profile-ranks 0.",
        "",
    ),
    "a loss that ends no sampling": (
        "--exit-loss 0.5",
        2,
        {},
        "--exit-loss (0.5): is for training on answers in the data. The loss of a policy gradient says nothing "
        "of progress, so --algorithm grpo ends after --train-iters.",
        "--algorithm sft --exit-loss 0.5",
    ),
    "experts of a dense model": (
        "--expert-model-parallel-size 2",
        2,
        {},
        "--expert-model-parallel-size (2): needs a mixture of experts, and qwen3 is none. Leave it out.",
        "",
    ),
    "losses of experts that a dense model has not": (
        "--moe-z-loss-coeff 1e-3",
        2,
        {},
        "--moe-z-loss-coeff (0.001): needs a mixture of experts, and qwen3 is none. Leave it out.",
        "",
    ),
    "experts of the engine": (
        "--moe-routing-replay engine --no-rollout-enable-prefix-caching",
        2,
        EXPERTS,
        "--moe-routing-replay (engine): vLLM reports the experts that it chose only with its "
        "prefix cache. Leave --no-rollout-enable-prefix-caching "
        "out, or try --moe-routing-replay policy.",
        "--moe-routing-replay engine",
    ),
    "an engine of transformers on two ranks": (
        "--rollout-backend transformers --rollout-tensor-parallel-size 2",
        2,
        {},
        "--rollout-tensor-parallel-size (2): with --rollout-backend transformers each engine is whole on "
        "one rank. Try --rollout-tensor-parallel-size 1, or try --rollout-backend vllm.",
        "--rollout-backend transformers",
    ),
    "blocks of a cache without blocks": (
        "--rollout-backend transformers --rollout-block-size 32",
        2,
        {},
        "--rollout-block-size (32): the KV cache of --rollout-backend transformers has no blocks. "
        "Leave it out, or try --rollout-backend vllm.",
        "--rollout-backend vllm --rollout-block-size 32",
    ),
    "graphs that transformers does not have": (
        "--rollout-backend transformers --no-rollout-enforce-eager",
        2,
        {},
        "--no-rollout-enforce-eager (False): --rollout-backend transformers has no CUDA graphs and is "
        "not compiled. Leave it out, or try --rollout-backend vllm.",
        "--rollout-backend transformers --rollout-enforce-eager",
    ),
    "experts that transformers does not report": (
        "--rollout-backend transformers --moe-routing-replay engine",
        2,
        EXPERTS,
        "--moe-routing-replay (engine): --rollout-backend transformers does not report the experts that "
        "it chose. Try --moe-routing-replay policy, or try --rollout-backend vllm.",
        "--rollout-backend transformers --moe-routing-replay policy",
    ),
    "an argument of the other backend": (
        "--rollout-backend transformers --rollout-scheduling-policy fcfs",
        2,
        {},
        "--rollout-scheduling-policy (fcfs): is an argument of vLLM, and the engine is that of "
        "--rollout-backend transformers. Leave it out, or try --rollout-backend vllm.",
        "--rollout-backend vllm --rollout-scheduling-policy fcfs",
    ),
    "fp8 of fp32 weights": (
        "--fp8-format hybrid",
        2,
        {},
        "--fp8 (hybrid): needs weights in bf16. Add --bf16.",
        "--fp8-format hybrid --bf16",
    ),
    "fp8 experts": (
        "--fp8 hybrid --bf16",
        2,
        EXPERTS,
        "--fp8 (hybrid): is not supported for a mixture of experts, whose experts get any number of "
        "tokens. Leave it out.",
        "--bf16",
    ),
    "a factor of no balancing loss": (
        "--moe-aux-loss-coeff 1e-3",
        2,
        EXPERTS,
        "--moe-aux-loss-coeff (0.001): has no effect without --moe-router-load-balancing-type. "
        "Leave it out, or try "
        "--moe-router-load-balancing-type seq_aux_loss.",
        "--moe-aux-loss-coeff 1e-3 --moe-router-load-balancing-type seq_aux_loss",
    ),
    "a balancing loss without a factor": (
        "--moe-router-load-balancing-type aux_loss",
        2,
        EXPERTS,
        "--moe-router-load-balancing-type (aux_loss): has no effect with --moe-aux-loss-coeff 0. "
        "Try --moe-aux-loss-coeff 1e-3.",
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3",
    ),
    "expert count": (
        "--expert-model-parallel-size 2",
        2,
        EXPERTS | {"num_moe_experts": 5},
        "--expert-model-parallel-size (2): must divide the model's num_experts (5). Try 1 or 5.",
        "--expert-model-parallel-size 1",
    ),
    "expert width": (
        "--expert-tensor-parallel-size 2",
        2,
        EXPERTS | {"moe_ffn_hidden_size": 15},
        "--expert-tensor-parallel-size (2): must divide the model's moe_intermediate_size (15). Try 1 or 3.",
        "--expert-tensor-parallel-size 1",
    ),
    "expert ranks": (
        "--expert-model-parallel-size 4",
        2,
        EXPERTS,
        "--expert-model-parallel-size (4) x --expert-tensor-parallel-size (1) = 4: must divide the "
        "ranks of a pipeline stage (2). "
        "Try 1 or 2.",
        "--expert-model-parallel-size 2",
    ),
    "experts and sequence parallelism": (
        "--tensor-model-parallel-size 2",
        2,
        EXPERTS,
        "--tensor-model-parallel-size (2): Megatron trains a mixture of experts with tensor "
        "parallelism only together with sequence "
        "parallelism. Try --sequence-parallel.",
        "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "rollout experts": (
        "--rollout-tensor-parallel-size 2",
        2,
        EXPERTS | {"moe_ffn_hidden_size": 15},
        "--rollout-tensor-parallel-size (2): must divide the model's moe_intermediate_size (15). Try 1.",
        "--rollout-tensor-parallel-size 1",
    ),
    "vocabulary": (
        "--tensor-model-parallel-size 3 --global-batch-size 32",
        3,
        {"num_attention_heads": 3, "num_query_groups": 3, "ffn_hidden_size": 255},
        "--tensor-model-parallel-size (3): must divide the model's vocabulary, padded to a multiple "
        "of 64 (320). Try 1.",
        "--num-prompts 3 --num-samples-per-prompt 2 --global-batch-size 6",
    ),
    "rollout heads": (
        "--rollout-tensor-parallel-size 8",
        8,
        {},
        "--rollout-tensor-parallel-size (8): must divide the model's attention heads (4). Try 2 or 4.",
        "--rollout-tensor-parallel-size 4",
    ),
    "rollout key-value heads": (
        "--rollout-tensor-parallel-size 3",
        3,
        {"num_attention_heads": 6, "ffn_hidden_size": 384, "vocab_size": 192},
        "--rollout-tensor-parallel-size (3): must divide the model's key-value heads (2), or be a "
        "multiple of them. Try 1 or 2.",
        "--num-prompts 3 --num-samples-per-prompt 2 --global-batch-size 6",
    ),
    "rollout ranks": (
        "--rollout-tensor-parallel-size 4",
        2,
        {},
        "--rollout-tensor-parallel-size (4): must divide the ranks of the rollout engines (2). Try 1 or 2.",
        "--rollout-tensor-parallel-size 2",
    ),
    "layers": (
        "--pipeline-model-parallel-size 2",
        2,
        {"num_layers": 3},
        "--pipeline-model-parallel-size (2): must divide the model's layers (3). Try 1.",
        "--pipeline-model-parallel-size 1",
    ),
    "virtual pipeline": (
        "--virtual-pipeline-model-parallel-size 2",
        2,
        {},
        "--virtual-pipeline-model-parallel-size (2): needs --pipeline-model-parallel-size above 1",
        "--virtual-pipeline-model-parallel-size 1 --pipeline-model-parallel-size 2",
    ),
    "layers of a stage": (
        "--virtual-pipeline-model-parallel-size 2 --pipeline-model-parallel-size 2",
        2,
        {"num_layers": 6},
        "--virtual-pipeline-model-parallel-size (2): must divide the actor's layers per pipeline "
        "stage (3). Try 1 or 3.",
        "--virtual-pipeline-model-parallel-size 3 --pipeline-model-parallel-size 2",
    ),
    "recompute layers of a chunk": (
        "--virtual-pipeline-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--recompute-granularity full --recompute-method block "
        "--recompute-num-layers 2",
        2,
        {"num_layers": 4},
        "--recompute-num-layers (2): must be at most the actor's layers per model chunk (1). Try 1.",
        "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 2",
    ),
    "blocks of recomputed layers": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        2,
        {"num_layers": 3},
        "--recompute-num-layers (2): must divide the actor's layers per pipeline stage (3). Try 1 or 3.",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
    ),
    "too few ranks": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        2,
        {},
        "needs as many ranks, and the actor has 2. Try --nproc-per-node 4.",
        "--tensor-model-parallel-size 2",
    ),
    "context parallel ranks": (
        "--tensor-model-parallel-size 2 --context-parallel-size 2",
        6,
        {},
        "--tensor-model-parallel-size (2) x --context-parallel-size (2) x "
        "--pipeline-model-parallel-size (1) = 4: must divide the actor's "
        "ranks (6). Try --nproc-per-node 4.",
        "--context-parallel-size 2 --num-prompts 3 --num-samples-per-prompt 2 --global-batch-size 6",
    ),
    "experts on context parallel ranks": (
        "--context-parallel-size 2 --expert-model-parallel-size 4",
        2,
        EXPERTS,
        "--expert-model-parallel-size (4) x --expert-tensor-parallel-size (1) = 4: must divide the "
        "ranks of a pipeline stage (2). "
        "Try 1 or 2.",
        "--context-parallel-size 2 --expert-model-parallel-size 2",
    ),
    "ranks that do not fit": (
        "--tensor-model-parallel-size 2",
        3,
        {},
        "must divide the actor's ranks (3). Try --nproc-per-node 2.",
        "--num-prompts 3 --num-samples-per-prompt 2 --global-batch-size 6",
    ),
    "sequence parallel": (
        "--sequence-parallel",
        2,
        {},
        "--sequence-parallel: needs --tensor-model-parallel-size above 1.",
        "--sequence-parallel --tensor-model-parallel-size 2",
    ),
    "batch": (
        "--global-batch-size 48",
        2,
        {},
        "--global-batch-size (48): must divide num_prompts (16) x num_samples_per_prompt (8) = 128. "
        "Try 32 or 64.",
        "--global-batch-size 32",
    ),
    "batch over ranks": (
        "--global-batch-size 1",
        2,
        {},
        "--global-batch-size (1): must be a multiple of the actor's data-parallel size (2). Try 2 or 4.",
        "--global-batch-size 2",
    ),
    "batch that no size fits": (
        "",
        3,
        {},
        "must be a multiple of the actor's data-parallel size (3). Try --num-prompts 18 "
        "--global-batch-size 144.",
        "--num-prompts 18 --global-batch-size 144",
    ),
    "sft batch": (
        "--algorithm sft --global-batch-size 7",
        2,
        {},
        "--global-batch-size (7): must be a multiple of the actor's data-parallel size (2). Try 6 or 8.",
        "--algorithm sft --global-batch-size 6",
    ),
    "full recompute": (
        "--recompute-granularity full --recompute-num-layers 1",
        2,
        {},
        "--recompute-granularity (full): needs --recompute-method.",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "no recompute": (
        "--recompute-num-layers 1",
        2,
        {},
        "--recompute-num-layers (1): has no effect without --recompute-granularity full.",
        "",
    ),
    "selective layers": (
        "--recompute-granularity selective --recompute-method block",
        2,
        {},
        "--recompute-method (block): has no effect without",
        "--recompute-granularity selective",
    ),
    "modules": (
        "--recompute-modules mlp layernorm",
        2,
        {},
        "--recompute-modules (mlp layernorm): has no effect without --recompute-granularity selective.",
        "--recompute-modules mlp --recompute-granularity selective",
    ),
    "modules of a mixture": (
        "--recompute-granularity selective --recompute-modules layernorm mlp",
        2,
        EXPERTS,
        "--recompute-modules (layernorm mlp): mlp has no effect on mixtures of experts, and all layers are.",
        "--recompute-granularity selective --recompute-modules layernorm",
    ),
    "recompute layers": (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2 "
        "--pipeline-model-parallel-size 2",
        2,
        {},
        "--recompute-num-layers (2): must be at most the actor's layers per pipeline stage (1). Try 1.",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ),
    "top-p": (
        "--top-p 0.9",
        2,
        {},
        "--top-p (0.9): must be 1 in training: the engine would draw from a truncated distribution",
        "--top-p 1.0",
    ),
    "top-k": ("--top-k 50", 2, {}, "--top-k (50): must be 0 (off) in training", "--top-k 0"),
    "temperature": ("--temperature 0", 2, {}, "--temperature (0): must be above 0", "--temperature 0.1"),
    "length": (
        "--max-response-length 449",
        2,
        {},
        "= 513: must be at most the model's max_position_embeddings (512). Try --max-response-length 448.",
        "--max-response-length 448",
    ),
    "length of evaluations": (
        "--eval-max-response-length 449",
        2,
        {},
        "--eval-max-response-length (449) = 513: must be at most the model's max_position_embeddings (512).",
        "--eval-max-response-length 448",
    ),
    "min lr": (
        "--lr 1e-5 --min-lr 1e-4 --lr-decay-style linear",
        2,
        {},
        "--min-lr (0.0001): must be at most --lr (1e-05).",
        "--lr 1e-5 --min-lr 1e-6 --lr-decay-style linear",
    ),
    "warm-up": (
        "--lr-warmup-iters 10 --lr-decay-iters 10 --lr-decay-style cosine",
        2,
        {},
        "--lr-decay-iters (10): must be above --lr-warmup-iters (10). Try 11.",
        "--lr-warmup-iters 10 --lr-decay-iters 11 --lr-decay-style cosine",
    ),
    "name of a metric": (
        "--best-metric eval_2/accuracy_greedy",
        2,
        {},
        "--best-metric (eval_2/accuracy_greedy): has another name now.",
        "--best-metric eval_2/reward_greedy",
    ),
    "evaluation data": (
        "--eval-interval 5",
        2,
        {},
        "--eval-interval (5): needs --eval-data.",
        "--eval-interval 0",
    ),
    "inline": (
        "--executor inline",
        2,
        {},
        "--executor (inline): has one rank, not 2. Try --nproc-per-node 1.",
        None,
    ),
    "rank outside": (
        "--actor-ranks 0-2",
        2,
        {},
        "--actor-ranks (0-2): must be below the number of ranks (2). Try 0-1.",
        "--actor-ranks 0-1",
    ),
    "rollout rank outside": (
        "--rollout-ranks 1,2",
        2,
        {},
        "--rollout-ranks (1,2): must be below",
        "--rollout-ranks 0,1",
    ),
    "in-process on some ranks": (
        "--rollout-ranks 0 --rollout-engine in-process",
        2,
        {},
        "--rollout-engine (in-process): needs engines on all 2 ranks, and --rollout-ranks is 0.",
        "--rollout-ranks 0 --rollout-engine out-of-process",
    ),
    "two buffers in-process": (
        "--reshard-double-buffer",
        2,
        {},
        "--reshard-double-buffer: an in-process engine has one buffer.",
        "--reshard-double-buffer --rollout-engine out-of-process",
    ),
    "idle rank": (
        "--actor-ranks 0 --rollout-ranks 0",
        2,
        {},
        "--actor-ranks and --rollout-ranks: leave rank 1 of 2 ranks without work.",
        "--actor-ranks 0",
    ),
    "offload of aliases": (
        "--offload parameters",
        2,
        {},
        "--offload (parameters): the engine generates with the actor's own memory where it can "
        "(--reshard-alias), which must stay. "
        "Try --no-reshard-alias, or leave parameters out.",
        "--offload parameters --no-reshard-alias",
    ),
    "offload of what is exported": (
        "--offload parameters --actor-ranks 0 --rollout-ranks 1",
        2,
        {},
        "--offload (parameters): an engine in another process keeps the memory that it reads by "
        "CUDA IPC (--reshard-transport auto)",
        "--offload parameters --actor-ranks 0 --rollout-ranks 1 --reshard-transport messages",
    ),
    "offload of what other ranks read": (
        "--offload parameters --no-reshard-alias --tensor-model-parallel-size 2",
        2,
        {},
        "--offload (parameters): an engine that is split otherwise than the actor reads other ranks' weights, "
        "and keeps the memory that it reads by CUDA IPC (--reshard-transport auto), so nothing would become "
        "free. Try --reshard-transport messages, or leave parameters out.",
        "--offload parameters --no-reshard-alias --tensor-model-parallel-size 2 --reshard-transport messages",
    ),
    "offload of other stages": (
        "--offload parameters --no-reshard-alias --pipeline-model-parallel-size 2",
        2,
        {},
        "--offload (parameters): an engine that is split otherwise than the actor reads other ranks' weights",
        "--offload parameters --no-reshard-alias --rollout-tensor-parallel-size 2",
    ),
    "offload of an actor on some ranks": (
        "--offload parameters --no-reshard-alias --actor-ranks 0",
        2,
        {},
        "--offload (parameters): an engine that is split otherwise than the actor reads other ranks' weights",
        "--offload parameters --no-reshard-alias --tensor-model-parallel-size 2 --rollout-tensor-parallel-size 2",
    ),
    "offload of experts of other ranks": (
        "--offload parameters --no-reshard-alias --expert-model-parallel-size 2",
        2,
        EXPERTS,
        "--offload (parameters): an engine that is split otherwise than the actor reads other ranks' weights",
        "--offload parameters --no-reshard-alias",
    ),
    "offload twice": (
        "--offload optimizer gradients optimizer",
        2,
        {},
        "--offload (optimizer gradients optimizer): names a part twice. Try --offload optimizer gradients.",
        "--offload optimizer gradients",
    ),
    "offload of a frozen role": (
        "--kl-mode loss --kl-coef 0.1 --reference-offload parameters optimizer",
        2,
        {},
        "--reference-offload (parameters optimizer): the reference is frozen, it has no optimizer. "
        "Try --reference-offload parameters.",
        "--kl-mode loss --kl-coef 0.1 --reference-offload parameters --actor-offload gradients optimizer",
    ),
    "ahead of nothing": (
        "--offload-ahead-bytes 5",
        2,
        {},
        "--offload-ahead-bytes (5): has no effect without --offload. Leave it out, or set that.",
        "--offload-ahead-bytes 5 --offload gradients",
    ),
    "hybrid optimizer offloaded": (
        "--optimizer-cpu-offload --offload optimizer",
        2,
        {},
        "--optimizer-cpu-offload: the optimizer state is always in host memory, so --offload "
        "(optimizer) has nothing to move.",
        "--optimizer-cpu-offload --offload gradients",
    ),
    "hybrid optimizer not distributed": (
        "--optimizer-cpu-offload --no-use-distributed-optimizer",
        2,
        {},
        "--optimizer-cpu-offload: needs --use-distributed-optimizer.",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    ),
    "fraction of nothing": (
        "--optimizer-offload-fraction 0.5",
        2,
        {},
        "--optimizer-offload-fraction (0.5): has no effect without --optimizer-cpu-offload.",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    ),
    "adapters of experts": (
        "--lora-rank 4",
        2,
        EXPERTS,
        "--lora-target-modules (linear_fc1 linear_fc2): in a mixture of experts it is the experts', "
        "which have no adapters. "
        "Try --lora-target-modules linear_qkv linear_proj.",
        "--lora-rank 4 --lora-target-modules linear_qkv linear_proj",
    ),
    "adapters of rank 0": (
        "--algorithm ppo --lora-rank 4 --critic-lora-rank 0 --critic-lora-alpha 8",
        2,
        {},
        "--critic-lora-alpha (8): has no effect without --critic-lora-rank. Leave it out, or try "
        "--critic-lora-rank 16.",
        "--algorithm ppo --lora-rank 4 --critic-lora-rank 0",
    ),
    "adapters and the hybrid optimizer": (
        "--lora-rank 4 --optimizer-cpu-offload",
        2,
        {},
        "--optimizer-cpu-offload: is not tested with --lora-rank (4), whose optimizer state "
        "is small. Leave it out.",
        "--lora-rank 4",
    ),
    "sharding without Megatron-FSDP": (
        "--data-parallel-sharding-strategy optim",
        2,
        {},
        "--data-parallel-sharding-strategy (optim): has no effect without --use-megatron-fsdp.",
        "--data-parallel-sharding-strategy optim --use-megatron-fsdp",
    ),
    "sharded weights": (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
        2,
        {},
        "--data-parallel-sharding-strategy (optim_grads_params): the weights are shards between two "
        "passes, and no weight sync, export or checkpoint "
        "reads these. Try --data-parallel-sharding-strategy optim_grads.",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
    ),
    "nothing sharded": (
        "--use-megatron-fsdp --data-parallel-sharding-strategy no_shard",
        2,
        {},
        "(no_shard): shards nothing, as without --use-megatron-fsdp. Try "
        "--data-parallel-sharding-strategy optim_grads.",
        "--use-megatron-fsdp",
    ),
    "Megatron-FSDP and overlap": (
        "--use-megatron-fsdp --overlap-grad-reduce",
        2,
        {},
        "--use-megatron-fsdp: does not go with --overlap-grad-reduce.",
        "--overlap-grad-reduce",
    ),
    "Megatron-FSDP and the other optimizer": (
        "--use-megatron-fsdp --no-use-distributed-optimizer",
        2,
        {},
        "--use-megatron-fsdp: needs Megatron's distributed optimizer.",
        "--use-megatron-fsdp",
    ),
    "Megatron-FSDP and adapters": (
        "--algorithm ppo --critic-use-megatron-fsdp --lora-rank 4",
        2,
        {},
        "--critic-use-megatron-fsdp: is not tested with --critic-lora-rank (4)",
        "--algorithm ppo --critic-use-megatron-fsdp --lora-rank 4 --critic-lora-rank 0",
    ),
    "Megatron-FSDP and tensor parallelism": (
        "--use-megatron-fsdp --tensor-model-parallel-size 2",
        2,
        {},
        "--use-megatron-fsdp: is not tested with --tensor-model-parallel-size (2). Leave it "
        "out, or try --tensor-model-parallel-size 1.",
        "--use-megatron-fsdp --tensor-model-parallel-size 1",
    ),
    "Megatron-FSDP and stages": (
        "--use-megatron-fsdp --pipeline-model-parallel-size 2",
        2,
        {},
        "is not tested with --pipeline-model-parallel-size (2).",
        "--use-megatron-fsdp --context-parallel-size 2",
    ),
    "Megatron-FSDP and experts": (
        "--use-megatron-fsdp",
        2,
        EXPERTS,
        "--use-megatron-fsdp: is not tested with a mixture of experts, which qwen3 is. Leave it out.",
        "",
    ),
    "Megatron-FSDP and offload": (
        "--use-megatron-fsdp --offload gradients",
        2,
        {},
        "--use-megatron-fsdp: its buffers stay where they are, and --offload (gradients) would move them.",
        "--offload gradients",
    ),
    "critic rank outside": (
        "--algorithm ppo --critic-ranks 2",
        2,
        {},
        "--critic-ranks (2): must be below the number of ranks (2). Try 0-1.",
        "--algorithm ppo --critic-ranks 1",
    ),
    "ranks named twice": (
        "--algorithm ppo --critic-ranks 0,0",
        2,
        {},
        "--critic-ranks (0,0): must ascend, each rank once.",
        "--algorithm ppo --critic-ranks 0",
    ),
    "gap": (
        "--algorithm ppo --actor-ranks 0 --critic-ranks 2 --rollout-ranks 0",
        3,
        {},
        "--actor-ranks and --critic-ranks and --rollout-ranks: leave rank 1 of 3 ranks without work.",
        "--algorithm ppo --actor-ranks 0 --critic-ranks 1-2 --rollout-ranks 0",
    ),
    "too few ranks for the critic": (
        "--algorithm ppo --critic-ranks 1 --critic-tensor-model-parallel-size 2",
        2,
        {},
        "--critic-tensor-model-parallel-size (2) x --pipeline-model-parallel-size (1) = 2: needs as "
        "many ranks, and the critic has 1.",
        "--algorithm ppo --critic-ranks 0-1 --critic-tensor-model-parallel-size 2",
    ),
    "uneven groups": (
        "--algorithm ppo --critic-ranks 0-2 --critic-tensor-model-parallel-size 2",
        4,
        {},
        "--critic-tensor-model-parallel-size (2) x --pipeline-model-parallel-size (1) = 2: must "
        "divide the critic's ranks (3).",
        "--algorithm ppo --critic-ranks 0-1 --critic-tensor-model-parallel-size 2",
    ),
    "every role": (
        "--algorithm ppo --tensor-model-parallel-size 2 --critic-ranks 1",
        2,
        {},
        "--tensor-model-parallel-size (2) x --pipeline-model-parallel-size (1) = 2: needs as many "
        "ranks, and the critic has 1.",
        "--algorithm ppo --tensor-model-parallel-size 2 --critic-tensor-model-parallel-size 1 "
        "--critic-ranks 1",
    ),
    "unknown pool": (
        "--actor-ranks train",
        2,
        {},
        "--actor-ranks (train): must be ranks and ranges of ranks, like 0-3 or 0,2.",
        "--pools train=0-1 --actor-ranks train",
    ),
    "pool outside": (
        "--pools train=0-2 --actor-ranks train",
        2,
        {},
        "--actor-ranks is pool train, whose ranks (0-2): must be below the number of ranks (2). Try 0-1.",
        "--pools train=0-1 --actor-ranks train",
    ),
    "no pool": (
        "--pools 0-1",
        2,
        {},
        "--pools (0-1): must be name=ranks, each name once. Try train=0-3.",
        "--pools train=0-1",
    ),
    "critic's learning rate": (
        "--algorithm ppo --lr 1e-5 --critic-min-lr 1e-4 --lr-decay-style linear",
        2,
        {},
        "--critic-min-lr (0.0001): must be at most --critic-lr (1e-05).",
        "--algorithm ppo --lr 1e-5 --critic-min-lr 1e-6 --lr-decay-style linear",
    ),
    "critic warm-up": (
        "--algorithm ppo --critic-warmup-iters 3",
        2,
        {},
        "--critic-warmup-iters (3): must be below --train-iters (3), or the policy never learns.",
        "--algorithm ppo --critic-warmup-iters 1",
    ),
    "KL horizon": (
        "--kl-mode loss --kl-coef 0.1 --kl-controller adaptive --kl-horizon 20",
        2,
        {},
        "--kl-horizon (20): must be above 0.2 x the samples of a step (128), or the KL's factor may "
        "fall to 0 at once. Try 1280.",
        "--kl-mode loss --kl-coef 0.1 --kl-controller adaptive --kl-horizon 1280",
    ),
    "an order without stale samples": (
        "--rollout-order in-order",
        2,
        {},
        "--rollout-order (in-order): has no effect in synchronous training. Leave it out, or set "
        "--staleness 1.",
        "--rollout-order in-order --staleness 1",
    ),
    "requests at a commit without stale samples": (
        "--weight-update keep",
        2,
        {},
        "--weight-update (keep): has no effect in synchronous training. Leave it out, or set --staleness 1.",
        "--weight-update keep --staleness 1",
    ),
    "canaries without stale samples": (
        "--num-canaries 0",
        2,
        {},
        "--num-canaries (0): has no effect in synchronous training. Leave it out, or set --staleness 1.",
        "--num-canaries 0 --staleness 1",
    ),
    "parts of responses without stale samples": (
        "--max-tokens-per-step 8",
        2,
        {},
        "--max-tokens-per-step (8): has no effect in synchronous training. Leave it out, or set "
        "--staleness 1.",
        "--max-tokens-per-step 8 --staleness 1",
    ),
    "parts as long as responses": (
        "--max-tokens-per-step 64 --staleness 1 --max-response-length 64",
        2,
        {},
        "--max-tokens-per-step (64): must be below --max-response-length (64), or it has no effect. Leave "
        "it out, or try 32.",
        "--max-tokens-per-step 32 --staleness 1 --max-response-length 64",
    ),
    "parts of responses of one version": (
        "--max-tokens-per-step 8 --staleness 1 --weight-update wait",
        2,
        {},
        "--max-tokens-per-step (8): a response goes on with the next version of the weights, but with "
        "--weight-update wait one version samples all of it. Try --weight-update recompute.",
        "--max-tokens-per-step 8 --staleness 1 --weight-update recompute",
    ),
    "parts of responses with stop strings": (
        "--max-tokens-per-step 8 --staleness 1 --stop END",
        2,
        {},
        "--max-tokens-per-step (8): a response goes on as a new request, which does not find a stop string "
        "that has begun before. Try --stop-token-ids in place of --stop.",
        "--max-tokens-per-step 8 --staleness 1 --stop-token-ids 3",
    ),
    "fewer engines in synchronous training": (
        "--min-engines 1",
        2,
        {},
        "--min-engines (1): has no effect in synchronous training. Leave it out, or set --staleness 1.",
        "--min-engines 1 --staleness 1 --rollout-engine out-of-process",
    ),
    "fewer engines in the ranks' processes": (
        "--min-engines 1 --staleness 1",
        2,
        {},
        "--min-engines (1): an engine in the process of its rank cannot end alone. Try --rollout-engine "
        "out-of-process, or leave --min-engines out.",
        "--min-engines 1 --staleness 1 --rollout-engine out-of-process",
    ),
    "more engines than there are": (
        "--min-engines 3 --staleness 1 --rollout-engine out-of-process",
        2,
        {},
        "--min-engines (3): the job has 2 engines. Try 1.",
        "--min-engines 1 --staleness 1 --rollout-engine out-of-process",
    ),
    "engines for evaluations in synchronous training": (
        "--eval-engines 1",
        2,
        {},
        "--eval-engines (1): has no effect in synchronous training. Leave it out, or set --staleness 1.",
        "",
    ),
    "engines for evaluations in the ranks' processes": (
        "--eval-engines 1 --staleness 1",
        2,
        {},
        "--eval-engines (1): an engine in the process of its rank gets every update of the weights. Try "
        "--rollout-engine out-of-process, or leave --eval-engines out.",
        "--staleness 1",
    ),
    "all engines for evaluations": (
        "--eval-engines 2 --staleness 1 --rollout-engine out-of-process",
        2,
        {},
        "--eval-engines (2): the job has 2 engines, and one at least must train. Try 1.",
        "--staleness 1 --rollout-engine out-of-process",
    ),
    "no evaluations for engines": (
        "--eval-engines 1 --staleness 1 --rollout-engine out-of-process",
        2,
        {},
        "--eval-engines (1): needs --eval-interval. Leave it out, or set --eval-interval 5.",
        "--staleness 1 --rollout-engine out-of-process",
    ),
    "too few engines beside an evaluation": (
        "--eval-engines 1 --min-engines 1 --staleness 1 --rollout-engine out-of-process",
        2,
        {},
        "--min-engines (1): must be above --eval-engines (1), so that an engine is left to train with. Try "
        "--min-engines 2.",
        "--min-engines 1 --staleness 1 --rollout-engine out-of-process",
    ),
    "a replay of no run": (
        "--replay no/such --staleness 1",
        2,
        {},
        "--replay (no/such): is not a run folder, because it holds no resolved.args. Name the folder that "
        "was the run's --save, or leave it out.",
        "--staleness 1",
    ),
    "stale samples of supervised fine-tuning": (
        "--algorithm sft --staleness 2",
        2,
        {},
        "--staleness (2): supervised fine-tuning samples no responses that could be stale. Leave it out.",
        "--algorithm sft",
    ),
    "experts of several versions": (
        "--moe-routing-replay engine --staleness 1",
        2,
        EXPERTS,
        "--weight-update (recompute): with --moe-routing-replay engine a response must be sampled by one "
        "version of the weights, because the engine reports other experts when it computes a prefix anew. "
        "Try --weight-update wait, or try --moe-routing-replay policy.",
        "--moe-routing-replay engine --staleness 1 --weight-update wait",
    ),
    "idle rank of sft": (
        "--algorithm sft --actor-ranks 0",
        2,
        {},
        "--actor-ranks: leave rank 1 of 2 ranks without work.",
        "--algorithm sft",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name, findings):
    flags, world_size, shape, words, right = RULES[name]
    found = findings(flags, world_size, **shape)
    assert any(words in finding for finding in found), found
    assert len(found) <= 3, "nothing that does not follow from the same mistake"
    if right is not None:
        assert findings(right, world_size, **shape) == []


def test_a_loss_without_a_correction_for_stale_samples_is_warned_of(job):
    def warnings(flags):
        return [*correction_warnings(load_config([job, *flags.split()], REGISTRY))]

    assert warnings("") == warnings("--staleness 2") == warnings("--staleness 2 --tis-clip 3") == []
    for name in ("raft", "online-dpo", "gkd --reference-model m"):
        assert warnings(f"--algorithm {name} --staleness 2") == []
    assert load_config([job, "--algorithm", "raft", "--staleness", "2"], REGISTRY).algorithm.tis_clip is None
    (text,) = warnings("--staleness 2 --tis-clip none")
    assert text == (
        "--tis-clip (none): with --staleness 2 the loss does not correct for weights that were older when they "
        "sampled: its ratio compares with the log-probs of the step's first weights, so it starts at exactly 1 "
        "and clipping does not see staleness. Try --tis-clip 2."
    )


def test_roles_on_ranks_of_their_own(findings):
    assert findings("--actor-ranks 0 --rollout-ranks 1", world_size=2) == []
    assert (
        findings("--actor-ranks 0-1 --rollout-ranks 2-3 --rollout-tensor-parallel-size 2", world_size=4) == []
    )


def test_routing_is_replayed_by_the_actor_alone(job, tmp_path):
    """A critic of experts beside a dense actor is refused once, and a dense critic beside an actor of experts
    is fine."""
    dense = ModelShape.load(tmp_path / "model")
    mixture = dataclasses.replace(dense, model_type="qwen3_moe", **EXPERTS)
    config = load_config(f"{job} --algorithm ppo --moe-routing-replay policy".split(), REGISTRY)
    found = [
        check(config, actor, 2, critic_shape=critic)
        for actor in (dense, mixture)
        for critic in (dense, mixture)
    ]
    of_none = "--moe-routing-replay (policy): needs a mixture of experts, and qwen3 is none. Leave it out."
    of_critic = (
        "--moe-routing-replay (policy): replays the experts of the actor, and --model (qwen3) has none; a "
        "critic chooses its own. Leave it out."
    )
    assert found == [[of_none], [of_critic], [], []]


def test_inline_with_one_rank(findings):
    assert findings("--executor inline --nproc-per-node 1", world_size=1) == []


def test_sft_needs_no_rollout(findings):
    """What only sampling cares about is not checked: engines' splits, sampling, prompts per step."""
    flags = "--rollout-tensor-parallel-size 3 --top-p 0.5 --top-k 5 --num-prompts 7 --rollout-ranks 0"
    assert len(findings(flags)) >= 5 and findings(f"--algorithm sft {flags}") == []


def test_files(findings, tmp_path):
    text, run, eval_data = tmp_path / "rows.txt", tmp_path / "old", tmp_path / "eval.PARQUET"
    text.touch(), eval_data.touch(), run.mkdir()
    (run / "metrics.jsonl").touch()
    (tmp_path / "old-2").mkdir()
    reward = tmp_path / "reward.py"
    reward.write_text("def score(**_): return 1.0\n")
    assert findings(f"--train-data {tmp_path}/none.jsonl {text}") == [
        f"--train-data ({tmp_path}/none.jsonl): there is no such file. Give one or more *.jsonl or *.parquet files.",
        f"--train-data ({text}): must end in .jsonl, .json, .jsonl.gz, .json.gz, .jsonl.zst, .json.zst, .parquet. "
        "Give one or more *.jsonl or *.parquet files.",
    ]
    assert findings(f"--train-data {tmp_path}/trian.jsonl") == [
        f"--train-data ({tmp_path}/trian.jsonl): there is no such file. Try {tmp_path}/train.jsonl."
    ]
    (tmp_path / "clone" / "data").mkdir(parents=True), (tmp_path / "saved").mkdir()
    (tmp_path / "clone" / "data" / "test-0.parquet").touch(), (tmp_path / "clone" / "README.md").touch()
    assert findings(f"--train-data {tmp_path}/clone {tmp_path}/saved") == [
        f"--train-data ({tmp_path}/clone): is a folder. Give the files in it that you mean: "
        f"{tmp_path}/clone/data/test-0.parquet.",
        f"--train-data ({tmp_path}/saved): is a folder. Give the files in it that you mean: one or more *.parquet "
        "files (to_parquet of datasets).",
    ]
    train = f"{tmp_path}/train.jsonl"
    assert findings(f"--train-data {train} --eval-data {tmp_path}/val.json") == [
        f"--eval-data ({tmp_path}/val.json): there is no such file. Try {eval_data}."
    ]
    eval_data.unlink()
    assert findings(f"--train-data {train} --eval-data {tmp_path}/train.json") == [
        f"--eval-data ({tmp_path}/train.json): there is no such file. Give one or more *.jsonl or *.parquet files."
    ]
    eval_data.touch()
    assert (
        findings(f"--eval-data {eval_data}") == [] and "--eval-data" in findings(f"--eval-data {tmp_path}")[0]
    )
    assert findings(f"--save {run}") == [
        f"--save ({run}): holds another run (metrics.jsonl), which would be overwritten. Try --save {run}-3."
    ]
    (run / "checkpoints" / "step_000002").mkdir(parents=True)
    assert findings(f"--save {run}")[0].endswith(
        f"Try --save {run}-3, or continue that run with --load {run}."
    )
    (run / "metrics.jsonl").rename(run / "resolved.args")
    assert "holds another run (resolved.args)" in findings(f"--save {run}")[0]
    assert "is a file" in findings(f"--save {text}")[0] and findings(f"--save {tmp_path}/old-2") == []
    assert (
        findings(f"--reward-function {reward}:score") == []
        and "there is no file" in findings("--reward-function no.py:score")[0]
    )
    reward.write_text(
        "from math import gcd as borrowed\nmade = lambda **_: 1.0\ndef score(**_): return 1.0\n"
    )
    for name in ("score", "made", "borrowed"):
        assert findings(f"--reward-function {reward}:{name}") == []
    assert f"{reward} defines no scroe, but score." in findings(f"--reward-function {reward}:scroe")[0]
    reward.write_text("def score(:")
    assert "is not Python: invalid syntax" in findings(f"--reward-function {reward}:score")[0]
    for name in (reward, f"{reward}:", ":score", f"{reward}:a-b"):
        assert "must be path/to/file.py:function" in findings(f"--reward-function {name}")[0]
    assert (
        "does not exist" in findings(f"--tokenizer-model {tmp_path}/none.model")[0]
        and findings(f"--tokenizer-model {text}") == []
    )
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "holds no *.safetensors" in findings()[0] and findings("--random-init") == []


def test_all_findings_at_once_and_without_a_shape(job):
    config = load_config(
        [
            job,
            "--sequence-parallel",
            "--top-p",
            "0.5",
            "--global-batch-size",
            "3",
            "--train-data",
            "none.jsonl",
        ],
        REGISTRY,
    )
    found = check(config, None, 2)
    flags = sorted(line.split()[0].rstrip(":") for line in found)
    assert flags == [
        "--global-batch-size",
        "--global-batch-size",
        "--sequence-parallel",
        "--top-p",
        "--train-data",
    ]
    with pytest.raises(ConfigError) as caught:
        raise_errors(found)
    assert isinstance(caught.value, ValueError) and all(line in str(caught.value) for line in found)
    raise_errors([])


def test_what_is_accepted_makes_meshes(job):
    """The sizes that check accepts are those that the workers build, and no others."""
    for world_size in range(1, 5):
        for tp in range(1, 5):
            for pp in (1, 2):
                config = load_config(
                    [
                        job,
                        "--tensor-model-parallel-size",
                        str(tp),
                        "--pipeline-model-parallel-size",
                        str(pp),
                        "--num-prompts",
                        "12",
                        "--num-samples-per-prompt",
                        "1",
                        "--global-batch-size",
                        "12",
                        "--recompute-modules",
                        "none",
                    ],
                    REGISTRY,
                )
                accepted = not any("rank" in line for line in check(config, None, world_size))
                if accepted:
                    assert role_meshes(config, world_size)["actor"].dp == world_size // (tp * pp)
                else:
                    assert world_size % (tp * pp)


@pytest.mark.parametrize(
    "text, ranks",
    [
        ("0-3", (0, 1, 2, 3)),
        ("0-2,6", (0, 1, 2, 6)),
        ("5", (5,)),
        ("1,3,5-7", (1, 3, 5, 6, 7)),
        (" 0 - 1 , 3", (0, 1, 3)),
    ],
)
def test_ranks(text, ranks):
    assert parse_ranks(text, 8) == ranks


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "0-",
        "-1",
        "0,,1",
        "1-0",
        "0,0",
        "0-2,1",
        "3,1",
        "8",
        "0-8",
        "0;1",
        "1.0",
        "0-99999999999999999999",
        "9" * 5000,
    ],
)
def test_what_is_no_list_of_ranks(text):
    with pytest.raises(ValueError, match="ranks"):
        parse_ranks(text, 8)


@pytest.mark.parametrize("size", ["tp", "pp", "ep", "etp", "cp", "vpp"])
def test_a_mesh_of_no_size_is_refused(size):
    with pytest.raises(ValueError, match=r"_parallel_size \(0\) must be at least 1"):
        MeshSpec((0, 1), **{size: 0})
