"""Record the conversations of one episode in token ids, as a tree of turns to which turns are only added.

    session = Session(chat)
    turn = session.open(messages)                       turn.prompt is what the engine gets
    session.answer(turn, ids, log_probs, versions)      what it sampled
    turn = session.open(reply, parent=turn)             the same ids, the sampled ids, and the ids of the reply
    session.branches()                                  what is trained on

The prompt of a turn begins with its parent's prompt and sampled ids, whatever the chat template would make of
their text. So the tokens that are trained on are those that were sampled.

A conversation that only grows is one branch. Two answers to one prompt, messages that were edited, and a further
agent with a prompt of its own make further branches, each a sample for training. A sampled token is trained on in
the first branch that has it, and is context in the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megarl.episodes.chat import Chat, Message


@dataclass(eq=False, slots=True)
class TurnRecord:
    """One answer of the model, or one that it is asked for, and what came before it."""

    number: int
    """Number of the turn in its session, in the order in which answers were asked for."""
    parent: TurnRecord | None
    """The turn whose conversation this one continues. None for the first turn of a conversation."""
    added: list[int]
    """Ids between the last sampled id of the parent and the answer; all ids before it without a parent."""
    prompt: list[int]
    """All ids before the answer."""
    messages: list[Message]
    """Messages between the parent's answer and this one; once there is one, the answer too."""
    tools: Sequence[Message] = ()
    request: int = 0
    """Number of the agent's request that asked for the answer."""
    is_constrained: bool = False
    """Whether a JSON schema constrains the answer, so that it is context: its log-probs are not the model's."""
    sampled: list[int] = field(default_factory=list)
    """Ids of the answer; [] while it is sampled."""
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each id."""

    @property
    def path(self) -> list[TurnRecord]:
        """The turns of the conversation up to this one."""
        found = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]

    @property
    def conversation(self) -> list[Message]:
        """All messages up to this turn's."""
        return [message for turn in self.path for message in turn.messages]


@dataclass(frozen=True, slots=True)
class Branch:
    """One conversation of a session as a sample for training."""

    prompt: list[int]
    """Ids before the first one that is trained on."""
    response: list[int]
    """All ids after the prompt, up to the last sampled one."""
    holes: list[tuple[int, int]]
    """(start, end) in `response` of the ids that are not trained on."""
    log_probs: list[float]
    """Log-prob of each id that is trained on."""
    versions: list[int]
    """Version of the weights that sampled each of them."""
    messages: list[Message]
    """The conversation, with messages behind the last answer that were not answered."""
    num_first: int
    """Number of messages before the first answer."""


