"""Reading prompts: real files in, checked rows out, and every kind of bad row named with its place and
column."""

import datetime
import gzip
import json
import re
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from megarl.data.columns import GSM8K_INSTRUCTION
from megarl.data.encoder import fitting
from megarl.data.prompts import Prompt, PromptDataset

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLING = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
USER = [{"role": "user", "content": "23-5-1 ?"}]
GOOD = {
    "data_source": "megarl/sums",
    "prompt": USER,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "17"},
    "extra_info": {"split": "train", "index": 0},
}

ANSWER = {"role": "assistant", "content": "#### 17"}


def write_jsonl(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def test_jsonl_in_verl_columns(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, "", GOOD | {"response": "#### 17"}])
    dataset = PromptDataset.load(path, needs="ground_truth")
    assert list(dataset) == [
        Prompt(0, "megarl/sums", tuple(USER), "17", None, {"split": "train", "index": 0}),
        Prompt(1, "megarl/sums", tuple(USER), "17", ANSWER, {"split": "train", "index": 0}),
    ]
    assert len(dataset) == 2 and dataset[-1].index == 1 and [p.index for p in dataset[:1]] == [0]


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path):
    # The second row has a field "name" that the first has not: parquet's struct fills it with null, which
    # must not show. The arguments of tool calls are structs within structs.
    other = CALL | {"function": {"name": "g", "arguments": {"y": "q", "z": [{"a": 1}, {"b": 2}]}}}
    turns = [*USER, CALLING, {"role": "tool", "content": "1"}, CALLING | {"tool_calls": [other]}, *USER]
    rows = [
        GOOD,
        GOOD | {"prompt": [{"role": "system", "content": "Be brief.", "name": "s"}, *USER]},
        GOOD | {"prompt": turns},
    ]
    parquet = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    jsonl = write_jsonl(tmp_path / "a.jsonl", rows)
    assert list(PromptDataset.load(parquet, needs="ground_truth")) == list(
        PromptDataset.load(jsonl, needs="ground_truth")
    )


def test_null_arguments_of_tool_calls_in_jsonl_stay(tmp_path):
    """Fields of a message that are null are absent, as OpenAI's clients write messages."""
    arguments = {"limit": None, "q": 1, "in": [{"x": None}]}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    row = GOOD | {"prompt": [USER[0] | {"tool_calls": None}, calling, *USER]}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    assert PromptDataset.load(path)[0].messages == (*USER, calling, *USER)


def test_several_files_are_one_dataset_with_running_indices(tmp_path):
    first, second = (
        write_jsonl(tmp_path / "a.jsonl", [GOOD] * 3),
        write_jsonl(tmp_path / "b.jsonl", [GOOD] * 2),
    )
    assert [p.index for p in PromptDataset.load([first, str(second)])] == [0, 1, 2, 3, 4]


LINES = b"".join(json.dumps(row).encode() + b"\n" for row in (GOOD, GOOD | {"data_source": "x"}))
ARRAY = b"\xef\xbb\xbf\n" + json.dumps([GOOD, GOOD | {"data_source": "x"}], indent=1).encode()


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


FORMATS = {
    "a.json": LINES,
    "b.json": ARRAY,
    "c.jsonl": ARRAY,
    "d.jsonl.gz": gzip.compress(LINES),
    "e.JSONL.GZ": gzip.compress(LINES[:99]) + gzip.compress(LINES[99:]),
    "f.json.gz": gzip.compress(ARRAY),
    "g.jsonl.zst": zstd(LINES),
    "h.json.zst": zstd(ARRAY),
}


@pytest.mark.parametrize("name", FORMATS)
def test_json_in_all_forms(name, tmp_path):
    """Line by line or as one array, with a byte order mark, compressed in one piece or several."""
    (tmp_path / name).write_bytes(FORMATS[name])
    dataset = PromptDataset.load(tmp_path / name, needs="ground_truth")
    assert [row.data_source for row in dataset] == ["megarl/sums", "x"]
    assert [row.messages for row in dataset] == [tuple(USER)] * 2
    (place,) = dataset.places([1])
    assert place in (f"{tmp_path / name}:2", f"{tmp_path / name} row 1 (from 0)")


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.jsonl.gz", gzip.compress(LINES)[:-20], "cannot be read: Truncated"),
        ("a.jsonl.zst", zstd(LINES)[:-4], "cannot be read: Truncated"),
        ("a.jsonl.gz", LINES, "cannot be read: "),
        ("a.json", ARRAY[:-2], "begins as an array, and is no JSON: "),
        ("a.json", b"[]", "is empty"),
        ("a.csv.gz", gzip.compress(LINES), "is not a *.jsonl or *.parquet file"),
    ],
)
def test_json_that_cannot_be_read(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(words)):
        PromptDataset.load(tmp_path / name)


