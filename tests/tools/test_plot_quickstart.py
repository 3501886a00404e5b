"""tools/plot_quickstart.py draws the rows of metrics.jsonl."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

from tests.launch import succeed

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "plot_quickstart.py"


def test_svg_holds_every_curve_and_follows_the_theme(tmp_path):
    evaluated = {"eval/reward": 0.25, "eval/reward_greedy": 0.125}
    trained = [{"step": n, "reward/mean": n / 4, "response/length_mean": 8 + n} for n in (1, 2, 3)]
    rows = [{"step": 0, **evaluated}, *trained[:2], trained[2] | evaluated]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("curve.svg", "again.svg"):
        succeed(SCRIPT, tmp_path, tmp_path / name, timeout=60)
    text = (tmp_path / "curve.svg").read_text()
    assert text == (tmp_path / "again.svg").read_text()
    assert "prefers-color-scheme:dark" in text and "var(--ink)" in text
    assert len(re.findall("#57606a", text)) == 1, "ink that does not follow the theme"
    assert "answers per episode" not in text
    shown = "".join(ElementTree.fromstring(text).itertext())
    for label in ("reward, training prompts", "held-out accuracy, sampled", "held-out accuracy, greedy"):
        assert label in shown


def test_a_run_over_several_turns_shows_its_answers_per_episode(tmp_path):
    rows = [{"step": n, "response/length_mean": 8 + n, "turns/mean": 1 + n} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    succeed(SCRIPT, tmp_path, tmp_path / "curve.svg", timeout=60)
    text = (tmp_path / "curve.svg").read_text()
    assert "answers per episode" in text and "sampled tokens per episode" in text
