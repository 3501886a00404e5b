"""`megarl plot` on run folders of the product's own writer; what is drawn is read from the SVG."""

from __future__ import annotations

import math
import re

import pytest

from megarl.inspect.runs import metrics_of

STEPS = (1, 2, 3, 4)


def write_run(open_run, folder, steps=STEPS, arguments="--train-iters 4", **more):
    with open_run(folder, arguments) as run:
        for step in steps:
            run.begin_step()
            metrics = {"reward/mean": step / 10, "policy/kl": 0.1, "policy/entropy": 2.0 / step}
            run.record_step(step, metrics | more, num_tokens=10)
            run.record_evaluation(step, {"eval/reward": 0.5, "eval/reward_greedy": 0.6})
    return folder


def drawn(path) -> set[str]:
    """All texts of an SVG."""
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()))


def test_a_run_of_an_earlier_version_has_the_names_of_now(open_run, megarl, tmp_path):
    run = write_run(open_run, tmp_path / "a")
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().replace("eval/reward", "eval/accuracy"))
    assert '"eval/accuracy_greedy": 0.6' in file.read_text()
    assert megarl("plot", run, "--out", tmp_path / "a.svg")[0] == 0
    assert {"eval/reward", "eval/reward_greedy"} <= drawn(tmp_path / "a.svg")
    assert metrics_of(run)[-1]["eval/reward"] == 0.5


def test_the_default_panels_are_those_that_the_run_has(open_run, megarl, tmp_path):
    run = write_run(open_run, tmp_path / "a")
    code, out, err = megarl("plot", run, "--out", tmp_path / "a.svg")
    assert (code, out, err) == (0, f"{tmp_path / 'a.svg'}\n", "")
    texts = drawn(tmp_path / "a.svg")
    assert {"reward/mean", "policy/kl", "policy/entropy", "eval/reward", "eval/reward_greedy"} <= texts
    assert not {"policy/grad_norm", "response/length_mean", "policy/loss"} & texts
    megarl("plot", run, "--out", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_full_path_is_printed_and_whether_a_picture_was_replaced(open_run, megarl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(open_run, tmp_path / "a")
    assert megarl("plot", "a") == (0, f"{tmp_path / 'curves.png'}\n", "")
    assert megarl("plot", "a") == (0, f"{tmp_path / 'curves.png'} (replaced)\n", "")


def test_the_kl_to_the_reference_comes_before_that_of_the_update(open_run, megarl, tmp_path):
    write_run(open_run, tmp_path / "a")
    write_run(open_run, tmp_path / "b", **{"policy/ref_kl": 0.2})
    megarl("plot", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "x.svg")
    assert "policy/ref_kl" in drawn(tmp_path / "x.svg") and "policy/kl" not in drawn(tmp_path / "x.svg")


def test_several_runs_have_a_legend_and_equal_names_are_told_apart(open_run, megarl, tmp_path):
    a, b = (write_run(open_run, tmp_path / name) for name in ("a", "b"))
    other = write_run(open_run, tmp_path / "other" / "a")
    megarl("plot", a, b, "--out", tmp_path / "x.svg")
    assert {"a", "b"} <= drawn(tmp_path / "x.svg")
    megarl("plot", a, other, "--out", tmp_path / "x.svg")
    assert {str(a), str(other)} <= drawn(tmp_path / "x.svg")


def test_a_resumed_run_is_one_curve(open_run, tmp_path, monkeypatch, megarl):
    monkeypatch.chdir(tmp_path)
    write_run(open_run, tmp_path / "a", steps=range(1, 6))
    write_run(open_run, tmp_path / "b", steps=(4, 5), arguments="--load a/checkpoints/step_000003", x=1.0)
    write_run(open_run, tmp_path / "c", steps=(6, 7), arguments="--load 'b'", x=2.0)
    rows = metrics_of(tmp_path / "c")
    assert [(row["step"], row.get("x")) for row in rows] == [
        *((step, None) for step in (1, 2, 3)),
        *((step, 1.0) for step in (4, 5)),
        *((step, 2.0) for step in (6, 7)),
    ]
    monkeypatch.chdir("/")
    code, out, _ = megarl("plot", tmp_path / "c", "--out", tmp_path / "c.png")
    assert code == 0 and "c: begins at step 6" in out


def test_a_run_that_resumes_itself_has_its_own_rows(open_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(open_run, tmp_path / "a", arguments="--load a")
    assert [row["step"] for row in metrics_of(tmp_path / "a")] == list(STEPS)


def test_metrics_by_name_pattern_and_actor(open_run, megarl, tmp_path):
    run = write_run(open_run, tmp_path / "a", **{"reward_2/mean": 0.3, "time/step": 1.0})
    megarl("plot", run, "--metrics", "reward_2/mean", "policy/*", "--out", tmp_path / "x.svg")
    texts = drawn(tmp_path / "x.svg")
    assert {"reward_2/mean", "policy/kl", "policy/entropy"} <= texts and "reward/mean" not in texts
    megarl("plot", run, "--metrics", "reward/mean", "--out", tmp_path / "y.svg")
    assert "reward_2/mean" in drawn(tmp_path / "y.svg"), "no line of the second actor in the panel"


def test_values_that_are_not_finite_are_told(open_run, megarl, tmp_path):
    run = write_run(open_run, tmp_path / "a", **{"policy/grad_norm": math.inf})
    code, out, _ = megarl("plot", run, "--out", tmp_path / "a.png")
    assert code == 0 and "a: policy/grad_norm is not finite in 4 steps, first inf in step 1" in out


def test_fine_tuning_shows_its_loss(open_run, megarl, tmp_path):
    with open_run(tmp_path / "sft") as run:
        run.begin_step()
        run.record_step(1, {"policy/loss": 2.0, "policy/grad_norm": 1.0}, num_tokens=1)
    (tmp_path / "sft" / "metrics.jsonl").open("a").write('{"step": 2, "policy/l')
    assert megarl("plot", tmp_path / "sft", "--out", tmp_path / "x.svg")[0] == 0
    assert {"policy/loss", "policy/grad_norm"} <= drawn(tmp_path / "x.svg")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            ["--metrics", "rewrd/mean"],
            ["--metrics (rewrd/mean): no run has such a metric. Did you mean reward/mean?"],
        ),
        (["--out", "x.pdf"], ["--out (x.pdf): must end in .png or .svg. Try x.png."]),
        (["--out", "no/such/x.png"], ["--out (no/such/x.png): cannot be written", "a folder that exists"]),
    ],
)
def test_errors_name_flag_value_rule_and_advice(arguments, words, open_run, megarl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write_run(open_run, tmp_path / "a")
    code, out, err = megarl("plot", run, *arguments)
    assert (code, out) == (2, "") and all(word in err for word in words), err


def test_a_run_without_rows_is_refused(open_run, megarl, tmp_path):
    with open_run(tmp_path / "a"):
        code, _, err = megarl("plot", tmp_path / "a")
    assert code == 2 and "has no complete row yet" in err
