"""Map settings of OpenRLHF, NeMo-RL and Megatron-LM, and short names that many frameworks use, to megarl's
flags.

`megarl translate` has no table for these; they answer a single flag."""

from __future__ import annotations

from megarl.frameworks.rows import START, Row, as_number, known_trackers


def seconds_of(minutes: object) -> object:
    """Return minutes as seconds; a value that is no number as it is."""
    number = as_number(minutes)
    return minutes if number is None else 60 * number


TABLE = (
    Row("pretrain model-name model-path pretrained-checkpoint", "--model {}"),
    Row("critic-pretrain critic-path value-model", "--critic-model {}"),
    Row("tokenizer-name tokenizer-name-or-path tokenizer-path", "--tokenizer-model {}"),
    Row("reward-pretrain reward-model-path rm-path", "--reward-model {}"),
    Row("train-file dataset data-path", "--train-data {}"),
    Row("val-file test-files validation-data", "--eval-data {}"),
    Row("prompt-column prompt-column-name", "--prompt-key {}"),
    Row("save-path save-dir checkpoint-dir", "--save {}"),
    Row("resume resume-from resume-path load-checkpoint", "--load {}"),
    Row("max-ckpt-num max-ckpt-to-keep", "--keep {}"),
    Row("save-every checkpoint-interval", "--save-interval {}"),
    Row("eval-freq val-period", "--eval-interval {}"),
    Row("num-steps total-steps num-updates", "--train-iters {}"),
    Row("num-prompts-per-step prompts-per-step", "--num-prompts {}"),
    Row("rollout-n num-generations-per-prompt group-size samples-per-prompt", "--num-samples-per-prompt {}"),
    Row("train-batch-size mini-batch-size", "--global-batch-size {}"),
    Row("num-ppo-epochs", "--num-epochs {}"),
    Row(
        "max-epochs",
        "--num-epochs {}",
        note="it counts passes over the samples of a step; --train-iters says how often the data is seen",
    ),
    Row("max-token-len-per-gpu", "--max-tokens-per-micro-batch {}"),
    Row("num-gpus", "--nproc-per-node {}", note="ranks of each node"),
    Row("world-size", "--nproc-per-node {}", note="ranks of each node, of which there are --nnodes"),
    Row("num-nodes", "--nnodes {}", note=START),
    Row("tp tp-size tensor-parallel-size tensor-parallel", "--tensor-model-parallel-size {}"),
    Row("pp pp-size pipeline-parallel-size", "--pipeline-model-parallel-size {}"),
    Row("cp cp-size ring-attn-size", "--context-parallel-size {}"),
    Row("ep ep-size expert-parallel-size", "--expert-model-parallel-size {}"),
    Row("etp etp-size", "--expert-tensor-parallel-size {}"),
    Row("vpp vpp-size", "--virtual-pipeline-model-parallel-size {}"),
    Row("rollout-tp gen-tp rollout-tensor-model-parallel-size", "--rollout-tensor-parallel-size {}"),
    Row("actor-learning-rate", "--actor-lr {}"),
    Row("critic-learning-rate", "--critic-lr {}"),
    Row("num-warmup-steps", "--lr-warmup-iters {}"),
    Row("lr-scheduler", "--lr-decay-style {}"),
    Row("max-norm gradient-clipping", "--clip-grad {}"),
    Row("adam-offload", "--optimizer-cpu-offload"),
    Row("use-fsdp", "--use-megatron-fsdp"),
    Row("prompt-max-len", "--max-prompt-length {}"),
    Row("max-new-tokens generate-max-len max-tokens", "--max-response-length {}"),
    Row("kl-beta", "--kl-coef {} --kl-mode loss"),
    Row("init-kl-coef kl-ctrl-kl-coef", "--kl-coef {} --kl-mode reward"),
    Row("cliprange clip-eps", "--clip-eps-low {} --clip-eps-high {}"),
    Row("epsilon-low eps-clip-low", "--clip-eps-low {}"),
    Row("value-clip-range", "--value-clip-eps {}"),
    Row("gae-gamma discount", "--gamma {}"),
    Row("lambda gae-lam", "--gae-lambda {}"),
    Row("entropy-loss-coef entropy-loss-coeff", "--entropy-coef {}"),
    Row("critic-warmup-steps", "--critic-warmup-iters {}"),
    Row("lora-dim peft-lora-r", "--lora-rank {}"),
    Row("lora-targets", "--lora-target-modules {}"),
    Row("reward-func", "--reward-function {}"),
    Row("remote-rm-url", instead="write a function that asks the server: --reward-function FILE.py:NAME"),
    Row("loggers", "--log-with {}", convert=known_trackers),
    Row("mlflow-experiment-name", "--log-project {}"),
    Row("distributed-timeout-minutes", "--call-timeout-s {}", convert=seconds_of),
    Row(
        "grpo.async_grpo.max_trajectory_age_steps",
        "--staleness {}",
        note="no sample is discarded for its age (docs/asynchronous.md)",
    ),
    Row("async-queue-size", "--staleness {}", note="counts training steps"),
    Row("async-train grpo.async_grpo.enabled", "--staleness 1"),
    Row(
        "in-flight-weight-updates recompute-kv-cache-after-weight-updates",
        instead="--weight-update says what unfinished responses do at a weight sync: keep, recompute or wait",
    ),
    Row(
        "micro-train-batch-size",
        instead="sequences are packed up to --max-tokens-per-micro-batch tokens, whatever their number",
    ),
    Row("num-episodes", instead="steps are counted, by --train-iters, and not passes over the data"),
    Row(
        "colocate-all-models colocate-actor-ref",
        instead="roles share ranks unless --actor-ranks and the like say otherwise",
    ),
    Row(
        "zero-stage",
        instead="--use-distributed-optimizer, the default, shards Adam's state, --use-megatron-fsdp more",
    ),
)
