"""Balancing losses, statistics and replay of routers: every layout against transformers in float64 with the
formulas written out.

One torchrun job with two ranks (run_experts.py) does all the work. Mutations that made tests fail are named
at them.

    pytest tests/megatron/test_experts.py        25 s"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from megarl.metrics import combine
from tests.megatron.cases import run_ranks
from tests.shared import selected_cases, with_nightly
from tests.megatron.expert_cases import (
    CASES,
    COEFF,
    CONFIG,
    LAYOUTS,
    MAX_TOKENS,
    QUICK,
    REPLAY_CASES,
    REPLAYS,
    TEMPERATURE,
    Z_COEFF,
    engine_choices,
    make_batch,
    micro_batches,
)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    out = tmp_path_factory.mktemp("experts")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**CONFIG), dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name else 0.1)
    model.save_pretrained(out / "model")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.add_(torch.randn_like(layer.mlp.gate.weight) * 0.05)
    model.save_pretrained(out / "moved")
    cases = selected_cases(request, "layout", "balance") + selected_cases(request, "layout", "source")
    run_ranks("run_experts.py", out, 2, *cases)
    return out


class Reference:
    """Router logits and the policy's loss by transformers in float64, one unpadded sequence at a time."""

    def __init__(self, folder: Path, choices: torch.Tensor | None = None) -> None:
        """choices: [T, layers, topk] experts of every token, in place of the router's."""
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        self.model.train()
        self.batch = make_batch(CONFIG["vocab_size"])
        seen: list[torch.Tensor] = []
        for layer in self.model.model.layers:
            layer.mlp.gate.register_forward_pre_hook(
                lambda gate, args: seen.append(
                    F.linear(args[0].reshape(-1, CONFIG["hidden_size"]), gate.weight)
                )
            )
        self.logits, losses = [], []
        for row in range(len(self.batch)):
            sample = self.batch.select([row])
            if choices is not None:
                rows = slice(*self.batch.cu_seqlens[row : row + 2].tolist())
                for layer, given in zip(self.model.model.layers, choices[rows].unbind(1), strict=True):
                    layer.mlp.gate.forward = forced(layer.mlp.gate, given.long())
            logits = self.model(sample.tokens[None], use_cache=False).logits[0] / TEMPERATURE
            log_probs = F.log_softmax(logits, -1)[:-1].gather(1, sample.tokens[1:, None])[:, 0]
            losses.append(-(log_probs * sample.advantages[1:].double()).sum())
            self.logits.append(torch.stack(seen))  # [layers, T, E]
            seen.clear()
        self.loss = sum(losses) / self.batch.response_mask.sum()

    def balance(self, groups: list[list[int]], weights: list[float]) -> torch.Tensor:
        """Mean over groups of samples of E * sum_e f_e P_e, summed over layers (arXiv:2101.03961, equation
        4)."""
        total = 0.0
        for rows, weight in zip(groups, weights, strict=True):
            probs = torch.cat([self.logits[row] for row in rows], dim=1).softmax(-1)
            chosen = F.one_hot(probs.topk(CONFIG["num_experts_per_tok"]).indices, CONFIG["num_experts"]).sum(
                2
            )
            shares = chosen.double().mean(1) / CONFIG["num_experts_per_tok"]
            total = total + weight * CONFIG["num_experts"] * (shares * probs.mean(1)).sum()
        return total

    def of(self, balance: str, dp: int) -> torch.Tensor:
        """The balancing loss of all layers together."""
        lengths, count = self.batch.lengths.double(), len(self.batch)
        if balance == "seq_aux_loss":
            return self.balance([[row] for row in range(count)], [1 / count] * count)
        if balance == "global_aux_loss":
            return self.balance([list(range(count))], [1.0])
        groups = [
            m.batch.sample_ids.tolist()
            for of_rank in micro_batches(self.batch, dp, MAX_TOKENS)
            for m in of_rank
            if len(m.batch)
        ]
        return self.balance(groups, [float(lengths[rows].sum() / lengths.sum()) for rows in groups])

    @property
    def z(self) -> torch.Tensor:
        """[layers, T]"""
        return torch.cat(self.logits, dim=1).logsumexp(-1)

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True))


def forced(gate: torch.nn.Module, given: torch.Tensor):
    """The router's forward with its choice of experts given: their weights are the softmax over their
    logits."""

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden.reshape(-1, CONFIG["hidden_size"]), gate.weight)
        return logits, logits.gather(1, given).softmax(-1), given

    return forward


@pytest.fixture(scope="module")
def reference(folder) -> Reference:
    return Reference(folder / "model")


def data_parallel(layout: str) -> int:
    return 2 if layout == "ep2" else 1


