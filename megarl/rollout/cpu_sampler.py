"""vLLM's CPU sampler, drawing the noise seeds of a request ahead.

A seeded request takes one random number per token from a generator of its own; vLLM draws them one by one, 5 us each, which
is a tenth of a decode step of a small model. Drawing 32 at once gives the same numbers, so the same tokens."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

_AHEAD = 32


class SeededSampler(TopKTopPSampler):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._seeds: weakref.WeakKeyDictionary[torch.Generator, Iterator[int]] = weakref.WeakKeyDictionary()

    def forward_cpu(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As vLLM's: logits [B, V] -> sampled tokens [B] int64, and what `logprobs_mode` asks for [B, V]."""
        if self.use_fp64_gumbel:
            return super().forward_cpu(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        returned = None
        if self.logprobs_mode == "processed_logits":
            returned = logits
        elif self.logprobs_mode == "processed_logprobs":
            returned = logits.log_softmax(dim=-1, dtype=torch.float32)
        num_requests = len(logits)
        if len(generators) == num_requests:
            seeds = torch.tensor([next(self._seeds_of(generators[i])) for i in range(num_requests)])
        else:
            seeds = torch.randint(0, 2**31, (num_requests,))
            for i, generator in generators.items():
                seeds[i] = next(self._seeds_of(generator))
        return torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), seeds), returned

    def _seeds_of(self, generator: torch.Generator) -> Iterator[int]:
        seeds = self._seeds.get(generator)
        if seeds is None:
            # The iterator must not keep the generator alive: the entry goes when the request does.
            seeds = self._seeds[generator] = _draw(weakref.ref(generator))
        return seeds


def _draw(generator: weakref.ref[torch.Generator]) -> Iterator[int]:
    while True:
        yield from torch.randint(0, 2**31, (_AHEAD,), generator=generator()).tolist()
