"""How many ranks a translation asks for and on how many nodes, and which programs become asynchronous."""

import pytest

from megarl import cli
from tests.translate.conftest import of_file

VERL = "python3 -m {} algorithm.adv_estimator=grpo data.train_batch_size=64 "
MAIN_PPO = VERL.format("verl.trainer.main_ppo")
SLIME = "python3 {} --hf-checkpoint /m --rollout-batch-size 8 --n-samples-per-prompt 4 --num-rollout 3 "
GRPO = "train.py --num_generations 8 --per_device_train_batch_size 4"


@pytest.mark.parametrize(
    "command, nodes, per_node",
    [
        (MAIN_PPO + "trainer.n_gpus_per_node=4", 1, 4),
        (MAIN_PPO + "trainer.nnodes=2 trainer.n_gpus_per_node=8", 2, 8),
        (SLIME + "--colocate --actor-num-nodes 2 --actor-num-gpus-per-node 4", 2, 4),
        (SLIME + "--actor-num-gpus-per-node 4 --rollout-num-gpus 4", 1, 8),
        (SLIME + "--actor-num-gpus-per-node 8 --rollout-num-gpus 8", 2, 8),
        (SLIME + "--actor-num-gpus-per-node 8 --rollout-num-gpus 4", 2, 6),
        (SLIME + "--actor-num-nodes 2 --rollout-num-gpus 8", 3, 8),
        (SLIME + "--num-gpus-per-node 4 --actor-num-gpus-per-node 4 --rollout-num-gpus 4", 2, 4),
        (f"torchrun --nnodes 2 --nproc_per_node 4 {GRPO}", 2, 4),
        (f"accelerate launch --num_machines 2 --num_processes 16 {GRPO}", 2, 8),
        (f"deepspeed --num_nodes 2 --num_gpus 4 {GRPO}", 2, 4),
        (f"accelerate launch --num_processes 8 {GRPO}", 1, 8),
    ],
)
def test_ranks_per_node(translate, tmp_path, command, nodes, per_node):
    """--nproc-per-node counts the ranks of a node, so that torchrun and --executor ray start as many."""
    flags, comments = of_file(translate, tmp_path, "run.sh", command.format("train.py"))
    assert (flags["--nnodes"], flags["--nproc-per-node"]) == ([str(nodes)], [str(per_node)])
    assert ("by torchrun, or with --executor ray" in comments) is (nodes > 1)


def test_ranks_of_roles_count_those_of_all_nodes(translate, tmp_path):
    flags, _ = of_file(translate, tmp_path, "run.sh", SLIME.format("train.py") + "--actor-num-nodes 2")
    assert flags["--actor-ranks"] == ["0-15"] and flags["--rollout-ranks"] == ["16-31"]
    assert flags["--nnodes"] == ["4"]


def test_processes_of_trl_on_unknown_machines_are_noted(translate, tmp_path):
    flags, comments = of_file(translate, tmp_path, "run.sh", f"accelerate launch --num_processes 16 {GRPO}")
    assert flags["--nproc-per-node"] == ["16"] and "on N machines --nnodes N" in comments
    command = f"accelerate launch --num_machines 3 --num_processes 16 {GRPO}"
    flags, comments = of_file(translate, tmp_path, "run.sh", command)
    assert "--nproc-per-node" not in flags and "16 processes on 3 machines" in comments


@pytest.mark.parametrize(
    "command, note",
    [
        (
            SLIME.format("train_async.py"),
            "train_async.py samples a step ahead, and ends responses before a sync",
        ),
        (SLIME.format("/root/slime/train_async.py"), "train_async.py samples a step ahead"),
        (VERL.format("recipe.one_step_off_policy.main_ppo"), "samples while it trains"),
        (VERL.format("verl.experimental.fully_async_policy.fully_async_main"), "samples while it trains"),
        (SLIME.format("train.py"), None),
        (MAIN_PPO, None),
    ],
)
def test_an_asynchronous_program_becomes_asynchronous(translate, tmp_path, command, note):
    flags, comments = of_file(translate, tmp_path, "run.sh", command)
    assert flags.get("--staleness") == (["1"] if note else None)
    assert note is None or note in comments


def test_engines_of_verls_asynchronous_programs_have_ranks_of_their_own(translate, tmp_path):
    """The scripts of one node divide its GPUs between trainer and engines."""
    program = VERL.format("recipe.one_step_off_policy.main_ppo")
    sizes = "trainer.nnodes=1 trainer.n_gpus_per_node=6 rollout.nnodes=1 rollout.n_gpus_per_node=2"
    flags, comments = of_file(translate, tmp_path, "run.sh", f"{program} {sizes}")
    assert (flags["--nnodes"], flags["--nproc-per-node"]) == (["1"], ["8"])
    assert (flags["--actor-ranks"], flags["--rollout-ranks"]) == (["0-5"], ["6-7"])
    assert "give trainer and engines devices of their own" not in comments
    sizes_of_two = "trainer.n_gpus_per_node=4 actor_rollout_ref.rollout.tensor_model_parallel_size=8"
    flags, comments = of_file(
        translate, tmp_path, "run.sh", f"{program} {sizes_of_two}"
    )  # no engine on 2 nodes
    assert "--nproc-per-node" not in flags and "no equal nodes of up to 8 ranks hold 4 of" in comments
    assert (flags["--actor-ranks"], flags["--rollout-ranks"]) == (["0-3"], ["4-11"])
    flags, comments = of_file(translate, tmp_path, "run.sh", f"{MAIN_PPO} {sizes}")
    assert flags["--nproc-per-node"] == ["6"] and "--rollout-ranks" not in flags
    assert "give trainer and engines devices of their own" in comments


@pytest.mark.parametrize("launcher", [(), ("--executor", "ray")], ids=["torchrun", "ray"])
def test_asynchronous_training_on_two_nodes_passes_check(translate, tmp_path, local, capsys, launcher):
    command = SLIME.format("train_async.py") + "--rollout-max-response-len 16 --global-batch-size 32"
    (tmp_path / "run.sh").write_text(command)
    assert cli.main(["translate", str(tmp_path / "run.sh")]) == 0
    text = capsys.readouterr().out
    (tmp_path / "translated.args").write_text(text)
    code = cli.main(
        ["check", "--gpu-memory", "80", f"@{tmp_path / 'translated.args'}", *local(text), *launcher]
    )
    result = capsys.readouterr()
    assert code == 0, f"{result.err}\n{text}"
    assert "world size 16," in result.out
