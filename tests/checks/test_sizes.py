"""Elements that a rank holds, counted from single layers, against the atlases of whole models; memory and
disk against sums by hand.

pytest tests/checks/test_sizes.py"""

import dataclasses

import pytest

from megarl.algorithms import REGISTRY
from megarl.checks.disk import checkpoint_bytes, disk_errors, disk_line, export_bytes, new_checkpoints
from megarl.checks.fits import memory_errors, memory_table
from megarl.checks.machine import Machine, free_bytes
from megarl.checks.memory import PHASES, estimate, peak_bytes, peak_phase, phase_bytes
from megarl.checks.sizes import aliased_elements, canonical_elements, engine_held, megatron_held
from megarl.config.hf_config import ModelShape
from megarl.config.loader import load_config
from megarl.config.mesh import MeshSpec
from megarl.config.schema import LoRAConfig
from megarl.reshard.alias import find_aliases
from megarl.reshard.lora_atlas import with_adapters
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.transformers_atlas import transformers_atlas
from megarl.reshard.vllm_atlas import vllm_atlases
from tests.config.conftest import MIXTURE, QWEN3, job, write_model  # noqa: F401

MESHES = [
    MeshSpec((0,)),
    MeshSpec((0, 1), tp=2),
    MeshSpec((0, 1), pp=2),
    MeshSpec((0, 1, 2, 3), tp=2, pp=2),
    MeshSpec((0, 1), pp=2, vpp=2),
    MeshSpec((0, 1, 2, 3), tp=2, ep=2, etp=1),
    MeshSpec((0, 1, 2, 3), ep=2),
]
CPU, GIGABYTE = Machine(ram_bytes=10**12), 10**9


def elements(atlas) -> int:
    return sum(param.rows * param.cols for param in atlas.values())


@pytest.fixture(params=["dense", "tied", "mixture", "mixture after dense layers"])
def shape(request, write_model):  # noqa: F811
    config = (MIXTURE if "mixture" in request.param else QWEN3) | {
        "num_hidden_layers": 4,
        "tie_word_embeddings": request.param == "tied",
    }
    loaded = ModelShape.load(write_model(config))
    return dataclasses.replace(loaded, dense_layers=(0,)) if "after" in request.param else loaded


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_counted_by_layers_as_the_whole_atlas(shape, mesh):
    if mesh.ep > 1 and not shape.is_moe:
        mesh = dataclasses.replace(mesh, ep=1, etp=None)
    for layout in ("grouped", "stacked"):
        atlases = megatron_atlases(shape, mesh, qkv_layout=layout)
        held = megatron_held(shape, mesh, layout)
        assert {rank: of_rank.total for rank, of_rank in held.items()} == {
            rank: elements(atlas) for rank, atlas in atlases.items()
        }
        experts = {
            rank: elements({name: p for name, p in atlas.items() if ".mlp.experts." in name})
            for rank, atlas in atlases.items()
        }
        assert {rank: of_rank.experts for rank, of_rank in held.items()} == experts
        for tp in (1, 2) if len(mesh.ranks) > 1 else (1,):
            engines = vllm_atlases(shape, mesh.ranks, tp)
            assert engine_held(shape, tp) == elements(engines[0])
            shared = {
                rank: elements(
                    {name: engines[rank][name] for name in find_aliases(atlases[rank], engines[rank])}
                )
                for rank in mesh.ranks
            }
            assert aliased_elements(shape, mesh, MeshSpec(mesh.ranks, tp), layout) == shared
        whole = transformers_atlas(shape)
        assert engine_held(shape, 1, "transformers") == elements(whole)
        assert aliased_elements(shape, mesh, MeshSpec(mesh.ranks), layout, "transformers") == {
            rank: elements({name: whole[name] for name in find_aliases(atlases[rank], whole)})
            for rank in mesh.ranks
        }


def test_adapters_are_counted_apart(shape):
    lora = LoRAConfig(lora_rank=4, lora_target_modules=("linear_qkv", "linear_proj"))
    mesh = MeshSpec((0, 1), tp=2)
    held = megatron_held(shape, mesh, "grouped", lora)
    for rank, atlas in megatron_atlases(shape, mesh).items():
        assert held[rank].adapters == elements(with_adapters(atlas, lora)) - elements(atlas) > 0


