"""Parse one row in verl's columns into a prompt with its ground truth or response, and list the row's
problems.

    {"data_source": "megarl/sums", "prompt": [{"role": "user", "content": "23-5-1 ?"}], "ability": "math",
     "reward_model": {"style": "rule", "ground_truth": "17"}, "extra_info": {"split": "train", "index": 0}}

Fine-tuning rows have `response` or `completion` besides `prompt`, or `messages` with the assistant's turn
last, which a prompt may stand beside. An answer is a string or a message, also one with `tool_calls` in place
of `content`.

`tools` (a list in OpenAI's form, or its JSON text) and `chat_template_kwargs` are for the chat template.

Preference rows have `chosen` and `rejected`: strings, or messages with the assistant's turn last. Such
messages may begin with the prompt, and then need no column for it. `score_chosen` and `score_rejected` are
optional. Labelled rows have `completion`, in the same forms, and `label`: true or false.

A row of GSM8K as published is {"question": ..., "answer": "... #### 1,234"}. It is converted as in verl's own
script: the instruction below is added to the question, and the ground truth is the text after "####", without
thousands separators.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
Message = dict[str, Any]
_WANTED_MESSAGES = 'a non-empty list of {"role": str, "content": str}, or a string'
_WANTED_TEXT = "a string that is not empty"
_WANTED_ANSWER = "a string that is not empty, or messages with the assistant's turn last"
_WANTED_TOOLS = "a list of tools in OpenAI's form, or its JSON text"
_SCORES = ("score_chosen", "score_rejected")
Needs = Literal["ground_truth", "response", "pair", "scored_pair", "labelled"] | None
"""Part that a row must have besides its prompt. A pair is `chosen` and `rejected`; a scored one has
`score_chosen` and `score_rejected` too. A labelled row has `completion` and `label`."""
_SHOWN_CHARACTERS = 80
_MAX_DEPTH = 64
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(slots=True)
class Prompt:
    """One row of a dataset: the prompt's messages, and the ground truth or response that belongs to them.

    Example: `Prompt(0, "megarl/sums", ({"role": "user", "content": "23-5-1 ?"},), "17")`."""

    index: int = 0
    """Position in the dataset: 0 .. len(dataset) - 1, counted over all files in order."""
    data_source: str = ""
    """Source of the row, which selects the reward under --reward auto; "" if the row has none."""
    messages: tuple[Message, ...] | str = ()
    """The conversation so far, for the chat template; a string is encoded without one."""
    ground_truth: Any = None
    """The right answer: a string for rewards of megarl, any JSON value for a function of the user's."""
    response: Message | None = None
    """The assistant's message that supervised fine-tuning learns."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    chosen: Message | None = None
    """The assistant's message that is preferred in a pair."""
    rejected: Message | None = None
    score_chosen: float | None = None
    """Score of the preferred answer, for algorithms that read scores."""
    score_rejected: float | None = None
    label: bool | None = None
    """Whether the response, which is the column `completion`, is desirable."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the chat template shows to the model."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """What else the chat template reads, over --chat-template-args."""
    was_text: bool = False
    """Whether the messages were JSON text in the file."""

    @property
    def columns(self) -> dict[str, Any]:
        """The row in verl's columns, as environments get it."""
        prompt = self.messages if isinstance(self.messages, str) else list(self.messages)
        for_template = {"tools": [*self.tools], "chat_template_kwargs": self.template_arguments}
        return {name: value for name, value in for_template.items() if value} | {
            "data_source": self.data_source,
            "prompt": prompt,
            "reward_model": {"ground_truth": self.ground_truth},
            "extra_info": self.extra_info,
            "index": self.index,
        }


def text_of(message: Message) -> str:
    """Return the content of a message; "" beside tool calls without one."""
    return message["content"] or ""


