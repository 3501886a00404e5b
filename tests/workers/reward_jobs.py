"""What the tests of reward models share: a step of four samples, and a job that scores it."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.algorithms import REGISTRY
from megarl.batch import Batch
from megarl.config.schema import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RewardModelConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)
from megarl.data.tokenizer import load_tokenizer
from megarl.data.tokenizer_base import Tokenizer
from megarl.workers.data_plane import DataPlane, Share
from sums.model import EOS_ID

QUESTIONS, RESPONSES = ["1+2 ?", "4+5-1 ?"], ["3", "it is 8", "no idea", "so " + 30 * "0 and " + "9"]
SAMPLE_IDS = [11, 5, 8, 2]
ROWS = {11: 0, 5: 1, 8: 1, 2: 0}


def write_rows(folder: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": question}], "data_source": "megarl/sums"}
        for question in QUESTIONS
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def config(folder: Path, backend: str, **reward_models) -> TrainConfig:
    """A reward model in folder/<backend>."""
    return TrainConfig(
        algorithm=REGISTRY["grpo"](),
        model=ModelConfig(model=str(folder / "actor")),
        batch=BatchConfig(train_iters=1),
        data=DataConfig(train_data=(str(folder / "rows.jsonl"),)),
        run=RunConfig(save="unused", num_rollouts_to_log=2),
        sampling=SamplingConfig(max_prompt_length=32, max_response_length=128),
        reward=ParallelConfig(offload=("parameters",)),
        reward_models=RewardModelConfig(
            reward_model=(str(folder / backend),), reward_model_backend=(backend,), **reward_models
        ),
    )


def ids_of_step(tokenizer: Tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses as an actor samples them."""
    prompts = tokenizer.encode_prompts(
        [[{"role": "user", "content": QUESTIONS[ROWS[sample]]}] for sample in SAMPLE_IDS]
    )
    return prompts, [[*ids, EOS_ID] for ids in tokenizer.encode_responses(RESPONSES)]


def plane(folder: Path) -> DataPlane:
    """A data plane with the step as the share of role reward_model."""
    batch = Batch.from_samples(SAMPLE_IDS, *ids_of_step(load_tokenizer(folder / "actor")))
    return DataPlane(shares={"reward_model": Share(batch, mini_batches=[])})
