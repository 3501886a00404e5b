"""Chat templates in the format of eleven published families, and a tokenizer with their special tokens.

They are written anew from each family's published format, for these tests: headers, ends of turns, thinking, tools."""

from __future__ import annotations

import json
from pathlib import Path

CHATML_TOOLS = "{%- if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
CALLS = "{%- for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
QWEN25 = (
    CHATML_TOOLS
    + "{%- if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + CALLS
    + "{{ '<|im_end|>\n' }}{% endfor %}"
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAST_USER = (
    "{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
# Thinking is written behind the last question only, and an empty one where the last answer has none.
QWEN3 = (
    CHATML_TOOLS
    + LAST_USER
    + "{%- for m in messages %}{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' + (m.content or '').lstrip('\n') }}"
    "{%- else %}{{ m.content or '' }}{% endif %}"
    + CALLS
    + "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
)
QWEN3_HYBRID = (
    QWEN3
    + "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
QWEN3_THINKING = QWEN3 + "{{ '<think>\n' }}{% endif %}"
LLAMA31 = (
    "{{ bos_token }}{%- if tools %}<|start_header_id|>system<|end_header_id|>\n\n{% for tool in tools %}"
    "{{ tool | tojson(indent=4) }}\n\n{% endfor %}<|eot_id|>{% endif %}"
    "{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{%- if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{%- if tools %}{{ '# Tools ' + tools | tojson }}{% endif %}{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{%- else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
DEEPSEEK31 = (
    "{%- if not thinking is defined %}{% set thinking = false %}{% endif %}{{ bos_token }}"
    "{%- if tools %}{{ '## Tools ' + tools | tojson }}{% endif %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{ '<|Assistant|></think>' + (m.content or '').split('</think>')[-1] }}"
    "{%- for call in m.tool_calls or [] %}{{ '<|tool_call|>' + call.function | tojson }}{% endfor %}{{ eos_token }}"
    "{%- else %}{{ m.content }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|Assistant|>' + ('<think>' if thinking else '</think>') }}{% endif %}"
)
# Writes no end of a turn: the model ends it with the header of what comes next.
GLM45 = (
    "{{ '[gMASK]<sop>' }}{%- if tools %}{{ '<|system|>\n# Tools\n' + tools | tojson }}{% endif %}"
    + LAST_USER
    + "{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{%- if loop.index0 > ns.last and m.reasoning_content %}{{ '\n<think>' + m.reasoning_content.strip() + '</think>' }}"
    "{%- else %}{{ '\n<think></think>' }}{% endif %}{{ '\n' + m.content.strip() }}"
    "{%- else %}{{ '<|observation|>\n' + m.content }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# The last answer ends with another token than earlier ones, whose thinking is dropped.
GPT_OSS = (
    "{{ '<|start|>system<|message|>You are ChatGPT.<|end|>' }}"
    "{%- if tools %}{{ '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{% endif %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- if loop.last and m.thinking and not add_generation_prompt %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# Marks what the assistant writes, its header included.
SMOLLM = (
    CHATML_TOOLS
    + "{%- for m in messages %}{%- if m.role == 'assistant' %}{% generation %}"
    + "{{ '<|im_start|>assistant\n' + (m.content or '').lstrip('\n') }}"
    + CALLS
    + "{{ '<|im_end|>\n' }}{% endgeneration %}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FAMILIES = {
    "qwen2.5-base": (QWEN25, "<|endoftext|>", ["<|endoftext|>"], "<|im_end|>"),
    "qwen2.5": (QWEN25, "<|im_end|>", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),
    "qwen3-hybrid": (QWEN3_HYBRID, "<|im_end|>", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),
    "qwen3-thinking": (QWEN3_THINKING, "<|im_end|>", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),
    "llama3.1": (LLAMA31, "<|eot_id|>", ["<|eot_id|>"], "<|eot_id|>"),
    "gemma3": (GEMMA3, "<eos>", ["<eos>", "<end_of_turn>"], "<end_of_turn>"),
    "mistral": (MISTRAL, "</s>", ["</s>"], "</s>"),
    "deepseek3.1": (DEEPSEEK31, "<|end_of_sentence|>", ["<|end_of_sentence|>"], "<|end_of_sentence|>"),
    "glm4.5": (GLM45, "<|endoftext|>", ["<|endoftext|>", "<|user|>", "<|observation|>"], "<|user|>"),
    "gpt-oss": (GPT_OSS, "<|return|>", ["<|return|>", "<|endoftext|>"], "<|return|>"),
    "smollm": (SMOLLM, "<|im_end|>", ["<|im_end|>"], "<|im_end|>"),
}
"""Family -> template, the tokenizer's end of sequence, those of the model, and the token that ends a turn."""
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header_id|>", "<|end_header_id|>"),
    *(
        "<|eot_id|>",
        "<eos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
    ),
    *(
        "[/AVAILABLE_TOOLS]",
        "<|User|>",
        "<|Assistant|>",
        "<|end_of_sentence|>",
        "[gMASK]",
        "<sop>",
        "<|system|>",
    ),
    *("<|user|>", "<|assistant|>", "<|observation|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
    *("<|return|>", "<|tool_call|>"),
)


def write_tokenizer(folder: Path, family: str) -> Path:
    """Write a byte-level tokenizer with merges, all special tokens and a family's template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    template, eos, _, _ = FAMILIES[family]
    made = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s?[^\s]+|\s+"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the answer is system user assistant one and two\n\n"] * 9, trainer)
    thinking = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    made.add_tokens([AddedToken(token, normalized=False, special=False) for token in thinking])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": eos,
        "pad_token": "<|endoftext|>",
        "bos_token": "<|begin|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder
