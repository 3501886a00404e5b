"""Token ids against transformers' and SentencePiece's own, and every unusable tokenizer refused with its
path."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from megarl.data.chat_template import compile_template
from megarl.data.columns import text_of
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset
from megarl.data.sentencepiece_tokenizer import DEFAULT_CHAT_TEMPLATE
from megarl.data.tokenizer import check_vocabulary, load_tokenizer

NASTY = [
    "",
    " ",
    "#### 17",
    "a\nb\n\n c ",
    "caf\u00e9 \U0001f600 \u4f60\u597d",
    "tab\tquote\"'\\",
    " ##  . , !",
    "1234567",
    "\u2028\x00",
]
CHAT = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": " 1+1 ?\nNow! "}]
STRICT_TEMPLATE = (
    "{{ bos_token }}\n{%- if messages[0].role == 'assistant' %}{{ raise_exception('the user "
    "begins') }}{% endif %}\n"
    "{% for m in messages %}\n  {% if m.content is not string %}{% continue %}{% endif %}\n"
    "[{{ m.role | upper }}] {{ m.content | trim }}{{ eos_token }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}[ASSISTANT]{% endif %}"
)


@pytest.fixture(scope="module")
def llama_like(tmp_path_factory):
    """A tokenizer that begins every text with <s>, has an added token above the BPE's ids, and a chat
    template that writes <s> itself."""
    folder = tmp_path_factory.mktemp("llama_like")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    special = ["<unk>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["hello world"] * 9,
        trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.add_special_tokens(["<|late|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": STRICT_TEMPLATE}))
    return folder


def train_sentencepiece(path, **options):
    lines = [
        f"the cat number {i} sat on mat {i * 7 % 13} and said: hello, world? #### {i}" for i in range(400)
    ]
    with io.BytesIO() as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, minloglevel=2, **options
        )
        path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory):
    """As language models train theirs: no normalization, bytes as a fallback, digits apart."""
    options = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "split_digits": True,
    }
    options |= {"control_symbols": ["<|end|>"], "allow_whitespace_only_pieces": True, "pad_id": 3}
    path = tmp_path_factory.mktemp("sp") / "exact.model"
    return train_sentencepiece(path, model_type="bpe", vocab_size=330, **options)


# --- Hugging Face folders


def test_prompts_equal_apply_chat_template(sums_paths):
    ours, theirs = load_tokenizer(sums_paths["model"]), AutoTokenizer.from_pretrained(sums_paths["model"])
    prompts = [p.messages for p in PromptDataset.load(sums_paths["train"])][:500]
    expected = [
        theirs.apply_chat_template(list(p), add_generation_prompt=True, return_dict=False) for p in prompts
    ]
    assert ours.encode_prompts(prompts) == expected and [ours.encode_prompt(p) for p in prompts] == expected
    assert ours.encode_prompts([]) == []


def test_responses_and_decoding_equal_transformers(sums_paths):
    ours, theirs = load_tokenizer(sums_paths["model"]), AutoTokenizer.from_pretrained(sums_paths["model"])
    texts = (
        NASTY
        + [text_of(p.response) for p in PromptDataset.load(sums_paths["sft_mixed"], needs="response")][:200]
    )
    ids = ours.encode_responses(texts)
    assert (
        ids
        == [theirs.encode(text, add_special_tokens=False) for text in texts]
        == [ours.encode_response(text) for text in texts]
    )
    assert ours.decode_batch(ids) == texts == [ours.decode(row) for row in ids]
    assert ours.decode([0, *ours.encode_response("17"), 1, 4]) == "17"


def test_sums_tokenizer_has_one_token_per_digit_and_its_special_ids(sums_paths):
    tokenizer = load_tokenizer(sums_paths["model"])
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id) == (283, 1, 0)
    assert all(len(tokenizer.encode_response(str(n))) == len(str(n)) for n in (0, 7, 42, 99, 123456))
    prompt = tokenizer.encode_prompt([{"role": "user", "content": "1"}])
    assert [prompt[0], *prompt[2:]] == [3, 1, 4]  # <|user|> 1 <|end|> <|assistant|>


def test_string_prompt_begins_with_bos_once(llama_like):
    ours, theirs = load_tokenizer(llama_like), AutoTokenizer.from_pretrained(llama_like)
    assert ours.encode_prompt("hello") == theirs("hello")["input_ids"] and ours.encode_prompt("hello")[0] == 1
    assert ours.encode_prompt("<s>hello") == ours.encode_prompt("hello")
    assert ours.encode_response("hello") == ours.encode_prompt("hello")[1:]
    mixed = [CHAT, "hello", CHAT]
    assert ours.encode_prompts(mixed) == [ours.encode_prompt(prompt) for prompt in mixed]


def test_template_with_bos_and_jinja_extras_equals_transformers(llama_like):
    ours, theirs = load_tokenizer(llama_like), AutoTokenizer.from_pretrained(llama_like)
    ids = ours.encode_prompt(tuple(CHAT))
    assert ids == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ids.count(1) == 1 and ids.count(2) == 2
    with pytest.raises(
        ValueError, match=r"chat template in .* refuses the prompt .*'assistant'.*: the user begins"
    ):
        ours.encode_prompt([{"role": "assistant", "content": "hi"}])
    # an error of Python's, not of the template language
    ours.template = compile_template("{{ 'a' + messages | length }}", "it")
    with pytest.raises(ValueError, match=r"chat template in .* refuses the prompt .*: TypeError: "):
        ours.encode_prompt(CHAT)


def test_vocab_size_counts_added_tokens_and_pad_falls_back_to_eos(llama_like):
    tokenizer = load_tokenizer(llama_like)
    late = tokenizer.encode_response("<|late|>")
    assert late == [tokenizer.vocab_size - 1] and tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.decode([*late, tokenizer.vocab_size, 10**6]) == ""


def test_decoded_text_is_not_cleaned_up(tmp_path):
    # A tokenizer folder can ask for clean-up, which makes "a ." into "a."; what is judged must be what was
    # written.
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["</s>", "a", ".", "b", ","])}, unk_token="</s>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.decode([1, 2, 3, 4]) == "a. b,"
    assert load_tokenizer(tmp_path).decode([1, 2, 3, 4]) == "a . b ,"


def test_missing_chat_template_is_an_error_only_for_messages(sums_paths, tmp_path):
    shutil.copytree(sums_paths["model"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "chat_template"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_prompt("1+1") == tokenizer.encode_response("1+1")
    with pytest.raises(ValueError, match=rf"{tmp_path} has no chat template.*chat_template.jinja"):
        tokenizer.encode_prompt([{"role": "user", "content": "1+1"}])


def unusable(kind, model, folder):
    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if kind == "config only":
        (folder / "tokenizer.json").unlink(), (folder / "tokenizer_config.json").unlink()
    elif kind == "no vocabulary":
        (
            (folder / "tokenizer.json").unlink(),
            (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}'),
        )
    elif kind == "not json":
        (folder / "tokenizer.json").write_text("{")
    elif kind == "not a tokenizer":
        (folder / "tokenizer.json").write_text('{"a": 1}')
    elif kind == "no eos":
        (folder / "tokenizer_config.json").write_text(
            json.dumps({k: v for k, v in config.items() if k != "eos_token"})
        )
    return folder


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("config only", "holds no tokenizer files"),
        ("no vocabulary", "the tokenizer has no vocabulary"),
        ("not json", "transformers cannot load this tokenizer"),
        ("not a tokenizer", "transformers cannot load this tokenizer"),
        ("no eos", 'Set "eos_token"'),
    ],
)
def test_unusable_folder_is_refused(kind, words, sums_paths, tmp_path):
    folder = unusable(kind, sums_paths["model"], tmp_path)
    with pytest.raises(ValueError, match=words) as error:
        load_tokenizer(folder)
    assert f"--tokenizer-model ({folder})" in str(error.value)


def test_missing_path_and_wrong_file_are_refused(sums_paths, tmp_path):
    with pytest.raises(ValueError, match=r"--model \(Qwen/Qwen3-0.6B\) does not exist. Give a folder"):
        load_tokenizer("Qwen/Qwen3-0.6B", flag="--model")
    with pytest.raises(ValueError, match=r"is a file, but not a \*.model file"):
        load_tokenizer(os.path.join(sums_paths["model"], "tokenizer.json"))
    (tmp_path / "x.model").write_text("not a model")
    with pytest.raises(ValueError, match="is not a SentencePiece model"):
        load_tokenizer(tmp_path / "x.model")


# --- SentencePiece files


def test_sentencepiece_ids_are_its_own_and_text_survives(exact_model, caplog):
    ours, theirs = (
        load_tokenizer(exact_model),
        sentencepiece.SentencePieceProcessor(model_file=str(exact_model)),
    )
    texts = [text for text in NASTY if "\x00" not in text]
    assert ours.encode_responses(texts) == [theirs.encode(text) for text in texts]
    assert ours.decode_batch(ours.encode_responses(texts)) == texts
    assert (ours.vocab_size, ours.eos_token_id, ours.pad_token_id) == (330, 2, 3)
    assert ours.decode([1, *theirs.encode("hello"), 2, 3, 330, 10**6]) == "hello"
    assert not caplog.records


def test_sentencepiece_default_template(exact_model):
    ours, theirs = (
        load_tokenizer(exact_model),
        sentencepiece.SentencePieceProcessor(model_file=str(exact_model)),
    )
    assert ours.encode_prompt(CHAT) == [
        1,
        *theirs.encode("system: Be brief. \nuser:  1+1 ?\nNow! \nassistant:"),
    ]
    assert ours.encode_prompt("hello") == [1, *theirs.encode("hello")] == ours.encode_prompt("<s>hello")
    assert ours.encode_prompts([CHAT, "x"]) == [ours.encode_prompt(CHAT), ours.encode_prompt("x")]


@pytest.mark.parametrize("template", [STRICT_TEMPLATE, DEFAULT_CHAT_TEMPLATE])
def test_sentencepiece_with_a_template_beside_it(exact_model, tmp_path, template):
    shutil.copy(exact_model, tmp_path / "tokenizer.model")
    (tmp_path / "chat_template.jinja").write_text(template)
    ours, theirs = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_file=str(exact_model))
    variables = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    text = render_jinja_template([CHAT], chat_template=template, **variables)[0][0]
    stretches = text.removeprefix("<s>").split("</s>")
    expected = [1] + [i for n, part in enumerate(stretches) for i in ([2] if n else []) + theirs.encode(part)]
    assert ours.encode_prompt(CHAT) == expected


def test_sentencepiece_template_errors(exact_model, tmp_path):
    shutil.copy(exact_model, tmp_path / "a.model")
    (tmp_path / "chat_template.jinja").write_text(STRICT_TEMPLATE)
    with pytest.raises(ValueError, match="refuses the prompt .*: the user begins"):
        load_tokenizer(tmp_path / "a.model").encode_prompt([{"role": "assistant", "content": "hi"}])
    (tmp_path / "chat_template.jinja").write_text("{{ 'a' + messages | length }}")
    with pytest.raises(ValueError, match="refuses the prompt .*: TypeError: "):
        load_tokenizer(tmp_path / "a.model").encode_prompt(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="chat_template.jinja is not a jinja template"):
        load_tokenizer(tmp_path / "a.model")


def test_sentencepiece_without_bos_and_pad_loses_line_breaks_loudly(tmp_path, caplog):
    path = train_sentencepiece(tmp_path / "default.model", vocab_size=200, bos_id=-1)
    tokenizer = load_tokenizer(path)
    assert "default.model loses line breaks" in caplog.text
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert tokenizer.encode_prompt("hello") == theirs.encode("hello")
    assert tokenizer.encode_prompt(CHAT[:1]) == theirs.encode("system: Be brief. \nassistant:")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == theirs.eos_id()
    with pytest.raises(ValueError, match="no-eos.model\\) has no end-of-sequence piece"):
        load_tokenizer(train_sentencepiece(tmp_path / "no-eos.model", vocab_size=200, eos_id=-1))


# --- both


def test_vocabulary_must_fit_into_the_model(sums_paths):
    tokenizer = load_tokenizer(sums_paths["model"])
    check_vocabulary(tokenizer, 283, sums_paths["model"])
    check_vocabulary(tokenizer, 320, sums_paths["model"])
    with pytest.raises(
        ValueError,
        match=r"ids up to 282 \(.*model\), but the model's vocab_size is 282 \(/m/config.json\).* for 1 of",
    ):
        check_vocabulary(tokenizer, 282, "/m")


def test_encoder_gives_each_row_its_ids_in_any_order(sums_paths, exact_model):
    dataset = PromptDataset.load(sums_paths["sft_mixed"], needs="response")
    for path in (sums_paths["model"], exact_model):
        tokenizer = load_tokenizer(path)
        encoder = PromptEncoder(tokenizer, dataset)
        for rows in ([5, 3, 5], [3, 9], [], [9, 5, 0]):
            assert encoder.prompts(rows) == [tokenizer.encode_prompt(dataset[row].messages) for row in rows]
            answers = [tokenizer.encode_response(text_of(dataset[row].response)) for row in rows]
            if path is not exact_model:  # whose template writes a blank before an answer, and no end
                assert [one.response for one in encoder.answers(rows)] == [[*ids, 1] for ids in answers]


def test_long_prompts_are_found_before_training(sums_paths):
    dataset = PromptDataset.load(sums_paths["test"])
    encoder = PromptEncoder(load_tokenizer(sums_paths["model"]), dataset)
    lengths = [len(ids) for ids in encoder.prompts(range(len(dataset)))]
    encoder.check_prompt_lengths(max(lengths))
    long = [row for row, length in enumerate(lengths) if length == max(lengths)]
    with pytest.raises(
        ValueError,
        match=rf"--max-prompt-length \({max(lengths) - 1}\): {len(long)} of 200 rows of .*Try {max(lengths)}",
    ) as error:
        encoder.check_prompt_lengths(max(lengths) - 1)
    text, path = str(error.value), sums_paths["test"]
    assert f"{path}:{long[0] + 1} ({max(lengths)} tokens)" in text and f"{path}:{long[5] + 1} " not in text


def test_long_prompts_of_several_files_are_named_by_file_and_line(sums_paths, tmp_path):
    rows = Path(sums_paths["test"]).read_text().splitlines()
    short, long = tmp_path / "short.jsonl", tmp_path / "long.jsonl"
    short.write_text("\n".join(rows[:3]))
    row = json.loads(rows[0])
    row["prompt"][0]["content"] = "1+" * 60 + "1 ?"
    long.write_text("\n\n".join([rows[3], rows[4], json.dumps(row), rows[5]]))  # every second line is empty
    tokenizer = load_tokenizer(sums_paths["model"])
    for first in (None, 3):
        dataset = PromptDataset.load([short, long], first=first)
        with pytest.raises(ValueError, match="1 of [67] rows .*longer prompts: ") as error:
            PromptEncoder(tokenizer, dataset).check_prompt_lengths(60)
        assert f"prompts: {long}:5 (" in str(error.value)
        assert ("(at most the first 3 of a file)" in str(error.value)) == (first == 3)