def load(job, *flags):  # noqa: F811
    return load_config([job, *" ".join(flags).split()], REGISTRY)


def parts_of(parts, rank=0) -> dict[tuple[str, str], int]:
    return {(part.role, part.name): part.bytes for part in parts[rank]}


def test_bytes_of_a_parameter(job, tmp_path):  # noqa: F811
    """docs/memory.md's table: 4 + 4 + 8 in fp32, 2 + 4 + 12 in bf16, the optimizer over data-parallel
    ranks."""
    n = megatron_held(ModelShape.load(tmp_path / "model"), MeshSpec((0,)), "grouped")[0].total
    parts = parts_of(estimate(load(job), 2, CPU))
    assert [parts["actor", name] for name in ("parameters", "gradients", "optimizer")] == [
        4 * n,
        4 * n,
        8 * (n // 2),
    ]
    parts = parts_of(
        estimate(load(job, "--bf16 --no-use-distributed-optimizer --kl-mode loss --kl-coef 0.1"), 2, CPU)
    )
    assert [parts["actor", name] for name in ("parameters", "gradients", "optimizer")] == [
        2 * n,
        4 * n,
        12 * n,
    ]
    assert parts["reference", "parameters"] == 2 * n
    parts = parts_of(
        estimate(load(job, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"), 2, CPU)
    )
    assert [parts["actor", name] for name in ("parameters", "gradients", "optimizer")] == [
        4 * n,
        4 * (n // 2),
        8 * (n // 2),
    ]
    parts = parts_of(estimate(load(job, "--rollout-ranks 1 --rollout-dtype bfloat16"), 2, CPU), rank=1)
    assert parts["rollout", "engine"] == 2 * 2 * engine_held(
        ModelShape.load(tmp_path / "model"), 1
    )  # a second buffer


def test_rows_of_a_cache_without_blocks(job, tmp_path):  # noqa: F811
    """--rollout-backend transformers: a row of full length per sequence of a step on each engine, as far as
    there is room; the plain parameters; and a second buffer out of process."""
    shape = ModelShape.load(tmp_path / "model")
    row = 2 * 4 * shape.num_layers * shape.num_query_groups * shape.head_dim
    config = load(job, "--rollout-backend transformers")
    row *= config.sampling.max_length
    samples = config.batch.num_prompts * config.batch.num_samples_per_prompt
    parts = parts_of(estimate(config, 2, CPU))
    assert parts["rollout", "KV cache"] == -(-samples // 2) * row
    flags = "--rollout-backend transformers --staleness 2 --num-canaries 1 --rollout-max-num-seqs 1000"
    parts = parts_of(estimate(load(job, flags), 2, CPU))
    assert parts["rollout", "KV cache"] == (3 * samples // 2 + 1) * row
    flags = "--rollout-backend transformers --rollout-max-num-seqs 3 --rollout-ranks 1"
    parts = parts_of(estimate(load(job, flags), 2, CPU), rank=1)
    assert parts["rollout", "KV cache"] == 3 * row
    assert parts["rollout", "engine"] == 4 * 2 * canonical_elements(shape)
    flags = f"--rollout-backend transformers --rollout-kv-cache-memory-bytes {2 * row + 1}"
    assert parts_of(estimate(load(job, flags), 2, CPU))["rollout", "KV cache"] == 2 * row
    gpu = Machine(None, has_gpu=True, gpu_bytes=10**9)
    parts = parts_of(estimate(load(job, "--rollout-backend transformers"), 2, gpu))
    assert parts["rollout", "KV cache"] == -(-samples // 2) * row


def test_an_evaluation_needs_the_weights_and_the_engine(job):  # noqa: F811
    """No optimizer is built, and the actor computes nothing."""
    whole, evaluation = (parts_of(estimate(load(job), 2, CPU, trains)) for trains in (True, False))
    assert {*evaluation} == {("actor", "parameters"), ("rollout", "engine"), ("rollout", "KV cache")}
    assert all(whole[part] == size for part, size in evaluation.items())


def test_an_evaluation_of_several_policies_needs_the_engines_of_all(job, write_model):  # noqa: F811
    smaller = write_model(QWEN3 | {"hidden_size": 64}, name="smaller")
    config = load(job, f"--num-actors 2 --actor-2-model {smaller}")
    parts = parts_of(estimate(config, 2, CPU, trains=False))
    shapes = {"": ModelShape.load(config.model.model), "_2": ModelShape.load(smaller)}
    for suffix, shape in shapes.items():
        held = megatron_held(shape, MeshSpec((0,)), "grouped")[0].total
        assert parts[f"actor{suffix}", "parameters"] == 4 * held
        assert parts[f"rollout{suffix}", "engine"] == 2 * 4 * engine_held(shape, 1)  # a second buffer
        assert parts[f"rollout{suffix}", "KV cache"] > 0
    assert len(parts) == 6 and parts["actor", "parameters"] > parts["actor_2", "parameters"]


def test_phases_hold_what_their_calls_need(job):  # noqa: F811
    flags = (
        "--algorithm ppo --kl-mode reward --kl-coef 0.1 --offload parameters gradients "
        "optimizer --no-reshard-alias"
    )
    config = load(job, flags)
    parts = estimate(config, 2, Machine(None, has_gpu=True, gpu_bytes=10**9))[0]
    size = {
        key: sum(part.bytes for part in parts if part.role == key and part.during is None)
        for key in ("actor", "critic", "reference", "rollout")
    }
    weights = {part.role: part.bytes for part in parts if part.name == "parameters"}
    needed = {
        (part.role, part.during): part.bytes for part in parts if part.during is not None and part.bytes
    }
    assert set(needed) == {
        ("actor", "log-probs"),
        ("actor", "update"),
        ("critic", "log-probs"),
        ("critic", "update"),
        ("reference", "log-probs"),
        ("rollout", "rollout"),
    }
    always = size["rollout"] + next(part.bytes for part in parts if part.name == "margin")
    expected = [
        always + needed["rollout", "rollout"],
        always + max(weights[role] + needed[role, "log-probs"] for role in weights),
        always + max(size[role] + needed[role, "update"] for role in ("actor", "critic")),
        always + weights["actor"],
    ]
    assert [phase_bytes(parts, phase) for phase in PHASES] == expected
    on_cpu = estimate(config, 2, CPU)[0]  # where nothing can go anywhere
    always = sum(part.bytes for part in on_cpu if part.during is None)
    most = {
        phase: max([part.bytes for part in on_cpu if part.during == phase], default=0) for phase in PHASES
    }
    assert {phase: phase_bytes(on_cpu, phase) for phase in PHASES} == {
        phase: always + most[phase] for phase in PHASES
    }
    assert peak_bytes(on_cpu) == always + most["update"] and peak_phase(on_cpu) == "update"


def test_what_cannot_fit_is_an_error(job):  # noqa: F811
    config = load(job)
    parts = estimate(config, 2, CPU)
    needed = sum(map(peak_bytes, parts.values()))
    assert list(memory_errors(config, parts, Machine(needed), 2)) == [] and any(
        "ranks 0-1" in line for line in memory_table(parts, CPU)
    )
    (finding,) = memory_errors(config, parts, Machine(needed - 1), 2)
    assert (
        finding.startswith(f"--model ({config.model.model}): on this machine 2 ranks need ")
        and " during an update, of " in finding
    )
    assert (
        list(memory_errors(config, parts, Machine(needed // 2 + 1), 1)) == []
    )  # the other rank is on another machine
    (finding,) = memory_errors(config, parts, Machine(None, has_gpu=True, gpu_bytes=1000), 2)
    assert "on its GPU rank 0 needs" in finding and "Use a smaller model" in finding


def test_disk(job, tmp_path):  # noqa: F811
    n = canonical_elements(ModelShape.load(tmp_path / "model"))
    config = load(job, "--save-interval 1 --keep 5 --best-metric reward/mean")
    assert (checkpoint_bytes(config), export_bytes(config), new_checkpoints(config)) == (
        12 * n,
        4 * n,
        3,
    )  # of three steps
    config = load(job, "--save-interval 1 --keep 2 --train-iters 100 --bf16")
    assert (checkpoint_bytes(config), export_bytes(config), new_checkpoints(config)) == (12 * n, 2 * n, 3)
    assert list(disk_errors(config, 38 * n)) == [] and list(disk_errors(config, None)) == []
    (finding,) = disk_errors(config, 38 * n - 1)
    assert finding.startswith(f"--save ({tmp_path}/run): writes 3 checkpoints of") and finding.endswith(
        "Try --keep 1."
    )
    assert (
        list(disk_errors(load(job, "--save-interval 1 --keep 1 --train-iters 100 --bf16"), 38 * n - 1)) == []
    )
    assert (
        list(disk_errors(load(job, "--train-iters 100"), 4 * n)) == []
        and free_bytes(tmp_path / "not" / "there" / "yet") > GIGABYTE
    )


def simulated_folders(held: list[int], begin: int, steps: int, interval: int, keep: int) -> int:
    """Simulate a job's remaining checkpoints, and return how many more there are at most than now."""
    replaced = [step for step in held if step > begin]  # renamed, and removed with the next one's completion
    there, most = [step for step in held if step <= begin], len(held)
    for step in range(begin + 1, steps + 1):
        if step % interval == 0 or step == steps:
            there.append(step)
            most = max(most, len(there) + len(replaced))
            there, replaced = there[-keep:], []
    return most - len(held)


@pytest.mark.parametrize(
    "held, begin, steps, interval, keep",
    [
        ([], 0, 100, 5, 2),
        ([5], 5, 100, 5, 2),
        ([5, 10], 10, 100, 5, 2),
        ([5, 10], 5, 100, 5, 2),  # --load names the older one
        ([5, 10, 15, 20], 20, 100, 5, 1),  # --keep is lower than before
        ([5, 7], 7, 12, 5, 2),  # SIGTERM stopped the job after step 7
        ([95, 100], 100, 100, 5, 2),  # only the export is missing
    ],
)
def test_a_run_that_goes_on_needs_no_room_for_what_it_holds(
    job,  # noqa: F811
    tmp_path,
    held,
    begin,
    steps,
    interval,
    keep,
):
    """The disk on which a run has begun is large enough to continue it."""
    run = tmp_path / "run"
    for step in held:
        folder = run / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "job.json").touch()
    load_flag = (
        f"--load {run}" if begin == max(held, default=0) else f"--load {run}/checkpoints/step_{begin:06d}"
    )
    flags = f"--save-interval {interval} --keep {keep} --train-iters {steps}"
    config = load(job, flags, load_flag if held else "")
    more = simulated_folders(held, begin, steps, interval, keep)
    needed = more * checkpoint_bytes(config) + export_bytes(config)
    assert list(disk_errors(config, needed)) == [] and len(list(disk_errors(config, needed - 1))) == 1
    assert (f"writes {more} more checkpoint" in disk_line(config, None)) == bool(held and more)


def test_an_export_is_written_beside_the_one_that_it_replaces(job, tmp_path):  # noqa: F811
    n = canonical_elements(ModelShape.load(tmp_path / "model"))
    assert export_bytes(load(job, "--train-iters 10")) == 4 * n
    assert export_bytes(load(job, "--train-iters 10 --export-interval 10")) == 4 * n
    assert export_bytes(load(job, "--train-iters 10 --export-interval 5")) == 2 * 4 * n
    ppo = load(job, "--algorithm ppo --num-samples-per-prompt 1 --train-iters 10 --export-interval 5")
    critic = n - QWEN3["vocab_size"] * QWEN3["hidden_size"] + QWEN3["hidden_size"]  # one score, no words
    assert export_bytes(ppo) == 4 * (n + critic + n)
    (tmp_path / "run" / "hf").mkdir(parents=True)
    assert export_bytes(ppo) == 4 * (critic + n)
    (tmp_path / "run" / "hf_critic").mkdir()
    assert export_bytes(ppo) == 4 * n
    assert export_bytes(load(job, "--train-iters 10")) == 4 * n
