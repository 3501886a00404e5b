"""Note from which run --model comes, and which characters its tokenizer cannot represent.

Both are notes of `megarl check`: a model of another task is no error, but easily named by mistake."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from megarl.config.schema import TrainConfig
from megarl.data.tokenizer_base import Tokenizer
from megarl.files.checkpoints import run_of_model
from megarl.loggers.base import flags_of

_MAX_FOLDERS, _MAX_NAMED = 200, 5


def model_notes(config: TrainConfig) -> Iterator[str]:
    """Yield a note if --model is the export of a run: on which data the run trained, and which newer run
    beside it trained on the same data."""
    folder = Path(config.model.model)
    run = run_of_model(folder)
    if run is None or run == folder or config.checkpoint.load is not None:
        return
    data = _trained_on(run)
    if data is None:
        return
    algorithm, files = data
    yield (
        f"--model ({folder}): the model that the run {run} has trained with --algorithm {algorithm} on {files}"
    )
    newest = _newest_like(run, folder.name)
    if newest is not None:
        yield f"--model ({folder}): {newest} is a newer model, of a run with the same algorithm and data"


def _trained_on(run: Path) -> tuple[str, str] | None:
    """Return --algorithm and --train-data of a run; None if its resolved.args cannot be read."""
    try:
        flags = flags_of((run / "resolved.args").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    if "algorithm" not in flags or "train-data" not in flags:
        return None
    return flags["algorithm"], flags["train-data"]


def _newest_like(run: Path, export: str) -> Path | None:
    """Return the newest export of the runs beside `run` that had the same algorithm and data; None if it is
    the one of `run`."""
    try:
        own = (run / export / "config.json").stat().st_mtime
        beside = sorted(islice(run.resolve().parent.iterdir(), _MAX_FOLDERS))
    except OSError:
        return None
    newest, found = own, None
    for other in beside:
        file = other / export / "config.json"
        if other.name == run.resolve().name or not file.is_file() or _trained_on(other) != _trained_on(run):
            continue
        if file.stat().st_mtime > newest:
            newest, found = file.stat().st_mtime, run.parent / other.name / export
    return found


def lost_characters(tokenizer: Tokenizer, texts: Iterable[str]) -> list[str]:
    """Return the characters of these texts that are lost when the texts are encoded as tokens and decoded,
    most frequent first.

    Blanks, case, accents and forms of a character are not compared: tokenizers may normalise them."""
    texts = list(texts)
    back = tokenizer.decode_batch(tokenizer.encode_responses(texts))
    lost: dict[str, int] = {}
    for text, again in zip(texts, back, strict=True):
        kept = set(_plain(again))
        for character in text:
            if not character.isspace() and not kept.issuperset(_plain(character)):
                lost[character] = lost.get(character, 0) + 1
    return sorted(lost, key=lambda character: -lost[character])


def lost_note(flag: str, model_flag: str, lost: list[str]) -> str:
    """Return the note about the characters of a flag's rows that the tokenizer loses."""
    named = ", ".join(repr(character) for character in lost[:_MAX_NAMED])
    more = f" and {len(lost) - _MAX_NAMED} more" if len(lost) > _MAX_NAMED else ""
    return (
        f"{model_flag}: its tokenizer has no tokens for {named}{more} in the first rows of {flag}, so the "
        "model reads these texts without them. It may be the model of another task"
    )


def _plain(text: str) -> str:
    """Return a text without case, accents and compatibility forms."""
    parts = unicodedata.normalize("NFKD", text.casefold())
    return "".join(part for part in parts if not unicodedata.combining(part))
