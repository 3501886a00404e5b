"""Read requests of /inference/v1/generate, which has token ids in and out, and write the replies. Knows no server.

The form is vLLM's. Clients such as renderers read the id of an answer's token from `token`, as "token_id:276", and
vLLM's own client from `token_id`: each entry has both. As in the other dialects the job decides how it samples, and
where answers end."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from megarl.episodes.answers import Completion
from megarl.episodes.bad_request import BadRequest, decode, how_of, refuse_unsupported
from megarl.episodes.chat_requests import LARGEST_NUMBER
from megarl.packing import MAX_BRANCHES


class _SamplingParams(msgspec.Struct):
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


class _Body(msgspec.Struct):
    token_ids: list[int]
    sampling_params: _SamplingParams
    model: str | None = None
    stream: bool | None = None
    features: Any = None


_DECODER = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for answers to token ids."""

    token_ids: list[int]
    max_tokens: int | None
    count: int = 1
    how: dict[str, Any] = field(default_factory=dict)
    """How answers are sampled, see `how_of`."""

    def repeats(self, other: object) -> bool:
        """Return whether this asks for what the other request has asked for."""
        return isinstance(other, GenerateRequest) and replace(self, max_tokens=other.max_tokens) == other


def read_generate_request(data: bytes, vocab_size: int) -> GenerateRequest:
    """Return the request in the body of a POST. Raises: BadRequest with the reason and the field.

    Args:
        vocab_size: ids must be below it."""
    body = decode(_DECODER, data, "a request for /inference/v1/generate")
    params = body.sampling_params
    fields = (
        ("stream", body.stream, "the answer comes in one piece"),
        ("features", body.features, "a prompt is token ids only"),
        ("min_tokens", params.min_tokens, "the job decides where answers end"),
        ("bad_words", params.bad_words, "the job decides how it samples"),
        ("logit_bias", params.logit_bias, "the job decides how it samples"),
        ("allowed_token_ids", params.allowed_token_ids, "the job decides how it samples"),
        ("prompt_logprobs", params.prompt_logprobs, "log-probs are those of sampled tokens"),
        ("structured_outputs", params.structured_outputs, "answers are sampled without a grammar"),
    )
    refuse_unsupported(fields)
    if (params.logprobs or 0) > 1:
        raise BadRequest(
            f"logprobs ({params.logprobs}) must be 0 or 1: of each place the log-prob of the sampled token is known",
            param="logprobs",
        )
    if params.max_tokens is not None and not 1 <= params.max_tokens <= LARGEST_NUMBER:
        raise BadRequest("max_tokens must be a positive number of 31 bits at most", param="max_tokens")
    count = 1 if params.n is None else params.n
    if not 1 <= count <= MAX_BRANCHES:
        raise BadRequest(f"n ({count}) must be from 1 to {MAX_BRANCHES}", param="n")
    if not body.token_ids:
        raise BadRequest("token_ids is empty", param="token_ids")
    for at, token in enumerate(body.token_ids):
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"token_ids[{at}] ({token}) is not in the vocabulary: must be from 0 to {vocab_size - 1}",
                param=f"token_ids[{at}]",
            )
    return GenerateRequest(body.token_ids, params.max_tokens, count, how_of(params.stop, None))


def generate_body(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the answers to a request as one JSON object."""
    return {
        "request_id": uuid.uuid4().hex,
        "choices": [_choice(index, completion) for index, completion in enumerate(completions)],
    }


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    entries = [
        {
            "token_id": token,
            "token": f"token_id:{token}",
            "logprob": log_prob,
            "bytes": None,
            "top_logprobs": [],
        }
        for token, log_prob in zip(completion.token_ids, completion.log_probs, strict=True)
    ]
    return {
        "index": index,
        "token_ids": [*completion.token_ids],
        "logprobs": {"content": entries},
        "finish_reason": "length" if completion.usage.is_cut else "stop",
    }
