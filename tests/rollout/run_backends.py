"""One process: the same requests to an engine of each backend, with the same weights. Writes how many
responses are equal; test_backends.py judges.

python tests/rollout/run_backends.py MODEL REPORT"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import jobs

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import hf_atlas
from megarl.reshard.hf_weights import load_hf
from megarl.rollout.draws import draw_key
from megarl.rollout.engine import Response, RolloutEngine

WAYS = {
    "drawn": {"temperature": 1.0},
    "narrowed": {"temperature": 1.3, "top_p": 0.9, "top_k": 20},
    "greedy": {"temperature": 0.0},
}
COUNT = 1000


def responses(folder: Path, backend: str) -> dict[str, list[Response]]:
    shape = ModelShape.load(folder)
    atlas = hf_atlas(shape)
    tensors = {name: torch.empty(param.rows, param.cols) for name, param in atlas.items()}
    load_hf(folder, atlas, tensors, shape)
    config = jobs.job(folder, backend=backend, max_num_seqs=128)
    engine = RolloutEngine(config, shape, [0], {0: atlas}, tensors)
    engine.sync(1)
    asked = jobs.prompts(COUNT, shape.vocab_size)
    keys = [draw_key(0, "train", visit, 0) for visit in range(COUNT)]
    sampled = {way: engine.generate(asked, keys, **how) for way, how in WAYS.items()}
    engine.shutdown()
    return sampled


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder, report = Path(sys.argv[1]), {}
    ours = responses(folder, "transformers")
    theirs = responses(folder, "vllm")  # last, as it destroys the process group
    for way in WAYS:
        pairs = [(a, b) for a, b in zip(ours[way], theirs[way], strict=True) if a.token_ids == b.token_ids]
        gaps = [abs(x - y) for a, b in pairs for x, y in zip(a.log_probs, b.log_probs, strict=True)]
        same_ends = sum(a.finish_reason == b.finish_reason for a, b in pairs)
        report[way] = {"equal": len(pairs), "same_ends": same_ends, "gap": max(gaps), "tokens": len(gaps)}
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
