"""One in-process engine whose KV cache is released and restored on a simulated GPU. Writes a JSON report;
test_kv_cache.py judges it.

python tests/rollout/run_kv_cache.py FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import jobs
from run_engine import KEYS, engine_for, refusal
from simulated_gpu import SimulatedGPU

from megarl.rollout.draws import draw_arguments


def start_requests(llm, prompts: list[list[int]]) -> None:
    """Queue prompts that are drawn as `Engine.generate` draws them."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            **draw_arguments(key, True),
            temperature=1.0,
            max_tokens=24,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
        )
        for key in KEYS
    ]
    llm.enqueue([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def finish_requests(llm) -> tuple[list[list[int]], list[list[float]]]:
    completions = [output.outputs[0] for output in llm.wait_for_completion(use_tqdm=False)]
    return [list(c.token_ids) for c in completions], [list(c.logprobs.logprobs) for c in completions]


def unfinished(engine, gpu, asked) -> dict:
    """Requests that are released after seven steps, against the same requests left alone."""
    start_requests(engine.inference.llm, asked)
    tokens, log_probs = finish_requests(engine.inference.llm)
    start_requests(engine.inference.llm, asked)
    for _ in range(7):
        engine.inference.llm.llm_engine.step()
    engine.release_kv_cache()
    during = gpu.kv_cache_bytes
    engine.restore_kv_cache()
    same_tokens, same_log_probs = finish_requests(engine.inference.llm)
    gaps = torch.tensor(log_probs) - torch.tensor(same_log_probs)
    return {
        "bytes": during,
        "num_tokens": sum(map(len, tokens)),
        "same": tokens == same_tokens,
        "gap": gaps.abs().max().item(),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    gpu = SimulatedGPU()
    gpu.install()
    config = jobs.job(jobs.make_folder(folder / "qwen3", "qwen3"), block_size=32)
    with engine_for(config, "qwen3", seed=1) as (engine, reference):
        engine.sync(1)
        asked, report = jobs.prompts(16, 150), {"num_bytes": engine.inference.kv_cache.num_bytes}
        addresses = {name: tensor.data_ptr() for name, tensor in engine.tensors[0].items()}
        before = engine.generate(asked, KEYS, temperature=1.0)
        report["resident"] = [gpu.kv_cache_bytes]
        for call in (engine.release_kv_cache, engine.release_kv_cache, lambda: engine.sync(2)):
            call()
            report["resident"].append(gpu.kv_cache_bytes)
        engine.restore_kv_cache()
        report["resident"].append(gpu.kv_cache_bytes)
        after = engine.generate(asked, KEYS, temperature=1.0)
        report["same"] = [r._replace(versions=[]) for r in before] == [r._replace(versions=[]) for r in after]
        report["weights_stay"] = addresses == {n: t.data_ptr() for n, t in engine.tensors[0].items()}
        report["log"] = list(gpu.log)
        report["unfinished"] = unfinished(engine, gpu, asked)
        core = engine.inference.llm.llm_engine.engine_core.engine_core
        blocks = core.scheduler.kv_cache_manager.block_pool
        report["cached"] = [len(blocks.cached_block_hash_to_block)]
        engine.restore_kv_cache()  # a rank that had not released its cache
        report["cached"].append(len(blocks.cached_block_hash_to_block))
        gpu.refuses = "map"
        engine.release_kv_cache()
        report["no_room"] = refusal(engine.restore_kv_cache)
        report["resident_after_refusal"] = engine.inference.kv_cache.is_resident
        gpu.refuses = ""
        report["not_paused"] = refusal(engine.inference.llm.release_kv_cache_memory)
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
