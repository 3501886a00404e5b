"""Choose the prompts of canaries: samples that only compare an engine with the trainer.

A canary's prompt fills two blocks of the engine's KV cache, so that it would find the blocks of the canary
before it if the engine kept them over a change of the weights. It consists of neighbouring prompts of the
training data."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import TrainConfig
from megarl.rollout.kv_cache import block_size

NUM_TOKENS = 8
"""Number of response tokens of a canary, unless a stop token ends the response earlier."""
NUM_BLOCKS = 2
"""Number of whole KV-cache blocks of a canary's prompt."""
_REST = 4  # tokens after the last whole block: an engine computes the last token of a prompt anew


def num_response_tokens(config: TrainConfig) -> int:
    """Return the largest number of response tokens of a canary."""
    return min(NUM_TOKENS, config.sampling.max_response_length)


def canary_length(config: TrainConfig, on_cpu: bool) -> int:
    """Return the number of tokens of a canary's prompt: two KV-cache blocks and a few tokens more, or as many
    as the engine takes.

    It may exceed --max-prompt-length. An engine takes --max-context-length tokens, by default
    --max-prompt-length + --max-response-length. Where these are fewer than two blocks, hardly a prefix of any
    request is cached."""
    most = config.sampling.max_length - num_response_tokens(config)
    return min(NUM_BLOCKS * block_size(config, on_cpu) + _REST, most)


def canary_prompts(
    prompt_of: Callable[[int], list[int]], num_rows: int, count: int, length: int
) -> list[tuple[int, list[int]]]:
    """Return (first row, prompt) of each canary. Every prompt has `length` tokens.

    Args:
        prompt_of: returns the token ids of a row's prompt.

    Canary i begins at row i * num_rows // count, and goes on with the next rows until it is long enough."""
    found = []
    for index in range(count):
        first = row = index * num_rows // count
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += prompt_of(row)
            row = (row + 1) % num_rows
        found.append((first, tokens[:length]))
    return found
