"""Define what enters and leaves an inference engine: a request, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

Running = Literal["refuse", "keep", "recompute"]
"""What a commit does with unfinished requests: refuse them, keep their KV cache, or compute it anew."""


@dataclass(frozen=True)
class Request:
    """One response to sample. Its stop tokens are those of the job."""

    id: str
    """Unique among the engine's unfinished requests."""
    prompt: list[int]
    key: int
    """Key of the random draws, see draws.py."""
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0  # off
    is_first: bool = False
    """Whether the request starts before all others that wait."""
    stop: Sequence[str] = ()
    """Texts that end the response, besides those of the job."""
    schema: dict[str, Any] | None = None
    """JSON schema that the response must have. vLLM only."""


@dataclass(frozen=True)
class Output:
    """The tokens of one request."""

    id: str
    token_ids: list[int]
    """Sampled tokens, including the token that ended the response."""
    log_probs: list[float]
    """Log-prob of each token in the distribution that it was sampled from."""
    versions: list[int]
    """Version of the weights that sampled each token."""
    finish_reason: str | None
    """"stop" or "length"; None while the request is unfinished."""
    experts: torch.Tensor | None = None
    """Experts of each token of prompt and response with --moe-routing-replay engine, else None."""

    def after(self, first: int) -> Output:
        """Return a copy of this output without its first `first` tokens."""
        return replace(
            self,
            token_ids=self.token_ids[first:],
            log_probs=self.log_probs[first:],
            versions=self.versions[first:],
        )

    def followed_by(self, last: Output) -> Output:
        """Return one output with the tokens of this output, then those of `last`."""
        return replace(
            self,
            token_ids=[*self.token_ids, *last.token_ids],
            log_probs=[*self.log_probs, *last.log_probs],
            versions=[*self.versions, *last.versions],
        )
