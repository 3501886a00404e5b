"""When a KV cache is released and restored: by the declarations of all roles' methods, in the orders that
steps, evaluations, resumptions, aborts and failures make, and how large it is made.

pytest tests/workers/test_kv_cache.py"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megarl.algorithms import REGISTRY
from megarl.checks.job import examine
from megarl.checks.machine import Machine
from megarl.checks.memory import MARGIN, estimate
from megarl.config.hf_config import ModelShape
from megarl.config.loader import load_config
from megarl.config.mesh import role_meshes
from megarl.rollout.kv_cache import sequence_bytes
from megarl.workers.actor import ActorRole
from megarl.workers.critic import CriticRole
from megarl.workers.kv_cache import EngineKVCache, with_kv_cache_bytes
from megarl.workers.megatron_role import megatron_atlases
from megarl.workers.offload_manager import KV_CACHE, OffloadManager, needs
from megarl.workers.reference import AdapterlessReferenceRole, ReferenceRole
from megarl.workers.reward_model import RewardModelRole
from megarl.workers.rollout import RolloutRole
from tests.config.conftest import job, write_model  # noqa: F401

ROLES = (ActorRole, AdapterlessReferenceRole, CriticRole, ReferenceRole, RewardModelRole, RolloutRole)
DECLARED = {
    f"{role.__name__}.{name}": getattr(role, name).needs
    for role in ROLES
    for name in dir(role)
    if hasattr(getattr(role, name), "needs")
}


class Engine:
    """Logs what is asked of it, and refuses on request."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.refuses = log, False

    def release_kv_cache(self) -> None:
        self._do("release")

    def restore_kv_cache(self) -> None:
        self._do("restore")

    def _do(self, what: str) -> None:
        if self.refuses:
            raise RuntimeError(f"vLLM refuses to {what}")
        self.log.append(what)


class Model:
    """Memory of a model whose parts all leave the device."""

    def __init__(self, log: list[str], unallocated: int = 0) -> None:
        self.log, self.here, self.unallocated = log, {"parameters", "optimizer"}, unallocated

    def offload(self, parts) -> None:
        self.log += [f"{part} leaves" for part in sorted(self.here & set(parts))]
        self.here -= set(parts)

    def load(self, parts) -> None:
        self.log += [f"{part} comes" for part in sorted(set(parts) - self.here)]
        self.here |= set(parts)

    def part_bytes(self, part: str) -> int:
        return 100

    def resident_bytes(self, part: str | None = None) -> int:
        return 100 * len(self.here & ({part} if part else self.here))

    def unallocated_bytes(self) -> int:
        return self.unallocated

    def take_copy_seconds(self) -> float:
        return 0.0


class Role:
    """A rank's roles in one: `run(name)` is a call of a role's method with that method's declaration."""

    def __init__(self, has_cache: bool = True) -> None:
        self.log: list[str] = []
        self.offload_manager, self.name = OffloadManager(), "actor"
        self.model = Model(self.log)
        self.offload_manager.add("actor", self.model, ("parameters", "optimizer"))
        self.engine = Engine(self.log)
        if has_cache:
            self.offload_manager.add("rollout", EngineKVCache(self.engine, 1000), (KV_CACHE,))

    def run(self, called: str, fails: bool = False) -> None:
        def body(role: Role) -> None:
            role.log.append(called)
            if fails:
                raise ValueError("the step failed")

        self.name = "rollout" if called.endswith("generate") else "actor"
        needs(*DECLARED[called])(body)(self)


def test_only_sampling_needs_the_cache():
    needing = [called for called, parts in DECLARED.items() if KV_CACHE in parts]
    sampling = ("catch_up", "generate", "load_requests", "sample_canaries")
    assert sorted(needing) == [f"RolloutRole.{method}" for method in sampling]
    assert len(DECLARED) > 20


@pytest.mark.parametrize("called", [name for name in DECLARED if name != "RolloutRole.generate"])
def test_every_other_call_finds_the_memory_free(called):
    role = Role()
    role.run("RolloutRole.generate")
    role.log.clear()
    role.run(called)
    assert role.log.index("release") < role.log.index(called)
    comes = [position for position, what in enumerate(role.log) if what.endswith("comes")]
    assert all(position > role.log.index("release") for position in comes)


