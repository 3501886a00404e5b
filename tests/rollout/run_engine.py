"""One process, one engine after the other (TP=1). Writes a JSON report; test_engine.py judges it.

python tests/rollout/run_engine.py FOLDER"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import counting
import jobs

from megarl.config.hf_config import ModelShape
from megarl.config.schema import TrainConfig
from megarl.reshard.atlas import hf_atlas
from megarl.reshard.vllm_atlas import TABLES
from megarl.rollout.draws import draw_key
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.requests import Request

KEYS = [draw_key(7, "train", visit, index) for visit in range(8) for index in range(2)]
LONG = {"count": 12, "vocab_size": 150, "seed": 6, "length": (120, 200)}
COUNTING = {"scheduler_cls": "counting.CountingScheduler"}


@contextlib.contextmanager
def engine_for(config: TrainConfig, name: str, seed: int):
    """(engine, its reference model), connected but not yet synced. The world is destroyed with the engine."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    counting.COUNTS.clear()
    shape, reference = ModelShape.load(config.model.model), jobs.reference_model(name, seed)
    before = torch.get_rng_state()
    engine = RolloutEngine(config, shape, [0], {0: hf_atlas(shape)}, jobs.full_tensors(reference))
    engine.kept_random_state = torch.equal(before, torch.get_rng_state())
    yield engine, reference
    engine.shutdown()


def refusal(call) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def whole_story(folder: Path) -> dict:
    """Qwen3, fp32, block_size=32: first sync, sampling, greedy, seeds, stops, stale prefixes, a failed
    sync."""
    model = jobs.make_folder(folder / "qwen3", "qwen3")
    config = jobs.job(model, block_size=32, sampling={"stop_token_ids": jobs.STOP_IDS}, engine_args=COUNTING)
    with engine_for(config, "qwen3", seed=1) as (engine, reference):
        report = {
            "kept_random_state": engine.kept_random_state,
            "version_before": engine.version,
            "before_first_sync": refusal(lambda: engine.generate([[11]], [0], temperature=1.0)),
        }
        report["bytes"], report["version"] = engine.sync(7), engine.inference.llm.get_weight_version()
        asked = jobs.prompts(16, 150)
        sampled = engine.generate(asked, KEYS, temperature=0.7)
        report |= {"sampled": sampled, "counts": dict(counting.COUNTS)}
        report["gap"] = {
            "T=0.7": jobs.largest_gap(reference, asked, sampled, 0.7),
            "T=1.3": jobs.largest_gap(reference, asked, engine.generate(asked, KEYS, temperature=1.3), 1.3),
        }
        report["shortfall"] = jobs.largest_shortfall(reference, asked, KEYS, sampled, 0.7)
        report["long"] = engine.generate(jobs.prompts(**LONG), KEYS[:12], temperature=1.0)
        report["gap_if_temperature_were_ignored"] = jobs.largest_gap(reference, asked, sampled, 1.0)
        report |= (
            greedy(engine, reference, asked)
            | keys(engine, asked, sampled)
            | continued(engine, asked, sampled)
            | step_by_step(engine, asked, sampled)
        )
        report |= prefixes(engine, reference)
        engine.inference.llm.start_weight_update()
        report["failed_sync"] = [
            refusal(lambda: engine.sync(9)),
            refusal(lambda: engine.generate([[11]], [0], temperature=1.0)),
        ]
        engine.inference.llm.finish_weight_update()
        engine.sync(10)
        report["works_again"] = jobs.largest_gap(
            reference, asked, engine.generate(asked, KEYS, temperature=1.0)
        )
        report["refused"] = [
            refusal(lambda: engine.generate([[11], [12]], [0], temperature=1.0)),
            refusal(lambda: engine.generate([[11], [11] * 201], [0, 0], temperature=1.0)),
        ]
        report["nothing"] = engine.generate([], [], temperature=1.0)
    return report


def vllm_as_it_is(folder: Path) -> dict:
    """The same samples by vLLM's own scheduler."""
    own = {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}
    config = jobs.job(
        folder / "qwen3", block_size=32, sampling={"stop_token_ids": jobs.STOP_IDS}, engine_args=own
    )
    with engine_for(config, "qwen3", seed=1) as (engine, _):
        engine.sync(7)
        return {
            "sampled": engine.generate(jobs.prompts(16, 150), KEYS, temperature=0.7),
            "counts": dict(counting.COUNTS),
        }