def parse_row(row: dict[str, Any], prompt_key: str, needs: Needs) -> tuple[Prompt, list[str]]:
    """Return the row's content as a `Prompt`, and its problems as texts; [] if the row is right.

    Each problem names the column, its value and the expected value.

    Args:
        needs: the part that the row must have besides the prompt. The other parts are read if present.
    """
    problems = _Problems(row)
    parsed = Prompt()
    is_sampled = needs in (None, "ground_truth")
    """Whether answers are sampled and rewarded; fine-tuning does not read the columns for rewards."""
    of_rewards = problems if is_sampled else _Problems(row)
    parsed.data_source = of_rewards.check("data_source", row.get("data_source"), str, "a string") or ""
    parsed.extra_info = of_rewards.check("extra_info", row.get("extra_info"), dict, "an object") or {}
    answer = "completion" if needs == "labelled" else "chosen"
    has_context = isinstance(row.get(answer), list) and row.get(prompt_key) is row.get("messages") is None
    if not (has_context and needs in ("pair", "scored_pair", "labelled", None)):
        _read_prompt(row, prompt_key, parsed, problems, needs)
    if needs == "labelled":
        _read_labelled(row, prompt_key, parsed, problems)
    else:
        _read_pair(row, prompt_key, parsed, problems, needs)
    _read_ground_truth(row, parsed, of_rewards, needs)
    _read_response(row, prompt_key, parsed, problems if needs == "response" else _Problems(row), needs)
    _read_template_columns(row, parsed, problems)
    content = {
        "data_source": parsed.data_source,
        prompt_key: parsed.messages,
        "reward_model.ground_truth": parsed.ground_truth,
        "response": parsed.response,
        "chosen": parsed.chosen,
        "rejected": parsed.rejected,
    }
    for column, value in (*content.items(), ("extra_info", parsed.extra_info)):
        if (reason := _unfit(value, is_recorded=column in content)) is not None:
            problems.unfit(column, reason)
    if (
        needs == "ground_truth"
        and parsed.ground_truth is None
        and not problems.about("reward_model", "answer")
    ):
        problems.missing("reward_model.ground_truth", "the right answer as a string")
    if (
        needs == "response"
        and not parsed.response
        and not problems.about("response", "completion", "messages")
    ):
        wanted = 'a string (or "messages" with the assistant\'s turn last, or a "completion")'
        problems.missing("response", wanted)
    return parsed, problems.texts


class _Problems:
    """Collects the problems of one row as texts, and the columns that they are about."""

    def __init__(self, row: dict[str, Any]):
        self.row = row
        self.texts: list[str] = []
        self._columns: set[str] = set()

    def about(self, *columns: str) -> bool:
        return not self._columns.isdisjoint(columns)

    def check(self, column: str, value: Any, kind: type, wanted: str) -> Any:
        """Return the value if it is None or a `kind`. Otherwise record a problem and return None.

        A required text must not be empty."""
        if value is None or isinstance(value, kind) and (value or wanted != _WANTED_TEXT):
            return value
        self.wrong(column, value, wanted)
        return None

    def wrong(self, column: str, value: object, wanted: str) -> None:
        shown = _shown(repr(value), _SHOWN_CHARACTERS)
        self.unfit(column, f"is {shown} ({type(value).__name__}), wanted {wanted}")

    def unfit(self, column: str, reason: str) -> None:
        self.texts.append(f"column {column!r} {reason}")
        self._columns.add(column.partition(".")[0])

    def missing(self, column: str, wanted: str) -> None:
        there = ", ".join(name for name in self.row if self.row[name] is not None) or "nothing"
        self.texts.append(
            f"no column {column!r} (there: {_shown(there, 5 * _SHOWN_CHARACTERS)}), wanted {wanted}"
        )


def _read_prompt(
    row: dict[str, Any], prompt_key: str, parsed: Prompt, problems: _Problems, needs: Needs
) -> None:
    has_answer = row.get("response") is not None or row.get("completion") is not None
    is_conversation = needs == "response" and not has_answer and isinstance(row.get("messages"), list)
    if row.get(prompt_key) is not None and not is_conversation:
        parsed.messages = _messages(row[prompt_key], prompt_key, problems)
        parsed.was_text = isinstance(row[prompt_key], str) and not isinstance(parsed.messages, str)
    elif row.get("messages") is not None:
        parsed.messages = _messages(row["messages"], "messages", problems)
        if (
            isinstance(parsed.messages, tuple)
            and parsed.messages
            and parsed.messages[-1]["role"] == "assistant"
        ):
            *before, answer = parsed.messages
            parsed.messages = tuple(before)
            if _says_something(answer):
                parsed.response = answer
            elif needs == "response":
                problems.wrong(f"messages.{len(before)}", answer, "an answer with a text or tool calls")
            if not before:
                problems.wrong("messages", row["messages"], "a prompt before the assistant's turn")
    elif isinstance(row.get("question"), str) and isinstance(row.get("answer"), str):
        _read_published_gsm8k(row, parsed)
    else:
        problems.missing(prompt_key, f"{_WANTED_MESSAGES} (or GSM8K's own question and answer)")