class Session:
    """The turns of one episode."""

    def __init__(self, chat: Chat, row: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Begin without turns.

        Args:
            row: row of the data, which may have `tools` and `chat_template_kwargs` for the chat template."""
        self._chat = chat
        self._tools, self._arguments = row.get("tools") or (), row.get("chat_template_kwargs")
        self.turns: list[TurnRecord] = []
        """All turns, in the order in which they were asked for."""
        self.answered: list[TurnRecord] = []
        """Turns with an answer, in the order of the answers."""

    @property
    def num_answers(self) -> int:
        return len(self.answered)

    @property
    def answers(self) -> list[str]:
        """Text of each answer."""
        return [turn.messages[-1]["content"] for turn in self.answered]

    @property
    def answer_lengths(self) -> list[int]:
        """Number of sampled ids of each answer."""
        return [len(turn.sampled) for turn in self.answered]

    def open(
        self,
        messages: Sequence[Message],
        parent: TurnRecord | None = None,
        tools: Sequence[Message] | None = None,
        count: int = 1,
    ) -> list[TurnRecord]:
        """Return new turns that are not in the session yet, for `count` answers to the same messages.

        Args:
            messages: those of a new conversation, or those that follow the parent's answer.
            parent: a turn with an answer.
            tools: tools that the chat template shows to the model, in OpenAI's form. None: those of the row.
        Raises: ValueError if the chat template refuses the messages."""
        tools = self._tools if tools is None else tools
        if parent is None:
            added = prompt = self._chat.encode(messages, tools, self._arguments)
        else:
            last = parent.sampled[-1]
            added = self._chat.suffix(parent.conversation, messages, last, tools, self._arguments)
            prompt = [*parent.prompt, *parent.sampled, *added]
        return self._turns(count, parent, added, prompt, messages, tools)

    def open_ids(self, prompt: Sequence[int], count: int = 1) -> list[TurnRecord]:
        """Return new turns for a prompt of token ids. They continue the turn whose prompt and answer are the
        longest beginning of it, if there is one."""
        parent, length = None, 0
        for turn in self.answered:
            end = len(turn.prompt) + len(turn.sampled)
            if length < end < len(prompt) and [*prompt[:end]] == turn.prompt + turn.sampled:
                parent, length = turn, end
        added = [*prompt[length:]]
        shown = {"role": "tokens", "content": self._chat.decode(added)}  # for people; no template renders it
        return self._turns(count, parent, added, [*prompt], [shown], ())

    def _turns(
        self,
        count: int,
        parent: TurnRecord | None,
        added: list[int],
        prompt: list[int],
        messages: Sequence[Message],
        tools: Sequence[Message],
    ) -> list[TurnRecord]:
        first = len(self.turns)
        return [TurnRecord(first + n, parent, added, prompt, [*messages], tools) for n in range(count)]

    def add(self, turns: Sequence[TurnRecord]) -> None:
        """Add the turns that `open` has returned."""
        self.turns += turns

    def num_branches_with(self, turns: Sequence[TurnRecord] = ()) -> int:
        """Return the number of branches when all turns, and these new ones, have their answers."""
        everything = [*self.turns, *turns]
        return len(everything) - len({id(turn.parent) for turn in everything if turn.parent is not None})

    def answer(
        self, turn: TurnRecord, ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]
    ) -> str:
        """Record the model's answer to a turn, and return its text.

        Raises: ValueError for an answer without ids, or with other numbers of log-probs or versions, and for a
        turn that has one."""
        if not len(ids) == len(log_probs) == len(versions) > 0:
            raise ValueError(
                f"an answer has {len(ids)} ids, {len(log_probs)} log-probs and {len(versions)} versions: "
                "there must be as many of each, and at least one"
            )
        if turn.sampled:
            raise ValueError(f"turn {turn.number} has an answer")
        turn.sampled, turn.log_probs, turn.versions = [*ids], [*log_probs], [*versions]
        text = self._chat.decode(ids)
        turn.messages.append({"role": "assistant", "content": text})
        self.answered.append(turn)
        return text

    def branches(self) -> list[Branch]:
        """Return one sample per conversation that no other one continues. The first one is what became of the first
        turn, by the first requests that continued it."""
        parents = {id(turn.parent) for turn in self.answered}
        leaves = [turn for turn in self.turns if turn.sampled and id(turn) not in parents]
        leaves.sort(key=lambda leaf: [turn.number for turn in leaf.path])
        trained = {id(turn) for turn in self.turns if turn.is_constrained}
        rest = {id(turn.parent): turn.messages for turn in self.turns if not turn.sampled}
        found = [_branch(leaf, trained, rest.get(id(leaf), [])) for leaf in leaves]
        return [branch for branch in found if branch is not None]


def _branch(leaf: TurnRecord, trained: set[int], rest: Sequence[Message]) -> Branch | None:
    """Return the sample that ends with a turn; None without a token to train on.

    Args:
        rest: messages after it that were not answered.
        trained: ids of the objects of the turns that earlier samples train on, or none does. The sample's own are
            added."""
    path = leaf.path
    own = [turn for turn in path if id(turn) not in trained]
    if not own:
        return None
    response: list[int] = []
    holes: list[tuple[int, int]] = []
    end = 0  # of the last token that is trained on
    for turn in path[path.index(own[0]) :]:
        if turn is not own[0]:
            response += turn.added
        if turn in own and end < len(response):
            holes.append((end, len(response)))
        response += turn.sampled
        if turn in own:
            end = len(response)
    trained.update(map(id, own))
    return Branch(
        own[0].prompt,
        response[:end],
        holes,
        [value for turn in own for value in turn.log_probs],
        [version for turn in own for version in turn.versions],
        [*leaf.conversation, *rest],
        len(path[0].messages) - 1,
    )
