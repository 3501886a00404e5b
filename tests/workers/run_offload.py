"""One rank, no engine: two PPO steps by calls on the roles, with and without offload. Writes a JSON report
for test_offload.py.

python tests/workers/run_offload.py OUT_FOLDER
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "examples")]
from moved_storages import MovedStorages

from megarl.algorithms import REGISTRY
from megarl.batch import Batch
from megarl.config.loader import load_config
from megarl.config.role_sections import OFFLOAD_PARTS
from megarl.flow import FlowError
from megarl.packing import Sample, plan_mini_batches
from megarl.workers.store import BatchLayout, BatchShard
from megarl.workers.worker import build_roles
from sums.model import write_model_folder

ALL = ("--actor-offload", *OFFLOAD_PARTS, "--critic-offload", *OFFLOAD_PARTS)
BF16, PLAIN_ADAM = ("--bf16",), ("--no-use-distributed-optimizer",)
# Name -> flags, and whether storages really move.
RUNS = {
    "stay": ((), False),
    "account": (ALL, False),
    "move": (ALL, True),
    "move_critic_optimizer": (("--critic-offload", "optimizer"), True),
    "ahead": ((*ALL, "--offload-ahead-bytes", str(1 << 40)), True),
    "ahead_of_parameters": ((*ALL, "--offload-ahead-bytes", "AS_PARAMETERS"), True),
    "stay_bf16": (BF16, False),
    "move_bf16": ((*ALL, *BF16), True),
    "stay_plain_adam": (PLAIN_ADAM, False),
    "move_plain_adam": ((*ALL, *PLAIN_ADAM), True),
}
# The calls of a step, in the order of the algorithm's flow.
STEP = (
    ("rollout", "generate", ("train", [], 1)),
    ("reference", "log_probs", ()),
    ("actor", "log_probs", ()),
    ("critic", "values", ()),
    ("actor", "advantages", None),
    ("critic", "update", ()),
    ("actor", "update", (0.01,)),
    ("rollout", "sync", (1,)),
)
MODELS = ("actor", "reference", "critic")


class Engine:
    """In the place of vLLM: copies the actor's weights."""

    def __init__(self, actor) -> None:
        self.actor = actor

    def sync(self, version: int) -> int:
        self.weights = {name: weight.clone() for name, weight in self.actor.model.parameters.items()}
        return sum(weight.nbytes for weight in self.weights.values())


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)

    def ids(low: int, high: int) -> list[int]:
        return torch.randint(
            3, 250, (int(torch.randint(low, high, (1,), generator=generator)),), generator=generator
        ).tolist()

    prompts, responses = [ids(2, 9) for _ in range(8)], [ids(1, 17) for _ in range(8)]
    return Batch.from_samples(
        list(range(8)), prompts, responses, [[-5.0] * len(response) for response in responses]
    )


def digest(tensors: list[torch.Tensor]) -> str:
    copies = (
        t.detach().clone(memory_format=torch.contiguous_format) for t in tensors
    )  # .numpy() makes a storage that cannot be resized
    return hashlib.sha256(
        b"".join(t.view(-1).view(torch.uint8).numpy().tobytes() for t in copies)
    ).hexdigest()


def run(config, moves: bool) -> dict:
    roles = build_roles(config, world_size=1)
    store, offload_manager = roles["actor"].store, roles["actor"].offload_manager
    out = {"calls": [], "numbers": [], "peaks": []}
    running, arrived = [], []

    def call(role: str, method: str, arguments: tuple) -> None:
        running[:] = [f"{role}.{method}"]
        value = getattr(roles[role], method)(*arguments)
        if method in ("log_probs", "advantages", "update", "sync"):
            out["numbers"].append(
                {
                    k: v
                    for k, v in (value or {}).items()
                    if not k.startswith("memory/") and k != "time/offload_s"
                }
            )
        out["metrics"] = out.get("metrics", {}) | {
            k: v for k, v in (value or {} if isinstance(value, dict) else {}).items() if "/" in k
        }
        out["calls"].append(
            [
                f"{role}.{method}",
                {
                    name: {part: roles[name].model.memory.resident_bytes(part) for part in OFFLOAD_PARTS}
                    for name in MODELS
                    if hasattr(roles[name], "model")
                },
            ]
        )

    for name in MODELS:
        call(name, "setup", ())
        if moves:
            roles[name].model.memory._copies = MovedStorages(
                lambda part, name=name: arrived.append([*running, f"{name} {part}"])
            )
    roles["rollout"].engine = engine = Engine(roles["actor"])
    out["num_parameters"] = {
        name: sum(p.numel() for _, p in roles[name].model.named_parameters()) for name in MODELS
    }
    out["bytes_of_parameters"] = max(roles[name].model.memory.resident_bytes("parameters") for name in MODELS)
    out["optimizer_at_start"] = {name: optimizer_bytes(roles[name].model.memory) for name in MODELS}
    views = {}
    for name in MODELS:
        roles[name].model.memory.load(OFFLOAD_PARTS)
        views[name] = dict(roles[name].model.parameters)
    for _ in range(2):
        batch = make_batch()
        samples = [
            Sample(i, int(n), int(r))
            for i, (n, r) in enumerate(zip(batch.lengths, batch.response_lengths, strict=True))
        ]
        offload_manager.peak_bytes = 0
        arrived.clear()
        for role, method, arguments in STEP:
            if arguments is None:
                arguments = (list(range(8)), [0] * 4 + [1] * 4, [1.0, 0, 0, 0, 0, 1.0, 1.0, 0], 0.01)
            roles["rollout"].engine = None if method == "generate" else engine
            call(role, method, arguments)
            if method == "generate":
                plans = plan_mini_batches(samples, 4, {}, 1, 60, 64, "plan")
                order = [i for plan in plans for i in plan.samples_of(0)]
                store.release_batch("actor")
                store.set_batch("actor", BatchShard(batch.select_samples(order), plans))
                store.layouts["actor"] = BatchLayout("train", plans, {s.sample_id: s for s in samples})
        out["peaks"].append(offload_manager.peak_bytes)
    out["arrived"] = list(arrived)  # of the second step: what follows is the test's own
    out["engine"] = digest(list(engine.weights.values()))
    out["optimizer_at_end"] = {name: optimizer_bytes(roles[name].model.memory) for name in MODELS}
    out["weights"], out["states"], out["same_views"] = {}, {}, {}
    for name in MODELS:
        model = roles[name].model
        model.memory.load(OFFLOAD_PARTS)
        out["weights"][name] = digest(list(model.parameters.values()))
        out["same_views"][name] = all(
            model.parameters[k] is v and v.data_ptr() == p.data_ptr()
            for (k, v), p in zip(views[name].items(), dict(model.named_parameters()).values(), strict=True)
        )
        if model.optimizer is not None:
            inner = [
                part.optimizer for part in getattr(model.optimizer, "chained_optimizers", [model.optimizer])
            ]
            out["states"][name] = digest(
                [
                    state[key]
                    for adam in inner
                    for state in adam.state.values()
                    for key in ("exp_avg", "exp_avg_sq")
                ]
            )
    out["num_moves"] = {name: roles[name].model.memory._copies.num_moves for name in MODELS} if moves else {}
    out["errors"] = errors(roles["critic"].model)
    store.release_batch("actor")
    store.set_batch(
        "actor", BatchShard(make_batch().select_samples(order), plans)
    )  # a step without any call yet
    out["too_early"] = too_early(roles)
    return out


def optimizer_bytes(memory) -> tuple[int, int]:
    """What there is of the optimizer's state, and what is still to come."""
    return memory.resident_bytes("optimizer"), memory.unallocated_bytes()


def too_early(roles) -> dict[str, str]:
    """What each call says that reads columns which no call has written."""
    ids, rewards = list(range(8)), [1.0] * 8
    told = {}
    for role, method, arguments in (
        ("actor", "advantages", (ids, ids, rewards, 0.01)),
        ("actor", "update", ()),
        ("critic", "update", ()),
    ):
        try:
            getattr(roles[role], method)(*arguments)
        except FlowError as error:
            told[f"{role}.{method}"] = error.errors[0]
    return told


def errors(model) -> dict[str, str]:
    """What each use of a part that is away says."""
    uses = {
        "parameters": lambda: model.parameters,
        "gradients": lambda: model._update([], None, None, None),
        "optimizer": model.step,
        "forward": lambda: model.values([]),
    }
    told = {}
    for name, use in uses.items():
        part = "parameters" if name == "forward" else name
        model.memory.offload([part])
        try:
            use()
            told[name] = "nothing"
        except RuntimeError as error:
            told[name] = str(error)
        model.memory.load([part])
    return told


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    write_model_folder(str(folder / "model"), seed=0)
    (folder / "train.jsonl").write_text("{}\n")
    report = {}
    for name, (flags, moves) in RUNS.items():
        as_parameters = str(report["stay"]["bytes_of_parameters"]) if report else ""
        flags = [flag.replace("AS_PARAMETERS", as_parameters) for flag in flags]
        config = load_config(
            [
                "--algorithm",
                "ppo",
                "--model",
                str(folder / "model"),
                "--train-data",
                str(folder / "train.jsonl"),
                "--save",
                str(folder / name),
                "--train-iters",
                "2",
                "--lr",
                "1e-2",
                "--kl-mode",
                "reward",
                "--kl-coef",
                "0.01",
                "--global-batch-size",
                "4",
                "--no-reshard-alias",
                *flags,
            ],
            REGISTRY,
        )
        report[name] = run(config, moves)
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
