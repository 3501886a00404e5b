"""Search a local corpus by BM25, with the package bm25s: `pip install "megarl[tools]"`.

The index is built once, into a folder beside the corpus, and mapped into memory: the processes of an
environment share its pages. The texts stay in the corpus's file."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

_NEED = 'Search needs the package bm25s: pip install "megarl[tools]", or bm25s in the Python of --env-python'
_FORM = "1"  # changes when an index of an earlier megarl must be built anew


class Search:
    """BM25 over the rows of a *.jsonl file: `Search("corpus.jsonl")("capital of France", k=3)`.

    A row has `text` (or `contents`), and maybe `title`, which is searched too. Scores are Lucene's, with k1 =
    1.5 and b = 0.75; English stop words are left out. Make one per process, at the module's top.

    Args:
        corpus: path of the file.
        index: folder of the index. Default: beside the corpus, called as the corpus with `.bm25` behind.
    Raises: ImportError without bm25s; ValueError for a corpus that cannot be read."""

    def __init__(self, corpus: str | os.PathLike[str], index: str | os.PathLike[str] | None = None) -> None:
        import numpy

        bm25s = _bm25s()
        self._path = Path(corpus)
        folder = Path(index) if index is not None else self._path.with_name(self._path.name + ".bm25")
        _build_once(self._path, folder)
        self._index = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)
        self._starts = numpy.load(folder / "starts.npy", mmap_mode="r")

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._starts)

    def find(self, query: str, k: int = 3) -> list[tuple[float, dict[str, Any]]]:
        """Return the k documents with the highest scores, best first, each with its score. Documents that
        have no word of the query are left out."""
        words = _words([query])[0]
        if not words:
            return []
        found, scores = self._index.retrieve([words], k=min(k, len(self)), show_progress=False)
        pairs = zip(scores[0].tolist(), found[0].tolist(), strict=True)
        return [(score, self._document(number)) for score, number in pairs if score > 0]

    def __call__(self, query: str, k: int = 3, max_characters: int = 1000) -> str:
        """Return the best documents as text for the model, each cut at `max_characters`."""
        found = self.find(query, k)
        if not found:
            return "nothing was found"
        shown = []
        for number, (_, row) in enumerate(found, 1):
            text = _text(row)
            text = text if len(text) <= max_characters else f"{text[:max_characters]}..."
            shown.append(f"[{number}] {row['title']}\n{text}" if row.get("title") else f"[{number}] {text}")
        return "\n\n".join(shown)

    def _document(self, number: int) -> dict[str, Any]:
        with open(self._path, "rb") as file:
            file.seek(int(self._starts[number]))
            return json.loads(file.readline())


@functools.cache
def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ImportError(_NEED) from error
    return bm25s


def _text(row: dict[str, Any]) -> str:
    return str(row["text"] if "text" in row else row["contents"])


def _words(texts: list[str]) -> list[list[str]]:
    return _bm25s().tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


def _mark(corpus: Path) -> str:
    """Return what an index must be of: the corpus as it is now, and this form."""
    found = corpus.stat()
    return f"{_FORM} {_bm25s().__version__} {found.st_size} {found.st_mtime_ns}"


def _build_once(corpus: Path, folder: Path) -> None:
    """Build the index unless it is there and of this corpus. Processes that come meanwhile wait."""
    if not corpus.is_file():
        raise ValueError(f"there is no corpus {corpus}")
    mark = folder / "mark"
    if mark.is_file() and mark.read_text() == _mark(corpus):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.is_file() and mark.read_text() == _mark(corpus):
            return
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as scratch:
            made = Path(scratch, "index")
            _build(corpus, made)
            (made / "mark").write_text(_mark(corpus))
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)


def _build(corpus: Path, folder: Path) -> None:
    import numpy

    starts, texts = [0], []
    with open(corpus, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                texts.append(f"{row.get('title') or ''} {_text(row)}")
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ValueError(
                    f'{corpus}:{number}: wanted an object with "text", and maybe "title"; {type(error).__name__}: {error}'
                ) from error
            starts.append(starts[-1] + len(line))
    if not texts:
        raise ValueError(f"the corpus {corpus} is empty")
    index = _bm25s().BM25(method="lucene", k1=1.5, b=0.75)
    index.index(_words(texts), show_progress=False)
    index.save(str(folder), show_progress=False)
    numpy.save(folder / "starts.npy", numpy.array(starts[:-1], numpy.int64))