def _read_response(
    row: dict[str, Any], prompt_key: str, parsed: Prompt, problems: _Problems, needs: Needs
) -> None:
    """Read the answer of a fine-tuning row that stands in a column of its own."""
    column = next((name for name in ("response", "completion") if row.get(name) is not None), None)
    if column is None or needs == "labelled" or column == "completion" and needs != "response":
        return
    context, answer = _read_answer(row, column, problems)
    if needs == "response":
        _check_context(context, column, prompt_key, parsed.messages, problems)
        parsed.messages = context or parsed.messages
    parsed.response = None if context and needs != "response" else answer


def _read_template_columns(row: dict[str, Any], parsed: Prompt, problems: _Problems) -> None:
    """Read what the chat template gets besides messages. A string may be the JSON text of either."""
    tools, arguments = (_of_json(row.get(name)) for name in ("tools", "chat_template_kwargs"))
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        problems.wrong("tools", row["tools"], _WANTED_TOOLS)
    elif tools:
        parsed.tools = tuple(tools)
    if arguments and (not isinstance(arguments, dict) or {"messages", "tools", "tagged"} & arguments.keys()):
        problems.wrong("chat_template_kwargs", arguments, "an object without messages and tools")
    elif arguments:
        parsed.template_arguments = {n: v for n, v in arguments.items() if n != "add_generation_prompt"}


def _of_json(value: object) -> object:
    """Return the value of a JSON text; another value, or another text, as it is."""
    if isinstance(value, str) and value.strip():
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def _says_something(answer: Message) -> bool:
    return bool(answer["content"] or answer.get("tool_calls"))


def _read_pair(
    row: dict[str, Any], prompt_key: str, parsed: Prompt, problems: _Problems, needs: Needs
) -> None:
    """Read both answers of a pair, their scores, and the prompt if only the answers' messages have it.

    A row that need not have a pair has no problem with it."""
    is_needed = needs in ("pair", "scored_pair")
    found = problems if is_needed else _Problems(row)
    (context, chosen), (other, rejected) = (_read_answer(row, name, found) for name in ("chosen", "rejected"))
    for name in _SCORES:
        value = row.get(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value)):
            found.wrong(name, value, "a finite number")
    if (row.get(_SCORES[0]) is None) != (row.get(_SCORES[1]) is None):
        found.unfit(_SCORES[0], f"and {_SCORES[1]!r} must both be there, or neither")
    elif needs == "scored_pair" and row.get(_SCORES[0]) is None:
        found.missing(_SCORES[0], f"numbers in {_SCORES[0]!r} and {_SCORES[1]!r}")
    if not found.texts and context != other:
        found.unfit(
            "rejected", "continues another prompt than column 'chosen'; the messages before must be equal"
        )
    given = parsed.messages
    _check_context(context, "chosen", prompt_key, given, found)
    if found.texts:
        if not is_needed and not given and not problems.texts:
            problems.missing(prompt_key, _WANTED_MESSAGES)
        return
    parsed.messages = context or given
    parsed.chosen, parsed.rejected = chosen, rejected
    parsed.score_chosen, parsed.score_rejected = (
        None if row.get(name) is None else float(row[name]) for name in _SCORES
    )


def _check_context(
    context: tuple[dict[str, Any], ...],
    column: str,
    prompt_key: str,
    given: tuple[dict[str, Any], ...] | str,
    problems: _Problems,
) -> None:
    """Record a problem if the messages before an answer are not the row's prompt, or if there is no prompt.

    Args:
        given: the row's prompt; () if it has no column for it."""
    as_messages = ({"role": "user", "content": given},) if isinstance(given, str) else given
    if not problems.texts and context and given and context != as_messages:
        problems.unfit(column, f"begins with other messages than column {prompt_key!r}")
    if not problems.texts and not context and not given:
        problems.missing(prompt_key, f"{_WANTED_MESSAGES}, or messages before the answer in {column!r}")


def _read_labelled(row: dict[str, Any], prompt_key: str, parsed: Prompt, problems: _Problems) -> None:
    """Read a completion with its label, and the prompt if only the completion's messages have it."""
    context, parsed.response = _read_answer(row, "completion", problems)
    if row.get("label") is None:
        problems.missing("label", "true for a desirable completion, false for an undesirable one")
    parsed.label = problems.check("label", row.get("label"), bool, "true or false")
    _check_context(context, "completion", prompt_key, parsed.messages, problems)
    parsed.messages = context or parsed.messages