@pytest.mark.parametrize(
    "prompt, read_as_messages",
    [
        (json.dumps(USER), True),
        ("[1, 2] and more", False),
        ('[{"role": "user", "content": ', False),
        ("[[]] 2 ?", False),
        ('[{"x": 1}] has which key?', False),
    ],
)
def test_a_prompt_that_is_json_text_of_messages(prompt, read_as_messages, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD | {"prompt": prompt}, {"messages": prompt}])
    for row in PromptDataset.load(path):
        assert row.messages == (tuple(USER) if read_as_messages else prompt)
        assert row.was_text == read_as_messages or row.index == 1


def test_prompt_key_and_string_prompts(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "1+1=", "reward_model": {"ground_truth": "2"}}])
    assert PromptDataset.load(path, prompt_key="text", needs="ground_truth")[0] == Prompt(0, "", "1+1=", "2")


def test_messages_column_ends_with_the_response(tmp_path):
    conversation = [{"role": "system", "content": "s"}, *USER, {"role": "assistant", "content": "#### 17"}]
    prompt = PromptDataset.load(
        write_jsonl(tmp_path / "a.jsonl", [{"messages": conversation}]), needs="response"
    )[0]
    assert prompt.messages == tuple(conversation[:2]) and prompt.response == ANSWER


def test_published_gsm8k_is_converted(tmp_path):
    answer = "He pays 2*617=<<2*617=1234>>1234.\n#### 1,234"
    path = write_jsonl(tmp_path / "gsm8k.jsonl", [{"question": "How much?", "answer": answer}])
    for needs in ("ground_truth", "response"):
        prompt = PromptDataset.load(path, needs=needs)[0]
        assert (prompt.data_source, prompt.ground_truth, prompt.response) == (
            "openai/gsm8k",
            "1234",
            ANSWER | {"content": answer},
        )
        assert prompt.messages == ({"role": "user", "content": f"How much? {GSM8K_INSTRUCTION}"},)


def test_text_survives_byte_for_byte(tmp_path):
    # characters at which str.splitlines would break a line
    nasty = 'a\u2028b\u0085c \U0001f600 \\n "quoted" \x0b end'
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"prompt": nasty}, ensure_ascii=False).encode() + b"\r\n")
    assert PromptDataset.load(path)[0].messages == nasty


def change(**columns):
    return {name: value for name, value in (GOOD | columns).items() if value is not None}


