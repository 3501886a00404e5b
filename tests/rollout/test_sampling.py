"""Which tokens top_k and top_p leave, against their definitions in a loop: `pytest tests/rollout/test_sampling.py`.

test_transformers_engine.py has the same with a model's logits, whose probabilities are near one another."""

import math

import pytest
import torch

from megarl.rollout.requests import Request
from megarl.rollout.sampling import sample

SHARP = [-3.0, 6.0, 1.0, 1.0, 0.0, -9.0]
NUM_DRAWS = 100


def kept_by_definition(logits, top_k, top_p):
    """Token -> its log-prob among those kept: the top_k most likely ones with all that equal the last of them, then
    of these, most likely first, each before which there is less than top_p together."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    best = [token for token in order if logits[token] >= logits[order[(top_k or len(logits)) - 1]]]
    total, before, kept = sum(math.exp(logits[token]) for token in best), 0.0, []
    for token in best:
        if not kept or before < top_p:
            kept.append(token)
        before += math.exp(logits[token]) / total
    whole = math.log(sum(math.exp(logits[token]) for token in kept))
    return {token: logits[token] - whole for token in kept}


@pytest.mark.parametrize(
    ("top_k", "top_p", "num_kept"),
    [(0, 0.9, 1), (0, 0.995, 3), (1, 1.0, 1), (2, 1.0, 3), (4, 0.997, 3), (0, 1e-9, 1), (9, 1.0, 6)],
)
def test_top_k_and_top_p_keep_what_their_definitions_keep(top_k, top_p, num_kept):
    kept = kept_by_definition(SHARP, min(top_k, len(SHARP)), top_p)
    requests = [Request(str(i), [7], i, 1, top_k=top_k, top_p=top_p) for i in range(NUM_DRAWS)]
    # the last row is not restricted, and is sampled beside the others
    requests.append(Request("free", [7], NUM_DRAWS, 1))
    tokens, log_probs = sample(torch.tensor([SHARP] * len(requests)), requests, [1] * len(requests))
    everything = kept_by_definition(SHARP, 0, 1.0)
    wanted = [kept.get(token, math.nan) for token in tokens[:-1]] + [everything[tokens[-1]]]
    assert len(kept) == num_kept
    assert log_probs == pytest.approx(wanted, abs=1e-5)  # fp32: six numbers below 10
