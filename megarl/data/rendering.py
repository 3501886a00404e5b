"""Turn rows of the data into token ids as the chat template writes them, and say which ids are trained on.

The template writes the whole conversation. What is trained on is what it marks by {% generation %}, or else what
stands between its own header of an answer and the end of that turn. The token behind an answer is the template's,
too; what follows this token, such as Qwen's line break, is context, and is left out at the end."""

from __future__ import annotations

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
    is_trained: bool
    end: int | None = None
    """Id that follows the text, where the template writes no end behind an answer."""
    is_raw: bool = False
    """Whether the text is a prompt that no template has written."""


def parts_of(tokenizer: Tokenizer, row: Prompt, answer: Message, turns: Turns = "last") -> list[Part]:
    """Return the texts of a row with this answer, context and what is trained on in turns.

    Raises: ValueError if the chat template refuses the messages, writes an answer otherwise than behind its own
    header, or leaves out a part of it; and if nothing is trained on."""
    if isinstance(row.messages, str) and (turns != "score" or tokenizer.template is None):
        return _raw_parts(tokenizer, row.messages, text_of(answer))
    prompt = row.messages
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    messages.append(answer)
    if turns == "score":
        return [Part(tokenizer.render(messages, row.tools, row.template_arguments, is_answered=True), False)]
    text, spans = _rendered(tokenizer, row, messages, turns)
    parts, position = [], 0
    for start, end in spans:
        parts.append(Part(text[position:start], False))
        answered, position, index = _ended(tokenizer, text, start, end)
        parts.append(Part(answered, True, index))
    return parts


def difference(tokenizer: Tokenizer, row: Prompt, answer: Message, turns: Turns) -> str | None:
    """Return how a sample differs from what the template writes for the whole conversation; None if it does not.

    Only the context of an answer can differ: some templates write earlier answers otherwise, e.g. without their
    thinking, once another one follows."""
    if isinstance(row.messages, str) or turns == "score":
        return None
    parts = parts_of(tokenizer, row, answer, turns)
    ours = "".join(part.text for part in parts)
    whole = tokenizer.render([*row.messages, answer], row.tools, row.template_arguments, is_answered=True)
    if not whole.startswith(ours):
        return f"the template writes it otherwise in the whole conversation: {_first_difference(whole, ours)}"
    together = tokenizer.encode_response(ours)
    apart = [index for ids in tokenizer.encode_responses([part.text for part in parts]) for index in ids]
    if together != apart:
        return f"its {len(apart)} tokens are {len(together)} where the texts of prompt and answers are encoded as one"
    return None


def _raw_parts(tokenizer: Tokenizer, prompt: str, text: str) -> list[Part]:
    """Return the parts of texts that no template writes. An answer that has its end gets no second one."""
    if any(
        text.endswith(end) and index in _ends(tokenizer) for end, index in tokenizer.special_tokens.items()
    ):
        return [Part(prompt, False, is_raw=True), Part(text, True)]
    was_rendered = tokenizer.turn_end in tokenizer.encode_response(prompt)
    end = tokenizer.turn_end if was_rendered else tokenizer.eos_token_id
    return [Part(prompt, False, is_raw=True), Part(text, True, end)]


def _rendered(
    tokenizer: Tokenizer, row: Prompt, messages: list[Message], turns: Turns
) -> tuple[str, list[tuple[int, int]]]:
    """Return a conversation as text, and (start, end) of each answer in it that is trained on."""
    given = row.tools, row.template_arguments
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = [at for at in answers if at and _counts(messages[at], at)] if turns == "all" else answers[-1:]
    if not chosen or not _counts(messages[chosen[-1]], chosen[-1]):
        raise ValueError("every answer to train on has weight 0, so nothing is learnt. Take the row out.")
    for at in chosen:
        _check_fields(tokenizer, row, messages[: at + 1])
    tagged = ""
    if getattr(tokenizer.template, "marks_answers", False):
        tagged = tokenizer.render(messages, *given, is_answered=True, is_tagged=True)
    if tagged.count(OPEN) == len(answers) == tagged.count(CLOSE):
        pieces = tagged.replace(CLOSE, OPEN).split(OPEN)
        ends = [len("".join(pieces[:count])) for count in range(1, len(pieces))]
        marked = dict(zip(answers, zip(ends[::2], ends[1::2], strict=True), strict=True))
        return "".join(pieces), [marked[at] for at in chosen]
    text, spans, last = "", [], 0
    for at in chosen:
        before = tokenizer.render(messages[:at], *given)
        after = tokenizer.render(messages[: at + 1], *given, is_answered=True)
        if not after.startswith(before) or not after[len(before) :].strip():
            raise ValueError(
                f"message {at}: the chat template writes this answer otherwise than behind its own header for one: "
                f"{_first_difference(after, before)}. Give --chat-template-args with which both are the same, or a "
                "template with {% generation %} around the answers."
            )
        if spans and not before.startswith(text):  # earlier answers are written otherwise from here on
            token = _end_at(tokenizer, text[spans[-1][0] :])
            rest = _behind(tokenizer, row, messages[:at], last)
            if token is None:
                text = text.removesuffix(tokenizer.turn_tail) + rest
            else:  # what ends this answer may be another token where one follows, as in gpt-oss's template
                ended = max(
                    (one for one in tokenizer.special_tokens if rest.startswith(one)), key=len, default=""
                )
                text = text[: text.rindex(token)] + token + rest.removeprefix(ended)
        else:
            text = before
        spans.append((len(text), len(text) + len(after) - len(before)))
        text, last = text + after[len(before) :], at
    return text, spans