@pytest.mark.parametrize(
    ("row", "needs", "message"),
    [
        ('{"prompt": ', None, r"not a line of JSON .*; it begins b'\{\"prompt\": "),
        ("[1, 2]", None, "the row is a list, wanted an object"),
        (
            change(prompt=None),
            None,
            r"no column 'prompt' \(there: data_source, ability, reward_model, extra_info\), wanted "
            r"a non-empty list",
        ),
        (change(prompt=[]), None, r"column 'prompt' is \[\] \(list\)"),
        (change(prompt=""), None, r"column 'prompt' is '' \(str\)"),
        (change(prompt=7), None, r"column 'prompt' is 7 \(int\), wanted a non-empty list"),
        (change(prompt=["hi"]), None, r"column 'prompt.0' is 'hi' \(str\), wanted \{\"role\": str"),
        (
            change(prompt=[{"role": "user"}]),
            None,
            r"column 'prompt.0.content' is None \(NoneType\), wanted a string",
        ),
        (
            change(prompt=[*USER, {"role": 1, "content": ""}]),
            None,
            r"column 'prompt.1.role' is 1 \(int\), wanted a string",
        ),
        (change(reward_model=None), "ground_truth", "no column 'reward_model.ground_truth'"),
        (change(reward_model={"style": "rule"}), "ground_truth", "no column 'reward_model.ground_truth'"),
        (
            change(reward_model="17"),
            "ground_truth",
            r"column 'reward_model' is '17' \(str\), wanted an object",
        ),
        (
            change(reward_model={"ground_truth": 17}),
            "ground_truth",
            r"'reward_model.ground_truth' is 17 \(int\), wanted a string",
        ),
        (
            change(reward_model={"ground_truth": ""}),
            "ground_truth",
            r"'reward_model.ground_truth' is '' \(str\), wanted a string that",
        ),
        (change(extra_info=[1]), None, r"column 'extra_info' is \[1\] \(list\), wanted an object"),
        (change(data_source=3), None, r"column 'data_source' is 3 \(int\), wanted a string"),
        (change(), "response", "no column 'response'"),
        (change(response=["x"]), "response", r"column 'response.0' is 'x' \(str\), wanted \{\"role\""),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            "response",
            "wanted a prompt before the assistant's turn",
        ),
        ({"messages": USER}, "response", "no column 'response'"),
        (change(prompt="caf\ud83d"), None, r"column 'prompt' holds '\\ud83d', half of a character"),
        (
            change(prompt=[{**USER[0], "name": "\ud83d"}]),
            None,
            r"column 'prompt' holds '\\ud83d', half of a character",
        ),
        (change(reward_model={"ground_truth": "\udc00"}), None, "column 'reward_model.ground_truth' holds '"),
        (
            change(extra_info={"x": json.loads("[" * 65 + "]" * 65)}),
            None,
            "column 'extra_info' is nested deeper than 64 levels",
        ),
        ('{"prompt": ' + "[" * 100_000, None, r"not a line of JSON \(maximum recursion depth"),
        ({"x" * 1000: 1}, None, r"\(there: x{400}\.\.\.\), wanted a non-empty list"),
        ({"question": "q", "answer": "no marker"}, "ground_truth", "no column 'reward_model.ground_truth'"),
    ],
)
def test_bad_row_is_named(tmp_path, row, needs, message):
    path = write_jsonl(tmp_path / "bad.jsonl", [GOOD | {"response": "#### 17"}, row])
    with pytest.raises(ValueError, match=message) as error:
        PromptDataset.load(path, needs=needs)
    assert f"{path}:2: " in str(error.value) and "1 of 2 rows cannot be used" in str(error.value)
    assert str(error.value).count("column ") <= 1, "one mistake must be reported once"


def test_all_bad_rows_are_counted_and_five_shown(tmp_path):
    bad = change(reward_model=None)
    first = write_jsonl(tmp_path / "a.jsonl", [GOOD, bad, bad, GOOD])
    second = tmp_path / "b.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([change(reward_model={"style": "rule"})] * 6), second
    )
    with pytest.raises(ValueError) as error:
        PromptDataset.load([first, second], needs="ground_truth", flag="--eval-data")
    lines = str(error.value).splitlines()
    assert lines[0] == "--eval-data: 8 of 10 rows cannot be used. The first 5:" and len(lines) == 6
    counted = {
        2: ([first], "1 of the first 2 rows"),
        5: ([first], "2 of 4 rows"),
        3: ([first, second], re.escape("5 of 6 rows (at most the first 3 of a file)")),
    }
    for limit, (files, words) in counted.items():
        with pytest.raises(ValueError, match=f"{words} cannot be used"):
            PromptDataset.load(files, needs="ground_truth", first=limit)
    assert [line.split(": ")[0].strip() for line in lines[1:]] == [
        f"{first}:2",
        f"{first}:3",
        *(f"{second} row {i} (from 0)" for i in range(3)),
    ]


def test_unusable_files_are_all_named(tmp_path):
    empty, text, broken, blank = (
        tmp_path / name for name in ("empty.jsonl", "notes.txt", "broken.parquet", "blank.jsonl")
    )
    empty.write_text("")
    blank.write_text("\n\n")
    text.write_text("hello")
    broken.write_bytes(b"PAR1 nonsense")
    rowless = tmp_path / "rowless.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), rowless)
    missing = tmp_path / "missing.jsonl"
    with pytest.raises(ValueError) as error:
        PromptDataset.load([missing, empty, text, broken, blank, rowless, tmp_path])
    lines = str(error.value).splitlines()
    expected = [
        "does not exist",
        "is empty",
        "is not a *.jsonl or",
        "is not a parquet file",
        "is empty",
        "is empty",
        "is not a *.jsonl or",
    ]
    assert len(lines) == len(expected)
    for line, path, words in zip(
        lines, [missing, empty, text, broken, blank, rowless, tmp_path], expected, strict=True
    ):
        assert str(path) in line and words in line


def test_no_files_is_an_error():
    with pytest.raises(ValueError, match="--train-data names no file"):
        PromptDataset.load([])


