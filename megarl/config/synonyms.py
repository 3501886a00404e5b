"""What flags are called in verl, TRL, OpenRLHF, slime, NeMo-RL and Megatron-LM -> ours, {} for the value. Or
why there is none."""

from __future__ import annotations

_PACKED = "sequences are packed up to --max-tokens-per-micro-batch tokens, whatever their number"
_METRICS = "metrics go to metrics.jsonl and tensorboard/ in --save"

_FLAGS = {
    "--algorithm {}": "adv-estimator advantage-estimator",
    "--model {}": "pretrain model-name-or-path model-name model-path hf-checkpoint ref-load "
    "pretrained-checkpoint",
    "--critic-model {}": "critic-pretrain critic-path value-model",
    "--tokenizer-model {}": "tokenizer tokenizer-name tokenizer-name-or-path tokenizer-path",
    "--reward-model {}": "reward-pretrain reward-model-path rm-path",
    "--train-data {}": "prompt-data train-files train-file dataset dataset-name train-dataset data-path",
    "--eval-data {}": "val-files val-file eval-dataset eval-prompt-data test-files validation-data",
    "--prompt-key {}": "input-key prompt-column prompt-column-name",
    "--save {}": "output-dir save-path save-dir default-local-dir checkpoint-dir",
    "--load {}": "resume resume-from resume-from-checkpoint resume-path load-checkpoint",
    "--keep {}": "save-total-limit max-ckpt-num max-ckpt-to-keep",
    "--save-interval {}": "save-steps save-freq save-every checkpoint-interval",
    "--eval-interval {}": "eval-steps test-freq eval-freq val-period",
    "--train-iters {}": "max-steps num-steps total-steps total-training-steps num-rollout num-updates",
    "--num-prompts {}": "data.train-batch-size rollout-batch-size num-prompts-per-step prompts-per-step",
    "--num-samples-per-prompt {}": "rollout-n num-generations n-samples-per-prompt "
    "num-generations-per-prompt group-size samples-per-prompt",
    "--global-batch-size {}": "train-batch-size ppo-mini-batch-size mini-batch-size",
    "--num-epochs {}": "ppo-epochs num-ppo-epochs num-iterations max-epochs",
    "--max-tokens-per-micro-batch {}": "ppo-max-token-len-per-gpu max-tokens-per-gpu max-token-len-per-gpu",
    "--nproc-per-node {}": "num-gpus n-gpus-per-node num-gpus-per-node num-processes world-size "
    "actor-num-gpus-per-node",
    "--tensor-model-parallel-size {}": "tp tp-size tensor-parallel-size tensor-parallel",
    "--pipeline-model-parallel-size {}": "pp pp-size pipeline-parallel-size",
    "--context-parallel-size {}": "cp cp-size ulysses-sequence-parallel-size ring-attn-size",
    "--expert-model-parallel-size {}": "ep ep-size expert-parallel-size",
    "--expert-tensor-parallel-size {}": "etp etp-size",
    "--virtual-pipeline-model-parallel-size {}": "vpp vpp-size num-virtual-stages-per-pipeline-rank",
    "--rollout-tensor-parallel-size "
    "{}": "rollout-tp gen-tp vllm-tensor-parallel-size rollout-num-gpus-per-engine "
    "rollout-tensor-model-parallel-size",
    "--rollout-gpu-memory-utilization {}": "gpu-memory-utilization vllm-gpu-memory-utilization",
    "--rollout-max-num-seqs {}": "max-num-seqs",
    "--rollout-enforce-eager": "enforce-eager",
    "--lr {}": "learning-rate",
    "--actor-lr {}": "actor-learning-rate",
    "--critic-lr {}": "critic-learning-rate",
    "--lr-warmup-iters {}": "warmup-steps lr-warmup-steps num-warmup-steps",
    "--lr-decay-style {}": "lr-scheduler-type lr-scheduler warmup-style",
    "--clip-grad {}": "max-grad-norm grad-clip max-norm gradient-clipping",
    "--optimizer-cpu-offload": "adam-offload",
    "--use-megatron-fsdp": "fsdp use-fsdp",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": "gradient-checkpointing enable-gradient-checkpointing",
    "--max-prompt-length {}": "prompt-max-len rollout-max-prompt-len",
    "--max-response-length {}": "max-new-tokens max-completion-length generate-max-len "
    "rollout-max-response-len max-tokens response-length",
    "--kl-coef {} --kl-mode loss": "beta kl-loss-coef kl-beta",
    "--kl-coef {} --kl-mode reward": "init-kl-coef kl-ctrl-kl-coef",
    "--clip-eps-low {} --clip-eps-high {}": "eps-clip cliprange clip-ratio epsilon clip-eps",
    "--clip-eps-low {}": "clip-ratio-low epsilon-low eps-clip-low",
    "--clip-eps-high {}": "clip-ratio-high epsilon-high eps-clip-high",
    "--value-clip-eps {}": "value-clip cliprange-value value-clip-range",
    "--gamma {}": "gae-gamma discount",
    "--gae-lambda {}": "lam lambd lambda gae-lam",
    "--entropy-coef {}": "entropy-coeff entropy-loss-coef entropy-loss-coeff",
    "--critic-warmup-iters {}": "critic-warmup critic-warmup-steps",
    "--lora-rank {}": "lora-r lora-dim peft-lora-r",
    "--lora-target-modules {}": "target-modules lora-targets",
    "--reward-function {}": "custom-reward-function reward-func reward-funcs custom-rm-path remote-rm-url",
    "--log-with {}": "report-to logger trainer.logger loggers",
    "--log-with wandb": "use-wandb",
    "--log-with tensorboard": "use-tensorboard",
    "--log-project {}": "wandb-project project-name trainer.project-name mlflow-experiment-name",
    "--log-name {}": "wandb-run-name wandb-name experiment-name run-name trainer.experiment-name "
    "wandb-exp-name",
    "--call-timeout-s {}": "nccl-timeout distributed-timeout-minutes",
}
_REASONS = {
    _PACKED: """per-device-train-batch-size micro-train-batch-size micro-batch-size-per-gpu ppo-micro-batch-size-per-gpu
        ppo-micro-batch-size gradient-accumulation-steps use-dynamic-batch-size""",
    "steps are counted, by --train-iters, and not passes over the "
    "data": "num-train-epochs total-epochs num-episodes",
    "adapters have no dropout, as the engine's log-probs have none": "lora-dropout",
    _METRICS: "logging-steps tensorboard-dir",
    "the model is a folder, and no code from it is run": "trust-remote-code",
    "roles share ranks unless --actor-ranks and the like say "
    "otherwise": "colocate colocate-all-models colocate-actor-ref",
    "--use-distributed-optimizer shards Adam's state, which is the "
    "default": "zero-stage deepspeed deepspeed-config",
}
FLAG_OF = {name: ours for ours, names in _FLAGS.items() for name in names.split()}
REASON_OF = {name: reason for reason, names in _REASONS.items() for name in names.split()}


def our_name(name: str) -> str:
    """As in the tables: of trainer.save_freq save-freq; of data.train_batch_size all, as verl counts prompts
    and OpenRLHF samples."""
    name = name.replace("_", "-")
    return name if name in FLAG_OF else name.rpartition(".")[2]
