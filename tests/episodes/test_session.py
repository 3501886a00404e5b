"""What is trained on is what was sampled: the tokens of a conversation are only appended to.

pytest tests/episodes/test_session.py"""

from __future__ import annotations

import random

import pytest

from megarl.episodes.chat import Chat
from megarl.episodes.session import Session
from tests.episodes.templates import ADDED, SPECIAL, TEMPLATES, WORDS, tokenizer

TEXTS = [
    *WORDS.split(" "),
    "é",
    "日本",
    "🙂",
    "\n\n",
    "  ",
    '{"a":1}',
    '{"a": "\\u00e9"}',
    "</think>",
    "<tool_call>",
]
NUM_CONVERSATIONS = 40


def chat_of(name: str) -> Chat:
    made = tokenizer(name)
    return Chat(made, [made.eos_token_id, made.encode_response("<|endoftext|>")[0]])


def random_text(rng: random.Random) -> str:
    return " ".join(rng.choices(TEXTS, k=rng.randint(0, 8)))


def sampled_ids(rng: random.Random, name: str) -> list[int]:
    """Return an answer as models write them: most end their turn, some are cut, some end otherwise, and some
    are split into other tokens than the tokenizer would make of their text."""
    made = tokenizer(name)
    ids = made.encode_response(random_text(rng))
    if rng.random() < 0.5:
        ids = [one for index in ids for one in (_split(name, index) if rng.random() < 0.3 else [index])]
    end = rng.choices([[made.eos_token_id], [], made.encode_response("<|endoftext|>")], [8, 1, 1])[0]
    return [*ids, *end] or [made.eos_token_id]


def _split(name: str, index: int) -> list[int]:
    """Return the ids of single bytes that spell a token, or the token where it is one byte or special."""
    made = tokenizer(name)._tokenizer
    pieces = made.id_to_token(index)
    return [index] if pieces in (*SPECIAL, *ADDED) else [made.token_to_id(piece) for piece in pieces]


class Conversation:
    """A session whose conversation only grows."""

    def __init__(self, chat: Chat, messages: list[dict]) -> None:
        self.session = Session(chat)
        self.append(messages)

    def append(self, messages: list[dict]) -> None:
        parent = self.session.turns[-1] if self.session.turns else None
        self.session.add(self.session.open(messages, parent))

    def answer(self, *sampled) -> str:
        return self.session.answer(self.session.turns[-1], *sampled)

    @property
    def prompt(self) -> list[int]:
        """All ids so far."""
        turn = self.session.turns[-1]
        return [*turn.prompt, *turn.sampled]

    @property
    def messages(self) -> list[dict]:
        return self.session.turns[-1].conversation


def reply(rng: random.Random) -> list[dict[str, str]]:
    role = rng.choice(["tool", "user"])
    return [{"role": role, "content": random_text(rng)} for _ in range(rng.choice([1, 1, 2]))]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_prompt_begins_with_the_last_one_and_what_was_sampled(name):
    chat, rng = chat_of(name), random.Random(name)
    for _ in range(NUM_CONVERSATIONS):
        session, answers = Conversation(chat, [{"role": "user", "content": random_text(rng)}]), []
        for _ in range(rng.randint(1, 5)):
            before, ids = session.prompt, sampled_ids(rng, name)
            log_probs, versions = [-rng.random() for _ in ids], [rng.randrange(3)] * len(ids)
            session.answer(ids, log_probs, versions)
            answers.append((ids, log_probs, versions))
            assert session.prompt == [*before, *ids]
            session.append(reply(rng))
            assert session.prompt[: len(before) + len(ids)] == [*before, *ids]
            assert len(session.prompt) > len(before) + len(ids)
        check_record(session, answers)


