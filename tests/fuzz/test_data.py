"""Whatever stands in data files: prompts that can be encoded, sent and recorded, or a ValueError that names
the file and the row; and whatever prompts and templates say: token ids, or a ValueError that names the
template.

pytest tests/fuzz/test_data.py"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as st

from megarl.data.columns import parse_row
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset
from megarl.data.rendering import parts_of
from megarl.data.tokenizer import load_tokenizer
from megarl.data.tokenizer_base import Tokenizer
from megarl.rewards.judge_prompt import JudgePrompt
from sums.model import write_model_folder
from tests.fuzz.cases import fuzz, may_refuse
from tests.fuzz.templates import TEMPLATES

COLUMNS = [
    "prompt",
    "messages",
    "question",
    "answer",
    "response",
    "reward_model",
    "data_source",
    "extra_info",
    "other",
]
strings = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(codec=None), max_size=6),
    st.sampled_from(
        [
            "",
            "#### 1,234",
            "user",
            "assistant",
            "system",
            "tool",
            "\ud800",
            "\x00",
            "<|end|>",
            "<|user|>",
            "</think>",
            "{{ 1 }}",
            "\u2028",
            "x" * 3000,
        ]
    ),
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), strings, st.just(10**4000), st.just(-(2**63) - 1)
)
json_values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=8,
)
roles = st.sampled_from(["user", "assistant", "system", "tool", "User", ""]) | strings
messages = st.lists(
    st.fixed_dictionaries(
        {"role": roles, "content": strings | json_values},
        optional={
            "name": strings,
            "tool_calls": json_values,
            "reasoning_content": json_values,
            "tool_call_id": json_values,
        },
    )
    | json_values,
    max_size=4,
)
good_messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": strings}, optional={"tool_calls": json_values}),
    min_size=1,
    max_size=4,
)
rows = st.one_of(
    st.dictionaries(st.sampled_from(COLUMNS), json_values, max_size=6),
    st.fixed_dictionaries(
        {"prompt": strings | messages | good_messages},
        optional={
            "data_source": strings,
            "reward_model": st.fixed_dictionaries({"ground_truth": json_values}),
            "extra_info": json_values,
            "response": strings,
        },
    ),
    st.fixed_dictionaries({"messages": messages | good_messages}),
    st.fixed_dictionaries({"question": strings, "answer": strings}),
    json_values,
)


lines = st.one_of(
    rows.map(lambda row: json.dumps(row).encode()),
    rows.map(lambda row: json.dumps(row, ensure_ascii=False).encode(errors="surrogatepass")),
    st.binary(max_size=40),
    st.text(max_size=20).map(lambda text: text.encode(errors="replace")),
    st.sampled_from(
        [
            b"",
            b"\xef\xbb\xbf{}",
            "{}".encode("utf-16"),
            b"[" * 100_000,
            b'{"prompt":' * 5000 + b"1" + b"}" * 5000,
            b"9" * 5000,
            b"NaN",
            b"null",
            b'{"prompt": "a", "prompt": "b"}',
            b'{"extra_info": ' + b"[" * 500 + b"]" * 500 + b', "prompt": "a"}',
            b'{"prompt": [{"role": "user", "content": "x", "a": ' + b"[" * 900 + b"]" * 900 + b"}]}",
        ]
    ),
)
needs = st.sampled_from([None, "ground_truth", "response"])


def use(dataset: PromptDataset) -> None:
    """What training does with prompts besides encoding them: sends them to other processes and writes them
    down."""
    assert len(dataset) > 0
    for prompt in dataset:
        record = {
            "prompt": prompt.messages,
            "ground_truth": prompt.ground_truth,
            "response": prompt.response,
            "data_source": prompt.data_source,
        }
        assert json.loads(json.dumps(record, ensure_ascii=False).encode()) is not None
        assert pickle.loads(pickle.dumps(prompt)).index == prompt.index


@fuzz(
    st.lists(lines, max_size=4),
    st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n"]),
    needs,
    st.sampled_from(["prompt", "messages", "other", ""]),
)
def test_jsonl(folder: Path, drawn: list[bytes], end: bytes, need: str | None, prompt_key: str) -> None:
    path = folder / "train.jsonl"
    path.write_bytes(end.join(drawn))
    with may_refuse(ValueError, naming=f"--train-data: {path}" if not drawn else "--train-data"):
        use(PromptDataset.load(path, prompt_key, need))


@fuzz(rows, needs, st.sampled_from(["prompt", "messages", "question"]))
def test_rows(folder: Path, row: object, need: str | None, prompt_key: str) -> None:
    """Straight from Python, so what no file can hold is there too."""
    if isinstance(row, dict):
        parsed, problems = parse_row(row, prompt_key, need)
        assert problems or parsed.messages
        assert all("column" in problem and len(problem) < 2000 for problem in problems)


types = st.recursive(
    st.sampled_from(
        [
            pyarrow.string(),
            pyarrow.large_string(),
            pyarrow.binary(),
            pyarrow.int64(),
            pyarrow.uint8(),
            pyarrow.float64(),
            pyarrow.float16(),
            pyarrow.bool_(),
            pyarrow.timestamp("ns"),
            pyarrow.timestamp("us", "UTC"),
            pyarrow.date32(),
            pyarrow.duration("ns"),
            pyarrow.time64("ns"),
            pyarrow.decimal128(20, 3),
            pyarrow.null(),
            pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]),
            pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
        ]
    ),
    lambda inner: st.one_of(
        inner.map(pyarrow.list_),
        inner.map(
            lambda of: pyarrow.struct([("ground_truth", of), ("role", pyarrow.string()), ("content", of)])
        ),
        inner.map(lambda of: pyarrow.map_(pyarrow.string(), of)),
    ),
    max_leaves=3,
)


def array_of(kind: pyarrow.DataType, length: int, data: bytes) -> pyarrow.Array:
    """Any bytes as values of a type: strings that are no UTF-8 and times that no calendar has."""
    if pyarrow.types.is_struct(kind):
        parts = [array_of(kind.field(i).type, length, data) for i in range(kind.num_fields)]
        return pyarrow.StructArray.from_arrays(parts, fields=[kind.field(i) for i in range(kind.num_fields)])
    if pyarrow.types.is_map(kind):
        offsets = pyarrow.array(range(length + 1), pyarrow.int32())
        return pyarrow.MapArray.from_arrays(
            offsets, array_of(pyarrow.string(), length, b"k"), array_of(kind.item_type, length, data)
        )
    if pyarrow.types.is_list(kind):
        return pyarrow.ListArray.from_arrays(
            pyarrow.array(range(length + 1), pyarrow.int32()), array_of(kind.value_type, length, data)
        )
    if pyarrow.types.is_dictionary(kind):
        return pyarrow.DictionaryArray.from_arrays(
            pyarrow.array([0] * length, pyarrow.int8()), array_of(kind.value_type, 1, data)
        )
    if pyarrow.types.is_null(kind):
        return pyarrow.nulls(length)
    if pyarrow.types.is_binary(kind) or pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        binary = pyarrow.array(
            [data] * length, pyarrow.large_binary() if kind == pyarrow.large_string() else pyarrow.binary()
        )
        return pyarrow.Array.from_buffers(kind, length, binary.buffers())
    return pyarrow.Array.from_buffers(
        kind,
        length,
        [
            None,
            pyarrow.py_buffer(
                (data * (16 * length + 16))[: 16 * length + 16] if data else bytes(16 * length + 16)
            ),
        ],
    )


columns = st.dictionaries(st.sampled_from(COLUMNS), types, min_size=1, max_size=4)
contents = st.binary(min_size=1, max_size=8) | st.text(min_size=1, max_size=8).map(
    lambda text: text.encode(errors="replace")
)


@fuzz(
    columns,
    contents,
    st.integers(0, 3),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    st.floats(0, 1),
    st.booleans(),
    needs,
)
def test_parquet(
    folder: Path,
    kinds: dict,
    data: bytes,
    num_rows: int,
    damage: list,
    cut: float,
    whole: bool,
    need: str | None,
) -> None:
    """Sound files of any columns, and damaged ones."""
    path = folder / "train.parquet"
    table = pyarrow.table({name: array_of(kind, num_rows, data) for name, kind in kinds.items()})
    try:
        pyarrow.parquet.write_table(table, path)
    except (pyarrow.ArrowException, ValueError):  # the values that were drawn cannot be written
        return
    content = bytearray(path.read_bytes())
    for at, byte in [] if whole else damage:
        content[int(at * (len(content) - 1))] = byte
    path.write_bytes(content if whole else content[: int(cut * len(content)) or None])
    with may_refuse(ValueError, naming=f"{path}"):
        use(PromptDataset.load(path, "prompt", need))


@pytest.fixture(scope="module", autouse=True)
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By template: the sums model's tokenizer with each of them, and with its own."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_model_folder(str(folder), seed=0)
    LOADED["own"] = load_tokenizer(folder)
    for name, template in TEMPLATES.items():
        LOADED[name] = load_tokenizer(folder)
        LOADED[name].hugging_face.chat_template = template


LOADED: dict[str, Tokenizer] = {}


@fuzz(st.lists(rows, min_size=1, max_size=3), st.sampled_from(["own", *TEMPLATES]), st.booleans(), quick=20)
def test_chat_templates(folder: Path, drawn: list[object], template: str, responses: bool) -> None:
    """Ids are those of the vocabulary; what a judge or classifier is shown can be made of every prompt that
    passes."""
    path, tokenizer = folder / "train.jsonl", LOADED[template]
    path.write_bytes("\n".join(map(json.dumps, drawn)).encode())
    with may_refuse(ValueError, naming="--train-data"):
        dataset = PromptDataset.load(path, needs="response" if responses else None)
    if "dataset" not in locals():
        return
    judge = JudgePrompt.load(None, "(1)", (0, 1))
    for prompt in dataset:
        assert judge.fill(prompt.messages, "a", prompt.ground_truth)
    encoder = PromptEncoder(tokenizer, dataset)
    with may_refuse(ValueError, naming="template"):
        for ids in encoder.prompts(range(len(dataset))):
            assert all(0 <= token < tokenizer.vocab_size for token in ids)
            assert isinstance(tokenizer.decode(ids), str)
        for prompt in dataset:
            parts_of(tokenizer, prompt, {"role": "assistant", "content": "a"}, "score")
    for turns in ("last", "all") if responses else ():
        with may_refuse(ValueError, naming="--train-data"):
            for sample in encoder.answers(range(len(dataset)), turns=turns):
                assert sample.num_trained > 0
