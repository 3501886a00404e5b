"""Run under torchrun with 4 ranks: value models in every layout. Writes JSON reports and Hugging Face folders
for test_values.py.

torchrun --nproc-per-node 4 tests/megatron/run_values.py OUT_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from cases import VALUE_LAYOUTS
from families import config
from run_families import MESHES, at, make_batch, micro_batches, parallel, randomise

from megarl.batch import Batch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import ModelConfig
from megarl.megatron.initialize import random_weights
from megarl.megatron.mesh import create_groups
from megarl.megatron.value_model import ValueModel
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.hf_weights import load_hf, save_hf
from megarl.workers.worker import join_world

MESHES |= {"one_bf16": MESHES["one"], "tp2_pp2": MeshSpec((0, 1, 2, 3), tp=2, pp=2)}


def make_folders(folder: Path, family: str) -> None:
    """A classifier with one label, and a causal language model beside it; away from zero everywhere."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(2)
    for kind, place in (
        (AutoModelForSequenceClassification, folder),
        (AutoModelForCausalLM, folder.with_name(f"{family}_causal")),
    ):
        of_family = config(family)
        of_family.num_labels, of_family.pad_token_id = 1, None
        model = kind.from_config(of_family, dtype=torch.float32)
        randomise(model, family)
        model.save_pretrained(place)


def hf_values(folder: Path, batch: Batch) -> dict[str, torch.Tensor]:
    """By transformers, one unpadded sequence at a time: values [T] at every token, scores [B] as the
    classifier gives them."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    values, scores = [], []
    for row in range(len(batch)):
        tokens = batch.select([row]).tokens[None]
        with torch.no_grad():
            values.append(model.score(model.model(tokens).last_hidden_state)[0, :, 0])
            scores.append(model(tokens).logits[0, 0])
    return {"values": torch.cat(values), "scores": torch.stack(scores)}


def build(folder: Path, layout: str) -> tuple[ValueModel, dict]:
    mesh, shape = MESHES[layout], ModelShape.load(folder, value_head=True)
    critic = ValueModel(
        shape, mesh, ModelConfig(model=str(folder), bf16=layout == "one_bf16"), parallel(layout)
    )
    atlases = megatron_atlases(shape, mesh)
    load_hf(folder, atlases[dist.get_rank()], critic.parameters, shape)
    return critic, atlases


def check_outputs(folder: Path, layout: str, batch: Batch, expected: dict[str, torch.Tensor]) -> dict:
    """How far values and scores are from transformers'; {} before the last stage."""
    model, atlases = build(folder, layout)
    save_hf(f"{folder}_{layout}_roundtrip", folder, model.shape, atlases, model.parameters)
    micros = micro_batches(model, batch)
    values, scores = model.values(micros), model.scores(micros)
    if not model.is_last_stage:
        assert values is None and scores is None
        return {}
    state_before = torch.zeros(len(batch.tokens))
    state_before[1:] = expected["values"][:-1]  # what token i was chosen in is where token i - 1 is
    wanted = torch.cat([at(state_before, batch, m)[m.batch.response_mask] for m in micros])
    wanted_scores = torch.cat([expected["scores"][m.batch.sample_ids] for m in micros])
    assert [len(v) for v in values] == [len(m.response_positions) for m in micros] and values[
        0
    ].dtype == torch.float32
    return {
        "value_error": (torch.cat(values) - wanted).abs().max().item(),
        "score_error": (torch.cat(scores) - wanted_scores).abs().max().item(),
    }


def check_fresh(causal: Path, layout: str, batch: Batch) -> dict:
    """Largest value by a head that no folder has: loaded from a causal language model, and initialised at
    random."""
    model, atlases = build(causal, layout)
    micros, atlas = micro_batches(model, batch), atlases[dist.get_rank()]
    loaded = torch.cat(model.values(micros)).abs().max().item()
    model.parameters["value_head.weight"].fill_(1.0)
    random_weights(model.shape, atlas, model.parameters, seed=0)
    return {"loaded": loaded, "random": torch.cat(model.values(micros)).abs().max().item()}


def main(out: Path) -> None:
    join_world(60)
    rank, report = dist.get_rank(), {}
    for mesh in dict.fromkeys(MESHES[layout] for layouts in VALUE_LAYOUTS.values() for layout in layouts):
        create_groups(mesh)
    for family, layouts in VALUE_LAYOUTS.items():
        folder, batch = out / family, make_batch(config(family).vocab_size)
        if rank == 0:
            make_folders(folder, family)
            torch.save(hf_values(folder, batch), out / f"{family}.pt")
        dist.barrier()
        expected = torch.load(out / f"{family}.pt")
        for layout in layouts:
            if rank in MESHES[layout].ranks:
                report[f"{family}/{layout}"] = check_outputs(folder, layout, batch, expected)
                if layout == "tp2_sp":
                    report[f"{family}/fresh"] = check_fresh(out / f"{family}_causal", layout, batch)
        dist.barrier()
    (out / f"report_{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