def _read_answer(
    row: dict[str, Any], column: str, problems: _Problems
) -> tuple[tuple[Message, ...], Message | None]:
    """Return the messages before an answer, and the assistant's message."""
    value = row.get(column)
    if value is None:
        problems.missing(column, _WANTED_ANSWER)
    elif isinstance(value, str) and value:
        return (), {"role": "assistant", "content": value}
    elif not isinstance(value := [value] if isinstance(value, dict) else value, list) or not value:
        problems.wrong(column, value, _WANTED_ANSWER)
    elif messages := _messages(value, column, problems):
        assert isinstance(messages, tuple)
        *before, answer = messages
        if answer["role"] == "assistant" and _says_something(answer):
            return tuple(before), answer
        problems.wrong(f"{column}.{len(before)}", answer, "the assistant's turn, with a text, at the end")
    return (), None


def _read_published_gsm8k(row: dict[str, Any], parsed: Prompt) -> None:
    parsed.data_source = parsed.data_source or "openai/gsm8k"
    parsed.messages = ({"role": "user", "content": f"{row['question']} {GSM8K_INSTRUCTION}"},)
    parsed.response = {"role": "assistant", "content": row["answer"]} if row["answer"] else None
    parsed.extra_info = {"question": row["question"], "answer": row["answer"], **parsed.extra_info}
    _, marker, final = row["answer"].rpartition("####")
    parsed.ground_truth = final.replace(",", "").strip() or None if marker else None


def _read_ground_truth(row: dict[str, Any], parsed: Prompt, problems: _Problems, needs: Needs) -> None:
    wanted = 'an object, e.g. {"style": "rule", "ground_truth": "17"}'
    reward_model = problems.check("reward_model", row.get("reward_model"), dict, wanted)
    if reward_model and reward_model.get("ground_truth") is not None:
        parsed.ground_truth = value = reward_model["ground_truth"]
        if needs == "ground_truth":
            parsed.ground_truth = problems.check("reward_model.ground_truth", value, str, _WANTED_TEXT)


def _messages(value: object, column: str, problems: _Problems) -> tuple[dict[str, Any], ...] | str:
    if isinstance(value, str) and value:
        try:
            value = json.loads(value) if value.startswith("[{") and '"role"' in value else value
        except (ValueError, RecursionError):
            pass  # a text that only begins like messages
        if isinstance(value, str):
            return value
    if not isinstance(value, list) or not value:
        problems.wrong(column, value, _WANTED_MESSAGES)
        return ()
    for position, message in enumerate(value):
        if not isinstance(message, dict):
            problems.wrong(f"{column}.{position}", message, '{"role": str, "content": str}')
            return ()
        for name in ("role", "content"):
            may_be_null = name == "content" and message.get("tool_calls")
            if not isinstance(message.get(name), str) and not (may_be_null and message.get(name) is None):
                problems.wrong(f"{column}.{position}.{name}", message.get(name), "a string")
                return ()
    # Clients of OpenAI's API write null for a field that a message has not, and templates look for the name. But
    # they look for a content that is null beside tool calls.
    return tuple(
        {n: part for n, part in message.items() if part is not None}
        | ({} if message.get("content") is not None else {"content": None})
        for message in value
    )


def _shown(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "..."


def _unfit(value: object, is_recorded: bool, depth: int = 0) -> str | None:
    """Return why a value cannot be tokenized or sent to other processes; None if it can.

    A recorded value (`is_recorded`) must also be writable as JSON."""
    if depth > _MAX_DEPTH:
        return f"is nested deeper than {_MAX_DEPTH} levels"
    if isinstance(value, str):
        return (
            None
            if value.isascii() or not _SURROGATE.search(value)
            else f"holds {_SURROGATE.search(value)[0]!r}, half of a character"
        )
    if isinstance(value, (dict, list, tuple)):
        inner = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        return next(
            (reason for part in inner if (reason := _unfit(part, is_recorded, depth + 1)) is not None), None
        )
    if is_recorded and not (value is None or isinstance(value, (bool, int, float))):
        return f"holds a {type(value).__name__}, wanted what JSON can hold"
    return None
