"""Chat templates in the manner of published ones, and a tokenizer for all of them.

They are written for these tests: turns, headers and special tokens of the families, without their prose."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

from megarl.data.quick_tokenizer import QuickTokenizer
from megarl.new.tiny_model import CHAT_TEMPLATE

_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n<tools>' }}"
    "{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}{% endif %}"
)
_CALLS = (
    "{%- for call in m.tool_calls or [] %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \''
    " + call.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}"
)
CHATML = (
    _TOOLS + "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    + _CALLS
    + "{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Drops the thinking of all answers before the last question, and writes that of later ones anew.
QWEN3 = (
    _TOOLS + "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') "
    "if '</think>' in m.content else '' %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' + content }}{% else %}{{ content }}{% endif %}"
    + _CALLS
    + "{{ '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA31 = (
    "{{ '<|begin_of_text|>' }}"
    "{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
    "{%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.tool_calls %}{%- set call = m.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "\' + call.name + \'", "parameters": \''
    " + call.arguments | tojson + '}<|eot_id|>' }}{% else %}"
    "{%- set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
DEEPSEEK31 = (
    "{{ '<|begin_of_text|>' }}{%- set ns = namespace(is_tool=false) %}"
    "{%- if tools %}{{ '## Tools' }}{% for tool in tools %}{{ '\\n' + tool.function | tojson }}{% endfor %}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}{% set ns.is_tool = false %}"
    "{%- elif m.role == 'tool' %}{{ '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' }}"
    "{%- set ns.is_tool = true %}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if not ns.is_tool %}{{ '<|Assistant|></think>' }}{% endif %}"
    "{{ m.content.split('</think>')[-1] }}"
    "{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for call in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments | tojson"
    " + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}"
    "{{ '<|end_of_sentence|>' }}{% set ns.is_tool = false %}"
    "{%- else %}{{ m.content }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|></think>' }}{% endif %}"
)
ALTERNATING = (
    "{%- set ns = namespace(turn=0) %}{%- for m in messages %}"
    "{%- if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{%- set ns.turn = ns.turn + 1 %}{%- endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Users and the assistant alternate, answers with tool calls excepted, as Mistral's templates demand."""
TEMPLATES = {
    "qwen2.5": (CHATML, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "llama3.1": (LLAMA31, "<|eot_id|>"),
    "deepseek3.1": (DEEPSEEK31, "<|end_of_sentence|>"),
    "quickstart": (CHAT_TEMPLATE, "<|end|>"),
}
"""Name -> chat template, and the token that ends a turn."""
SPECIAL = (
    "<|endoftext|>",
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    *("<|User|>", "<|Assistant|>", "<|tool_output_begin|>", "<|tool_output_end|>", "<|end_of_sentence|>"),
    *("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
    "<|python_tag|>",
)
ADDED = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
"""Tokens of their own that are part of an answer's text, as in the tokenizers of Qwen and DeepSeek."""
WORDS = (
    "the result of adding twelve and thirty is forty two, says the calculator; "
    '{"name": "add", "arguments": {"a": 12, "b": 30}} <think>\nlet me see\n</think>\n\n'
)


@functools.cache
def tokenizer(name: str) -> QuickTokenizer:
    """Return a byte-level tokenizer with merges and all special tokens, and with this chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    template, end = (TEMPLATES | {"alternating": (ALTERNATING, "<|im_end|>")})[name]
    made = Tokenizer(models.BPE())
    # line breaks are pieces of their own, as in the tokenizers of these families
    pieces = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s?[^\s]+|\s+"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=421,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([WORDS * 3, "tool_response user assistant 0123456789 " * 5], trainer)
    made.add_tokens([AddedToken(token, normalized=False, special=False) for token in ADDED])
    with tempfile.TemporaryDirectory() as folder:
        made.save(str(Path(folder) / "tokenizer.json"))
        settings = {"eos_token": end, "chat_template": template}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
        loaded = QuickTokenizer(folder, "--tokenizer-model")
        assert loaded.template is not None  # read while the folder is there
        return loaded


@functools.cache
def hugging_face(name: str):
    """Return the same tokenizer as one of transformers."""
    from transformers import PreTrainedTokenizerFast

    template, end = (TEMPLATES | {"alternating": (ALTERNATING, "<|im_end|>")})[name]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(name)._tokenizer, eos_token=end, chat_template=template
    )


PARSERS = {
    "qwen2.5": ("hermes", None),
    "qwen3": ("hermes", "deepseek_r1"),
    "llama3.1": ("llama3_json", None),
    "deepseek3.1": ("deepseek_v31", None),
}
"""Name -> vLLM's tool parser and reasoning parser."""


@functools.cache
def parser(name: str):
    """Return vLLM's parsers for the answers of a family."""
    from megarl.rollout.answer_parser import VllmAnswerParser

    return VllmAnswerParser(*PARSERS[name], hugging_face(name), [tokenizer(name).eos_token_id])
