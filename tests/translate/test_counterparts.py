"""A setting of another framework whose feature megarl has names the flag in its translation."""

import pytest

from tests.translate.conftest import of_file

VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
SLIME = "python3 train.py --hf-checkpoint /m --rollout-batch-size 8 --n-samples-per-prompt 4 --num-rollout 3 "
TRL = "num_generations: 8\nper_device_train_batch_size: 8\n"
ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
KL = "actor_rollout_ref.actor.use_kl_loss"


@pytest.mark.parametrize(
    "name, text, named",
    [
        ("run.sh", VERL + f"{ROLLOUT}.multi_turn.enable=True", ("--env", "--agent-command")),
        ("run.sh", VERL + f"{ROLLOUT}.agent.num_workers=8", ("--env", "--agent-command")),
        ("run.sh", VERL + "ray_init.num_cpus=4", ("--executor ray", "--ray-address")),
        ("run.sh", VERL + f"{ROLLOUT}.cudagraph_capture_sizes=[1,2]", ("--rollout-NAME",)),
        ("run.sh", VERL + "data.sampler.class_path=s.py", ("--curriculum",)),
        ("run.sh", VERL + "reward_model.sandbox_fusion.url=http://h", ("--reward code",)),
        ("run.sh", VERL + "reward_model.nnodes=1", ("--reward-ranks", "--reward-model-backend judge")),
        ("run.sh", VERL + f"{REF}.ulysses_sequence_parallel_size=2", ("--reference-context-parallel-size",)),
        ("grpo.yaml", TRL + "sync_ref_model: true", ("--reference-update-interval",)),
        ("grpo.yaml", TRL + "use_vllm: false", ("--rollout-backend transformers",)),
        ("grpo.yaml", TRL + "use_transformers_paged: true", ("--rollout-backend transformers",)),
        ("grpo.yaml", TRL + "reward_weights: [1, 0.5]", ("--score-weights",)),
        ("grpo.yaml", TRL + "multi_objective_aggregation: normalize_then_sum", ("--algorithm gdpo",)),
        ("grpo.yaml", TRL + "fsdp: full_shard", ("--use-megatron-fsdp",)),
        ("grpo.yaml", TRL + "vllm_server_host: h", ("--rollout-ranks",)),
        ("run.sh", SLIME + "--use-opd", ("--algorithm distill", "--reference-model")),
        ("run.sh", SLIME + "--ref-load /r", ("--reference-model",)),
        ("run.sh", SLIME + "--custom-generate-function-path g.f", ("--env", "--agent-command")),
        ("run.sh", SLIME + "--custom-loss-function-path l.f", ("--policy-loss FILE.py:FUNCTION",)),
        ("run.sh", SLIME + "--custom-advantage-function-path a.f", ("--advantage FILE.py:FUNCTION",)),
        ("run.sh", SLIME + "--train-backend fsdp", ("--use-megatron-fsdp",)),
    ],
)
def test_a_comment_names_the_flag(translate, tmp_path, name, text, named):
    _, comments = of_file(translate, tmp_path, name, text)
    assert all(flag in comments for flag in named), comments
    assert "no counterpart" not in comments and "not known here" not in comments


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("run.sh", VERL + f"{ROLLOUT}.name=hf", ("--rollout-backend", "transformers")),
        ("run.sh", VERL + f"{REF}.model.path=/r {KL}=True", ("--reference-model", "/r")),
        ("run.sh", VERL.replace("=grpo", "=gdpo") + "trainer.nnodes=1", ("--algorithm", "gdpo")),
        ("grpo.yaml", TRL + "max_staleness: 4", ("--staleness", "4")),
        ("run.sh", SLIME + "--use-rollout-logprobs", ("--old-log-probs", "engine")),
        ("run.sh", SLIME + "--use-rollout-routing-replay", ("--moe-routing-replay", "engine")),
        ("run.sh", SLIME + "--use-routing-replay", ("--moe-routing-replay", "policy")),
        ("run.sh", SLIME + "--ref-update-interval 5", ("--reference-update-interval", "5")),
        ("run.sh", SLIME + "--moe-z-loss-coeff 1e-3", ("--moe-z-loss-coeff", "1e-3")),
    ],
)  # fmt: skip
def test_a_setting_becomes_the_flag(translate, tmp_path, name, text, expected):
    flag, value = expected
    flags, _ = of_file(translate, tmp_path, name, text)
    assert flags[flag] == [value]


def test_a_reference_without_a_kl_is_a_comment(translate, tmp_path):
    flags, comments = of_file(translate, tmp_path, "run.sh", VERL + f"{REF}.model.path=/r")
    assert "--reference-model" not in flags
    assert f"no effect in this configuration:\n{REF}.model.path=/r" in comments


@pytest.mark.parametrize("engine, is_named", [("vllm", False), ("sglang", True)])
def test_another_engine_of_verl_is_a_comment(translate, tmp_path, engine, is_named):
    flags, comments = of_file(translate, tmp_path, "run.sh", VERL + f"{ROLLOUT}.name={engine}")
    assert "--rollout-backend" not in flags and (f"{ROLLOUT}.name={engine}" in comments) is is_named