def greedy(engine: RolloutEngine, reference, asked) -> dict:
    responses = engine.generate(asked, KEYS, temperature=0.0)
    best = [jobs.log_probs(reference, p, r.token_ids).argmax(-1).tolist() for p, r in zip(asked, responses)]
    return {
        "greedy_is_argmax": all(r.token_ids == b for r, b in zip(responses, best)),
        "gap_greedy": jobs.largest_gap(reference, asked, responses),
    }


def step_by_step(engine: RolloutEngine, asked, sampled) -> dict:
    """Half of the requests run, then there is a pause, then the others enter; two are aborted on the way."""
    inference, outputs = engine.inference, {}
    wanted = [
        Request(str(number), prompt, key, max_tokens=24, temperature=0.7)
        for number, (prompt, key) in enumerate(zip(asked, KEYS))
    ]
    inference.add(wanted[:8])
    for _ in range(3):
        inference.step()
    inference.pause()
    before = {output.id: output for output in inference.progress()}
    inference.add(wanted[8:])
    inference.step()
    paused = {output.id: output for output in inference.progress()}
    refused_commit = refusal(lambda: inference.commit(8))
    inference.resume()
    done = {output.id for output in inference.take()}
    inference.abort([number for number in ("0", "1", "9", "10") if number not in done][:2])
    aborted = {*(request.id for request in wanted)} - done - {output.id for output in inference.progress()}
    while inference.has_unfinished():
        inference.step()
        outputs |= {output.id: output for output in inference.take()}
    return {
        "stood_still": all(paused[number] == output for number, output in before.items()),
        "unfinished_in_the_pause": len(paused),
        "are_prefixes": all(
            sampled[int(number)].token_ids[: len(output.token_ids)] == output.token_ids
            for number, output in paused.items()
        ),
        "aborted": len(aborted),
        "missing": sorted({str(number) for number in range(16)} - done - {*outputs} - aborted),
        "same_as_generate": all(
            output.token_ids == sampled[int(number)].token_ids
            and output.finish_reason == sampled[int(number)].finish_reason
            and output.versions == [7] * len(output.token_ids)
            for number, output in outputs.items()
        ),
        "refused_commit": refused_commit,
    }


def long_prompts(folder: Path) -> dict:
    """Twelve prompts of 120 to 199 tokens; an engine step takes 64, so each is prefilled in chunks."""
    config = jobs.job(
        folder / "qwen3",
        block_size=32,
        sampling={"stop_token_ids": jobs.STOP_IDS},
        max_num_batched_tokens=64,
        engine_args=COUNTING,
    )
    with engine_for(config, "qwen3", seed=1) as (engine, reference):
        engine.sync(7)
        asked = jobs.prompts(**LONG)
        responses = engine.generate(asked, KEYS[:12], temperature=1.0)
        gap = jobs.largest_gap(reference, asked, responses)
        return {"responses": responses, "gap": gap, "tokens": sum(map(len, asked))}


def continued(engine: RolloutEngine, asked, sampled) -> dict:
    """Each response is cut after some tokens, which are admitted anew as a prefix; also under top-p and
    top-k."""

    def rest(whole: list, kept: list[int], **sampling) -> list:
        return engine.generate(
            asked, KEYS, prefixes=[r.token_ids[:n] for r, n in zip(whole, kept)], **sampling
        )

    def finished() -> None:
        engine.generate([[11]], [0], temperature=1.0, prefixes=[[11] * 24])

    narrowed = {"temperature": 1.3, "top_p": 0.9, "top_k": 20}
    narrow = engine.generate(asked, KEYS, **narrowed)
    kept = [[min(n, len(r.token_ids) - 1) for r in of] for of in (sampled, narrow) for n in (0, 1, 7)]
    ends = [rest(sampled, of, temperature=0.7) for of in kept[:3]] + [
        rest(narrow, of, **narrowed) for of in kept[3:]
    ]
    same = []
    for whole, of, rests in zip([sampled] * 3 + [narrow] * 3, kept, ends):
        for r, n, end in zip(whole, of, rests):
            same.append(
                ([*r.token_ids[:n], *end.token_ids], end.finish_reason) == (r.token_ids, r.finish_reason)
            )
    return {"continued": same, "kept": kept, "finished_prefix": refusal(finished)}


