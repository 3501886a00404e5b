"""Imports go down only, and no file imports in a circle. Imports inside functions and under TYPE_CHECKING
count.

    cli -> new, evaluate, env_serve, doctor -> evaluation -> inspect -> train, convert, translate -> trainer
    -> workers, checks, tools -> megatron, rollout, data, rewards, episodes -> checkpoint -> algorithms,
    reshard -> batch_invariants -> batch, invariants, loggers, gate_limits -> config, flow, runtime,
    collectives -> kernels, _C, packing, metrics, role_names, messages, files, futures, frameworks, ranges ->
    failures

Rooms on one floor do not import each other. Megatron-Core is known in one room, vLLM in another, Ray in a
third.

    pytest tests/test_import_floors.py"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (
    ("failures",),
    (
        "kernels",
        "_C",
        "role_names",
        "packing",
        "metrics",
        "messages",
        "files",
        "futures",
        "frameworks",
        "ranges",
    ),
    ("config", "flow", "runtime", "collectives"),
    ("batch", "invariants", "loggers", "gate_limits"),
    ("batch_invariants",),
    ("algorithms", "reshard"),
    ("checkpoint",),
    ("megatron", "rollout", "data", "rewards", "episodes"),
    ("workers", "checks", "tools"),
    ("trainer",),
    ("train", "convert", "translate"),
    ("inspect",),  # converts a checkpoint before a chat
    ("evaluation",),  # converts one too
    ("evaluate", "new", "env_serve", "doctor"),  # have inspect's parser; evaluate runs train
    ("cli",),  # starts each of them
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
LIBRARIES = {"megatron": {"megatron"}, "vllm": {"rollout"}, "ray": {"runtime"}}
"""Library -> the rooms that may import it."""
NO_TORCH = {
    "config",
    "flow",
    "packing",
    "metrics",
    "data",
    "rewards",
    "episodes",
    "role_names",
    "messages",
    "futures",
    "failures",
    "checks",
    "files",
    "gate_limits",
    "frameworks",
    "ranges",
    "translate",
    "new",
    "tools",
}
"""Rooms that the console script and the driver read before any device is touched."""
NO_TORCH_FILES = (
    {
        f"megarl.runtime.{name}"
        for name in (
            "abort",
            "background",
            "end_message",
            "executor",
            "process",
            "shutdown",
            "signing",
            "torchrun",
        )
    }
    | {f"megarl.rollout.{name}" for name in ("engine_memory", "replay_log", "replay_settings")}
    | {f"megarl.inspect.{name}" for name in ("curves", "plot", "runs", "show", "terminal")}
)
"""Files of other rooms that are read then, or that start at once without it."""
WITH_TORCH = {"megarl.rewards.classifier"}
"""What nothing but the rank of its model imports."""


def sources() -> dict[str, str]:
    """Module name -> source text, of everything that is installed."""
    files = {
        f"megarl.{'.'.join(p.relative_to(ROOT / 'megarl').with_suffix('').parts)}": p
        for p in (ROOT / "megarl").rglob("*.py")
    }
    files |= {f"megarl.kernels.{p.stem}": p for p in (ROOT / "triton_kernels").glob("*.py")}
    return {name.removesuffix(".__init__"): path.read_text() for name, path in files.items()}


@functools.cache
def names_in(source: str) -> tuple[list[str], list[str]]:
    """Return full names of everything imported anywhere in a file, and what it takes from `parallel_state`.

    `from a.b import c` is a.b.c. A relative import starts with a dot. Cached, as several tests read all files."""
    imported, of_state = [], []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported += (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("parallel_state", "mpu"):
                of_state.append(node.attr)
    return imported, of_state


def violations(module: str, source: str) -> list[str]:
    room, found = (module.split(".") + [""])[1], []
    imported, of_state = names_in(source)
    for name in imported:
        top, target, *_ = [*name.split("."), ""]
        if name.startswith("."):
            found.append(f"{module} imports {name}: write it out")
        elif (
            top == "megarl"
            and target in FLOOR_OF
            and target != room
            and not (room and FLOOR_OF[target] < FLOOR_OF[room])
        ):
            found.append(f"{module} imports {name}, which is not below it")
        elif top == "triton_kernels":
            found.append(f"{module} imports {name}: our kernels are megarl.kernels")
        elif top in LIBRARIES and room not in LIBRARIES[top]:
            found.append(f"{module} imports {name}: only {' and '.join(LIBRARIES[top])} may")
        elif top == "torch" and (room in NO_TORCH or module in NO_TORCH_FILES) and module not in WITH_TORCH:
            found.append(f"{module} imports {name}: the driver reads it without torch")
        elif any(f"{name}.".startswith(f"{lazy}.") for lazy in WITH_TORCH) and room != "workers":
            found.append(f"{module} imports {name}, which imports torch: only a worker may")
    found += [
        f"{module} uses parallel_state.{name}: a role has its own groups"
        for name in of_state
        if name.startswith(("get_", "initialize_model"))
    ]
    return found


def file_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Return the files that each file imports, in functions and under TYPE_CHECKING too.

    Python runs a package's `__init__` before any of its files; that is not counted as an import."""
    graph = {}
    for module, source in files.items():
        names = {name if name in files else name.rpartition(".")[0] for name in names_in(source)[0]}
        graph[module] = (names & files.keys()) - {module}
    return graph


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the files that `start` imports, directly or through others."""
    found, waiting = set(), [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def circles(files: dict[str, str]) -> set[frozenset[str]]:
    """Return every set of files that import each other."""
    graph = file_graph(files)
    reach = {module: reachable(graph, module) for module in graph}
    return {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if module in reach[module]
    }


def test_no_file_imports_in_a_circle():
    found = [sorted(circle) for circle in circles(sources())]
    assert found == [], "move what these files share into a file below them"


@pytest.mark.parametrize(
    "files",
    [
        {"megarl.a": "import megarl.b", "megarl.b": "from megarl import a"},
        {"megarl.a": "def late():\n    from megarl.b import B", "megarl.b": "from megarl.a import A"},
        {
            "megarl.a": "from megarl.b import B",
            "megarl.b": "from megarl.c import C",
            "megarl.c": "if TYPE_CHECKING:\n    from megarl.a import A",
        },
        {"megarl.a": "from megarl.b.c import C", "megarl.b.c": "class A:\n    import megarl.a"},
        {"megarl.a": "from megarl.b import C", "megarl.b": "import megarl.a", "megarl.b.c": ""},
    ],
)
def test_a_circle_is_seen_wherever_its_imports_stand(files):
    assert circles(files) == {frozenset(files) - {"megarl.b.c"} if "megarl.b" in files else frozenset(files)}


def test_files_that_only_share_a_file_are_no_circle():
    assert (
        circles({"megarl.a": "import megarl.c", "megarl.b": "import megarl.a, megarl.c", "megarl.c": ""})
        == set()
    )


def test_every_room_has_a_floor():
    rooms = {name.split(".")[1] for name in sources() if name != "megarl"}
    assert rooms <= FLOOR_OF.keys(), f"give {sorted(rooms - FLOOR_OF.keys())} a floor"
    assert FLOOR_OF.keys() - rooms <= {"_C"}


def test_what_imports_ray_is_small():
    """Ray places processes and tells of lost nodes. What a job is, it does not know."""
    users = {
        name: source
        for name, source in sources().items()
        if any(imports.split(".")[0] == "ray" for imports in names_in(source)[0])
    }
    assert {*users} == {f"megarl.runtime.{name}" for name in ("ray_node", "ray_ranks", "ray_worker")}
    assert sum(len(source.splitlines()) for source in users.values()) <= 500


def test_imports_go_down_only():
    assert [violation for name, source in sources().items() for violation in violations(name, source)] == []


@pytest.mark.parametrize(
    "module, source",
    [
        ("megarl.reshard.plan", "from megarl.megatron.model import build_model"),
        ("megarl.rollout.engine", "def late():\n    import megarl.megatron.policy"),
        ("megarl.algorithms.grpo", "from megarl import reshard"),
        ("megarl.config.check", "if TYPE_CHECKING:\n    from megarl.trainer.trainer import Trainer"),
        ("megarl", "from megarl.config import schema"),
        ("megarl.trainer.trainer", "from megatron.core import parallel_state"),
        ("megarl.workers.actor", "import vllm"),
        ("megarl.trainer.launch", "import ray"),
        ("megarl.workers.actor", "from . import rollout"),
        ("megarl.config.schema", "import torch.distributed as dist"),
        ("megarl.flow.graph", "import torch"),
        ("megarl.runtime.torchrun", "import torch"),
        ("megarl.runtime.local_ranks", "from megarl.config.errors import ConfigError"),
        ("megarl.flow.validate", "from megarl.config.errors import ConfigError"),
        ("megarl.trainer.trainer", "from megarl.rewards.classifier import Classifier"),
        ("megarl.trainer.trainer", "from megarl.rewards import classifier"),
        ("megarl.rewards.combine", "import torch"),
        ("megarl.algorithms.grpo", "from triton_kernels.kl import kl_estimate"),
        ("megarl.megatron.policy", "rank = parallel_state.get_data_parallel_rank()"),
    ],
)
def test_each_rule_sees_what_breaks_it(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    "module, source",
    [
        (
            "megarl.trainer.loop",
            "from megarl.trainer.trainer import Trainer\nimport megarl\nfrom megarl.config.schema import TrainConfig",
        ),
        (
            "megarl.megatron.policy",
            "from megatron.core import parallel_state\nparallel_state._set_global_memory_buffer()",
        ),
    ],
)
def test_what_is_allowed_passes(module, source):
    assert violations(module, source) == []
