"""Offload around the calls of a PPO step with actor, critic and reference on one rank.

What is on the device is compared with a table written by hand, sizes with the number of parameters. On a CPU no byte
moves by itself; here copies between two places of host memory (moved_storages.py) take the place of those to
a GPU: what leaves is freed, what comes back lies elsewhere, so that whatever is forgotten, or reached by an
old address, shows in the weights. They must be equal to the bit to those of a run without offload.

    pytest tests/workers/test_offload.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megarl.megatron import offload
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.reshard.plan import RectCopy, ReshardPlan
from megarl.reshard.transfer import Transfer
from tests.launch import succeed

PARAMETERS, ALL, NONE = {"parameters"}, {"parameters", "gradients", "optimizer"}, set()
# Call -> what is on the device during it, of actor, reference and critic; the reference may not leave.
DURING = {
    "rollout.generate": (NONE, PARAMETERS, NONE),
    "reference.log_probs": (NONE, PARAMETERS, NONE),
    "actor.log_probs": (PARAMETERS, PARAMETERS, NONE),
    "critic.values": (NONE, PARAMETERS, PARAMETERS),
    "actor.advantages": (NONE, PARAMETERS, PARAMETERS),  # needs nothing: all stays as it is
    "critic.update": (NONE, PARAMETERS, ALL),
    "actor.update": (ALL, PARAMETERS, NONE),
    "rollout.sync": (PARAMETERS, PARAMETERS, NONE),
}
# Bytes per parameter. Adam has two fp32 moments, and under bf16 an fp32 master of each weight.
BYTES = {
    "fp32": {"parameters": 4, "gradients": 4, "optimizer": 8},
    "bf16": {"parameters": 2, "gradients": 4, "optimizer": 12},
}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("offload")
    script = Path(__file__).with_name("run_offload.py")
    succeed(script, folder, timeout=240, preloaded=True)
    return json.loads((folder / "report.json").read_text())


def test_reference_follows_the_actor_and_keeps_no_more_than_it_has(report):
    """--actor-offload is the reference's too, of which it has the parameters."""
    second = report["account"]["calls"][-len(DURING) :]
    assert dict(second)["critic.values"]["reference"] == {"parameters": 0, "gradients": 0, "optimizer": 0}


@pytest.mark.parametrize(
    "name, dtype", [("account", "fp32"), ("move", "fp32"), ("move_bf16", "bf16"), ("move_plain_adam", "fp32")]
)
def test_during_each_call_the_device_has_what_it_needs_and_no_more(report, name, dtype):
    calls, num_parameters = report[name]["calls"][-len(DURING) :], report[name]["num_parameters"]
    assert [call for call, _ in calls] == list(DURING)
    for call, resident in calls:
        for role, parts in zip(("actor", "reference", "critic"), DURING[call], strict=True):
            if role == "reference" and call != "reference.log_probs":
                parts = NONE  # offloaded by the actor's flag
            for part, num_bytes in resident[role].items():
                wanted = (
                    BYTES[dtype][part] * num_parameters[role]
                    if part in parts and (role != "reference" or part == "parameters")
                    else 0
                )
                # Megatron pads its buffers: each parameter to 64 elements, the whole to a multiple of the
                # ranks.
                assert wanted <= num_bytes <= 1.02 * wanted, (call, role, part)


def test_peak_is_that_of_one_role_instead_of_all(report):
    """Of the second step: the first has no moments until it updates. Actor and critic of 16 bytes per
    parameter, the reference of 4."""
    n = report["stay"]["num_parameters"]
    assert report["stay"]["peaks"][1] == pytest.approx(
        16 * n["actor"] + 16 * n["critic"] + 4 * n["reference"], rel=0.02
    )
    assert report["account"]["peaks"][1] == pytest.approx(16 * max(n["actor"], n["critic"]), rel=0.02)
    assert report["move_critic_optimizer"]["peaks"][1] == report["stay"]["peaks"][1], (
        "the critic's update needs all of it"
    )


AHEAD = {  # call -> what comes while it computes, in the second step: gradients are zeros and need not
    "rollout.generate": ["reference parameters"],
    "reference.log_probs": ["actor parameters"],
    "actor.log_probs": ["critic parameters"],
    "critic.values": ["critic optimizer"],
    "critic.update": ["critic gradients", "actor parameters", "actor optimizer"],
    "actor.update": ["actor gradients"],
}