def keys(engine: RolloutEngine, asked, sampled) -> dict:
    """The same samples alone, in reverse, and among others; other samples with other keys."""
    alone = [engine.generate([p], [s], temperature=0.7)[0].token_ids for p, s in zip(asked[:4], KEYS)]
    backwards = engine.generate(asked[::-1], KEYS[::-1], temperature=0.7)[::-1]
    others = engine.generate(asked, [s + 1 for s in KEYS], temperature=0.7)
    twins = engine.generate([asked[0]] * 40, list(range(40)), temperature=0.7)  # more than max_num_seqs
    return {
        "alone": alone == [r.token_ids for r in sampled[:4]],
        "backwards": [r.token_ids for r in backwards] == [r.token_ids for r in sampled],
        "same_with_other_keys": sum(a.token_ids == b.token_ids for a, b in zip(others, sampled)),
        "different_twins": len({tuple(r.token_ids) for r in twins}),
    }


def prefixes(engine: RolloutEngine, reference) -> dict:
    """A prompt of 150 tokens is cached in blocks of 32; then the weights change."""
    asked = [jobs.prompts(1, 150, seed=5, length=(150, 151))[0]]
    engine.generate(asked, [0], temperature=1.0)
    for new, old in zip(reference.parameters(), jobs.reference_model("qwen3", seed=2).parameters()):
        new.data.copy_(old.data)
    engine.inference.llm.start_weight_update()
    engine.inference.llm.update_weights({"update_info": {"copy": engine.destination.pull}})
    engine.inference.llm.finish_weight_update("8")
    stale = jobs.largest_gap(reference, asked, engine.generate(asked, [0], temperature=1.0))
    engine.sync(8)
    return {
        "gap_stale": stale,
        "gap_fresh": jobs.largest_gap(reference, asked, engine.generate(asked, [0], temperature=1.0)),
    }


def too_little_cache(folder: Path) -> dict:
    """Qwen2, tied: 16 requests of up to 44 tokens in a cache of 12 blocks of 32, so requests wait and are
    preempted."""
    per_block = 2 * 2 * 2 * 32 * 4 * 32  # keys and values, layers, heads, head_dim, bytes, tokens
    model = jobs.make_folder(folder / "qwen2", "qwen2")
    config = jobs.job(model, block_size=32, kv_cache_memory_bytes=13 * per_block, engine_args=COUNTING)
    with engine_for(config, "qwen2", seed=3) as (engine, reference):
        engine.sync(0)
        asked = jobs.prompts(16, 130, length=(19, 21))
        responses = engine.generate(asked, KEYS, temperature=1.0)
        return {
            "gap": jobs.largest_gap(reference, asked, responses),
            "counts": dict(counting.COUNTS),
            "responses": responses,
            "shortfall": jobs.largest_shortfall(reference, asked, KEYS, responses),
        }


def exact_noise(folder: Path) -> dict:
    """--rollout-use-fp64-gumbel."""
    config = jobs.job(folder / "qwen2", block_size=32, engine_args={"use_fp64_gumbel": True})
    with engine_for(config, "qwen2", seed=3) as (engine, reference):
        engine.sync(0)
        asked = jobs.prompts(16, 130)
        sampled = engine.generate(asked, KEYS, temperature=1.0)
        ends = engine.generate(
            asked[:4], KEYS[:4], temperature=1.0, prefixes=[r.token_ids[:-1] for r in sampled[:4]]
        )
        return {
            "sampled": sampled,
            "gap": jobs.largest_gap(reference, asked, sampled),
            "ends": [end.token_ids for end in ends],
            **keys(engine, asked, engine.generate(asked, KEYS, temperature=0.7)),
        }


def stop_strings(folder: Path) -> dict:
    """Llama. Text stops need a tokenizer; here token i is the text <i>."""
    model = jobs.make_folder(folder / "llama", "llama", with_tokenizer=True)
    config = jobs.job(model, sampling={"stop": ("<11><", "7>")}, engine_args=COUNTING)
    with engine_for(config, "llama", seed=3) as (engine, reference):
        engine.sync(0)
        asked = jobs.prompts(16, 128)
        responses = engine.generate(asked, KEYS, temperature=1.0)
        own = engine.complete(
            [
                Request(f"own/{at}", prompt, key, max_tokens=24, stop=["5>"] if at % 2 else [])
                for at, (prompt, key) in enumerate(zip(asked, KEYS, strict=True))
            ]
        )
        return {
            "responses": responses,
            "own": [(one.token_ids, one.finish_reason) for one in own],
            "gap": jobs.largest_gap(reference, asked, responses),
            "counts": dict(counting.COUNTS),
        }


