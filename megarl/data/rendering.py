"""Turn rows of the data into token ids as the chat template writes them, and say which ids are trained on.

The template writes the whole conversation. What is trained on is what it marks by {% generation %}, or else
what stands between its own header of an answer and the end of that turn. The token behind an answer is the
template's, too; what follows this token, such as Qwen's line break, is context, and is left out at the
end."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

from megarl.data.columns import Message, Prompt, text_of
from megarl.data.tokenizer_base import CLOSE, MARK, OPEN, Tokenizer

Turns = Literal["last", "all", "score"]
"""Answers of a row that are trained on. score: none, everything is read, up to the token that has the score."""
_WRITTEN = ("reasoning_content", "reasoning", "thinking", "tool_calls")
"""Parts of an answer that a template which does not know them would leave out."""
_NUM_SHOWN = 24


class RowSample(NamedTuple):
    """The token ids and the reward of one sample of a row of the data."""

    prompt: list[int]
    response: list[int]
    """Everything after the prompt, with the end of the last answer."""
    reward: float | None = None
    holes: tuple[tuple[int, int], ...] = ()
    """(start, end) in the response of the ids that are context and not trained on."""

    @property
    def num_trained(self) -> int:
        return len(self.response) - sum(end - start for start, end in self.holes)


class Part(NamedTuple):
    """A text of a sample, which is encoded by itself."""

    text: str
    is_trained: bool = False
    is_raw: bool = False
    """Whether the text is a prompt that no template has written."""


def parts_of(tokenizer: Tokenizer, row: Prompt, answer: Message, turns: Turns = "last") -> list[Part]:
    """Return the texts of a row with this answer, context and what is trained on in turns.

    Raises: ValueError if the chat template refuses the messages, writes an answer otherwise than behind its
    own header, or leaves out a part of it; and if nothing is trained on."""
    prompt = row.messages
    if isinstance(prompt, str) and (turns != "score" or tokenizer.template is None):
        return _raw_parts(tokenizer, prompt, text_of(answer))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    conversation = _Conversation(tokenizer, [*messages, answer], (row.tools, row.template_arguments))
    if turns == "score":
        conversation.check_fields(len(messages))
        return [Part(conversation.whole())]
    text, spans = conversation.answers(turns)
    parts, position = [], 0
    for start, end in spans:
        parts.append(Part(text[position:start]))
        answered, position = _ended(tokenizer, text, start, end)
        parts.append(Part(answered, is_trained=True))
    return parts


def difference(tokenizer: Tokenizer, row: Prompt, answer: Message, turns: Turns) -> str | None:
    """Return how a sample differs from what the template writes for the whole conversation; None if it does
    not.

    Only the context of an answer can differ: some templates write earlier answers otherwise, e.g. without
    their thinking, once another one follows."""
    if isinstance(row.messages, str) or turns == "score":
        return None
    parts = [part.text for part in parts_of(tokenizer, row, answer, turns)]
    ours, whole = "".join(parts), parts_of(tokenizer, row, answer, "score")[0].text
    if not whole.startswith(ours) and ours != whole + _text(tokenizer, tokenizer.turn_end):
        return f"the template writes it otherwise in the whole conversation: {_first_difference(whole, ours)}"
    together, apart = len(tokenizer.encode_response(ours)), sum(map(len, tokenizer.encode_responses(parts)))
    if together != apart:
        return f"its {apart} tokens are {together} where the texts of prompt and answers are encoded as one"
    return None


def _raw_parts(tokenizer: Tokenizer, prompt: str, text: str) -> list[Part]:
    """Return the parts of texts that no template writes. An answer that has its end gets no second one."""
    ends = {tokenizer.turn_end, tokenizer.eos_token_id, *tokenizer.end_ids}
    if tokenizer.special_tokens.get(_trailing_token(tokenizer, text) or "") not in ends:
        was_rendered = tokenizer.turn_end in tokenizer.encode_response(prompt)
        text += _text(tokenizer, tokenizer.turn_end if was_rendered else tokenizer.eos_token_id)
    return [Part(prompt, is_raw=True), Part(text, is_trained=True)]


class _Conversation:
    """The messages of a row with an answer at the end, as their chat template writes them."""

    def __init__(self, tokenizer: Tokenizer, messages: list[Message], given: tuple) -> None:
        self.tokenizer, self.messages, self.given = tokenizer, messages, given

    def whole(self) -> str:
        return self.tokenizer.render(self.messages, *self.given, is_answered=True)

    def answers(self, turns: Turns) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and (start, end) of each answer in it that is trained on."""
        messages, tokenizer = self.messages, self.tokenizer
        every = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = [at for at in (every if turns == "all" else every[-1:]) if at and _counts(messages[at], at)]
        if not chosen:
            raise ValueError("every answer to train on has weight 0, so nothing is learnt. Take the row out.")
        for at in chosen:
            self.check_fields(at)
        if getattr(tokenizer.template, "marks_answers", False):
            tagged = tokenizer.render(messages, *self.given, is_answered=True, is_tagged=True)
            pieces = tagged.replace(CLOSE, OPEN).split(OPEN)
            if len(pieces) == 2 * len(every) + 1:
                ends = [*itertools.accumulate(map(len, pieces))]
                marked = dict(zip(every, zip(ends[::2], ends[1::2])))
                return "".join(pieces), [marked[at] for at in chosen]
        text, spans, last = "", [], 0
        for at in chosen:
            before = tokenizer.render(messages[:at], *self.given)
            after = tokenizer.render(messages[: at + 1], *self.given, is_answered=True)
            if not after.startswith(before) or not after[len(before) :].strip():
                raise ValueError(
                    f"message {at}: the chat template writes this answer otherwise than behind its own header for "
                    f"one: {_first_difference(after, before)}. Give --chat-template-args with which both are the "
                    "same, or a template with {% generation %} around the answers."
                )
            if before.startswith(text):
                text = before
            else:  # earlier answers are written otherwise from here on
                text = self._continued(text, spans[-1][0], last, at)
            spans.append((len(text), len(text) + len(after) - len(before)))
            text, last = text + after[len(before) :], at
        return text, spans

    def _continued(self, text: str, start: int, last: int, at: int) -> str:
        """Return the text up to the answer `last`, which begins at `start`, with what the template writes
        between it and the answer `at`."""
        answer = {name: value for name, value in self.messages[last].items() if name not in _WRITTEN}
        marked = [*self.messages[:last], {**answer, "content": MARK}, *self.messages[last + 1 : at]]
        _, found, rest = self.tokenizer.render(marked, *self.given).rpartition(MARK)
        if not found:
            raise ValueError(
                f"message {last}: the chat template leaves this answer out once another one follows."
            )
        token = _end_at(self.tokenizer, text[start:])
        if token is None:
            return text.removesuffix(self.tokenizer.turn_tail) + rest
        # What ends this answer may be another token where one follows, as in gpt-oss's template.
        return (
            text[: text.rindex(token)] + token + rest.removeprefix(self.tokenizer.leading_token(rest) or "")
        )

    def check_fields(self, at: int) -> None:
        """Raise ValueError if the template does not write a part of the answer `at`."""
        *before, answer = self.messages[: at + 1]
        for name in set(_WRITTEN) & {name for name, value in answer.items() if value}:
            without = {key: value for key, value in answer.items() if key != name}
            one, other = (
                self.tokenizer.render([*before, last], *self.given, is_answered=True)
                for last in (answer, without)
            )
            if one == other:
                raise ValueError(
                    f"message {at}: the chat template does not write its {name}, so it would not be learnt. Take it "
                    "out, put it into `content`, or give a template that writes it."
                )


