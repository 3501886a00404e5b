"""Samples of rows against what transformers makes of the same messages, for eleven families of chat templates: the
last answer, all answers, pairs, whole texts for a score, and prompts. Ids are compared exactly: nothing is rounded.

    pytest tests/data/test_rendering.py"""

from __future__ import annotations

import functools
import json

import pytest
import torch

from megarl.data.columns import Prompt, parse_row
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset
from megarl.data.quick_tokenizer import load_quickly
from megarl.data.rendering import difference, scored
from megarl.data.tokenizer import complete_export, load_tokenizer
from tests.data.chat_families import FAMILIES, write_tokenizer

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def says(text: str | None, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


ONE = [user("1+2 ?"), says("= 3")]
TWO = [user("1+2 ?"), says("= 3"), user("and 4 more?"), says("= 7 ")]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """loaded(family) -> megarl's tokenizer with the model's end ids, its fast double, and transformers' tokenizer."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("families")

    @functools.cache
    def load(family: str):
        path = write_tokenizer(folder / family, family)
        theirs = AutoTokenizer.from_pretrained(path)
        made = load_tokenizer(path), load_quickly(path)
        for one in made:
            one.end_ids = theirs.convert_tokens_to_ids(FAMILIES[family][2])
        return *made, theirs

    return load


def answers(tokenizer, row: Prompt, column="response", turns="last"):
    (sample,) = PromptEncoder(tokenizer, PromptDataset([row])).answers([0], column, turns)
    return sample


def row_of(messages, **more) -> Prompt:
    row, problems = parse_row({"messages": messages, **more}, "prompt", "response")
    assert problems == []
    return row


def trained_runs(sample) -> list[list[int]]:
    runs, end = [], 0
    for hole in [*sample.holes, (len(sample.response), None)]:
        runs.append(sample.response[end : hole[0]])
        end = hole[1]
    return runs


def whole_ids(theirs, messages, **arguments) -> list[int]:
    return theirs.apply_chat_template(messages, return_dict=False, **arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_what_transformers_writes(family, loaded):
    ours, quick, theirs = loaded(family)
    end = theirs.convert_tokens_to_ids(FAMILIES[family][3])
    assert ours.turn_end == end == quick.turn_end
    for messages in (ONE, TWO):
        row, whole = row_of(messages), whole_ids(theirs, messages)
        assert ours.encode_prompts([messages[:1]]) == [
            whole_ids(theirs, messages[:1], add_generation_prompt=True)
        ]
        for turns in ("last", "all"):
            one = answers(ours, row, turns=turns)
            assert one == answers(quick, row, turns=turns)
            ids = [*one.prompt, *one.response]
            told = difference(ours, row, row.response, turns)
            if family == "qwen3-thinking" and turns == "all" and messages is TWO:
                assert "the template writes it otherwise in the whole conversation" in told
                assert theirs.decode(one.prompt).endswith("<think>\n")
            elif family == "qwen3-hybrid" and turns == "all" and messages is TWO:
                assert "<think>" in told  # an empty thinking, which is not in earlier answers
            elif family == "gpt-oss" and turns == "all" and messages is TWO:
                assert "<|end|>" in told and "<|return|>" in told
            elif family == "glm4.5":  # ends with the header of what would follow
                assert told is None and ids == [*whole, end]
            elif (
                family == "qwen3-thinking"
            ):  # a line break on each side of the prompt's end is one token in the whole
                assert "encoded as one" in told and theirs.decode(whole).startswith(theirs.decode(ids))
            else:
                assert told is None and ids == whole[: len(ids)]
            rest = theirs.decode(whole[len(ids) :])
            assert rest.strip() == "" or told, "only what stands behind the end of the turn is left out"
            runs = trained_runs(one)
            assert len(runs) == (len(messages) // 2 if turns == "all" else 1)
            assert all(run[-1] == end and run.count(end) == 1 for run in runs)
            texts = [theirs.decode(run[:-1]).strip() for run in runs]
            wanted = [m["content"].strip() for m in messages if m["role"] == "assistant"][-len(runs) :]
            assert all(text.endswith(answer) for text, answer in zip(texts, wanted, strict=True))
        assert answers(ours, row, turns="score").prompt == whole
    pair, problems = parse_row(
        {"prompt": ONE[:1], "chosen": ONE[1:], "rejected": [says("= 4")]}, "prompt", "pair"
    )
    assert problems == []
    for column, text in (("chosen", "= 3"), ("rejected", "= 4")):
        assert answers(ours, pair, column) == answers(ours, row_of([ONE[0], says(text)]))
        assert answers(ours, pair, column, "score").prompt == whole_ids(theirs, [ONE[0], says(text)])


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_and_template_arguments_reach_the_template(family, loaded):
    ours, _, theirs = loaded(family)
    plain = ours.encode_prompts([ONE[:1]])
    for tools in (TOOLS, json.dumps(TOOLS)):
        row = row_of(ONE, tools=tools)
        assert PromptEncoder(ours, PromptDataset([row])).prompts([0]) != plain
        one = answers(ours, row)
        ids = [*one.prompt, *one.response][: -1 if family == "glm4.5" else None]
        text = theirs.apply_chat_template(ONE, tokenize=False, tools=TOOLS)
        assert text.startswith(theirs.decode(ids)) and "= 3" in theirs.decode(ids)
    for given in ({"enable_thinking": False}, {"thinking": True}):
        row = row_of(ONE, chat_template_kwargs=given)
        (ids,) = PromptEncoder(ours, PromptDataset([row])).prompts([0])
        assert ids == whole_ids(theirs, ONE[:1], add_generation_prompt=True, **given)


def test_generation_tags_are_transformers_mask(loaded):
    ours, _, theirs = loaded("smollm")
    masked = theirs.apply_chat_template(TWO, return_assistant_tokens_mask=True, return_dict=True)
    one = answers(ours, row_of(TWO), turns="all")
    mask = [0] * len(one.prompt) + [1] * len(one.response)
    for start, end in one.holes:
        mask[len(one.prompt) + start : len(one.prompt) + end] = [0] * (end - start)
    newline = theirs.encode("\n")
    theirs_mask = [
        int(bit and not (masked["input_ids"][at - 1 : at] == [one.response[-1]]))
        for at, bit in enumerate(masked["assistant_masks"])
    ]
    assert newline == [masked["input_ids"][-1]] and mask == theirs_mask[:-1]


THINKS = says("= 3", reasoning_content="one and two")
TOOL_CALL = says(None, tool_calls=[{"function": {"name": "add", "arguments": {"a": 1}}}])
REFUSED = {
    "thinking that the template does not write": (
        "qwen2.5",
        [ONE[0], THINKS],
        "does not write its reasoning_content",
    ),
    "calls that the template does not write": (
        "gemma3",
        [ONE[0], says("x", tool_calls=[{"a": 1}])],
        "its tool_calls",
    ),
    "a header that opens thinking, which answers lack": (
        "deepseek3.1",
        [ONE[0], says("= 3")],
        "otherwise than behind its own header",
    ),
    "no weight": ("qwen2.5", [ONE[0], says("= 3", weight=0)], "nothing is learnt"),
    "half a weight": ("qwen2.5", [ONE[0], says("= 3", weight=0.5)], "weight is 0.5, wanted 0 or 1"),
    "roles that the template refuses": ("gemma3", [ONE[0], ONE[0], says("= 3")], "roles must alternate"),
}


@pytest.mark.parametrize("family, messages, words", REFUSED.values(), ids=REFUSED)
def test_rows_that_cannot_be_trained_on_as_the_template_writes_them(family, messages, words, loaded):
    ours, _, _ = loaded(family)
    more = {"chat_template_kwargs": {"thinking": True}} if "header" in words else {}
    with pytest.raises(ValueError, match=words):
        answers(ours, row_of(messages, **more))


def test_fields_of_messages_are_trained_on_as_the_template_and_the_weight_say(loaded):
    ours, _, theirs = loaded("qwen3-hybrid")
    one = answers(ours, row_of([ONE[0], THINKS]))
    assert theirs.decode(one.response) == "<think>\none and two\n</think>\n\n= 3<|im_end|>"
    called = answers(loaded("qwen2.5")[0], row_of([ONE[0], TOOL_CALL]))
    text = theirs.decode(called.response)
    assert text.endswith("</tool_call><|im_end|>") and '"name": "add"' in text
    weighed = [ONE[0], says("no", weight=0), user("again"), says("= 3", train=True)]
    one = answers(loaded("qwen2.5")[0], row_of(weighed), turns="all")
    assert [theirs.decode(run) for run in trained_runs(one)] == ["= 3<|im_end|>"] and not one.holes


def test_texts_that_no_template_writes_end_once(loaded):
    ours, _, theirs = loaded("qwen2.5-base")
    rendered = theirs.apply_chat_template(ONE[:1], tokenize=False, add_generation_prompt=True)
    for prompt, response, end in (
        ("1+2 =", " 3", "<|endoftext|>"),
        ("1+2 =", " 3<|endoftext|>", "<|endoftext|>"),
        (rendered, "= 3", "<|im_end|>"),
        (rendered, "= 3<|im_end|>", "<|im_end|>"),
        (ONE[:1], "= 3<|im_end|>", "<|im_end|>"),
    ):
        row, problems = parse_row({"prompt": prompt, "response": response}, "prompt", "response")
        ids = answers(ours, row).response
        assert problems == [] and theirs.decode(ids).strip() == response.strip().removesuffix(end) + end


def test_the_scored_token_is_the_last_one_that_is_no_padding(loaded):
    ours, _, theirs = loaded("llama3.1")
    sample, end = answers(ours, row_of(ONE), turns="score"), ours.turn_end
    whole = [*sample.prompt, *sample.response]
    assert scored(sample, None).response == scored(sample, 0).response == whole[-1:] == [end]
    assert scored(sample, end).response == whole[-2:-1]


def test_an_export_has_the_tokenizer_that_trained_the_end_of_turns_and_the_padding(sums_data, tmp_path):
    """Of a base model whose own end of sequence is another token, and which has no padding."""
    import shutil

    from megarl.config.hf_config import ModelShape
    from megarl.config.schema import ModelConfig
    from megarl.reshard.export_folder import new_model_folder

    model, other = tmp_path / "model", write_tokenizer(tmp_path / "other", "gemma3")
    shutil.copytree(sums_data / "model", model)
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 0, "pad_token_id": None}))
    (model / "generation_config.json").write_text('{"eos_token_id": 0, "top_k": 7}')
    ids = load_quickly(other)
    for tokenizer, is_classifier in ((None, False), (other, False), (other, True)):
        config = ModelConfig(model=str(model), tokenizer_model=None if tokenizer is None else str(tokenizer))
        with new_model_folder(
            tmp_path / "hf", model, ModelShape.load(str(model)), torch.float32, tokenizer
        ) as out:
            complete_export(out, config, is_classifier)
        written = tmp_path / "hf"
        text = (tokenizer or model) / "tokenizer_config.json"
        assert (written / "tokenizer_config.json").read_text() == text.read_text()
        end = ids.turn_end if tokenizer else 1
        generation = json.loads((written / "generation_config.json").read_text())
        assert generation == {"eos_token_id": [0, end], "top_k": 7}
        pad = json.loads((written / "config.json").read_text())["pad_token_id"]
        assert pad == (ids.pad_token_id if is_classifier else None)


def test_engines_stop_at_the_end_of_turns_of_the_template():
    from megarl.algorithms import REGISTRY
    from megarl.config.schema import BatchConfig, DataConfig, ModelConfig, RunConfig, TrainConfig
    from megarl.rollout.engine_arguments import stopping_at

    config = TrainConfig(
        algorithm=REGISTRY["grpo"](),
        model=ModelConfig(model="m"),
        batch=BatchConfig(train_iters=1),
        data=DataConfig(train_data=("a",)),
        run=RunConfig(save="s"),
    )
    assert stopping_at(config, 7, (0, 7)) is config
    assert stopping_at(config, 7, (0,)).sampling.stop_token_ids == (7,)
