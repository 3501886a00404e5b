"""A PPO job and its resumption on a simulated GPU. Writes a JSON report for test_kv_cache_job.py.

    with      two steps and a resumed third, on a GPU that holds as much as the table of `megarl check` says
    without   three steps without a GPU, and on one with a byte less

Driver, roles, offload manager, vLLM's engine and scheduler are real. The GPU's ledger
(tests/rollout/simulated_gpu.py) knows which parts are on the device from the objects that move them, their
sizes from the table of `megarl check`, and the KV cache from vLLM's own allocations.

python tests/e2e/run_simulated_gpu.py HOW FOLDER MODEL REWARD TRAIN_DATA"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.algorithms import REGISTRY
from megarl.checks.machine import Machine
from megarl.checks.memory import PHASES, estimate, peak_bytes, phase_bytes
from megarl.config.kv_cache import releases_kv_cache
from megarl.config.loader import load_config
from megarl.megatron import mesh
from megarl.runtime.executor import RemoteError
from megarl.train import main
from tests.rollout.simulated_gpu import SimulatedGPU

PHASE = {  # method -> phase of the table
    "generate": "rollout",
    "log_probs": "log-probs",
    "values": "log-probs",
    "update": "update",
    "sync": "sync",
}
NAME = {"kv_cache": "KV cache"}
"""Part of the offload manager -> part of the table, where they differ."""


class Ledger:
    """Bytes of each part on the simulated GPU, by call."""

    def __init__(self, gpu: SimulatedGPU, table: list) -> None:
        self.gpu, self.table, self.call, self.events = gpu, table, ("", ""), []
        self.manager = None
        gpu.other_bytes = self.other_bytes

    def resident(self) -> dict[str, int]:
        """Role and part -> bytes of what is on the device, without the KV cache."""
        role, phase = self.call[0], PHASE.get(self.call[1])
        held = {}
        for part in self.table:
            if part.name == "KV cache":
                continue
            model = self.manager._models.get(part.role) if self.manager else None
            is_here = part.during is None or (part.role, part.during) == (role, phase)
            if model is not None and part.name in ("parameters", "gradients", "optimizer"):
                is_here = model.memory.resident_bytes(part.name) > 0 and self.has_state(model, part.name)
            if is_here:
                held[f"{part.role} {part.name}"] = held.get(f"{part.role} {part.name}", 0) + part.bytes
        return held

    def has_state(self, model, part: str) -> bool:
        """Whether a part exists: Adam has no moments before its first step."""
        return part != "optimizer" or model.memory.unallocated_bytes() == 0

    def other_bytes(self) -> int:
        return sum(self.resident().values())

    def watch(self) -> None:
        """Note what is on the device whenever a role's call begins and when it has ended."""
        from megarl.workers.actor import ActorRole
        from megarl.workers.critic import CriticRole
        from megarl.workers.offload_manager import OffloadManager
        from megarl.workers.reference import ReferenceRole
        from megarl.workers.rollout import RolloutRole

        ledger, enter = self, OffloadManager.enter

        def entered(manager, role, parts) -> None:
            ledger.manager = manager
            enter(manager, role, parts)
            ledger.note("begins")

        OffloadManager.enter = entered
        methods = ("generate", "log_probs", "values", "update", "sync", "load_checkpoint", "begin_checkpoint")
        for role in (ActorRole, CriticRole, ReferenceRole, RolloutRole):
            for method in methods:
                if hasattr(role, method):
                    setattr(role, method, ledger.watched(getattr(role, method), method))

    def watched(self, call, method: str):
        def run(role, *arguments, **options):
            self.call = role.name, method
            try:
                value = call(role, *arguments, **options)
                self.note("ends")
                return value
            finally:
                self.call = "", ""

        return run

    def note(self, moment: str) -> None:
        self.gpu.check()
        held = self.resident() | {"rollout KV cache": self.gpu.kv_cache_bytes}
        self.events.append([".".join(self.call), moment, sum(held.values()), self.gpu.kv_cache_bytes, held])


def train(flags: list[str]) -> int:
    """Run a job after another one in this process. The world of each ends with its engine."""
    mesh._groups.clear()
    return main(flags)


def run(how: str, folder: Path, model: str, reward: str, data: str) -> None:
    flags = [
        *"--algorithm ppo --kl-mode reward --kl-coef 0.01 --executor inline".split(),
        *("--model", model),
        *("--reward-function", reward, "--train-data", data, "--eval-data", data, "--eval-num-prompts", "2"),
        *"--num-prompts 4 --num-samples-per-prompt 4 --global-batch-size 8 --lr 1e-3".split(),
        *"--max-prompt-length 32 --max-response-length 16 --eval-interval 1 --save-interval 2".split(),
        *"--nproc-per-node 1 --rollout-max-num-seqs 32 --rollout-kv-cache-memory-bytes 4194304".split(),
        *"--actor-offload gradients optimizer --critic-offload parameters gradients optimizer".split(),
        "--no-reshard-alias",
    ]
    three = [*flags, "--train-iters", "3"]
    if how == "without":
        assert train([*three, "--save", str(folder / "plain")]) == 0
    gpu = SimulatedGPU()
    gpu.install()
    import megarl.workers.rollout

    megarl.workers.rollout.releases_here = lambda config: releases_kv_cache(config, 1)
    config = load_config([*three, "--save", str(folder / "released")], REGISTRY)
    machine = Machine(None, has_gpu=True, gpu_bytes=10**10, is_this=False)
    table = estimate(config, 1, machine)[0]
    ledger = Ledger(gpu, table)
    ledger.watch()
    gpu.capacity = peak_bytes(table)
    report = {"table": {phase: phase_bytes(table, phase) for phase in PHASES}, "capacity": gpu.capacity}
    if how == "without":
        gpu.capacity -= 1
        try:
            train([*three, "--save", str(folder / "less")])
        except RemoteError as error:
            report["one_byte_less"] = str(error)
    else:
        assert train([*flags, "--train-iters", "2", "--save", str(folder / "released")]) == 0
        report["events"], ledger.events = ledger.events, []
        resumed = ["--load", str(folder / "released"), "--save", str(folder / "resumed")]
        assert train([*three, *resumed]) == 0
        report["resumed"] = ledger.events
    (folder / f"{how}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