def test_what_the_next_call_needs_comes_while_this_one_computes(report):
    """By the order of events: no part but gradients arrives in the call that needs it."""
    arrived = report["ahead"]["arrived"]
    assert {
        call: [part for of, part in arrived if of == call] for call in dict.fromkeys(of for of, _ in arrived)
    } == AHEAD
    late = [[call, part] for call, part in report["move"]["arrived"] if not part.endswith("gradients")]
    assert late and all(part.startswith(call.split(".")[0]) for call, part in late), (
        "without it everything comes when its call begins"
    )


def test_what_comes_ahead_takes_no_more_than_its_limit(report):
    """Room for the parameters of one model: so parameters come ahead, the optimizer's 8 bytes per parameter
    do not."""
    limit, n = report["stay"]["bytes_of_parameters"], report["stay"]["num_parameters"]
    arrived = report["ahead_of_parameters"]["arrived"]
    assert ["reference.log_probs", "actor parameters"] in arrived and [
        "critic.update",
        "actor parameters",
    ] in arrived
    assert ["actor.update", "actor optimizer"] in arrived and ["critic.update", "critic optimizer"] in arrived
    for call, resident in report["ahead_of_parameters"]["calls"][-len(DURING) :]:
        total = sum(num_bytes for parts in resident.values() for num_bytes in parts.values())
        needed = sum(
            1.02 * BYTES["fp32"][part] * n[role]
            for role, parts in zip(("actor", "reference", "critic"), DURING[call], strict=True)
            for part in parts
            if role != "reference" or call == "reference.log_probs"
        )
        assert total <= needed + limit, call
    assert report["ahead_of_parameters"]["peaks"][1] <= report["move"]["peaks"][1] + limit


@pytest.mark.parametrize(
    "name, without",
    [
        ("account", "stay"),
        ("move", "stay"),
        ("move_critic_optimizer", "stay"),
        ("ahead", "stay"),
        ("ahead_of_parameters", "stay"),
        ("move_bf16", "stay_bf16"),
        ("move_plain_adam", "stay_plain_adam"),
    ],
)
def test_bits_are_those_of_a_run_without_offload(report, name, without):
    for what in ("numbers", "weights", "states", "engine"):
        assert report[name][what] == report[without][what], what
    assert report[without]["weights"]["actor"] != report[without]["weights"]["reference"], (
        "the actor was not trained"
    )


@pytest.mark.parametrize("name", ("stay", "stay_bf16", "stay_plain_adam"))
def test_what_the_first_update_allocates_is_known_before(report, name):
    """Adam's two moments; the size of a KV cache is derived from it."""
    for role in ("actor", "critic", "reference"):
        (held, coming), end = report[name]["optimizer_at_start"][role], report[name]["optimizer_at_end"][role]
        assert end == [held + coming, 0] and (coming > 0) == (role != "reference"), role


def test_parameters_stay_the_same_tensors(report):
    assert all(all(run["same_views"].values()) for run in report.values())


def test_each_part_comes_back_once_per_phase(report):
    """Per step: the actor's parameters for log-probs and for update (sync follows it), its gradients and
    optimizer once; the reference's parameters once; the critic's parameters stay from values to update. At
    the start and at the end the test itself loads all."""
    moves = report["move"]["num_moves"]
    at_start, steps, at_end = (
        {"actor": 3, "reference": 1, "critic": 0},
        2,
        {"actor": 2, "reference": 1, "critic": 3},
    )
    per_step = {"actor": 4, "reference": 1, "critic": 3}
    assert moves == {role: at_start[role] + steps * per_step[role] + at_end[role] for role in per_step}
    assert report["move_critic_optimizer"]["num_moves"] == {"actor": 0, "reference": 0, "critic": steps + 1}


