"""What run_experts.py runs and test_experts.py computes again."""

from __future__ import annotations

import torch

from megarl.batch import Batch, MicroBatch
from megarl.packing import Sample, plan_mini_batches

TEMPERATURE, MAX_TOKENS = 0.8, 80  # three micro-batches on one data-parallel rank, two on each of two
COEFF, Z_COEFF = 0.5, 0.1  # large, so that a wrong factor shows beside the loss of the policy
REPLAYS = ("policy", "engine")
BALANCES = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
CONFIG = dict(
    vocab_size=150,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    rope_theta=10000.0,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    norm_topk_prob=True,
    tie_word_embeddings=False,
)
SP = dict(tensor_model_parallel_size=2, sequence_parallel=True)
EP = dict(expert_model_parallel_size=2)
LAYOUTS = {
    "one": (1, {}),
    "ep2": (2, EP),
    "pp2_vpp2": (2, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)),
    "cp2_ep2": (2, EP | dict(context_parallel_size=2)),
    "tp2_sp_ep2_full": (
        2,
        SP
        | EP
        | dict(
            expert_tensor_parallel_size=1,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        ),
    ),
}
"""Name -> ranks and flags of ParallelConfig. With sequence parallelism a micro-batch of an odd number of
tokens is padded, with context parallelism every sample to a multiple of four."""

CASES = [
    (layout, balance)
    for layout, balances in {
        "one": ("none", "seq_aux_loss"),
        "ep2": ("aux_loss", "global_aux_loss"),
        "pp2_vpp2": ("global_aux_loss",),
        "cp2_ep2": BALANCES[1:],
        "tp2_sp_ep2_full": BALANCES,
    }.items()
    for balance in balances
]
REPLAY_CASES = [
    (layout, source)
    for layout in LAYOUTS
    for source in REPLAYS
    if (layout, source) not in (("one", "policy"), ("ep2", "engine"))
]
QUICK = [
    *(
        case
        for case in CASES
        if case[0] not in ("cp2_ep2", "tp2_sp_ep2_full") or case[1] != "global_aux_loss"
    ),
    *(case for case in REPLAY_CASES if case not in (("pp2_vpp2", "engine"), ("cp2_ep2", "policy"))),
]
"""Cases of the default suite. The others run nightly: their losses and sources of a replay are in other layouts here."""


def make_batch(vocab_size: int, count: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(3)

    def ids(low: int, high: int) -> list[int]:
        n = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(0, vocab_size, (n,), generator=generator).tolist()

    batch = Batch.from_samples(
        list(range(count)), [ids(1, 9) for _ in range(count)], [ids(1, 17) for _ in range(count)]
    )
    batch.advantages = torch.randn(len(batch.tokens), generator=generator) * batch.response_mask
    return batch


def engine_choices(batch: Batch) -> torch.Tensor:
    """[T, layers, topk]: experts that no router would choose, but for one in fourteen tokens."""
    scores = torch.rand(
        len(batch.tokens),
        CONFIG["num_hidden_layers"],
        CONFIG["num_experts"],
        generator=torch.Generator().manual_seed(5),
    )
    return scores.topk(CONFIG["num_experts_per_tok"]).indices.to(torch.uint8)


def micro_batches(batch: Batch, dp: int, max_tokens: int) -> list[list[MicroBatch]]:
    """Of each data-parallel rank."""
    samples = [
        Sample(i, int(n), int(r))
        for i, (n, r) in enumerate(zip(batch.lengths, batch.response_lengths, strict=True))
    ]
    (mini,) = plan_mini_batches(samples, len(samples), {}, dp, max_tokens, CONFIG["hidden_size"], "a")
    return [[MicroBatch.of(batch.select_samples(ids)) for ids in of_rank] for of_rank in mini.micro_batches]
