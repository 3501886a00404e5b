"""Find reasoning and tool calls in answers with vLLM's parsers, as vLLM's own server does."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar


def check_schema(schema: dict[str, Any]) -> None:
    """Raise ValueError for a JSON schema by which vLLM cannot constrain an answer."""
    try:
        validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
    except Exception as error:  # vLLM's own kinds
        raise ValueError(f"response_format has a schema of which vLLM makes no grammar: {error}") from error


_MOST_REQUESTS = 64  # lists of tools that are remembered; a job has one or a few


class _Failures(logging.Filter):
    """Counts what vLLM's tool parsers log about calls that they cannot read, in the place of their tracebacks."""

    number = 0

    def filter(self, record: logging.LogRecord) -> bool:
        self.number += record.exc_info is not None
        return record.exc_info is None


_FAILURES = _Failures()


class VllmAnswerParser:
    """Splits answers into text, reasoning and tool calls.

    What is slow is done once: loading the parsers, and reading the tokenizer's vocabulary. A parser object of
    vLLM has a state, so there is one for each answer.

    Args:
        tool_parser: name of vLLM's tool parser, if calls are to be found.
        reasoning_parser: name of vLLM's reasoning parser, if reasoning is to be taken out.
        tokenizer: a tokenizer of transformers.
        eos_ids: the model's end-of-sequence ids. One at the end of an answer is no part of its text.
        stop_ids: --stop-token-ids. One at the end of an answer is no part of its text if it is a special
            token, such as the end of a turn. Another one, such as the end of a call, is.
    Raises: ValueError if the tokenizer lacks tokens that a parser looks for."""

    def __init__(
        self,
        tool_parser: str | None,
        reasoning_parser: str | None,
        tokenizer: Any,
        eos_ids: Iterable[int],
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.takes_tools = tool_parser is not None
        self._tokenizer = get_cached_tokenizer(tokenizer)
        special = (one for one in stop_ids if not tokenizer.decode([one], skip_special_tokens=True))
        self._end_ids = frozenset((*eos_ids, *special))
        try:
            self._parser_class = ParserManager.get_parser(
                tool_parser,
                reasoning_parser,
                enable_auto_tools=self.takes_tools,
                model_name=tokenizer.name_or_path,
                tokenizer=self._tokenizer,
            )
        except TypeError as error:
            raise ValueError(
                f"{str(error).rstrip('.')}. Leave the flag out, or take the parser of this model."
            ) from error
        self._requests: dict[str, ChatCompletionRequest] = {}
        for one in getattr(self._parser_class, "tool_parser_cls", None).__mro__ if tool_parser else ():
            logging.getLogger(one.__module__).addFilter(_FAILURES)

    def parse(
        self, prompt: Sequence[int], ids: Sequence[int], tools: Sequence[dict[str, Any]], wants_calls: bool
    ) -> tuple[str | None, str | None, list[tuple[str | None, str, str]]]:
        """Return (text, reasoning, calls) of an answer; a call is (id that the model wrote or None, name,
        arguments as JSON). Calls that cannot be read are one without a name.

        Args:
            prompt: ids before the answer.
            ids: the sampled ids.
            tools: tools of the conversation, in OpenAI's form.
            wants_calls: whether the request allows calls."""
        assert self._parser_class is not None
        request, num_failures = self._request(tools, wants_calls), _FAILURES.number
        parser = self._parser_class(self._tokenizer, request.tools)
        parser.set_prompt_token_ids(prompt)
        end = len(ids) - (len(ids) > 0 and ids[-1] in self._end_ids)
        text = self._tokenizer.decode(
            list(ids[:end]),
            skip_special_tokens=request.skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=self.takes_tools, model_output_token_ids=list(ids)
        )
        found = [
            (call.id if call.id and call.id in text else None, call.name, call.arguments)
            for call in calls or ()
        ]
        if _FAILURES.number > num_failures:
            found = [(None, "", "")]
        return content, reasoning, found

    def _request(self, tools: Sequence[dict[str, Any]], wants_calls: bool) -> ChatCompletionRequest:
        """Return a request with these tools, as vLLM's parsers want to see it: they also decide whether special
        tokens are part of the text."""
        key = json.dumps([tools, wants_calls])
        found = self._requests.get(key)
        if found is None:
            given = {"tools": list(tools), "tool_choice": "auto" if wants_calls else "none"} if tools else {}
            messages = [{"role": "user", "content": ""}]
            request = ChatCompletionRequest.model_validate({"messages": messages, **given})
            assert self._parser_class is not None
            found = self._parser_class(self._tokenizer, request.tools).adjust_request(request)
            if len(self._requests) >= _MOST_REQUESTS:
                self._requests.clear()
            self._requests[key] = found
        return found