def test_metrics_name_what_each_role_leaves_on_the_device(report):
    metrics = report["account"]["metrics"]
    assert {
        name: metrics[f"memory/{name}_resident_bytes"] for name in ("actor", "reference", "critic")
    } == dict.fromkeys(("actor", "reference", "critic"), 0)
    partly, n = report["move_critic_optimizer"]["metrics"], report["stay"]["num_parameters"]
    assert partly["memory/critic_resident_bytes"] == pytest.approx(8 * n["critic"], rel=0.02)
    assert partly["memory/actor_resident_bytes"] == pytest.approx(16 * n["actor"], rel=0.02)
    assert metrics["time/offload_s"] == 0 and partly["time/offload_s"] == 0.75, (
        "of all three roles of the rank"
    )
    assert not [name for name in report["stay"]["metrics"] if "resident" in name or "offload" in name]


@pytest.mark.parametrize(
    "use, part",
    [
        ("parameters", "parameters"),
        ("forward", "parameters"),
        ("gradients", "gradients"),
        ("optimizer", "optimizer"),
    ],
)
def test_use_of_what_is_away_names_role_and_part(report, use, part):
    assert report["account"]["errors"][use] == (
        f"[critic] {part}: in host memory (--offload) when a call used it. Declare it on the "
        f'role\'s method, @needs("{part}"), or call '
        f'memory.load(["{part}"]) first.'
    )


def test_a_call_whose_columns_nobody_has_written_names_the_call_that_does(report):
    """In a loop by hand there is no flow that would be checked. Both roles are on this rank; the actor's KL
    wants the reference."""
    told = report["stay"]["too_early"]
    assert told.keys() == {"actor.advantages", "actor.update", "critic.update"}
    assert told["actor.advantages"] == (
        "actor.advantages reads old_log_probs, which this rank does not have. Call roles.actor.log_probs() "
        "before it."
    )
    assert told["critic.update"] == (
        "critic.update reads values, which this rank does not have. Call roles.critic.values() before it."
    )


def test_a_transfer_follows_storages_that_have_moved():
    """Weights in one rank, a column and a whole matrix; the old memory is full of other numbers."""
    source, destination = {"w": torch.arange(24.0).view(6, 4)}, {"v": torch.zeros(6, 4)}
    plan = ReshardPlan({(0, 0): (RectCopy("w", 0, 0, "v", 0, 0, 6, 3), RectCopy("w", 0, 3, "v", 0, 3, 6, 1))})
    transfer = Transfer(plan, 0, source, destination, {})
    storage, content = source["w"].untyped_storage(), source["w"].clone()
    old_address, size = storage.data_ptr(), storage.nbytes()
    storage.resize_(0)
    in_its_place = [torch.full((24,), -1.0) for _ in range(64)]
    storage.resize_(size)
    source["w"].copy_(content + 1)
    assert storage.data_ptr() != old_address and len(in_its_place) == 64
    transfer.follow()
    transfer.run()
    assert torch.equal(destination["v"], content + 1)


def test_pieces_of_host_memory_hold_a_part_whatever_its_storages(monkeypatch):
    """The copies to a GPU, with CUDA's names meaning the CPU. Storages that end within, at and beyond pieces
    of 64 bytes."""
    monkeypatch.setattr(offload, "PIECE_BYTES", 64)
    with cpu_megatron():
        copies = offload._Copies(torch.device("cpu"))
        for sizes in ((64, 200, 1), (1, 64, 200, 700), (5,)):  # the part grows, and shrinks
            tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
            wanted, storages = [t.clone() for t in tensors], [(t.untyped_storage(), len(t)) for t in tensors]
            copies.take("optimizer", storages, keep=True)
            assert [storage.nbytes() for storage, _ in storages] == [0] * len(sizes)
            assert max(map(len, copies._host["optimizer"])) <= 64
            copies.give("optimizer", storages, keep=True)
            assert all(map(torch.equal, tensors, wanted))
        copies.take("gradients", storages, keep=False)
        copies.give("gradients", storages, keep=False)
        assert tensors[0].tolist() == [0] * 5 and "gradients" not in copies._host


def test_the_hybrid_optimizer_needs_a_gpu():
    """Its precision-aware path asks Transformer Engine for its version, so what Megatron makes of the flags
    is tested in tests/gpu."""
    from megarl.config.schema import OptimizerConfig
    from megarl.megatron.optimizer import build_optimizer, megatron_config

    assert not megatron_config(OptimizerConfig(), bf16=True).use_precision_aware_optimizer
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--optimizer-cpu-offload: needs a GPU"):
            build_optimizer(OptimizerConfig(optimizer_cpu_offload=True), None, None, bf16=True)
