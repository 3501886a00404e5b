"""The first rows, the tokenizer and the template, as a job's start finds them; the quick tokenizer against
transformers' own.

pytest tests/checks/test_preview.py"""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from megarl.algorithms import REGISTRY
from megarl.checks.job import examine
from megarl.checks.machine import Machine
from megarl.checks.preview import NUM_ROWS, preview
from megarl.config import installed
from megarl.config.loader import load_config
from megarl.data.hf_tokenizer import HFTokenizer
from megarl.data.quick_tokenizer import load_quickly
from tests.config.conftest import ROW, job, write_model  # noqa: F401

NASTY = ["", " ", "#### 17", "a\nb\n\n c ", "caf\u00e9 \U0001f600", "<|late|> x<s>", "1234567"]
CHATS = [
    ({"role": "user", "content": " 1+1 ?\nNow! "},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}),
    "plain",
    "<s>plain",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n  {% if loop.index > 9 %}{% break %}{% endif %}[{{ "
    "m.role | upper }}] {{ m | tojson }}"
    "{% generation %}{{ m.content | trim }}{% endgeneration %}{{ eos_token }}\n{% endfor %}{% if "
    "add_generation_prompt %}[A]{% endif %}"
)


@pytest.fixture(params=["sums", "bos", "template file", "named templates"])
def folder(request, sums_paths, tmp_path):
    if request.param == "sums":
        return sums_paths["model"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(
        models.BPE(
            {
                **{
                    t: i
                    for i, t in enumerate(
                        ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
                    )
                }
            },
            [],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|late|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
    }
    template = (
        [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
        if "named" in request.param
        else TEMPLATE
    )
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": "no" if "file" in request.param else template})
    )
    if "file" in request.param:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return str(tmp_path)


def test_the_quick_tokenizer_is_transformers_own(folder):
    quick, real = load_quickly(folder), HFTokenizer(folder)
    assert (quick.vocab_size, quick.eos_token_id, quick.pad_token_id) == (
        real.vocab_size,
        real.eos_token_id,
        real.pad_token_id,
    )
    assert quick.encode_prompts(CHATS) == real.encode_prompts(CHATS)
    ids = quick.encode_responses(NASTY)
    assert ids == real.encode_responses(NASTY) and quick.decode_batch(ids) == real.decode_batch(ids)


@pytest.mark.parametrize(
    ("name", "model_type", "special"),
    [
        ("Qwen2Tokenizer", None, {}),
        ("Qwen2TokenizerFast", "qwen3", {"eos_token": None}),
        ("Qwen2Tokenizer", "llama", {"pad_token": "<|im_end|>"}),
        ("Qwen2Tokenizer", "qwen3", {"pad_token": "<|im_end|>", "unk_token": None, "bos_token": "<new>"}),
        ("Qwen2Tokenizer", "mistral", {}),
        ("PreTrainedTokenizerFast", "qwen2", {}),
        ("PreTrainedTokenizerFast", "qwen3", {"pad_token": "<pad>"}),
        (None, "qwen3_moe", {}),
        (None, "llama", {}),
    ],
)
def test_special_tokens_that_transformers_adds_to_a_vocabulary(tmp_path, name, model_type, special):
    """A Qwen2Tokenizer has <|endoftext|>, whatever tokenizer.json holds."""
    vocabulary = {text: index for index, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", **special} | ({"tokenizer_class": name} if name else {})
    if config["eos_token"] is None:
        del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    quick, real = load_quickly(tmp_path), HFTokenizer(str(tmp_path))
    assert (quick.vocab_size, quick.eos_token_id, quick.pad_token_id) == (
        real.vocab_size,
        real.eos_token_id,
        real.pad_token_id,
    )
    texts = ["a b", "<|endoftext|>x<|im_end|>", "<new>", "<pad>"]
    assert quick.encode_responses(texts) == real.encode_responses(texts)


def test_folders_without_tokenizer_json_are_left_to_transformers(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    assert load_quickly(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
        load_quickly(tmp_path)


@pytest.fixture
def findings(job, tmp_path):  # noqa: F811
    """findings("--flag value", rows=[...], **keys of config.json)"""

    def find(flags="", rows=(ROW,), **keys):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))
        return preview(load_config([job, *flags.split()], REGISTRY)).errors

    return find


@pytest.fixture
def notes(job, tmp_path):  # noqa: F811
    """notes("--flag value", train rows, held-out rows)"""

    def find(flags="", train=(ROW,), held_out=()):
        for name, rows in (("train", train), ("test", held_out)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = ["--eval-data", str(tmp_path / "test.jsonl")] if held_out else []
        return preview(load_config([job, *data, *flags.split()], REGISTRY)).notes

    return find


def asking(question, answer="2"):
    return ROW | {
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": answer},
    }


def test_held_out_prompts_that_are_trained_on_are_noted(notes):
    assert notes(train=[asking("1+1?")], held_out=[asking("1+2?")]) == []
    (note,) = notes(train=[asking("1+1?"), asking("1+2?")], held_out=[asking("1+2?"), asking("1+3?")])
    assert note.startswith("--eval-data: prompts of 1 of 2 rows are also in 2 rows of --train-data,")
    rows = [asking(f"{number}+1?") for number in range(NUM_ROWS + 1)]
    (note,) = notes(train=rows, held_out=rows)
    assert note.startswith(
        "--eval-data: prompts of 64 of the first 64 rows are also in the first 64 rows of "
    )


def test_a_response_too_short_for_every_right_answer_is_noted(notes):
    short = "--max-response-length 2"
    (note,) = notes(short, [asking("1?", "123"), asking("2?", "1234")])
    assert note == (
        "--max-response-length (2): the ground truths in 2 rows of --train-data have 3 to 4 tokens, so no "
        "response can repeat the right answer. Try --max-response-length 5"
    )
    assert notes(short, [asking("1?", "123"), asking("2?", "12")]) == []
    assert notes("--max-response-length 5", [asking("1?", "123")]) == []
    assert notes(short, [asking("1?", '{"inputs": ["1 2 3"]}')]) == []  # the tests of a program
    assert notes(f"{short} --algorithm sft", [asking("1?", "123")]) == []  # samples nothing


def test_nothing_is_wrong_with_the_job(findings):
    assert findings() == [] and findings("--algorithm sft") == []


def test_rows(findings, tmp_path):
    (finding,) = findings(rows=[ROW, ROW | {"prompt": [{"role": "user"}]}])
    assert (
        finding.startswith("--train-data: 1 of 2 rows")
        and "'prompt.0.content' is None (NoneType), wanted a string" in finding
    )
    assert findings(rows=[ROW] * NUM_ROWS + [{}]) == []  # the start of the job reads on
    assert "wanted the right answer" in findings(rows=[{**ROW, "reward_model": None}])[0]
    assert (
        "no column 'response'"
        in findings("--algorithm sft", rows=[{k: v for k, v in ROW.items() if k != "response"}])[0]
    )
    responses = tmp_path / "sft.jsonl"
    responses.write_text(json.dumps(ROW | {"response": "2"}) + "\n")
    assert findings(f"--sft-data {responses}") == []
    responses.write_text(json.dumps({"prompt": "1+1 ?"}) + "\n")
    (finding,) = findings(f"--sft-data {responses}")
    assert finding.startswith("--sft-data: 1 of 1 row") and "no column 'response'" in finding
    (finding,) = findings("--max-prompt-length 4")
    assert (
        finding.startswith("--max-prompt-length (4): 1 of 1 row of --train-data have longer prompts: ")
        and "Try 7" in finding
    )
    assert findings("--max-prompt-length 7") == []
    (finding,) = findings(rows=[ROW | {"data_source": "mine"}])
    assert (
        finding.startswith("--reward (auto): no rule is known for data_source 'mine'")
        and "Bring your own with --reward-function" in finding
    )
    assert findings("--reward math", rows=[ROW | {"data_source": "mine"}]) == []
    assert (
        "Try --prompt-key question."
        in findings(
            rows=[{"data_source": "gsm8k", "question": "1+1?", "reward_model": {"ground_truth": "2"}}]
        )[0]
    )


def test_a_parquet_file(findings, job, tmp_path):  # noqa: F811
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW] * 2000), tmp_path / "rows.parquet")
    assert findings(f"--train-data {tmp_path}/rows.parquet") == []
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "x", "n": 1}]), tmp_path / "rows.parquet")
    assert (
        "Try --prompt-key text."
        in findings(f"--train-data {tmp_path}/rows.parquet --reward-function a.py:f")[0]
    )