STEP = ("RolloutRole.generate", "ActorRole.log_probs", "ActorRole.update", "RolloutRole.sync")
ORDERS = {
    "two steps": (*STEP, *STEP),
    "an evaluation between steps": (*STEP, "RolloutRole.generate", *STEP),
    "a resumption": ("ActorRole.load_checkpoint", "RolloutRole.sync", "RolloutRole.generate", *STEP),
    "a checkpoint after a step": (*STEP, "ActorRole.begin_checkpoint", *STEP),
    "an abort, then a checkpoint": ("RolloutRole.generate", "ActorRole.begin_checkpoint"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_cache_is_there_for_every_request_and_for_nothing_else(name):
    role = Role()
    for called in ORDERS[name]:
        role.run(called)
        cache = role.offload_manager._models["rollout"].memory
        assert cache.resident_bytes() == (1000 if called == "RolloutRole.generate" else 0), called
    moves = [what for what in role.log if what in ("release", "restore")]
    for first, second in zip(moves, moves[1:]):
        assert (first, second) != ("release", "release")
    leaves = [i for i, what in enumerate(role.log) if what.endswith("leaves")]
    for i in (i for i, what in enumerate(role.log) if what == "restore"):
        after = role.log[i : role.log.index("RolloutRole.generate", i)]
        assert not any(what.endswith("leaves") for what in after), "room is made before the cache comes back"
    assert leaves


def test_after_a_failed_step_the_cache_stays_released():
    role = Role()
    role.run("RolloutRole.generate")
    with pytest.raises(ValueError, match="the step failed"):
        role.run("ActorRole.update", fails=True)
    assert role.offload_manager._models["rollout"].memory.resident_bytes() == 0
    role.run("RolloutRole.generate")
    assert role.log[-2:] == ["restore", "RolloutRole.generate"]


@pytest.mark.parametrize("called", ("ActorRole.update", "RolloutRole.generate"))
def test_a_refusal_of_vllm_fails_the_call_before_it_begins(called):
    role = Role()
    role.run("RolloutRole.generate" if called == "ActorRole.update" else "ActorRole.update")
    role.engine.refuses, num_logged = True, len(role.log)
    with pytest.raises(RuntimeError, match="vLLM refuses to"):
        role.run(called)
    assert called not in role.log[num_logged:]


def test_metrics_of_offload_are_those_of_jobs_with_offload():
    role = Role()
    role.offload_manager._models["actor"].offloaded_parts = frozenset()
    assert role.offload_manager.take_metrics("actor", with_time=True) == {}


def test_an_engine_that_keeps_its_cache_needs_nothing():
    """The prediction of the next call is that of a job without such engines."""
    role = Role(has_cache=False)
    role.run("RolloutRole.generate")
    assert role.offload_manager._recent == ((None, frozenset()),) and "restore" not in role.log


def test_growth_until_the_rollout():
    """Moments that the first update makes, unless they are offloaded; what is offloaded has left by then."""
    manager, log = OffloadManager(), []
    manager.add("actor", Model(log, unallocated=800), ())
    manager.add("critic", Model(log, unallocated=70), ("optimizer",))
    manager.add("reference", Model(log), ("parameters",))
    assert manager.growth_until_rollout() == 800 - 100 - 100


# ------------------------------------------------------------------ size


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


FLAGS = "--nproc-per-node 1 --rollout-enforce-eager"


def loaded(job_file: str, flags: str = ""):
    return load_config([job_file, *f"{FLAGS} {flags}".split()], REGISTRY)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("flags", ["", "--rollout-free-gpu-memory-fraction 0.9"])
def test_the_size_is_what_the_table_says(job, flags, monkeypatch):  # noqa: F811
    """A GPU that holds the trained model and the margin: what a rank finds free is what the table leaves. By
    default it is what the few sequences of this job fill."""
    config, size = loaded(job, flags), 10**9
    (parts,) = estimate(config, 1, Machine(None, has_gpu=True, gpu_bytes=size, is_this=False)).values()
    bytes_of = {(part.role, part.name, part.during): part.bytes for part in parts}
    moments = bytes_of["actor", "optimizer", None]
    lasting = [part for part in parts if part.role != "rollout" and part.during is None]
    here = sum(part.bytes for part in lasting) - moments
    manager = OffloadManager()
    manager.add("actor", Model([], unallocated=moments), ())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (size - here, size))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    shape = ModelShape.load(config.model.model)
    sources = megatron_atlases(shape, role_meshes(config, 1)["actor"], config.actor)
    sized = with_kv_cache_bytes(config, shape, sources, manager)
    assert abs(sized.rollout.kv_cache_memory_bytes - bytes_of["rollout", "KV cache", "rollout"]) <= 1
    assert bool(flags) == (bytes_of["rollout", "KV cache", "rollout"] > 0.1 * size)
    assert bytes_of["device", "margin", None] == MARGIN * size
    given = dataclasses.replace(config.rollout, kv_cache_memory_bytes=12345678)
    kept = dataclasses.replace(config, rollout=given)
    assert with_kv_cache_bytes(kept, shape, sources, manager) is kept


@pytest.mark.usefixtures("world")
def test_too_little_room_is_refused_before_vllm_starts(job, monkeypatch):  # noqa: F811
    config = loaded(job)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 10**9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    shape = ModelShape.load(config.model.model)
    assert sequence_bytes(shape, 1, 4, config.sampling.max_length, 16) > 1000
    message = r"--rollout-free-gpu-memory-fraction \(0.9\): leaves 0.00 GB of KV cache.* Try --offload"
    with pytest.raises(RuntimeError, match=message):
        with_kv_cache_bytes(config, shape, {}, OffloadManager())
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(RuntimeError, match=r"PYTORCH_CUDA_ALLOC_CONF \(expandable_segments:True\)"):
        with_kv_cache_bytes(config, shape, {}, OffloadManager())


# ------------------------------------------------------------------ rules

GPU = Machine(None, has_gpu=True, gpu_bytes=10**10, num_gpus=8)
REFUSED = {
    "--rollout-release-kv-cache --rollout-engine out-of-process": (
        "--rollout-release-kv-cache: an engine in processes of its own cannot know",
        "try --rollout-engine in-process.",
    ),
    "--rollout-free-gpu-memory-fraction 0.8 --rollout-gpu-memory-utilization 0.5": (
        "--rollout-free-gpu-memory-fraction (0.8): --rollout-gpu-memory-utilization sets the size",
        "Leave one of them out.",
    ),
    "--rollout-free-gpu-memory-fraction 0.8 --no-rollout-release-kv-cache": (
        "--rollout-free-gpu-memory-fraction (0.8): sizes a KV cache that is released",
        "Try --rollout-gpu-memory-utilization.",
    ),
    "--rollout-free-gpu-memory-fraction 0.00001": (
        "--rollout-free-gpu-memory-fraction (1e-05): leaves",
        "Try --rollout-free-gpu-memory-fraction 0.01.",
    ),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be(job, flags):  # noqa: F811
    report = examine(loaded(job, flags), 1, machine=GPU)
    begins, ends = REFUSED[flags]
    (error,) = report.errors + report.estimates
    assert error.startswith(begins) and error.endswith(ends)


def test_on_a_cpu_it_is_refused_and_changes_nothing(job):  # noqa: F811
    cpu = Machine(10**12)
    (error,) = examine(loaded(job, "--rollout-release-kv-cache"), 1, machine=cpu).errors
    assert error.startswith("--rollout-release-kv-cache: there is no GPU") and "--gpu-memory 80" in error
    plain, kept = (
        examine(loaded(job, flags), 1, machine=cpu).lines for flags in ("", "--no-rollout-release-kv-cache")
    )
    assert plain == kept and not any("margin" in line or "CUDA graphs" in line for line in plain)


def test_a_kv_cache_that_is_released_cannot_be_kept_for_unfinished_responses(job):  # noqa: F811
    keep = "--staleness 1 --weight-update keep"
    assert examine(loaded(job, keep), 1, machine=GPU).errors == (
        "--weight-update (keep): the engines release their KV cache while roles train "
        "(--rollout-release-kv-cache), so unfinished responses must compute it anew. Try "
        "--weight-update recompute, or try --no-rollout-release-kv-cache.",
    )
    for flags in (f"{keep} --no-rollout-release-kv-cache", "--staleness 1"):
        assert examine(loaded(job, flags), 1, machine=GPU).errors == ()
    assert examine(loaded(job, keep), 1, machine=Machine(ram_bytes=10**12)).errors == ()


@pytest.mark.parametrize(
    "environ, is_refused",
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments: true"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        (
            {
                "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
            False,
        ),
        ({}, False),
    ],
)
def test_expandable_segments(job, monkeypatch, environ, is_refused):  # noqa: F811
    """As vLLM reads the variables, of which the first counts (device_allocator/alloc_conf.py)."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    from vllm.device_allocator.alloc_conf import expandable_segments_enabled_from_env

    assert expandable_segments_enabled_from_env() == is_refused
    errors = examine(loaded(job), 1, machine=GPU).errors
    assert len(errors) == is_refused and all("pytorch/pytorch#147851" in error for error in errors)
    kept = examine(loaded(job, "--no-rollout-release-kv-cache"), 1, machine=GPU)
    planned = examine(loaded(job), 1, machine=dataclasses.replace(GPU, is_this=False))
    assert kept.errors == planned.errors == ()
