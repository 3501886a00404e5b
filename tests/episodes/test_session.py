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


def reply(rng: random.Random) -> list[dict[str, str]]:
    role = rng.choice(["tool", "user"])
    return [{"role": role, "content": random_text(rng)} for _ in range(rng.choice([1, 1, 2]))]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_prompt_begins_with_the_last_one_and_what_was_sampled(name):
    chat, rng = chat_of(name), random.Random(name)
    for _ in range(NUM_CONVERSATIONS):
        session, answers = Session(chat, [{"role": "user", "content": random_text(rng)}]), []
        for _ in range(rng.randint(1, 5)):
            before, ids = session.prompt, sampled_ids(rng, name)
            assert len(before) == len(session)
            log_probs, versions = [-rng.random() for _ in ids], [rng.randrange(3)] * len(ids)
            session.answer(ids, log_probs, versions)
            answers.append((ids, log_probs, versions))
            assert session.prompt == [*before, *ids]
            session.append(reply(rng))
            assert session.prompt[: len(before) + len(ids)] == [*before, *ids]
            assert len(session.prompt) > len(before) + len(ids)
        check_record(session, answers)


def check_record(session: Session, answers: list) -> None:
    """The sampled tokens of the record are those of the answers, in order, and no others."""
    inside, sampled = set(), []
    for start, end in session.holes:
        assert start < end and start > 0 and inside.isdisjoint(range(start, end))
        inside |= {*range(start, end)}
    sampled = [token for at, token in enumerate(session.response) if at not in inside]
    assert sampled == [token for ids, _, _ in answers for token in ids]
    assert session.log_probs == [value for _, log_probs, _ in answers for value in log_probs]
    assert session.versions == [value for _, _, versions in answers for value in versions]
    assert len(session.holes) == len(answers) - 1 == session.num_answers - 1
    assert len(session.response) - 1 not in inside  # a sample ends with a sampled token
    texts = [one["content"] for one in session.messages if one["role"] == "assistant"]
    assert len(texts) == len(answers)


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "deepseek3.1", "quickstart"])
def test_where_rendering_again_does_not_break_it_gives_the_same_ids(name):
    """The model writes what the tokenizer and the template would: then both ways must agree."""
    made, chat, rng = tokenizer(name), chat_of(name), random.Random(name)
    for _ in range(NUM_CONVERSATIONS):
        session = Session(chat, [{"role": "user", "content": "twelve and thirty"}])
        for _ in range(4):
            text = "the result of " + " ".join(rng.choices(["adding", "twelve", "日本", "é"], k=3))
            ids = [*made.encode_response(text), made.eos_token_id]
            assert session.answer(ids, [0.0] * len(ids), [0] * len(ids)) == text
            session.append([{"role": rng.choice(["tool", "user"]), "content": f"{rng.randrange(99)}"}])
            assert session.prompt == made.encode_prompt(session.messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_again_would_change_what_was_sampled(name):
    """The counter-test: with the same answers, encoding the whole conversation anew loses sampled ids often."""
    made, chat, rng, num_broken, num_turns = tokenizer(name), chat_of(name), random.Random(name), 0, 0
    for _ in range(NUM_CONVERSATIONS):
        session = Session(chat, [{"role": "user", "content": random_text(rng)}])
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


def test_a_reply_that_holds_the_marker_is_passed_on():
    made, chat = tokenizer("qwen2.5"), chat_of("qwen2.5")
    text = "\u241fanswer0\u241f"
    session = Session(chat, [{"role": "user", "content": "1"}])
    session.answer([made.eos_token_id], [-0.1], [0])
    session.append([{"role": "user", "content": text}])
    assert text in made._tokenizer.decode(session.prompt, skip_special_tokens=False)


def test_what_the_template_refuses_is_an_error():
    chat = chat_of("qwen2.5")
    session = Session(chat, [{"role": "user", "content": "1"}])
    with pytest.raises(ValueError, match="once after each answer"):
        session.append([{"role": "user", "content": "2"}])
    with pytest.raises(ValueError, match="2 ids, 1 log-probs and 2 versions"):
        session.answer([3, 4], [-0.1], [0, 0])
    with pytest.raises(ValueError, match="0 ids"):
        session.answer([], [], [])
    session.answer([30, 31], [-0.1, -0.2], [0, 0])
    before = session.prompt
    with pytest.raises(ValueError, match="the chat template in .* refuses the prompt"):
        session.append([{"role": "tool", "content": None}])
    assert session.prompt == before and session.messages[-1]["role"] == "assistant"
    session.append([{"role": "tool", "content": "4"}])
    with pytest.raises(ValueError, match="once after each answer"):
        session.append([{"role": "tool", "content": "4"}])


def test_a_template_that_leaves_the_answer_out_is_an_error():
    class Forgetful:
        """Renders the last message alone."""

        def render(self, messages, tools=()):
            return messages[-1]["content"]

    with pytest.raises(ValueError, match="leaves out the model's last answer"):
        Chat(Forgetful(), [0]).suffix(
            [{"role": "assistant", "content": "a"}], [{"role": "u", "content": "b"}], 0
        )
