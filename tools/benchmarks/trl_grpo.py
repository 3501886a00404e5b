"""TRL's side of bench_e2e.py: one GRPO run of TRL's own GRPOTrainer, in TRL's own environment. Imports
nothing of megarl.

    python trl_grpo.py JOB.json RESULT.json        # or: python -m torch.distributed.run --nproc-per-node 2 trl_grpo.py ...

JOB.json is what bench_e2e.py writes: files, the recipe of megarl's configuration, and which of TRL's settings
to take.

One *step* is what megarl calls so: one generation and all optimizer updates on it. Its clock starts when the
step before has
ended, or its evaluation, and runs until its last update is done: data loading, TRL's bookkeeping and this
file's callbacks count. Evaluation does not, and leaves the random state as it was."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")
_EVALUATION_SEED = 1234


def main(job_file: str, result_file: str) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    recorder = Recorder(job["updates_per_step"])
    trainer = build_trainer(job, recorder)
    recorder.evaluate = held_out(trainer, job) if job["eval_interval"] else None
    recorder.eval_interval, recorder.last_step = job["eval_interval"], job["steps"]
    trainer.add_callback(recorder)
    trainer.train()
    if trainer.accelerator.is_main_process:
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        result = {
            "first_step_at": recorder.first_step_at,
            "steps": recorder.steps,
            "evaluations": recorder.evaluations,
        }
        Path(result_file).write_text(
            json.dumps(result | {"threads": torch.get_num_threads(), "versions": versions})
        )


class Recorder(TrainerCallback):
    """The clock of the steps, and of the phases that TimedTrainer enters."""

    def __init__(self, updates_per_step: int) -> None:
        self.updates_per_step = updates_per_step
        self.eval_interval, self.last_step = 0, 0
        self.evaluate: Callable[[], float] | None = None
        self.steps: list[dict[str, float]] = []
        self.evaluations: dict[int, float] = {}
        self.first_step_at = 0.0
        self._start = self._inputs_ready_at = 0.0
        self._row: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._row[name] = self._row.get(name, 0.0) + time.perf_counter() - start

    def note(self, name: str, value: float) -> None:
        self._row[name] = value

    def inputs_are_ready(self) -> None:
        self._inputs_ready_at = time.perf_counter()

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self.evaluate:
            self.evaluations[0] = self.evaluate()
        self.first_step_at, self._start = time.time(), time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """After every optimizer update."""
        now = time.perf_counter()
        self._row["update_s"] = self._row.get("update_s", 0.0) + now - self._inputs_ready_at
        if state.global_step % self.updates_per_step:
            return
        step = state.global_step // self.updates_per_step
        self.steps.append(self._row | {"step": step, "step_s": now - self._start})
        self._row = {}
        if self.evaluate and (step % self.eval_interval == 0 or step == self.last_step):
            self.evaluations[step] = self.evaluate()
            now = time.perf_counter()
        self._start = now


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer with a stop-watch around its own phases."""

    recorder: Recorder

    def _generate(self, prompts):
        with self.recorder.phase("rollout_s"):
            generated = super()._generate(prompts)
        lengths = [len(ids) for ids in generated[1]]
        self.recorder.note("response_length", sum(lengths) / len(lengths))
        return generated

    def _calculate_rewards(self, *args):
        with self.recorder.phase("reward_s"):
            rewards = super()._calculate_rewards(*args)
        self.recorder.note("reward", rewards.mean().item())
        return rewards

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        if torch.is_grad_enabled():  # the update's own forward pass
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.recorder.phase("log_probs_s"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        self.recorder.inputs_are_ready()
        return inputs


def build_trainer(job: dict, recorder: Recorder) -> TimedTrainer:
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    score = load_reward(job["reward_file"], job["reward_name"])

    def reward(
        completions: list[str], ground_truth: list[str], data_source: list[str], **_: object
    ) -> list[float]:
        return [
            score(source, text, truth)
            for source, text, truth in zip(data_source, completions, ground_truth, strict=True)
        ]

    trainer = TimedTrainer(
        model=model,
        reward_funcs=reward,
        args=grpo_config(job),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(read_rows(job["train_data"], tokenizer, job["train_rows"])),
        optimizers=build_optimizer(model, job),
    )
    trainer.recorder = recorder
    return trainer


def grpo_config(job: dict) -> GRPOConfig:
    """The recipe in TRL's words, and everything off that only costs time.

    loss_type bnpo is the loss that equals megarl's token-mean: it divides by the response tokens of the
    mini-batch at hand, which one process holds whole. dapo, TRL's default, divides by the tokens of the whole
    generation (128 samples) times the mini-batch's share of the *samples*, so the weight of a token depends
    on how long the responses of the other update are. On two processes bnpo takes the mean of two
    token-means: nearly the same, and as fast.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return GRPOConfig(
        output_dir=job["output_dir"],
        seed=job["seed"],
        use_cpu=True,
        bf16=False,
        fp16=False,
        max_steps=job["steps"] * job["updates_per_step"],
        num_generations=job["num_samples_per_prompt"],
        per_device_train_batch_size=job["global_batch_size"] // processes,
        gradient_accumulation_steps=1,
        steps_per_generation=job["updates_per_step"],
        num_iterations=1,
        shuffle_dataset=False,
        max_completion_length=job["max_response_length"],
        temperature=job["temperature"],
        top_p=1.0,
        top_k=0,
        cache_implementation=job["cache_implementation"],
        loss_type="bnpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=job["clip_eps_low"],
        epsilon_high=job["clip_eps_high"],
        max_grad_norm=job["clip_grad"],
        use_vllm=False,
        # No activation recompute, no logs, no progress bar, no checkpoints.
        gradient_checkpointing=False,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )


def build_optimizer(
    model: torch.nn.Module, job: dict
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """PyTorch's fused AdamW, and megarl's schedule: it warms up by step, not by update, and does not begin at
    0."""
    if job["weight_decay"]:
        raise ValueError(
            f"weight_decay ({job['weight_decay']}) must be 0: TRL would decay norms and biases too."
        )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=job["lr"],
        betas=tuple(job["adam_betas"]),
        eps=job["adam_eps"],
        weight_decay=0.0,
        fused=True,
    )
    warmup, per_step = job["lr_warmup_iters"], job["updates_per_step"]
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min(1.0, (update // per_step + 1) / max(1, warmup))
    )


def load_reward(file: str, name: str) -> Callable[[str, str, str], float]:
    """megarl's own reward function. Its file needs nothing but the standard library."""
    spec = importlib.util.spec_from_file_location("reward", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def read_rows(file: str, tokenizer, order: list[int] | None = None) -> list[dict[str, str]]:
    """Prompts as rendered text: TRL then spends no time on chat templates in a step."""
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return [
        {
            "prompt": tokenizer.apply_chat_template(
                row["prompt"], tokenize=False, add_generation_prompt=True
            ),
            "ground_truth": row["reward_model"]["ground_truth"],
            "data_source": row["data_source"],
        }
        for row in (rows if order is None else [rows[i] for i in order])
    ]


def held_out(trainer: TimedTrainer, job: dict) -> Callable[[], float]:
    """Accuracy on the held-out rows: one sampled answer each, by plain transformers generation. All processes
    call it, the first one works, and all leave together, so that none waits for another in the step that
    follows."""
    tokenizer, score = trainer.processing_class, load_reward(job["reward_file"], job["reward_name"])
    rows = read_rows(job["eval_data"], tokenizer)
    inputs = tokenizer(
        [row["prompt"] for row in rows],
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=False,
    )
    inputs.pop("token_type_ids", None)

    def accuracy() -> float:
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_EVALUATION_SEED)
            ids = model.generate(
                **inputs,
                do_sample=True,
                temperature=job["temperature"],
                top_k=0,
                top_p=1.0,
                max_new_tokens=job["max_response_length"],
            )
        model.train()
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(
            score(row["data_source"], text, row["ground_truth"])
            for row, text in zip(rows, texts, strict=True)
        ) / len(rows)

    def evaluate() -> float:
        scored = accuracy() if trainer.accelerator.is_main_process else 0.0
        trainer.accelerator.wait_for_everyone()
        return scored

    return evaluate


if __name__ == "__main__":
    main(*sys.argv[1:])