def bf16(folder: Path) -> dict:
    """A bf16 engine from fp32 sources. Errors are means over tokens, against the rounded weights in fp32
    arithmetic."""
    config = jobs.job(jobs.make_folder(folder / "bf16", "qwen3"), dtype="bfloat16")
    with engine_for(config, "qwen3", seed=4) as (engine, reference):
        per_parameter = engine.sync(0) / sum(p.numel() for p in reference.parameters())
        asked = jobs.prompts(16, 150)
        responses = engine.generate(asked, KEYS, temperature=1.0)
        exact = [
            jobs.sampled_log_probs(reference.bfloat16().float(), p, r.token_ids)
            for p, r in zip(asked, responses)
        ]
        rough = [
            jobs.sampled_log_probs(reference.bfloat16(), p, r.token_ids) for p, r in zip(asked, responses)
        ]
        engines = torch.cat([torch.tensor(r.log_probs) for r in responses])
        return {
            "bytes_per_parameter": per_parameter,
            "engine_error": (engines - torch.cat(exact)).abs().mean().item(),
            "transformers_error": (torch.cat(rough) - torch.cat(exact)).abs().mean().item(),
        }


def without_a_table(folder: Path) -> dict:
    """Qwen3-MoE as a model type of which there is no table."""
    config, table = jobs.job(jobs.make_folder(folder / "traced", "qwen3_moe")), TABLES.pop("qwen3_moe")
    with engine_for(config, "qwen3_moe", seed=5) as (engine, reference):
        gaps, asked = [], jobs.prompts(16, 150)
        for version in (6, 7):
            for new, old in zip(
                reference.parameters(), jobs.reference_model("qwen3_moe", seed=version).parameters()
            ):
                new.data.copy_(old.data)
            num_bytes = engine.sync(version)
            gaps.append(jobs.largest_gap(reference, asked, engine.generate(asked, KEYS, temperature=1.0)))
    TABLES["qwen3_moe"] = table
    return {"gaps": gaps, "bytes_per_parameter": num_bytes / sum(p.numel() for p in reference.parameters())}


def norms(folder: Path) -> dict:
    """Our norms and vLLM's own, both against float64: largest relative errors, worst over shapes, fp32 and
    bf16."""
    from vllm import ir

    from megarl.rollout.names import CPU_NORMS

    generator, errors = torch.Generator().manual_seed(0), {}
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((5, 48), (7, 3, 32), (1, 1024)):
            wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)
            x, residual = (
                wide.to(dtype)[..., : shape[-1]],
                torch.randn(shape, generator=generator).to(dtype),
            )  # q and k are slices too
            weight = torch.randn(shape[-1], generator=generator).to(dtype)

            def exact(v, weight=weight):
                v = v.double()
                return v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()

            for provider in (CPU_NORMS, "native"):
                plain = ir.ops.rms_norm.impls[provider].impl_fn(x.clone(), weight, 1e-6)
                fused, summed = ir.ops.fused_add_rms_norm.impls[provider].impl_fn(
                    x.contiguous().clone(), residual.clone(), weight, 1e-6
                )
                error = max(
                    (plain - exact(x)).abs().max().item(),
                    (fused - exact(x.double() + residual.double())).abs().max().item(),
                    (summed - (x.double() + residual.double())).abs().max().item(),
                )
                errors[f"{dtype} {provider}"] = max(error, errors.get(f"{dtype} {provider}", 0.0))
    chosen = {
        size: ir.ops.rms_norm.dispatch(torch.ones(2, size), torch.ones(size), 1e-6).provider
        for size in (32, 40)
    }
    return {"errors": errors, "chosen": chosen}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    scenarios = (
        whole_story,
        vllm_as_it_is,
        long_prompts,
        too_little_cache,
        exact_noise,
        stop_strings,
        bf16,
        without_a_table,
        norms,
    )
    (folder / "report.json").write_text(
        json.dumps({scenario.__name__: scenario(folder) for scenario in scenarios})
    )


if __name__ == "__main__":
    main()
