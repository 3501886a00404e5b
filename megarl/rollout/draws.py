"""Derive the random numbers of a sample from the sample's identity.

No generator has a state that could be lost or would have to be saved.

    key   = draw_key(run seed, purpose, visit, index)          one per sample
    seed  = draw_seeds([key], [position])[0]                   one per token
    token = argmax(log-probs + token_noise([seed], vocabulary)[0])

An episode of several turns has one key per answer, see `AnswerKeys`.

`position` is the number of tokens before the drawn one, prompt and response together. A resumed response
passes its first tokens as a part of the prompt. It therefore continues with the same tokens as without the
interruption."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

KEY = "megarl_draw_key"
"""Name of a request's key among vLLM's `SamplingParams.extra_args`."""

_GAMMA, _MIX_1, _MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)


def draw_key(run_seed: int, purpose: str, *numbers: int | str) -> int:
    """Return the key of the random draws of one sample, a hash of 63 bits.

    Args:
        purpose: "train", "eval", or the name of the judge that draws.
        numbers: identify the sample within the purpose. Training: visit of its prompt, index in the group."""
    text = "/".join(map(str, (run_seed, purpose, *numbers)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class AnswerKeys:
    """The keys of the random draws of one episode's answers, asked for in the order in which the answers are
    sampled.

    The first answer has the key of the episode, as a sample of a single turn does. The key of a later answer
    is a hash of that key, of the token ids before the answer, and of the number of earlier answers to the
    same ids. So two agents of one episode that share a conversation do not sample the same answer.

    Args:
        key: `draw_key` of the episode."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._num_answers: dict[bytes, int] = {}  # hash of the ids before an answer -> answers to them

    def next(self, prefix: Sequence[int]) -> int:
        """Return the key of the next answer, a number of 63 bits.

        Args:
            prefix: all token ids before the answer."""
        hashed = hashlib.blake2b(np.array(prefix, "<i8").tobytes(), digest_size=16).digest()
        number, is_first = self._num_answers.get(hashed, 0), not self._num_answers
        self._num_answers[hashed] = number + 1
        return self._key if is_first else draw_key(self._key, "answer", hashed.hex(), number)


def draw_seeds(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the seed of the sampling noise of each next token.

    The seed is output number `position` of the generator SplitMix64 that starts at the key.

    Args:
        keys: [B] uint64.
        positions: [B] integers, at least 0.
    Returns: [B] int64."""
    z = positions.astype(np.uint64)
    z += np.uint64(1)
    z *= _GAMMA
    z += keys
    z ^= z >> _30
    z *= _MIX_1
    z ^= z >> _27
    z *= _MIX_2
    z ^= z >> _31
    return z.view(np.int64)


def token_noise(seeds: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the Gumbel noise of each token of the vocabulary.

    vLLM's CPU kernel `fused_gumbel_argmax` computes the same. The uniform number of token t is output number
    t of the generator SplitMix64 that starts at the mixed seed.

    Args:
        seeds: [B] int64 of `draw_seeds`, on any device.
    Returns: [B, num_tokens] float64 on the same device."""
    gamma = int(_GAMMA.view(np.int64))
    bits = torch.arange(1, num_tokens + 1, device=seeds.device) * gamma + _mixed(seeds)[:, None]
    uniform = (_shifted(_mixed(bits), 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output function of 64-bit integers."""
    z = (z ^ _shifted(z, 30)) * int(_MIX_1.view(np.int64))
    z = (z ^ _shifted(z, 27)) * int(_MIX_2.view(np.int64))
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Return signed integers shifted to the right as if they were unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def draw_arguments(key: int, on_cpu: bool) -> dict[str, object]:
    """Return the arguments of vLLM's SamplingParams by which a request's random draws depend on its key.

    On a CPU our sampler (cpu_sampler.py) reads the key. A `seed` would make vLLM keep a generator per
    request, which fails as soon as a prompt is prefilled in chunks. On a GPU vLLM's Model Runner V2 already
    draws by position. In vllm/v1/worker/gpu/sample/gumbel.py the noise is a hash of (seed, position, token).
    The position is that of the last token in the sequence (`pos` in sampler.py beside it), whether that token
    was prompt or sampled."""
    return {"extra_args": {KEY: key}} if on_cpu else {"seed": key}