def test_row_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin1.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + '{"prompt": "caf\u00e9"}'.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=r"latin1.jsonl:2: not a line of JSON \('utf-8' codec"):
        PromptDataset.load(path)


def test_parquet_rows_that_python_cannot_hold_are_named(tmp_path):
    path, texts = tmp_path / "a.parquet", pyarrow.array([b"a", b"\x80", b"c"], pyarrow.binary())
    day = pyarrow.array([0, 0, 2**31 - 1], pyarrow.int32()).view(pyarrow.date32())
    prompt = pyarrow.Array.from_buffers(pyarrow.string(), 3, texts.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompt, "day": day}), path)
    with pytest.raises(ValueError) as error:
        PromptDataset.load(path)
    head, second, third = str(error.value).splitlines()
    assert head == "--train-data: 2 of 3 rows cannot be used. They are:"
    assert second.startswith(
        f"  {path} row 1 (from 0): has a value that Python cannot hold: 'utf-8' codec can't decode byte 0x80"
    )
    assert third.startswith(f"  {path} row 2 (from 0): has a value that Python cannot hold: ")


def test_only_extra_info_may_hold_what_json_cannot(tmp_path):
    """A reward function gets it as it is; prompts are written down."""
    day = datetime.date(2026, 1, 2)
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": ["a"], "extra_info": [{"day": day}]}), tmp_path / "a.parquet"
    )
    assert PromptDataset.load(tmp_path / "a.parquet")[0].extra_info == {"day": day}
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": [[{"role": "user", "content": "a", "day": day}]]}), tmp_path / "b.parquet"
    )
    with pytest.raises(
        ValueError, match=r"row 0 \(from 0\): column 'prompt' holds a date, wanted what JSON can hold"
    ):
        PromptDataset.load(tmp_path / "b.parquet")


class Lengths:
    """A tokenizer of one token per character."""

    def render(self, messages, *given):
        return messages[-1]["content"]

    def encode_rendered(self, texts, are_raw):
        return [[1] * len(text) for text in texts]


def job_with(limit, flag=True):
    data = SimpleNamespace(filter_long_prompts=flag, prompt_key="prompt")
    return SimpleNamespace(data=data, sampling=SimpleNamespace(max_prompt_length=limit))


def test_long_prompts_are_left_out_as_if_they_were_not_in_the_files(tmp_path):
    """The rows, their numbers, and the sizes of the files are those of files without these rows."""
    lengths = {"a": [3, 9, 1, 8], "b": [9], "c": [2, 9, 9, 4, 1]}
    rows = {
        name: [GOOD | {"prompt": [{"role": "user", "content": "x" * size}]} for size in sizes]
        for name, sizes in lengths.items()
    }
    short = {
        name: [row for row in of_file if len(row["prompt"][0]["content"]) <= 4]
        for name, of_file in rows.items()
    }
    (tmp_path / "clean").mkdir()
    given = [write_jsonl(tmp_path / f"{name}.jsonl", of_file) for name, of_file in rows.items()]
    clean = [
        write_jsonl(tmp_path / "clean" / f"{name}.jsonl", of_file)
        for name, of_file in short.items()
        if of_file
    ]
    said = []
    dataset = fitting(PromptDataset.load(given), Lengths(), job_with(4), "--train-data", said.append)
    wanted = PromptDataset.load(clean)
    assert list(dataset) == list(wanted) and [row.index for row in dataset] == list(range(5))
    assert dataset.file_sizes == (2, 0, 3) and said == [
        "--train-data: 5 of 10 rows are left out by --filter-long-prompts"
    ]
    places = [f"{given[0]}:1", f"{given[0]}:3", f"{given[2]}:1", f"{given[2]}:4", f"{given[2]}:5"]
    assert dataset.places(range(5)) == places
    assert (
        fitting(PromptDataset.load(clean), Lengths(), job_with(4), say=said.append)[3] == wanted[3]
        and len(said) == 1
    )


@pytest.mark.parametrize("flag, limit", [(False, 8), (True, 0)])
def test_long_prompts_without_the_flag_or_with_nothing_left(flag, limit, tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl", [GOOD, GOOD | {"prompt": [{"role": "user", "content": "x" * 9}]}]
    )
    with pytest.raises(
        ValueError, match=f"--max-prompt-length .{limit}.: . of 2 rows .* or --filter-long-prompts"
    ):
        fitting(PromptDataset.load(path), Lengths(), job_with(limit, flag))
