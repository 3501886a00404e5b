"""Sample tokens on CPU as vLLM does, with noise that depends only on the request's key and the token's
position.

draws.py derives the noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import (
    TopKTopPSampler,
    apply_top_k_top_p,
    empty_exponential_noise_like,
    sample_with_exponential_noise,
)

from megarl.rollout.draws import KEY, draw_seeds

if TYPE_CHECKING:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class PositionSampler(TopKTopPSampler):
    """A sampler for vLLM on a CPU that draws each row's noise from its request's key and position.

    Args:
        runner: the model runner. The rows of the logits follow the order of its batch."""

    def __init__(self, runner: CPUModelRunner, logprobs_mode: str, use_fp64_gumbel: bool) -> None:
        super().__init__(logprobs_mode, use_fp64_gumbel)
        self.forward = self.forward_cpu  # on every kind of CPU: vLLM's other methods draw from generators
        self._runner = runner
        self._request_ids: list[str] = []
        self._keys = np.zeros(0, np.uint64)
        self._generator = torch.Generator()

    def forward_cpu(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return one sampled token per row, and the log-probs that `logprobs_mode` asks for, as vLLM's method
        does.

        Takes logits [B, V]. Returns the sampled tokens [B] int64 and what `logprobs_mode` asks for [B, V]."""
        logits = apply_top_k_top_p(logits, k, p)
        returned = None
        if self.logprobs_mode == "processed_logprobs":  # an engine's; a judge needs none
            returned = logits.log_softmax(dim=-1, dtype=torch.float32)
        seeds = self._seeds(len(logits))
        if not self.use_fp64_gumbel:
            tokens = torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), torch.from_numpy(seeds))
            return tokens, returned
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        noise = empty_exponential_noise_like(probs, self.use_fp64_gumbel)
        for row, seed in zip(noise, seeds.tolist(), strict=True):
            row.exponential_(generator=self._generator.manual_seed(seed))
        return sample_with_exponential_noise(probs, noise), returned

    def _seeds(self, num_rows: int) -> np.ndarray:
        """Return one noise seed per row, [B] int64.

        A row whose prompt is incomplete gets a seed too: vLLM discards the token that it samples there."""
        batch = self._runner.input_batch
        if batch.req_ids != self._request_ids:
            self._request_ids = list(batch.req_ids)
            requests = self._runner.requests
            keys = [requests[request_id].sampling_params.extra_args[KEY] for request_id in self._request_ids]
            self._keys = np.array(keys, np.uint64)
        if not self._request_ids:  # vLLM runs its sampler once before there are requests
            return np.zeros(num_rows, np.int64)
        assert len(self._request_ids) == num_rows, (self._request_ids, num_rows)
        return draw_seeds(self._keys, batch.num_tokens_no_spec[:num_rows])