def check_record(conversation: Conversation, answers: list) -> None:
    """The sampled tokens of the record are those of the answers, in order, and no others."""
    inside, sampled, session = set(), [], conversation.session
    (branch,) = session.branches()
    assert [*branch.prompt, *branch.response] == conversation.prompt[: len(branch.prompt + branch.response)]
    for start, end in branch.holes:
        assert start < end and start > 0 and inside.isdisjoint(range(start, end))
        inside |= {*range(start, end)}
    sampled = [token for at, token in enumerate(branch.response) if at not in inside]
    assert sampled == [token for ids, _, _ in answers for token in ids]
    assert branch.log_probs == [value for _, log_probs, _ in answers for value in log_probs]
    assert branch.versions == [value for _, _, versions in answers for value in versions]
    assert len(branch.holes) == len(answers) - 1 == session.num_answers - 1
    assert len(branch.response) - 1 not in inside  # a sample ends with a sampled token
    texts = [one["content"] for one in branch.messages if one["role"] == "assistant"]
    assert texts == session.answers and branch.messages == conversation.messages


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "deepseek3.1", "quickstart"])
def test_where_rendering_again_does_not_break_it_gives_the_same_ids(name):
    """The model writes what the tokenizer and the template would: then both ways must agree."""
    made, chat, rng = tokenizer(name), chat_of(name), random.Random(name)
    for _ in range(NUM_CONVERSATIONS):
        session = Conversation(chat, [{"role": "user", "content": "twelve and thirty"}])
        for _ in range(4):
            text = "the result of " + " ".join(rng.choices(["adding", "twelve", "日本", "é"], k=3))
            ids = [*made.encode_response(text), made.eos_token_id]
            assert session.answer(ids, [0.0] * len(ids), [0] * len(ids)) == text
            session.append([{"role": rng.choice(["tool", "user"]), "content": f"{rng.randrange(99)}"}])
            assert session.prompt == made.encode_prompt(session.messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_again_would_change_what_was_sampled(name):
    """The counter-test: with the same answers, encoding the whole conversation anew loses sampled ids
    often."""
    made, chat, rng, num_broken, num_turns = tokenizer(name), chat_of(name), random.Random(name), 0, 0
    for _ in range(NUM_CONVERSATIONS):
        session = Conversation(chat, [{"role": "user", "content": random_text(rng)}])
        for _ in range(3):
            ids = sampled_ids(rng, name)
            before = [*session.prompt, *ids]
            session.answer(ids, [0.0] * len(ids), [0] * len(ids))
            session.append(reply(rng))
            num_turns += 1
            num_broken += made.encode_prompt(session.messages)[: len(before)] != before
    assert num_broken / num_turns > 0.2


def test_the_end_of_a_turn_that_was_sampled_is_not_repeated():
    made, chat = tokenizer("qwen2.5"), chat_of("qwen2.5")
    other_end = made.encode_response("<|endoftext|>")[0]
    texts = {}
    for last in (made.eos_token_id, other_end, made.encode_response("two")[-1]):
        before = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "two"}]
        suffix = chat.suffix(before, [{"role": "user", "content": "3"}], last)
        texts[last] = made._tokenizer.decode(suffix, skip_special_tokens=False)
    ended = "\n<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n"
    assert [*texts.values()] == [ended, ended, "<|im_end|>" + ended]


@pytest.mark.parametrize("is_base", [False, True], ids=["chat model", "base model"])
def test_a_stop_token_that_ends_no_turn_gets_the_end_from_the_template(is_base):
    """A base model's own end is another token than the template's, which is then one of --stop-token-ids."""
    made = tokenizer("qwen2.5")
    own, call = (made.encode_response(text)[0] for text in ("<|endoftext|>", "</tool_call>"))
    end = made.eos_token_id
    chat = Chat(made, [own], [end, call]) if is_base else Chat(made, [own, end], [end, call])
    before = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "two"}]
    texts = [
        made._tokenizer.decode(
            chat.suffix(before, [{"role": "tool", "content": "</tool_call>"}], last),
            skip_special_tokens=False,
        )
        for last in (end, own, call, made.encode_response("two")[-1])
    ]
    replied = "\n<|im_start|>user\n<tool_response>\n</tool_call>\n</tool_response><|im_end|>"
    ended = replied + "\n<|im_start|>assistant\n"
    assert texts == [ended, ended, "<|im_end|>" + ended, "<|im_end|>" + ended]


def test_a_reply_that_holds_the_marker_is_passed_on():
    made, chat = tokenizer("qwen2.5"), chat_of("qwen2.5")
    text = "\u241fanswer0\u241f"
    session = Conversation(chat, [{"role": "user", "content": "1"}])
    session.answer([made.eos_token_id], [-0.1], [0])
    session.append([{"role": "user", "content": text}])
    assert text in made._tokenizer.decode(session.prompt, skip_special_tokens=False)


def test_what_the_template_refuses_is_an_error():
    chat = chat_of("qwen2.5")
    session = Conversation(chat, [{"role": "user", "content": "1"}])
    with pytest.raises(ValueError, match="2 ids, 1 log-probs and 2 versions"):
        session.answer([3, 4], [-0.1], [0, 0])
    with pytest.raises(ValueError, match="0 ids"):
        session.answer([], [], [])
    session.answer([30, 31], [-0.1, -0.2], [0, 0])
    with pytest.raises(ValueError, match="turn 0 has an answer"):
        session.answer([30], [-0.1], [0])
    before = session.prompt
    with pytest.raises(ValueError, match="the chat template in .* refuses the prompt"):
        session.append([{"role": "tool", "content": None}])
    assert session.prompt == before and session.messages[-1]["role"] == "assistant"


