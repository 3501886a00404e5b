"""Adapting the language once per launch (quick_interpreter.py) changes no result."""

import torch

from tests.kernels.test_gae import make_batch, run


def test_a_scan_computes_the_same_bits_with_one_adaptation_per_launch(kernels, monkeypatch):
    if kernels == "torch":
        return
    from megarl.kernels import gae_triton
    from megarl.kernels.gae import gae
    from tests.kernels.quick_interpreter import adapt_always, adapt_once

    batch, results, counts = make_batch([33, 1, 64]), [], []
    monkeypatch.setattr(gae_triton, "_BLOCK", 32)
    for adapt in (adapt_always, adapt_once):
        adaptations = []

        def count(function, adapt=adapt, adaptations=adaptations):
            scope = adapt(function)
            adaptations.append(bool(scope._changes))
            return scope

        monkeypatch.setattr("triton.runtime.interpreter._patch_lang", count)
        results.append(run(gae, batch))
        counts.append(sum(adaptations))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert 0 < counts[1] < counts[0] / 2
