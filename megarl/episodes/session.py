"""Record one conversation with the model in token ids, to which ids are only appended.

    session = Session(chat, messages)
    session.prompt                              what the engine gets
    session.answer(ids, log_probs, versions)    what it sampled
    session.append(messages)                    what the environment replied
    session.prompt                              the same ids, the sampled ids, and the ids of the reply

The next prompt begins with the last prompt and the sampled ids, whatever the chat template would make of
their text. So the tokens that are trained on are those that were sampled."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.episodes.chat import Chat, Message


class Session:
    """The tokens of one conversation, with the log-prob and version of every sampled one.

    Args:
        tools: tools that the chat template shows to the model, in OpenAI's form.
    Raises: ValueError if the chat template refuses the first messages."""

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Message] = ()) -> None:
        self._chat, self._tools = chat, tools
        self.messages: list[Message] = [*messages]
        """The conversation as messages."""
        self.num_first = len(self.messages)
        """Number of messages of the first prompt."""
        self.first_prompt = chat.encode(self.messages, tools)
        """Ids of the first prompt."""
        self.response: list[int] = []
        """All ids after the first prompt, up to the last sampled one."""
        self.holes: list[tuple[int, int]] = []
        """(start, end) in `response` of the ids that were not sampled."""
        self.log_probs: list[float] = []
        """Log-prob of each sampled id."""
        self.versions: list[int] = []
        """Version of the weights that sampled each id."""
        self.answer_lengths: list[int] = []
        """Number of sampled ids of each answer."""
        self._appended: list[int] = []  # ids since the last sampled one

    @property
    def prompt(self) -> list[int]:
        """Token ids of the next prompt: the whole conversation so far."""
        return [*self.first_prompt, *self.response, *self._appended]

    @property
    def num_answers(self) -> int:
        return len(self.answer_lengths)

    def __len__(self) -> int:
        """Return the number of token ids of the next prompt."""
        return len(self.first_prompt) + len(self.response) + len(self._appended)

    def answer(self, ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]) -> str:
        """Record an answer of the model, and return its text.

        Raises: ValueError for an answer without ids, or with other numbers of log-probs or versions."""
        if not len(ids) == len(log_probs) == len(versions) > 0:
            raise ValueError(
                f"an answer has {len(ids)} ids, {len(log_probs)} log-probs and {len(versions)} versions: "
                "there must be as many of each, and at least one"
            )
        if self._appended:
            start = len(self.response)
            self.response += self._appended
            self.holes.append((start, len(self.response)))
            self._appended = []
        self.response += ids
        self.log_probs += log_probs
        self.versions += versions
        self.answer_lengths.append(len(ids))
        text = self._chat.decode(ids)
        self.messages.append({"role": "assistant", "content": text})
        return text

    def append(self, messages: Sequence[Message]) -> None:
        """Append the environment's messages, and the header of the next answer.

        Raises: ValueError if there is no answer before them, or the chat template refuses the messages."""
        if not self.num_answers or self._appended:
            raise ValueError("messages can be appended once after each answer of the model")
        appended = self._chat.suffix(self.messages, messages, self.response[-1], self._tools)
        self._appended = appended
        self.messages += messages