def test_several_rounds_of_tools_under_a_template_that_counts_turns():
    """Each tool's result follows as it does after the first answer."""
    made = tokenizer("alternating")
    session = Conversation(
        Chat(made, [made.eos_token_id]),
        [{"role": "system", "content": "s"}, {"role": "user", "content": "1"}],
    )
    added = []
    for number in range(3):
        ids = [*made.encode_response("call"), made.eos_token_id]
        session.answer(ids, [-0.1] * len(ids), [0] * len(ids))
        before = len(session.prompt)
        session.append([{"role": "tool", "content": "3"}])
        added.append(made.decode(session.prompt[before:]))
    assert added == [added[0]] * 3 and "3" in added[0]


def test_a_template_that_leaves_the_answer_out_is_an_error():
    class Forgetful:
        """Renders the last message alone."""

        def render(self, messages, *given):
            return messages[-1]["content"]

    with pytest.raises(ValueError, match="leaves out the model's last answer"):
        Chat(Forgetful(), [0]).suffix(
            [{"role": "assistant", "content": "a"}], [{"role": "u", "content": "b"}], 0
        )


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_sampled_token_of_a_tree_is_trained_on_once(name):
    """Random trees: answers to one prompt, continued in any order, further conversations, and turns without
    an answer. The reference walks up from every answer by itself."""
    chat, rng = chat_of(name), random.Random(f"tree {name}")
    for _ in range(NUM_CONVERSATIONS):
        session, contexts = Session(chat), {}
        for _ in range(rng.randint(1, 7)):
            parent = rng.choice([None, *session.answered]) if session.answered else None
            count = rng.choice([1, 1, 2])
            turns = session.open(reply(rng), parent, count=count)
            num_leaves = session.num_branches_with(turns)
            session.add(turns)
            for turn in turns:
                if parent is not None:
                    context = contexts[parent.number]
                    assert turn.prompt[: len(context)] == context and len(turn.prompt) > len(context)
                ids = sampled_ids(rng, name)
                if rng.random() < 0.1 and session.answered:
                    continue  # its agent has ended
                session.answer(turn, ids, [-rng.random() for _ in ids], [rng.randrange(3)] * len(ids))
                contexts[turn.number] = [*turn.prompt, *ids]
            if len(session.answered) == len(session.turns):
                assert len(session.branches()) == num_leaves
        check_tree(session, contexts)


def check_tree(session: Session, contexts: dict[int, list[int]]) -> None:
    """The branches are the longest contexts. Over all of them each answer's ids, log-probs and versions
    appear in the mask exactly once, and at their place."""
    found: dict[tuple[int, ...], list] = {}
    branches = session.branches()
    for branch in branches:
        whole, values = [*branch.prompt, *branch.response], iter(zip(branch.log_probs, branch.versions))
        assert whole in contexts.values()
        inside = {at for start, end in branch.holes for at in range(start, end)}
        for at in range(len(branch.prompt), len(whole)):
            if at - len(branch.prompt) not in inside:
                found.setdefault((*whole[: at + 1],), []).append(next(values))
        assert next(values, None) is None
    wanted: dict[tuple[int, ...], list] = {}
    for turn in session.answered:
        for at, pair in enumerate(zip(turn.log_probs, turn.versions), 1):
            wanted.setdefault((*turn.prompt, *turn.sampled[:at]), []).append(pair)
    assert {where: sorted(pairs) for where, pairs in found.items()} == {
        where: sorted(pairs) for where, pairs in wanted.items()
    }
    parents = {turn.parent for turn in session.answered}
    assert len(branches) == sum(turn not in parents for turn in session.answered)


def test_token_ids_continue_the_longest_turn_that_they_begin_with():
    chat = chat_of("qwen2.5")
    session = Session(chat)
    for prompt, parent in (
        ([1, 2], None),
        ([1, 2, 7, 8, 3], 0),
        ([1, 2, 7, 8, 3, 7, 8, 4], 1),
        ([1, 2, 7, 8, 4], 0),
        ([1, 2, 7, 8], None),  # adds nothing to the answer
        ([2, 7], None),
    ):
        (turn,) = session.open_ids(prompt)
        assert (None if turn.parent is None else turn.parent.number) == parent, prompt
        assert turn.prompt == prompt
        session.add([turn])
        session.answer(turn, [7, 8], [-0.5, -0.5], [0, 0])
    assert [(branch.prompt, branch.response, branch.holes) for branch in session.branches()] == [
        ([1, 2], [7, 8, 3, 7, 8, 4, 7, 8], [(2, 3), (5, 6)]),
        ([1, 2, 7, 8, 4], [7, 8], []),
        ([1, 2, 7, 8], [7, 8], []),
        ([2, 7], [7, 8], []),
    ]
