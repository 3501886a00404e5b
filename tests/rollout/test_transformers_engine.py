"""The transformers engine alone: log-probs against transformers' own forward pass, draws against their
definition, and requests that are paused, aborted, or run while the weights change.

pytest tests/rollout/test_transformers_engine.py

Nothing here imports vLLM. tests/e2e/test_grpo_job.py compares whole jobs of both backends, and
test_backends.py their tokens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from megarl import cli
from megarl.config.hf_config import ModelShape
from megarl.config.hf_families import FAMILIES
from megarl.config.schema import StreamingConfig
from megarl.reshard.atlas import hf_atlas
from megarl.reshard.hf_weights import load_hf
from megarl.messages import encode
from megarl.rollout import engine_process, patience
from megarl.rollout.draws import draw_key
from megarl.rollout.engine import Response
from megarl.rollout.engine_process import RemoteEngine
from megarl.rollout.offer import Offer
from megarl.rollout.out_of_process import OutOfProcessEngine
from megarl.rollout.processes import EngineDied, EngineHangs
from megarl.rollout.requests import Output, Request
from megarl.rollout.transformers_engine import EngineOptions, TransformersEngine
from tests.launch import preloaded_python
from tests.rollout import jobs

FP32_LIMIT = 1e-5  # seen: 2.4e-6; a wrong weight or mask is above 0.1
KEYS = [draw_key(7, "train", visit, index) for visit in range(8) for index in range(2)]
LENGTH = 24


def options(folder: Path, **changes: object) -> EngineOptions:
    fields = {"num_rows": 32, "max_length": 64, "tokens_per_step": 8192, "stop": (), "stop_token_ids": ()}
    fields |= {"rank": 0, "folder": str(folder), "dtype": "float32", "tokenizer": str(folder)} | changes
    return EngineOptions(**fields)


def load(engine: TransformersEngine, folder: Path, version: int = 0, **how: str) -> None:
    """Write the weights of a folder into the engine, and commit them."""
    shape = ModelShape.load(folder)
    engine.write_weights(lambda: load_hf(folder, engine.atlases[0], engine.tensors[0], shape))
    engine.commit(version, **how)


def requests(asked: list[list[int]], keys: list[int] = KEYS, **how: object) -> list[Request]:
    how = {"max_tokens": LENGTH, "temperature": 1.3} | how
    return [
        Request(str(number), prompt, key, **how)
        for number, (prompt, key) in enumerate(zip(asked, keys, strict=False))
    ]


def finish(engine: TransformersEngine) -> dict[str, Output]:
    outputs = {}
    while engine.has_unfinished():
        engine.step()
        outputs |= {output.id: output for output in engine.take()}
    return outputs


def run(engine: TransformersEngine, wanted: list[Request]) -> list[Output]:
    engine.add(wanted)
    outputs = finish(engine)
    return [outputs[request.id] for request in wanted]


def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def write_model(folder: Path, family: str, seed: int) -> Path:
    """A random model of the family whose log-probs spread over several nats."""
    arguments = ["--out", folder, "--family", family, "--hidden", 64, "--seed", seed]
    assert cli.main(["tiny-model", *map(str, arguments)]) == 0
    model = reference(folder)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.1, generator=generator)
        else:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, Path]:
    """Two models of the same Qwen3."""
    return {seed: write_model(tmp_path_factory.mktemp("model"), "qwen3", seed) for seed in (1, 2)}


@pytest.fixture(scope="module")
def models(folders) -> dict[int, PreTrainedModel]:
    return {seed: reference(folder) for seed, folder in folders.items()}


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return jobs.prompts(16, 200)


@pytest.fixture
def engine(folders) -> TransformersEngine:
    made = TransformersEngine(options(folders[1]))
    load(made, folders[1])
    return made


# ------------------------------------------------------------------ log-probs and draws


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers(family, tmp_path):
    """More requests than rows, so that requests enter while others run and rows are moved."""
    folder = write_model(tmp_path / "model", family, 3)
    engine, model = TransformersEngine(options(folder, num_rows=5)), reference(folder)
    load(engine, folder)
    asked = jobs.prompts(12, 200)
    outputs = run(engine, requests(asked))
    assert jobs.largest_gap(model, asked, outputs, 1.3) <= FP32_LIMIT
    assert sum(len(output.token_ids) for output in outputs) > 100
    assert jobs.largest_shortfall(model, asked[:2], KEYS[:2], outputs[:2], 1.3) <= FP32_LIMIT


def test_windows_shorter_than_a_sequence(tmp_path):
    """Mistral's in every layer, Gemma 3's in every other."""
    for name in ("mistral", "gemma3"):
        model = jobs.reference_model(name, 3, std=0.08)
        model.save_pretrained(tmp_path / name)
        engine = TransformersEngine(options(tmp_path / name))
        load(engine, tmp_path / name)
        asked = jobs.prompts(8, 140, length=(5, 30))
        outputs = run(engine, requests(asked))
        assert jobs.largest_gap(model, asked, outputs, 1.3) <= FP32_LIMIT
        assert max(len(p) + len(o.token_ids) for p, o in zip(asked, outputs, strict=True)) > 3 * 8


def test_a_sample_depends_on_its_key_and_nothing_else(engine, folders, asked):
    sampled = run(engine, requests(asked))
    alone = [run(engine, [request])[0] for request in requests(asked)[:4]]
    assert [o.token_ids for o in alone] == [o.token_ids for o in sampled[:4]]
    narrow = TransformersEngine(options(folders[1], num_rows=3, tokens_per_step=30))
    load(narrow, folders[1])
    assert [o.token_ids for o in run(narrow, requests(asked))] == [o.token_ids for o in sampled]
    others = run(engine, requests(asked, [key + 1 for key in KEYS]))
    assert sum(a.token_ids == b.token_ids for a, b in zip(others, sampled, strict=True)) <= 1


def test_greedy_takes_the_most_likely_token_also_beside_drawn_ones(engine, models, asked):
    mixed = [*requests(asked[:4], temperature=0.0), *requests(asked)[4:]]
    outputs = run(engine, mixed)
    for prompt, output in zip(asked[:4], outputs, strict=False):
        expected = jobs.log_probs(models[1], prompt, output.token_ids)
        assert output.token_ids == expected.argmax(-1).tolist()
    assert jobs.largest_gap(models[1], asked[:4], outputs[:4]) <= FP32_LIMIT
    assert jobs.largest_gap(models[1], asked[4:], outputs[4:], 1.3) <= FP32_LIMIT


def test_top_k_and_top_p_renormalize_what_they_keep(engine, models, asked):
    outputs = run(engine, requests(asked, top_k=5, top_p=0.8))
    for prompt, output in zip(asked, outputs, strict=True):
        everything = jobs.log_probs(models[1], prompt, output.token_ids, 1.3).exp()
        for row, token, log_prob in zip(everything, output.token_ids, output.log_probs, strict=True):
            best = row.topk(5).values
            kept = best / best.sum()
            kept = kept[: int((kept.cumsum(0) - kept < 0.8).sum())]
            wanted = row[token] / best.sum() / kept.sum()
            assert row[token] >= best[len(kept) - 1] - 1e-6
            assert log_prob == pytest.approx(wanted.log().item(), abs=1e-4)


def test_a_response_continues_after_a_prefix_as_it_would_have(engine, asked):
    whole = run(engine, requests(asked))
    kept = [output.token_ids[:3] for output in whole if len(output.token_ids) > 3]
    chosen = [number for number, output in enumerate(whole) if len(output.token_ids) > 3]
    prefixed = [asked[number] + prefix for number, prefix in zip(chosen, kept, strict=True)]
    rest = run(engine, requests(prefixed, [KEYS[number] for number in chosen], max_tokens=LENGTH - 3))
    assert [a + b.token_ids for a, b in zip(kept, rest, strict=True)] == [whole[n].token_ids for n in chosen]


def test_bf16_rounds_no_worse_than_transformers(folders, models, asked):
    engine = TransformersEngine(options(folders[1], dtype="bfloat16"))
    load(engine, folders[1])
    outputs = run(engine, requests(asked))
    rounded = reference(folders[1]).bfloat16()
    exact, rough = rounded.float(), reference(folders[1]).bfloat16()
    gaps = [
        torch.cat(
            [
                (jobs.sampled_log_probs(exact, p, o.token_ids, 1.3) - of(p, o)).abs()
                for p, o in zip(asked, outputs, strict=True)
            ]
        ).mean()
        for of in (
            lambda p, o: torch.tensor(o.log_probs),
            lambda p, o: jobs.sampled_log_probs(rough, p, o.token_ids, 1.3),
        )
    ]
    assert gaps[0] <= 2 * gaps[1]


# ------------------------------------------------------------------ the end of a response


def test_responses_end_with_the_token_that_stops_them(folders, asked):
    engine = TransformersEngine(options(folders[1], stop_token_ids=tuple(range(20, 30))))
    load(engine, folders[1])
    ends, reasons = {1, *range(20, 30)}, set()  # 1 is the model's own
    for output in run(engine, requests(asked)):
        reasons.add(output.finish_reason)
        assert not ends & {*output.token_ids[:-1]}
        stopped = output.token_ids[-1] in ends
        assert stopped if output.finish_reason == "stop" else len(output.token_ids) == LENGTH
    assert reasons == {"stop", "length"}


def test_stop_strings_stay_in_the_response(folders):
    engine = TransformersEngine(options(folders[1], stop=("e", "M")))
    load(engine, folders[1])
    outputs = run(engine, requests([[100, 101]] * 16, top_k=3))
    stopped = 0
    for output in outputs:
        text = engine._tokenizer.decode(output.token_ids, skip_special_tokens=True)
        found = {"e", "M"} & {*text}
        assert bool(found or output.token_ids[-1] == 1) == (output.finish_reason == "stop")
        assert not found or text[-1] in found and len({"e", "M"} & {*text[:-1]}) == 0
        stopped += bool(found)
    assert stopped > 4


def test_stop_strings_of_a_request_end_that_request_alone(folders):
    """The others have the tokens that they have without it."""
    plain = requests([[100, 101]] * 16, top_k=3)
    asked = [replace(one, stop=["e", "M"] if at % 2 else []) for at, one in enumerate(plain)]
    outputs = []
    for these in (plain, asked):
        engine = TransformersEngine(options(folders[1]))
        load(engine, folders[1])
        outputs.append(run(engine, these))
    shorter = 0
    for at, (without, output) in enumerate(zip(*outputs, strict=True)):
        texts = [engine._tokenizer.decode(output.token_ids[:n]) for n in range(len(output.token_ids) + 1)]
        assert output.token_ids == without.token_ids[: len(output.token_ids)]
        if len(output.token_ids) < len(without.token_ids):
            shorter += 1
            assert at % 2 and {"e", "M"} & {*texts[-1]} and not {"e", "M"} & {*texts[-2]}
            assert output.finish_reason == "stop"
    assert shorter > 4


def test_a_sequence_ends_where_the_cache_does(folders):
    engine = TransformersEngine(options(folders[1], max_length=12))
    load(engine, folders[1])
    (output,) = run(engine, requests([[100] * 10], max_tokens=50))
    assert (len(output.token_ids), output.finish_reason) == (2, "length")


# ------------------------------------------------------------------ steps


def test_nothing_happens_in_a_pause_and_nothing_is_lost(engine, asked):
    expected = run(engine, requests(asked))
    engine.add(requests(asked)[:8])
    for _ in range(3):
        engine.step()
    engine.pause()
    before = engine.progress()
    engine.add(requests(asked)[8:])
    engine.step()
    assert engine.progress()[:8] == before and {len(output.token_ids) for output in before} == {3}
    engine.resume()
    outputs = finish(engine)
    assert [outputs[o.id].token_ids for o in expected] == [o.token_ids for o in expected]


def test_aborted_requests_leave_no_trace(folders, engine, asked):
    expected = run(engine, requests(asked))
    few = TransformersEngine(options(folders[1], num_rows=6))
    load(few, folders[1])
    few.add(requests(asked))
    few.step()
    few.abort(["0", "3", "9"])  # two run, one waits
    outputs = finish(few)
    assert {*outputs} == {str(n) for n in range(16)} - {"0", "3", "9"}
    assert all(output.token_ids == expected[int(number)].token_ids for number, output in outputs.items())
    few.abort(["0"])
    assert not few.has_unfinished() and few.take() == []


def test_the_memory_of_the_cache_can_be_released_in_the_middle(engine, asked):
    expected = run(engine, requests(asked))
    engine.add(requests(asked))
    engine.step()
    engine.step()
    assert engine.release_kv_cache() and engine.model.cache._layers == {}
    outputs = finish(engine)
    assert [outputs[o.id].token_ids for o in expected] == [o.token_ids for o in expected]


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize("running", ["keep", "recompute"])
def test_a_commit_between_two_steps_is_known_by_every_token(running, engine, folders, models, asked):
    """After it the tokens of `recompute` are those of the new weights alone. Those of `keep` see old keys and
    values, so neither model has their log-probs."""
    prompts = [prompt + [50] * 10 for prompt in asked]
    engine.add(requests(prompts))
    for _ in range(5):
        engine.step()
    load(engine, folders[2], version=1, running=running)
    outputs = finish(engine)
    changed, off = 0, 0.0
    for prompt, output in zip(prompts, (outputs[str(n)] for n in range(16)), strict=True):
        length = len(output.token_ids)
        assert output.versions == ([0] * 5 + [1] * length)[:length]
        changed += length > 5
        expected = {
            version: jobs.sampled_log_probs(models[version + 1], prompt, output.token_ids, 1.3)
            for version in (0, 1)
        }
        told = torch.tensor(output.log_probs)
        assert (told - expected[0])[:5].abs().max() <= FP32_LIMIT
        if length > 5:
            off = max(off, (told - expected[1])[5:].abs().max().item())
    assert changed > 8
    assert off <= FP32_LIMIT if running == "recompute" else off > 0.1


def test_a_commit_refuses_unfinished_requests_by_default(engine, folders, asked):
    engine.add(requests(asked))
    engine.step()
    with pytest.raises(RuntimeError, match="version 1 cannot be committed: requests are unfinished"):
        load(engine, folders[2], version=1)
    assert engine.version is None


def test_weights_that_lie_alike_are_the_trainers_memory(folders, models, asked):
    shape = ModelShape.load(folders[1])
    ours = jobs.full_tensors(reference(folders[1]))
    offer = Offer(hf_atlas(shape), ours)
    engine = TransformersEngine(options(folders[1]), offer)
    assert offer.taken.keys() == ours.keys()
    engine.commit(0)
    outputs = run(engine, requests(asked))
    assert jobs.largest_gap(models[1], asked, outputs, 1.3) <= FP32_LIMIT
    shared = {view.data_ptr() for view in engine.tensors[0].values()}
    assert shared == {tensor.data_ptr() for tensor in ours.values()}


# ------------------------------------------------------------------ in a process of its own


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_an_engine_in_a_process_of_its_own(world, folders, models, engine, asked, monkeypatch):
    """Weights come through shared memory. The samples are those of the engine here, and a death is named."""
    monkeypatch.setattr(sys, "executable", preloaded_python())
    shape, ours = ModelShape.load(folders[1]), jobs.full_tensors(reference(folders[1]))
    config = jobs.job(folders[1], sampling={"max_response_length": LENGTH}, backend="transformers")
    outside = OutOfProcessEngine(config, shape, [0], [0])
    outside.connect({0: hf_atlas(shape)}, ours)

    def generate() -> list[Response]:
        return outside.generate(asked, KEYS, temperature=1.3)

    assert outside.sync(0) == sum(4 * tensor.numel() for tensor in ours.values())
    assert [r.token_ids for r in generate()] == [o.token_ids for o in run(engine, requests(asked))]
    for name, tensor in jobs.full_tensors(models[2]).items():
        ours[name].copy_(tensor)
    outside.sync(1)
    assert jobs.largest_gap(models[2], asked, generate(), 1.3) <= FP32_LIMIT
    with pytest.raises(ValueError, match="0 tokens; 1 to --max-prompt-length"):
        outside.generate([[]], [0], temperature=1.0)
    os.kill(outside.inference._process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(
            EngineDied, match=r"\[rank 0\] the process of the engine died \(killed by SIGKILL\)"
        ):
            generate()
    outside.shutdown()


@pytest.mark.timeout(120)
def test_an_engine_that_may_leave_is_replaced_and_its_tokens_are_known(
    world, folders, engine, asked, monkeypatch
):
    monkeypatch.setattr(patience, "_SHORTEST_S", 1.0)
    shape, ours = ModelShape.load(folders[1]), jobs.full_tensors(reference(folders[1]))
    config = jobs.job(folders[1], sampling={"max_response_length": LENGTH}, backend="transformers")
    config = replace(config, streaming=StreamingConfig(staleness=1, min_engines=1))
    outside = OutOfProcessEngine(config, shape, [0], [0])
    outside.connect({0: hf_atlas(shape)}, ours)
    wanted = {output.id: output.token_ids for output in run(engine, requests(asked))}

    def generate() -> list[list[int]]:
        return [one.token_ids for one in outside.generate(asked, KEYS, temperature=1.3)]

    outside.sync(0)
    outside.inference.patience.note_step(0.1)
    outside.add(requests(asked))
    while outside.has_unfinished() and not outside.inference.reported():
        outside.step()
    pid = outside.inference._process.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineDied, match="the engine's process did not answer within 1 s") as hang:
        while True:
            outside.step()
    outside.leave(hang.value)
    outside.leave(hang.value)  # a second time is no harm
    assert not Path(f"/proc/{pid}").exists()
    reported = outside.inference.reported()
    assert reported and all(wanted[one.id][: len(one.token_ids)] == one.token_ids for one in reported)
    assert all(len(one.token_ids) == len(one.log_probs) == len(one.versions) > 0 for one in reported)
    outside.take()
    assert outside.sync(1) == 0  # for the others' sake
    outside.restart()
    assert outside.failure is None and outside.version is None
    assert outside.sync(2) > 0 and generate() == [*wanted.values()]
    os.kill(outside.inference._process.pid, signal.SIGKILL)
    assert outside.sync(3) == 0 and "died (killed by SIGKILL)" in str(outside.failure)  # noticed in the sync
    outside.shutdown()


def test_a_process_that_hangs_while_it_starts_is_ended(tmp_path, monkeypatch):
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    started = []

    def start(*arguments, **how) -> subprocess.Popen:
        started.append(subprocess.Popen(*arguments, **how))
        return started[0]

    how = {"Popen": start, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(engine_process, "subprocess", SimpleNamespace(**how))
    monkeypatch.setattr(engine_process, "sys", SimpleNamespace(executable=str(silent)))
    monkeypatch.setattr(engine_process, "_START_S", 0.1)
    monkeypatch.setattr(engine_process, "_ANSWER_S", 0.1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(EngineHangs, match="did not answer within"):
        RemoteEngine(options(tmp_path))
    assert started[0].returncode == -signal.SIGKILL


def test_a_process_that_outlives_its_kill_does_not_hold_up_its_rank(caplog):
    """A call into a driver or a file system may keep it."""
    waits, closed = [], []

    def wait(timeout: float) -> None:
        waits.append(timeout)
        raise subprocess.TimeoutExpired("engine", timeout)

    engine = engine_process.RemoteEngine.__new__(engine_process.RemoteEngine)
    engine._rank, engine._connection = 3, SimpleNamespace(close=lambda: closed.append(True))
    engine._process = SimpleNamespace(kill=lambda: None, wait=wait, pid=17)
    engine.kill()
    assert waits == [10.0] and closed and "[rank 3] the engine's process 17 has not ended" in caplog.text


@pytest.mark.timeout(120)
def test_an_engine_ends_silently_when_its_rank_ends_in_a_call():
    """The rank says why it ended."""
    ours, theirs = Pipe()
    command = [sys.executable, "-P", "-m", "megarl.rollout.engine_process"]
    process = subprocess.Popen(command, stdin=theirs.fileno(), stderr=subprocess.PIPE, text=True)
    theirs.close()
    ours.send_bytes(encode(engine_process.Call(1, "no_method", [])))
    ours.close()
    assert process.communicate(timeout=100)[1] == "" and process.returncode == 0