def _behind(tokenizer: Tokenizer, row: Prompt, messages: list[Message], at: int) -> str:
    """Return what the template writes behind the answer `at`, the next answer's header included."""
    answer = {name: value for name, value in messages[at].items() if name not in _WRITTEN}
    marked = [*messages[:at], {**answer, "content": MARK}, *messages[at + 1 :]]
    _, found, rest = tokenizer.render(marked, row.tools, row.template_arguments).rpartition(MARK)
    if not found:
        raise ValueError(f"message {at}: the chat template leaves this answer out once another one follows.")
    return rest


def _counts(message: Message, at: int) -> bool:
    """Return whether a message is trained on, by its `weight` (OpenAI's fine-tuning) or `train`."""
    for name in ("weight", "train"):
        value = message.get(name)
        if value is not None and value not in (0, 1):
            raise ValueError(f"message {at}: {name} is {value!r:.40}, wanted 0 or 1, or true or false.")
        if value is not None and not value:
            return False
    return True


def _check_fields(tokenizer: Tokenizer, row: Prompt, messages: list[Message]) -> None:
    """Raise ValueError if the template does not write a part of the answer at the end of these messages."""
    given, answer = (row.tools, row.template_arguments, True), messages[-1]
    for name in _WRITTEN:
        if answer.get(name):
            without = {key: value for key, value in answer.items() if key != name}
            if tokenizer.render([*messages[:-1], without], *given) == tokenizer.render(messages, *given):
                raise ValueError(
                    f"message {len(messages) - 1}: the chat template does not write its {name}, so it would not be "
                    "learnt. Take it out, put it into `content`, or give a template that writes it."
                )


def _ends(tokenizer: Tokenizer) -> set[int]:
    return {tokenizer.turn_end, tokenizer.eos_token_id, *tokenizer.end_ids}


def _end_at(tokenizer: Tokenizer, answer: str) -> str | None:
    """Return the special token that ends an answer as the template writes it; None if there is none.

    It is the first one of what the template always writes behind answers, else the last one of this answer."""
    if answer.endswith(tokenizer.turn_tail):
        behind = tokenizer.turn_tail.lstrip()
        found = [one for one in tokenizer.special_tokens if behind.startswith(one)]
    else:
        written = answer.rstrip()
        found = [one for one in tokenizer.special_tokens if written.endswith(one)]
    return max(found, key=len, default=None)


def _ended(tokenizer: Tokenizer, text: str, start: int, end: int) -> tuple[str, int, int | None]:
    """Return the answer text[start:end] with one end of turn, the place behind it, and the id that is added to it
    because the template writes no end."""
    token = _end_at(tokenizer, text[start:end])
    if token is not None:
        stop = text.rindex(token, start, end) + len(token)
        answer = text[start:stop]
        while (once := answer.removesuffix(token)).endswith(token):  # the content had its end already
            answer = once
        return answer, stop, None
    # behind what {% generation %} marks, or at the beginning of the next turn
    behind, ends = text[end:].lstrip(), _ends(tokenizer)
    known = [
        one for one, index in tokenizer.special_tokens.items() if index in ends and behind.startswith(one)
    ]
    if known:
        stop = len(text) - len(behind) + len(max(known, key=len))
        return text[start:stop], stop, None
    answer = text[start:end].removesuffix(tokenizer.turn_tail)
    return answer, start + len(answer), tokenizer.turn_end


def _first_difference(whole: str, ours: str) -> str:
    place = next(
        (at for at, (one, other) in enumerate(zip(whole, ours)) if one != other), min(len(whole), len(ours))
    )
    place = max(0, place - _NUM_SHOWN // 2)
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
        response += ids if part.end is None else [*ids, part.end]
    return RowSample(encoded[0], response, holes=tuple(holes))


def scored(sample: RowSample, pad: int | None) -> RowSample:
    """Return a sample of which one token is scored: the last one that is no padding, as transformers' classifiers
    take it; what follows this token is left out.

    Args:
        pad: id of the padding token, which may also end every text; None: there is none."""
    ids = [*sample.prompt, *sample.response]
    while len(ids) > 1 and ids[-1] == pad:
        ids.pop()
    return RowSample(ids[:-1], ids[-1:])
