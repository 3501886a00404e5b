"""Search over a local corpus, against BM25 in float64, as the papers write it.

pytest tests/test_search_tool.py"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("bm25s")
from megarl.tools import Search
from megarl.tools.search import _words

TEXTS = [
    "the cat sat on the mat near another cat",
    "dogs and cats are animals; a dog barks",
    "Paris is the capital of France",
    "Berlin is the capital of Germany, and Bonn was the capital",
    "a mat is made of straw",
    "é 日本 straw",
]


def write(folder: Path, rows: list[dict]) -> Path:
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return file


@pytest.fixture
def corpus(tmp_path) -> Path:
    rows = [{"title": f"number {number}", "text": text} for number, text in enumerate(TEXTS)]
    return write(tmp_path, rows)


def reference(query: str, k1: float = 1.5, b: float = 0.75) -> dict[int, float]:
    """Scores of the documents that have a word of the query: Robertson's weights with Lucene's idf, which is
    positive.

    Lucene leaves out the constant factor k1 + 1, which changes no order."""
    documents = _words([f"number {number} {text}" for number, text in enumerate(TEXTS)])
    mean = sum(map(len, documents)) / len(documents)
    found = {}
    for number, words in enumerate(documents):
        counts, score = Counter(words), 0.0
        for word in _words([query])[0]:
            having = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            tf = counts[word]
            score += idf * tf / (tf + k1 * (1 - b + b * len(words) / mean))
        if score > 0:
            found[number] = score
    return found


@pytest.mark.parametrize("query", ["cat mat", "capital of France", "straw", "number", "日本"])
def test_scores_are_those_of_bm25(query, corpus):
    """The package keeps scores in float32, so they agree to about 1e-6."""
    search, wanted = Search(corpus), reference(query)
    found = {int(row["title"].split()[1]): score for score, row in search.find(query, k=len(TEXTS))}
    assert wanted and found == pytest.approx(wanted, rel=1e-5)
    scores = [score for score, _ in search.find(query, k=len(TEXTS))]
    assert scores == sorted(scores, reverse=True) and len(search.find(query, k=1)) == 1


def test_the_text_for_the_model(corpus):
    search = Search(corpus)
    assert search("Germany", k=2, max_characters=20) == "[1] number 3\nBerlin is the capita..."
    assert search("the of and") == search("") == search("zebra") == "nothing was found"
    assert search("é日本\ud800 ((( -- ' OR 1=1") is not None and len(search) == 6


def test_the_index_is_built_once_and_again_for_another_corpus(corpus, tmp_path):
    """Processes that begin together build one index; a changed corpus gets a new one."""
    code = f"from megarl.tools import Search; print(Search({str(corpus)!r})('France', k=1))"
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert {process.communicate(timeout=60)[0] for process in both} == {f"[1] number 2\n{TEXTS[2]}\n"}
    made = tmp_path / "corpus.jsonl.bm25" / "mark"
    first = made.stat().st_mtime_ns
    Search(corpus)
    assert made.stat().st_mtime_ns == first
    write(tmp_path, [{"contents": "Rome"}])
    assert Search(corpus)("Rome France") == "[1] Rome" and made.stat().st_mtime_ns != first
    assert Search(corpus, tmp_path / "elsewhere")("Rome") == "[1] Rome"
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix not in (".lock", ".jsonl")) == [
        "corpus.jsonl.bm25",
        "elsewhere",
    ]


@pytest.mark.parametrize(
    "lines, says",
    [
        ("", "is empty"),
        ('{"text": "a"}\n{"txt": "b"}\n', 'corpus.jsonl:2: wanted an object with "text"'),
        ("[1]", ":1"),
    ],
)
def test_a_bad_corpus_is_named(lines, says, tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text(lines)
    with pytest.raises(ValueError, match=says):
        Search(file)
    with pytest.raises(ValueError, match="there is no corpus"):
        Search(tmp_path / "none.jsonl")