def test_tokenizer_and_model(findings):
    # engines stop at what the template writes, and exports say so
    assert findings("--algorithm sft", eos_token_id=3) == [] == findings(eos_token_id=3)
    assert "eos_token_id (999) is not below vocab_size (283)" in findings(eos_token_id=999)[0]
    assert "the tokenizer has ids up to" in findings(vocab_size=10, eos_token_id=1)[0]


def test_templates(findings, tmp_path):
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    assert findings()[0].startswith("--train-data: the chat template in") and findings()[0].endswith("never")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% if %}")
    assert "is not a jinja template" in findings()[0]


def test_the_report(job, monkeypatch):  # noqa: F811
    config = load_config([job], REGISTRY)
    monkeypatch.setattr(installed, "pins", lambda: {"torch": "1.0"})
    report = examine(config, 2, machine=Machine(10**11))
    assert report.errors == () and any(
        line.startswith("note: torch ") and "tested with 1.0" in line for line in report.lines
    )
    assert "--train-data: prompts of 7 tokens in 1 row" in report.lines and any(
        "memory of each rank" in line for line in report.lines
    )


def test_a_group_of_one_sample_is_warned_of(job):  # noqa: F811
    """Only where samples are compared within their prompt."""

    def warnings(*flags, samples=1):
        sizes = f"--num-samples-per-prompt {samples} --num-prompts 16 --global-batch-size 16".split()
        report = examine(load_config([job, *sizes, *flags], REGISTRY), 1, machine=Machine(10**11))
        assert report.errors == ()
        return [line for line in report.warnings if "--num-samples-per-prompt" in line]

    (warning,) = warnings()
    assert warning.startswith("--num-samples-per-prompt (1): grpo compares the samples of one prompt")
    assert warnings(samples=8) == []
    assert warnings("--algorithm", "ppo") == [] and warnings("--algorithm", "sft") == []


def test_versions_are_the_pinned_ones():
    pins = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert all(f'"{library}=={installed.pins()[library]}"' in pins for library in installed.LIBRARIES)
