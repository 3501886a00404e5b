"""Run under torchrun with 2 ranks: updates that are not finite, planted in each case of test_nonfinite.py,
and in the updates of a role, by --on-nonfinite. Writes report_<rank>.json.

    torchrun --nproc-per-node 2 tests/megatron/run_nonfinite.py OUT_FOLDER dp2/actor/loss skip stop ..."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "examples")]
from layouts import LAYOUTS, MODELS
from run_equivalence import build, make_batch, plan, update

from megarl.algorithms import REGISTRY
from megarl.batch import MicroBatch
from megarl.config.loader import load_config
from megarl.config.mesh import megatron_mesh
from megarl.config.schema import ParallelConfig
from megarl.invariants import NonFiniteUpdate
from megarl.megatron.mesh import create_groups
from megarl.megatron.trained_model import TrainedModel
from megarl.packing import Sample, plan_mini_batches
from megarl.workers.worker import build_roles, join_world
from sums.model import write_model_folder

RANK = 1  # where a fault is planted


def state(model: TrainedModel) -> dict[str, torch.Tensor]:
    """Everything that an update changes on this rank: weights, moments, step counts, fp32 masters."""
    found = {name: p.clone() for name, p in model.parameters.items()}
    for i, inner in enumerate(getattr(model.optimizer, "chained_optimizers", [model.optimizer])):
        for j, p in enumerate(p for group in inner.optimizer.param_groups for p in group["params"]):
            kept = [("main", p.data), *inner.optimizer.state[p].items()]
            found |= {
                f"{i}/{j}/{k}": torch.as_tensor(getattr(v, "_local_tensor", v)).clone() for k, v in kept
            }
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Trained:
    """A model and the micro-batches of its updates."""

    def __init__(self, folder: Path, case: str) -> None:
        name, role, _ = case.split("/")
        layout = LAYOUTS[name]
        self.model, _ = build(folder, layout, role)
        batch = make_batch(MODELS[layout.model]["vocab_size"])
        mini_batch = plan(self.model, batch, 60)
        self.num_tokens = mini_batch.num_tokens
        self.micros = [
            MicroBatch.of(batch.select_samples(ids))
            for ids in mini_batch.micro_batches[self.model.groups.dp.rank()]
        ]

    def update(self, micros: list[MicroBatch] | None = None) -> dict[str, float]:
        return update(self.model, micros or self.micros, self.num_tokens, token_level=True)

    def faulty_update(self, fault: str) -> tuple[str, int | None]:
        """Message of what it raises on this rank, and the sample in whose micro-batch a loss was planted."""
        micros, undo, sample = list(self.micros), [], None
        here = dist.get_rank() == min(RANK, dist.get_world_size() - 1, len(self.model.mesh.ranks) - 1)
        trained = [p for _, p in self.model.named_parameters() if p.requires_grad]
        if fault == "loss":
            if (
                self.model.is_last_stage and here
            ):  # the mini-batch's last micro-batch, on one data-parallel rank
                last = micros[-1].batch.select(range(len(micros[-1].batch)))
                last.advantages = last.advantages.clone()
                last.advantages[last.response_mask] = (
                    math.nan
                )  # of all tokens: each context-parallel rank has some
                micros[-1], sample = MicroBatch.of(last), int(last.sample_ids[0])
        elif fault == "gradient" and here:  # before ranks sum theirs
            weight = next(
                p for name, p in self.model.named_parameters() if name.endswith("linear_fc1.weight")
            )
            undo.append(weight.register_hook(lambda gradient: gradient * math.nan).remove)
        elif fault in ("copy", "overflow"):  # after ranks have summed theirs
            step = self.model.step

            def planted(*check):
                if fault == "overflow":
                    for p in trained:
                        p.main_grad.fill_(1e30)
                elif here:
                    norm = next(
                        p
                        for name, p in self.model.named_parameters()
                        if "layernorm" in name or "layer_norm" in name
                    )
                    norm.main_grad.view(-1)[0] = math.inf
                return step(*check)

            self.model.step = planted
            undo.append(lambda: delattr(self.model, "step"))
        try:
            self.update(micros)
        except NonFiniteUpdate as error:
            return str(error), sample
        finally:
            for take_back in undo:
                take_back()
        return "", sample


def check(folder: Path, case: str) -> dict:
    mine, other = Trained(folder, case), Trained(folder, case)
    for trained in (mine, other):
        trained.update()
    before = state(mine.model)
    message, sample = mine.faulty_update(case.split("/")[2])
    report = {
        "message": message,
        "sample": sample,
        "unchanged": equal(before, state(mine.model)),
        "lr": [p["lr"] for p in mine.model.optimizer.param_groups[:1]],
    }
    other.model.advance_schedule()  # what is left of an update that is left out
    for trained in (mine, other):
        trained.update()
    return report | {
        "as_if_never": equal(state(mine.model), state(other.model)),
        "moved": not equal(before, state(mine.model)),
    }


def check_role(out: Path, on_nonfinite: str) -> list:
    """What the updates of each step of a role return or raise: 3 mini-batches, 2 epochs; those listed have a
    loss of NaN on one rank."""
    rows = [{"prompt": f"{a} + {b} =", "response": str(a + b)} for a in range(1, 5) for b in range(3)]
    if dist.get_rank() == 0:
        write_model_folder(out / "sums", 0)
        (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dist.barrier()
    flags = [
        "--algorithm",
        "sft",
        "--model",
        out / "sums",
        "--train-data",
        out / "rows.jsonl",
        "--save",
        out / "run",
        "--nproc-per-node",
        2,
        "--train-iters",
        5,
        "--num-epochs",
        2,
        "--lr",
        1e-3,
        "--on-nonfinite",
        on_nonfinite,
    ]
    actor = build_roles(load_config([*map(str, flags)], REGISTRY), 2)["actor"]
    actor.setup()
    actor.load_dataset()
    samples = [
        Sample(row, len(only.prompt) + len(only.response), len(only.response))
        for row, [only] in enumerate(actor.rows)
    ]
    visits = dict(enumerate(range(len(samples))))
    actor.receive_rows(visits, plan_mini_batches(samples, 4, {}, 2, 64, actor.shape.hidden_size, "a"))
    update, faulty = actor.model.update, []

    def planted(micros, loss, *others):
        def nan(*arguments):
            value, metrics = loss(*arguments)
            return value * math.nan, metrics

        return update(micros, nan if faulty.pop(0) and dist.get_rank() == RANK else loss, *others)

    actor.model.update, found = planted, []
    for step in ((), (1,), (2, 4, 5), range(6), range(6)) if on_nonfinite == "skip" else ((), (4,)):
        faulty[:] = [number in step for number in range(6)]
        try:
            metrics = actor.update()
            found.append({name: value for name, value in metrics.items() if name.startswith("policy/")})
        except NonFiniteUpdate as error:
            found.append(str(error))
    return found


def main(out: Path, *arguments: str) -> None:
    join_world(60)
    cases = [case for case in arguments if "/" in case]
    for case in cases:
        layout = LAYOUTS[case.split("/")[0]]
        create_groups(megatron_mesh(tuple(range(layout.ranks)), ParallelConfig(**layout.parallel)))
    if dist.get_rank() == 0:
        for name, config in MODELS.items():
            (out / name).mkdir(exist_ok=True)
            (out / name / "config.json").write_text(json.dumps(config))
    dist.barrier()
    report = {case: check(out, case) for case in cases if dist.get_rank() < LAYOUTS[case.split("/")[0]].ranks}
    report |= {mode: check_role(out, mode) for mode in arguments if "/" not in mode}
    (out / f"report_{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
