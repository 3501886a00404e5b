"""Run under torchrun with 2 ranks: steps of optimizers whose gradients are zero, so that only weight decay moves the
weights, before and after a resume. Writes a JSON report per rank for test_decay.py.

    torchrun --nproc-per-node 2 tests/megatron/run_decay.py OUT_FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from cases import DECAY, DECAY_CASES, DECAY_RESUMED, DECAY_STEPS, name_of
from expert_cases import MAX_TOKENS, TEMPERATURE, make_batch, micro_batches
from layouts import LAYOUTS, MODELS

from megarl.config.hf_config import ModelShape
from megarl.config.mesh import megatron_mesh
from megarl.config.schema import LoRAConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.megatron.trained_model import TrainedModel
from megarl.megatron.training_state import load_checkpoint, save_checkpoint
from megarl.megatron.value_model import ValueModel
from megarl.reshard.atlas import Atlas
from megarl.reshard.lora_atlas import with_adapters
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.workers.worker import join_world


def build(out: Path, case: tuple[str, str, str, int], is_drawn: bool) -> tuple[TrainedModel, Atlas] | None:
    """The model of a case on this rank, with random weights or with undefined ones."""
    role, layout, name, rank = case
    split = ParallelConfig(**LAYOUTS[layout].parallel)
    mesh = megatron_mesh(tuple(range(LAYOUTS[layout].ranks)), split)
    create_groups(mesh)
    if dist.get_rank() not in mesh.ranks:
        return None
    shape = ModelShape.load(out / name, value_head=role == "critic")
    lora = LoRAConfig(lora_rank=rank, lora_alpha=8.0)
    model = (ValueModel if role == "critic" else Policy)(
        shape,
        mesh,
        ModelConfig(model=name, bf16=LAYOUTS[layout].bf16),
        split,
        OptimizerConfig(**DECAY, **LAYOUTS[layout].optimizer),
        train_iters=99,
        lora=lora,
    )
    atlas = megatron_atlases(shape, mesh, qkv_layout=split.qkv_layout)[dist.get_rank()]
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters.values() if is_drawn else ():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + 0.5)
    model.parameters_changed()
    return model, with_adapters(atlas, lora) if rank else atlas


def step(model: TrainedModel) -> dict[str, list[float]]:
    """Parameter -> the smallest and the largest factor by which a step with zero gradients changes it; lr -> the
    reported learning rate, where there is one."""
    batch = make_batch(model.shape.vocab_size)
    micros = micro_batches(batch, model.mesh.dp, MAX_TOKENS)[model.groups.dp.rank()]
    before = {name: parameter.float().clone() for name, parameter in model.parameters.items()}

    def zero(micro, outputs, *others):
        value = (outputs * 0.0).sum()
        return value, {"loss": value.detach()}

    model.advance_schedule()
    metrics = (
        model.update(micros, zero)
        if isinstance(model, ValueModel)
        else model.update(micros, zero, TEMPERATURE)
    )
    found = {}
    for name, parameter in model.parameters.items():
        is_large = before[name].abs() > 0.1
        ratio = (parameter.float() / before[name])[is_large]
        found[name] = [ratio.min().item(), ratio.max().item()]
    return found | {"lr": [value for name, value in metrics.items() if name.endswith("/lr")]}


def main(out: Path) -> None:
    join_world(900)
    for name in {case[2] for case in DECAY_CASES} if dist.get_rank() == 0 else ():
        (out / name).mkdir()
        (out / name / "config.json").write_text(json.dumps(MODELS[name]))
    dist.barrier()
    report = {}
    for case in DECAY_CASES:
        built = build(out, case, is_drawn=True)
        if built is None:
            continue
        steps, name = [step(built[0]) for _ in range(DECAY_RESUMED)], name_of(case)
        save_checkpoint(out / name, *built)
        steps += [step(built[0]) for _ in range(DECAY_STEPS - DECAY_RESUMED)]
        resumed = build(out, case, is_drawn=False)
        load_checkpoint(out / name, *resumed)
        after = [step(resumed[0]) for _ in range(DECAY_STEPS - DECAY_RESUMED)]
        trained = [parameter for parameter, values in built[0].named_parameters() if values.requires_grad]
        report[name] = {"steps": steps, "resumed": after, "trained": trained}
    (out / f"decay_{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