def exported_names(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers holds experts stacked; folders hold each one's gate_proj, up_proj and down_proj."""
    out = {}
    for name, value in gradients.items():
        prefix = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(v.chunk(2) for v in value):
                out |= {f"{prefix}.{expert}.gate_proj.weight": gate, f"{prefix}.{expert}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            out |= {f"{prefix}.{expert}.down_proj.weight": down for expert, down in enumerate(value)}
        else:
            out[name] = value
    return out


@pytest.mark.parametrize("layout, balance", with_nightly(CASES, QUICK))
def test_gradients_are_those_of_the_formula(folder, reference, layout, balance):
    """Failed with Megatron's factor (the tokens of one rank), without the sum over tensor-parallel ranks,
    with padding counted, and with the loss added in passes without gradients."""
    loss = reference.loss
    if balance != "none":
        loss = (
            loss
            + COEFF * reference.of(balance, data_parallel(layout))
            + Z_COEFF * reference.z.square().mean(1).sum()
        )
    wanted, got = (
        exported_names(reference.gradients(loss)),
        load_file(folder / f"{layout}_{balance}" / "model.safetensors"),
    )
    assert_close(got, wanted)


def assert_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert wanted.keys() == got.keys()
    for name, value in wanted.items():  # an expert without tokens has a gradient of exactly 0
        assert (got[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def updates(folder: Path, layout: str, case: str) -> list[dict[str, float]]:
    """The metrics of the two updates, of all ranks together."""
    reports = [
        json.loads((folder / f"report_{rank}.json").read_text())[f"{layout}/{case}"]
        for rank in range(LAYOUTS[layout][0])
    ]
    return [combine(of_ranks) for of_ranks in zip(*reports, strict=True)]


@pytest.mark.parametrize("layout, balance", with_nightly(CASES, QUICK))
def test_metrics_are_of_all_ranks_layers_and_tokens(folder, reference, layout, balance):
    first, second = updates(folder, layout, balance)
    logits = torch.cat(reference.logits, dim=1).detach()
    load = (
        F.one_hot(logits.topk(CONFIG["num_experts_per_tok"]).indices, CONFIG["num_experts"])
        .sum((1, 2))
        .double()
    )
    share, layers = load.amax(1) / load.sum(1), len(logits)
    wanted = {
        "moe/load_ratio": (share * CONFIG["num_experts"]).mean(),
        "moe/max_share": share.max(),
        "moe/dead_experts": (load == 0).sum(),
        "moe/entropy": torch.special.entr(logits.softmax(-1)).sum(-1).mean(),
        "moe/z": reference.z.mean(),
        "loss": reference.loss,
    }
    if balance != "none":
        wanted |= {
            "moe/balance_loss": reference.of(balance, data_parallel(layout)) / layers,
            "moe/z_loss": reference.z.square().mean(),
        }
    assert first == pytest.approx(
        {name: float(torch.as_tensor(value).detach()) for name, value in wanted.items()}, rel=1e-5
    )
    assert second == pytest.approx(first, rel=1e-6)  # nothing piles up


def test_the_cases_tell_packings_apart_and_have_padding(reference):
    assert (reference.of("aux_loss", 1) - reference.of("aux_loss", 2)).abs() > 1e-3
    assert reference.of("seq_aux_loss", 1) == reference.of("seq_aux_loss", 2)
    assert any(len(micro.batch.tokens) % 2 for micro in micro_batches(reference.batch, 1, MAX_TOKENS)[0])


@pytest.fixture(scope="module")
def replayed(folder, reference) -> dict[str, Reference]:
    """By source: the moved router with the experts of the recording."""
    recorded = torch.cat(reference.logits, dim=1).topk(CONFIG["num_experts_per_tok"]).indices.transpose(0, 1)
    given = {"policy": recorded, "engine": engine_choices(reference.batch)}
    return {source: Reference(folder / "moved", given[source]) for source in REPLAYS}


@pytest.mark.parametrize("layout, source", with_nightly(REPLAY_CASES, QUICK))
def test_a_replay_has_the_experts_of_the_recording_and_the_weights_of_now(folder, replayed, layout, source):
    """Failed with the router's own choice in the update, with the layers of a stage counted from its first
    one, and with rows of another tensor-parallel rank."""
    wanted = exported_names(replayed[source].gradients(replayed[source].loss))
    assert_close(load_file(folder / f"{layout}_{source}" / "model.safetensors"), wanted)
    unmoved, moved = updates(folder, layout, source)
    assert unmoved["ratio_deviation_max"] == 0 < moved["ratio_deviation_max"]
    assert (unmoved["moe/replay_changed"] == 0) == (source == "policy") and 0.02 < moved[
        "moe/replay_changed"
    ] < 1
    assert moved["moe/load_ratio"] == unmoved["moe/load_ratio"]


@pytest.mark.parametrize("model", ["deepseek_v2", "deepseek_v3"])
def test_changed_choices_are_counted_among_the_groups_and_with_the_corrections(folder, model):
    """Against the choices of every token, written out. Failed with Megatron's score of a group and without
    the correction."""
    report = json.loads((folder / "report_0.json").read_text())[model]
    for number, wanted in zip(report[::2], report[1::2], strict=True):
        assert number == pytest.approx(
            wanted, abs=1e-12
        )  # both count choices; a tie would take two scores that are equal in float64
    unmoved, moved, corrected = report[::2]
    assert unmoved == 0 and 0.02 < moved < 0.9
    assert (corrected == moved) == (model == "deepseek_v2")  # which has no corrections
