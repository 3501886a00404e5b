"""The engine against transformers, on tiny random models of three families, with real vLLM.

Two programs run: run_engine.py, one engine after the other, and run_tensor_parallel.py, two jobs of two ranks
at once. The tests judge what they report. Log-probs in fp32 agree to 1e-4 (the step-0 gate's limit; 1e-5 is
seen), where any wrong weight, mask or temperature shows as 0.1 or more: the random models' log-probs spread
over several nats.

    pytest tests/rollout/test_engine.py"""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest

from megarl.rollout.engine_memory import sweep_shared_memory
from tests.launch import preloaded_python

FP32_LIMIT = 1e-4
TIMEOUT_S = 300  # 25 s on two free cores
EOS, STOP_IDS = 3, {4, 5, 6, 7, 8, 9}
HERE = Path(__file__).parent


def start(script: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [preloaded_python(), str(HERE / script), *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )


def finish(processes: dict) -> dict:
    """Key -> (process, what it wrote to stderr). None survives."""
    try:
        return {
            key: (process, process.communicate(timeout=TIMEOUT_S)[1]) for key, process in processes.items()
        }
    finally:
        for process in processes.values():
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def report(folder) -> dict:
    process, errors = finish({"one": start("run_engine.py", folder)})["one"]
    assert process.returncode == 0 and "Traceback" not in errors, errors
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def story(report) -> dict:
    return report["whole_story"]


@pytest.fixture(scope="module")
def two_jobs(folder) -> dict:
    """Job "clean" shuts down, job "crash" leaves by os._exit while its engine is up."""
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    names = ("clean", "crash")
    processes = {
        (own, rank): start("run_tensor_parallel.py", folder, rank, port, own, other)
        for own, other, port in zip(names, names[::-1], ports)
        for rank in (0, 1)
    }
    for (own, _), (process, errors) in finish(processes).items():
        assert process.returncode == (7 if own == "crash" else 0) and "Traceback" not in errors, errors
    return {key: json.loads((folder / f"{key[0]}-{key[1]}.json").read_text()) for key in processes}


# ------------------------------------------------------------------ weights


def test_log_probs_after_a_sync_are_those_of_transformers(report, story):
    assert (
        story["gap"]["T=0.7"] <= FP32_LIMIT and story["gap"]["T=1.3"] <= FP32_LIMIT
    )  # untied, q/k norms, vocabulary 150
    assert report["too_little_cache"]["gap"] <= FP32_LIMIT  # tied, biases, vocabulary 130
    assert report["stop_strings"]["gap"] <= FP32_LIMIT  # Llama, vocabulary 128
    assert story["gap_if_temperature_were_ignored"] > 0.1


def test_nothing_is_generated_before_the_first_sync(story):
    assert story["version_before"] is None and "before a sync was committed" in story["before_first_sync"]
    assert story["version"] == "7"


def test_sync_reports_the_bytes_it_writes(report, story):
    hidden, ffn, vocab, heads, groups, head = 128, 96, 150, 4, 2, 32
    layer = (
        hidden * head * (heads + 2 * groups)
        + heads * head * hidden
        + 3 * hidden * ffn
        + 2 * hidden
        + 2 * head
    )
    assert story["bytes"] == 4 * (2 * layer + 2 * vocab * hidden + hidden)
    assert report["bf16"]["bytes_per_parameter"] == 2


def test_a_sync_clears_the_prefix_cache(story):
    assert (
        story["gap_stale"] > 0.1
    )  # without it, 128 cached tokens of the old weights are used: the test can see the fault
    assert story["gap_fresh"] <= FP32_LIMIT


def test_a_failed_sync_commits_nothing_and_can_be_repeated(story):
    assert "already" in story["failed_sync"][0] and "before a sync was committed" in story["failed_sync"][1]
    assert story["works_again"] <= FP32_LIMIT


def test_bf16_engine_from_fp32_weights(report):
    """At most twice the error that transformers makes in bf16 with the same rounded weights."""
    assert report["bf16"]["engine_error"] <= 2 * report["bf16"]["transformers_error"]


# ------------------------------------------------------------------ sampling


def test_an_engine_without_a_table_has_the_same_weights(report):
    """Its loader says where they go."""
    assert max(report["without_a_table"]["gaps"]) <= FP32_LIMIT
    assert report["without_a_table"]["bytes_per_parameter"] == 4


def test_greedy_takes_the_most_likely_token(story):
    assert story["greedy_is_argmax"] and story["gap_greedy"] <= FP32_LIMIT


@pytest.mark.parametrize("noise", ["whole_story", "exact_noise"])
def test_a_sample_depends_on_its_key_and_nothing_else(report, noise):
    told = report[noise]
    assert told["alone"] and told["backwards"]
    assert told["same_with_other_keys"] <= 2  # a response may be one token long
    assert told["different_twins"] >= 35


def test_a_token_is_the_maximum_of_log_prob_and_noise_of_key_and_position(report, story):
    """By an independent computation; log-probs that differ by rounding move the maximum by no more than
    that."""
    assert story["shortfall"] <= FP32_LIMIT and report["too_little_cache"]["shortfall"] <= FP32_LIMIT
    assert sum(len(tokens) for tokens, *_ in story["sampled"]) > 100


def test_a_prefix_that_is_admitted_anew_goes_on_as_it_would_have(report, story):
    assert all(story["continued"]) and len(story["continued"]) == 6 * 16
    assert max(story["kept"][2]) == max(story["kept"][5]) == 7 and not any(story["kept"][0])
    assert story["finished_prefix"] == "prefix 0 has 24 tokens; the whole response has at most 24."
    exact = report["exact_noise"]
    assert exact["ends"] == [[tokens[-1]] for tokens, *_ in exact["sampled"][:4]]


def test_requests_enter_pause_and_leave_between_steps(story):
    assert story["stood_still"] and story["are_prefixes"] and story["unfinished_in_the_pause"] > 10
    assert story["aborted"] == 2 and story["missing"] == [] and story["same_as_generate"]
    assert story["refused_commit"] == "version 8 cannot be committed: requests are unfinished"


def test_prompts_longer_than_an_engine_step_give_the_same_samples(report, story):
    """The same tokens as from an engine that takes each prompt at once; their log-probs are sums in another
    order."""
    told = report["long_prompts"]
    assert told["tokens"] > 20 * 64 and told["gap"] <= FP32_LIMIT
    assert [tokens for tokens, *_ in told["responses"]] == [tokens for tokens, *_ in story["long"]]


def test_responses_end_with_the_token_that_stops_them(story):
    reasons = set()
    for token_ids, log_probs, _, reason, _ in story["sampled"]:
        reasons.add(reason)
        assert len(log_probs) == len(token_ids) <= 24
        assert not ({EOS} | STOP_IDS) & set(token_ids[:-1])
        assert (token_ids[-1] in {EOS} | STOP_IDS) if reason == "stop" else len(token_ids) == 24
    assert reasons == {"stop", "length"}


def test_stop_strings_stay_in_the_response(report):
    reasons = []
    for token_ids, _, _, reason, _ in report["stop_strings"]["responses"]:
        text = "".join(f"<{i}>" for i in token_ids)
        reasons.append(reason)
        if reason == "stop" and token_ids[-1] != EOS:
            last = f"<{token_ids[-1]}>"
            assert "7>" in last or "<11><" in text[: -len(last) + 1]
        before = "".join(f"<{i}>" for i in token_ids[:-1])
        assert "7>" not in before and "<11><" not in before
    for at, (token_ids, reason) in enumerate(
        report["stop_strings"]["own"]
    ):  # a stop string of every other one
        whole = report["stop_strings"]["responses"][at][0]
        end = next(
            (n for n, token in enumerate(whole, 1) if at % 2 and f"{token}>".endswith("5>")), len(whole)
        )
        assert token_ids == whole[:end] and (end == len(whole) or reason == "stop")
    assert reasons.count("stop") >= 8
    assert "short" not in report["stop_strings"]["counts"]  # text is matched token by token


def test_refusals_name_the_prompt_and_the_limit(story):
    assert story["refused"] == [
        "2 prompts, 1 keys and 2 prefixes must pair up.",
        "prompt 1 has 201 tokens; 1 to --max-prompt-length (200) are possible.",
    ]
    assert story["nothing"] == []


def test_the_trainers_random_state_survives(story):
    assert story["kept_random_state"]


# ------------------------------------------------------------------ our scheduler


def test_the_scheduler_changes_nothing(report, story):
    """Tokens, log-probs and finish reasons are those of vLLM's own, bit for bit, on most steps by the short
    way."""
    assert story["sampled"] == report["vllm_as_it_is"]["sampled"]
    assert story["counts"]["short"] >= 2 * story["counts"]["long"]
    assert report["vllm_as_it_is"]["counts"] == {}


def test_requests_that_wait_and_are_preempted_lose_nothing(report):
    counts = report["too_little_cache"]["counts"]
    assert counts["preempted"] >= 1 and counts["short"] >= 1 and counts["long"] >= 1
    for token_ids, log_probs, _, reason, _ in report["too_little_cache"]["responses"]:
        assert len(token_ids) == len(log_probs)
        assert token_ids[-1] == EOS if reason == "stop" else len(token_ids) == 24


def test_norms_are_as_exact_as_vllms_own(report):
    errors = report["norms"]["errors"]
    for dtype in ("torch.float32", "torch.bfloat16"):
        assert errors[f"{dtype} megarl_c"] <= 2 * errors[f"{dtype} native"]
    assert report["norms"]["chosen"] == {
        "32": "megarl_c",
        "40": "native",
    }  # the kernels take 16 elements at once


# ------------------------------------------------------------------ two ranks


@pytest.mark.nightly
def test_two_ranks_draw_the_same_samples_as_one(two_jobs, story):
    for result in two_jobs.values():
        assert result["gap"] <= FP32_LIMIT
        assert [tokens for tokens, _, _ in result["sampled"]] == [tokens for tokens, _, _ in story["sampled"]]


@pytest.mark.nightly
def test_a_sync_of_aliased_weights_moves_nothing(two_jobs):
    """One query group per rank: linear_qkv is vLLM's as it is. Three versions were written into the shards
    and sampled from (`gap`)."""
    assert two_jobs["clean", 0]["bytes"] == two_jobs["clean", 1]["bytes"] == [0, 0, 0]
    assert len(set(two_jobs["crash", 0]["bytes"])) == 1 and two_jobs["crash", 0]["bytes"][0] > 100_000


@pytest.mark.nightly
def test_jobs_side_by_side_use_shared_memory_of_their_own(two_jobs):
    pids = {own: two_jobs[own, 0]["pid"] for own in ("clean", "crash")}
    names = set(two_jobs["clean", 1]["shared_memory"] + two_jobs["crash", 1]["shared_memory"])
    for pid in pids.values():
        assert any(name.startswith(f"megarl-{pid}-") for name in names)
    left = [path.name for path in Path("/dev/shm").glob(f"megarl-{pids['crash']}-*")]
    assert left and not list(Path("/dev/shm").glob(f"megarl-{pids['clean']}-*"))
    assert set(left) <= set(sweep_shared_memory())  # what the next start does
    assert not list(Path("/dev/shm").glob(f"megarl-{pids['crash']}-*"))
