"""Engines whose weights change while requests run: versions of tokens, cached prefixes, steps and aborts.

    pytest tests/rollout/test_running_commits.py

run_running_commits.py runs each engine once and compares its log-probs with those of the models themselves.
In fp32 they agree to 1e-5. A token with a wrong version, or a prefix of other weights, shows as more than 1.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.launch import preloaded_python

FP32_LIMIT = 1e-5  # seen: 2.9e-6
TIMEOUT_S = 200  # 25 s on two free cores
HERE = Path(__file__).parent
KINDS = ("transformers", "transformers-process", "vllm")


def run(folder: Path, *kinds: str) -> dict[str, dict]:
    script = str(HERE / "run_running_commits.py")
    log = folder / "log"
    with log.open("w") as errors:
        done = subprocess.run(
            [preloaded_python(), script, str(folder), *kinds], stderr=errors, timeout=TIMEOUT_S
        )
    assert done.returncode == 0, log.read_text()
    return {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in kinds}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    return run(tmp_path_factory.mktemp("running"), *KINDS)


@pytest.fixture(params=KINDS)
def report(request, reports) -> dict:
    return reports[request.param]


def check_versions(report: dict) -> None:
    for running in ("keep", "recompute"):
        told = report[running]
        assert told["labels"] == [True] * 14, running
        assert told["numbers"] == {"before": 8, "after": 8, "later": 6, "if unlabelled": 8}
        assert max(told["gaps"][name] for name in ("before", "after", "later")) <= FP32_LIMIT, told
        assert told["next turn"] <= FP32_LIMIT, told
        assert told["least"] > 0.5  # the models differ enough for the limit to mean something


def check_undisturbed(report: dict) -> None:
    told = report["undisturbed"]
    assert told["looks"] > 30
    assert told["watched"] == [[True, True]] * 12
    assert told["held"] == [[True, True]] * 12
    assert told["labels"] == [True] * 12


def test_each_token_has_the_version_that_sampled_it(report):
    """`keep`: the log-probs after the commit are those of new weights over the old KV cache. `recompute`:
    those of the new weights alone. Requests that waited or came later see nothing of the old weights."""
    check_versions(report)


def test_a_look_a_stop_and_a_new_label_change_no_bit(report):
    """Tokens and log-probs are equal, bit for bit, to those of a run without them."""
    check_undisturbed(report)


def test_a_commit_refuses_unfinished_requests_by_default(report):
    assert report["refused"] == "version 99 cannot be committed: requests are unfinished"
    number, version = report["after refusal"]
    assert number == 12 and version < 99


def test_an_engine_cannot_be_held_at_a_step_that_is_past(report):
    assert "the engine cannot stand still before step" in report["past"]


def test_aborted_requests_leave_nothing_behind(report):
    assert report["aborted"] == [10, 0, 0]  # left after two were aborted, finished, tokens of KV cache lost


def check_steps_wait(report: dict) -> None:
    """A step returns before the request is finished, and one with nothing to report waits a moment."""
    told = report["steps"]
    assert told["number"] > 4
    assert told["still"] < 35 and told["cpu"] < 0.2  # steps, and CPU seconds, in 0.3 s


def check_group_shares(report: dict) -> None:
    """Four prompts of 90 tokens in blocks of 32: two blocks are shared, each has one of its own."""
    assert report["group's tokens"] == [6 * 32] * 2 and report["leaked"] == 0


def test_a_step_out_of_process_waits_a_moment_and_computes_nothing(reports):
    check_steps_wait(reports["transformers-process"])


def test_a_group_shares_its_prompt_also_beside_requests_of_an_earlier_version(reports):
    check_group_shares(reports["vllm"])


def test_a_request_may_be_aborted_in_the_step_that_ends_it(reports):
    assert reports["vllm"]["aborted within a step"] == [1, ["other"], 9]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["vllm-process", "vllm-processes"])
def test_vllm_in_processes_of_its_own(tmp_path, kind):
    """On one rank and on two."""
    report = run(tmp_path, kind)[kind]
    check_versions(report)
    check_undisturbed(report)
    check_steps_wait(report)
    check_group_shares(report)
    assert report["aborted"] == [10, 0, 0]
