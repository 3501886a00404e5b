"""Run under torchrun with 2 ranks: updates that are not finite, planted in each case of test_nonfinite.py. Writes report_<rank>.json.

    torchrun --nproc-per-node 2 tests/megatron/run_nonfinite.py OUT_FOLDER dp2/actor/loss ..."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from layouts import LAYOUTS, MODELS
from run_equivalence import build, make_batch, plan, update

from megarl.batch import MicroBatch
from megarl.config.mesh import megatron_mesh
from megarl.config.schema import ParallelConfig
from megarl.invariants import NonFiniteUpdate
from megarl.megatron.mesh import create_groups
from megarl.megatron.trained_model import TrainedModel
from megarl.workers.worker import join_world

RANK = 1  # where a fault is planted


def state(model: TrainedModel) -> dict[str, torch.Tensor]:
    """Everything that an update changes on this rank: weights, moments, step counts, fp32 masters."""
    found = {name: p.clone() for name, p in model.parameters.items()}
    for i, inner in enumerate(model.optimizer.chained_optimizers):
        for j, p in enumerate(p for group in inner.optimizer.param_groups for p in group["params"]):
            found |= {f"{i}/{j}": p.data.clone()} | {f"{i}/{j}/{k}": torch.as_tensor(v).clone() for k, v in inner.optimizer.state[p].items()}
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
        mini_batch = plan(self.model, batch, 30)
        self.num_tokens = mini_batch.num_tokens
        self.micros = [MicroBatch.of(batch.select_samples(ids)) for ids in mini_batch.micro_batches[self.model.groups.dp.rank()]]

    def update(self, micros: list[MicroBatch] | None = None) -> dict[str, float]:
        return update(self.model, micros or self.micros, self.num_tokens, token_level=True)

    def faulty_update(self, fault: str) -> tuple[str, int | None]:
        """Message of what it raises on this rank, and the sample in whose micro-batch a loss was planted."""
        micros, undo, sample = list(self.micros), [], None
        here = dist.get_rank() == min(RANK, dist.get_world_size() - 1, len(self.model.mesh.ranks) - 1)
        trained = [p for _, p in self.model.named_parameters() if p.requires_grad]
        if fault == "loss":
            if self.model.is_last_stage and here:  # the mini-batch's last micro-batch, on one data-parallel rank
                last = micros[-1].batch.select(range(len(micros[-1].batch)))
                last.advantages = last.advantages.clone()
                last.advantages[last.response_mask.nonzero()[-1]] = math.nan
                micros[-1], sample = MicroBatch.of(last), int(last.sample_ids[-1])
        elif fault == "gradient" and here:  # before ranks sum theirs
            weight = next(p for name, p in self.model.named_parameters() if name.endswith("linear_fc1.weight"))
            undo.append(weight.register_hook(lambda gradient: gradient * math.nan).remove)
        elif fault in ("copy", "overflow"):  # after ranks have summed theirs
            step = self.model.step

            def planted():
                if fault == "overflow":
                    for p in trained:
                        p.main_grad.fill_(1e30)
                elif here:
                    norm = next(p for name, p in self.model.named_parameters() if "layernorm" in name or "layer_norm" in name)
                    norm.main_grad.view(-1)[0] = math.inf
                return step()

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
    report = {"message": message, "sample": sample, "unchanged": equal(before, state(mine.model)),
              "lr": [p["lr"] for p in mine.model.optimizer.param_groups[:1]]}
    other.model.advance_schedule()  # what is left of an update that is left out
    for trained in (mine, other):
        trained.update()
    return report | {"as_if_never": equal(state(mine.model), state(other.model)), "moved": not equal(before, state(mine.model))}


def main(out: Path, *cases: str) -> None:
    join_world(60)
    for case in cases:
        layout = LAYOUTS[case.split("/")[0]]
        create_groups(megatron_mesh(tuple(range(layout.ranks)), ParallelConfig(**layout.parallel)))
    if dist.get_rank() == 0:
        for name, config in MODELS.items():
            (out / name).mkdir(exist_ok=True)
            (out / name / "config.json").write_text(json.dumps(config))
    dist.barrier()
    report = {case: check(out, case) for case in cases if dist.get_rank() < LAYOUTS[case.split("/")[0]].ranks}
    (out / f"report_{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
