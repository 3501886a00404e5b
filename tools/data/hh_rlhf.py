r"""Prepare HH-RLHF (Anthropic/hh-rlhf, arXiv:2204.05862): columns `chosen` and `rejected`.

    python tools/data/hh_rlhf.py helpful-base/train.jsonl harmless-base/train.jsonl --out data/hh_rlhf.jsonl

Unpack the published *.jsonl.gz first. A transcript is "\n\nHuman: ...\n\nAssistant: ..." and so on. The
prompt is the chosen transcript up to its last answer, the response is that answer. `extra_info.rejected`
is the rejected answer if it answers the same prompt, else null. Turns of one side in a row become one
message, as chat templates want. There is no ground truth: train with --reward-model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from prepare import LeftOut, Row, main, texts

ROLES = {"Human": "user", "Assistant": "assistant"}


def convert(row: Row) -> Row:
    chosen, rejected = (messages(text) for text in texts(row, "chosen", "rejected"))
    *prompt, answer = chosen
    if answer["role"] != "assistant" or not answer["content"]:
        raise LeftOut("the chosen transcript does not end with an answer")
    if not prompt or prompt[0]["role"] != "user" or not prompt[-1]["content"]:
        raise LeftOut("the transcript does not begin with a question")
    return {
        "data_source": "Anthropic/hh-rlhf",
        "prompt": prompt,
        "ability": "alignment",
        "response": answer["content"],
        "extra_info": {"rejected": rejected[-1]["content"] if rejected[:-1] == prompt else None},
    }


def messages(transcript: str) -> list[dict[str, str]]:
    """Split a transcript into messages, turns of one side in a row joined."""
    parts = re.split(r"(?:^|\n\n)(Human|Assistant):", transcript)
    if len(parts) < 3 or parts[0].strip():
        raise LeftOut("the text is no transcript of Human and Assistant")
    found: list[dict[str, str]] = []
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        if found and found[-1]["role"] == ROLES[name]:
            found[-1]["content"] = f"{found[-1]['content']}\n\n{text.strip()}".strip()
        else:
            found.append({"role": ROLES[name], "content": text.strip()})
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__, convert))