def _counts(message: Message, at: int) -> bool:
    """Return whether a message is trained on, by its `weight` (OpenAI's fine-tuning) or `train`."""
    given = {name: message[name] for name in ("weight", "train") if name in message}
    if wrong := [name for name, value in given.items() if value not in (0, 1)]:
        raise ValueError(
            f"message {at}: {wrong[0]} is {given[wrong[0]]!r:.40}, wanted 0 or 1, or true or false."
        )
    return all(given.values())


def _text(tokenizer: Tokenizer, token: int) -> str:
    return next(text for text, index in tokenizer.special_tokens.items() if index == token)


def _trailing_token(tokenizer: Tokenizer, text: str) -> str | None:
    written = text.rstrip()
    return max((one for one in tokenizer.special_tokens if written.endswith(one)), key=len, default=None)


def _end_at(tokenizer: Tokenizer, answer: str) -> str | None:
    """Return the special token that ends an answer as the template writes it; None if there is none.

    It is the first one of what the template always writes behind answers, else the last one of this
    answer."""
    tail = tokenizer.turn_tail
    is_usual = tail and answer.endswith(tail)
    return tokenizer.leading_token(tail) if is_usual else _trailing_token(tokenizer, answer)


def _ended(tokenizer: Tokenizer, text: str, start: int, end: int) -> tuple[str, int]:
    """Return the answer text[start:end] with one end of its turn, and the place in the text behind it."""
    token = _end_at(tokenizer, text[start:end])
    if token is not None:
        stop = text.rindex(token, start, end) + len(token)
        answer = text[start:stop]
        while (once := answer.removesuffix(token)).endswith(token):  # the content had its end already
            answer = once
        return answer, stop
    # behind what {% generation %} marks, or at the beginning of the next turn
    if token := tokenizer.leading_token(text[end:], {tokenizer.turn_end, *tokenizer.end_ids}):
        stop = text.index(token, end) + len(token)
        return text[start:stop], stop
    answer = text[start:end].removesuffix(tokenizer.turn_tail)
    return answer + _text(tokenizer, tokenizer.turn_end), start + len(answer)


def _first_difference(whole: str, ours: str) -> str:
    place = max(0, len(os.path.commonprefix([whole, ours])) - _NUM_SHOWN // 2)
    whole, ours = (repr(text[place : place + 2 * _NUM_SHOWN]) for text in (whole, ours))
    return f"at character {place} it writes {whole}, and there was {ours}"


def encode_parts(tokenizer: Tokenizer, samples: Sequence[Sequence[Part]]) -> list[RowSample]:
    """Return the token ids of samples, given their texts. Each text is encoded by itself."""
    parts = [part for sample in samples for part in sample]
    encoded = iter(tokenizer.encode_rendered([part.text for part in parts], [part.is_raw for part in parts]))
    return [_sample(sample, [next(encoded) for _ in sample]) for sample in samples]


def _sample(parts: Sequence[Part], encoded: list[list[int]]) -> RowSample:
    response: list[int] = []
    holes = []
    for part, ids in zip(parts[1:], encoded[1:], strict=True):
        if ids and not part.is_trained:
            holes.append((len(response), len(response) + len(ids)))
        response += ids
    return RowSample(encoded[0], response, holes=tuple(holes))


def scored(sample: RowSample, pad: int | None) -> RowSample:
    """Return a sample of which one token is scored: the last one that is no padding, as transformers'
    classifiers take it; what follows this token is left out.

    Args:
        pad: id of the padding token, which may also end every text; None: there is none."""
    ids = [*sample.prompt, *sample.response]
    while len(ids) > 1 and ids[-1] == pad:
        ids.pop()
    return sample._replace(prompt=ids[:-1], response=ids[-1:], holes=())
