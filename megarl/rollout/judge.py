"""Run a generative judge: a separate vLLM engine that answers questions. Its weights are never synced.

# on the first of the engine's ranks, not collective
judge = Judge("reward_model rank 1", config, path, ranks, num_template_characters)
judge.answers(["Grade this: ..."], keys=[0])
judge.shutdown()"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megarl.config.schema import TrainConfig
from megarl.runtime.abort import AbortableEngine
from megarl.rollout.draws import draw_arguments
from megarl.rollout.kv_cache import CPU_BLOCK_SIZE, MAX_CPU_KV_CACHE_BYTES, bounded_cache_bytes
from megarl.rollout.processes import UNIPROC, EngineDied, EngineProcesses, starting_engine


class Answer(NamedTuple):
    text: str
    """Text of the answer, without special tokens."""
    is_complete: bool
    """Whether the answer ended by itself; False if --judge-max-tokens cut it off."""


class Judge:
    def __init__(
        self, name: str, config: TrainConfig, path: str, ranks: Sequence[int], num_template_characters: int
    ) -> None:
        """Start vLLM on a model's folder.

        Args:
            name: role and rank, for errors.
            ranks: ranks of the engine. This process is the first.
            num_template_characters: characters of the question around the quoted text. No tokenizer makes
                more tokens of them than that.
        Raises: EngineDied if vLLM cannot start; ValueError if the engine's ranks are not on one node."""
        self.name, self.path, self.options = name, path, config.reward_models
        arguments = _engine_arguments(config, path, len(ranks), num_template_characters)
        with starting_engine(ranks, "--reward-tensor-model-parallel-size") as LLM:
            try:
                self.llm = LLM(**arguments)
            except Exception as error:  # any exception of vLLM, possibly from another process
                raise EngineDied(
                    f"[{name}] judge {path} did not start: {type(error).__name__}: {error}"
                ) from error
        AbortableEngine(self.llm.llm_engine)
        self._processes = EngineProcesses(
            self.llm, lambda pid, how: f"[{name}] judge process ({pid}) died: {how}"
        )
        self._tokenizer = self.llm.get_tokenizer()
        self.max_question_length = (
            self.llm.llm_engine.model_config.max_model_len - self.options.judge_max_tokens
        )
        """Largest number of tokens of a question."""
        if self.max_question_length < 1:
            raise ValueError(
                f"--judge-max-tokens ({self.options.judge_max_tokens}): leaves nothing of the "
                f"{self.llm.llm_engine.model_config.max_model_len} tokens that {path} can take. Try 128."
            )

    @property
    def pids(self) -> list[int]:
        """Process ids of the engine's processes that this process started."""
        return self._processes.pids

    def answers(self, questions: Sequence[str], keys: Sequence[int]) -> list[Answer | None]:
        """Return the judge's answer to each question, in order; None for a question that is too long.

        Args:
            keys: one per question, see draws.py.
        Raises: EngineDied as soon as the judge's process is gone."""
        encoded = [self._encode(question) for question in questions]
        asked = [index for index, ids in enumerate(encoded) if len(ids) <= self.max_question_length]
        out: list[Answer | None] = [None] * len(questions)
        outputs = self._generate([encoded[index] for index in asked], [keys[index] for index in asked])
        for index, output in zip(asked, outputs, strict=True):
            completion = output.outputs[0]
            out[index] = Answer(completion.text, completion.finish_reason == "stop")
        return out

    def shutdown(self) -> None:
        """End vLLM's processes."""
        self._processes.shutdown()

    def _encode(self, question: str) -> list[int]:
        """Return the token ids of the question as the user's turn of the chat template; without a template,
        as plain text."""
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._tokenizer(question)["input_ids"]

    def _generate(self, prompts: list[list[int]], keys: list[int]) -> list:
        from vllm import SamplingParams

        on_cpu = not torch.cuda.is_available()
        options = {"temperature": self.options.judge_temperature, "max_tokens": self.options.judge_max_tokens}
        params = [SamplingParams(**options, **draw_arguments(key, on_cpu)) for key in keys]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        return self._processes.call(
            lambda: self.llm.generate(requests, params, use_tqdm=False) if requests else []
        )


def _engine_arguments(
    config: TrainConfig, path: str, tp: int, num_template_characters: int
) -> dict[str, object]:
    options, sampling = config.reward_models, config.sampling
    model = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    wanted = options.judge_max_model_len or (
        options.judge_max_tokens
        + num_template_characters
        + 2 * (sampling.max_prompt_length + sampling.max_response_length)
    )
    limit = model.get("max_position_embeddings")
    max_model_len = (
        min(wanted, limit) if options.judge_max_model_len is None and isinstance(limit, int) else wanted
    )
    arguments: dict[str, object] = dict(
        model=path,
        dtype="float32" if _dtype(model) == "float32" else "auto",
        load_format="safetensors",
        trust_remote_code=False,
        seed=config.batch.seed,
        tensor_parallel_size=tp,
        distributed_executor_backend="mp" if tp > 1 else UNIPROC,
        max_model_len=max_model_len,
        disable_log_stats=True,
    )
    if torch.cuda.is_available():
        return arguments | {"gpu_memory_utilization": options.judge_gpu_memory_utilization}
    return arguments | {
        "worker_cls": "megarl.rollout.worker.NamedCPUWorker",
        "enforce_eager": True,
        "kv_cache_memory_bytes": _cpu_kv_cache_bytes(model, max_model_len),
    }


def _dtype(model: dict[str, object]) -> str:
    return str(model.get("dtype") or model.get("torch_dtype") or "float32").removeprefix("torch.")


_QUESTIONS_AT_ONCE = 16


def _cpu_kv_cache_bytes(model: dict[str, object], max_model_len: int) -> int:
    """Return the bytes of a KV cache for `_QUESTIONS_AT_ONCE` questions of full length in fp32.

    A config.json without the
    usual size fields gets the maximum."""
    layers, hidden, heads = (
        model.get(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    if not (layers and hidden and heads):
        return MAX_CPU_KV_CACHE_BYTES
    per_token = (
        2
        * 4
        * layers
        * (model.get("num_key_value_heads") or heads)
        * (model.get("head_dim") or hidden // heads)
    )
    block_bytes = per_token * CPU_BLOCK_SIZE
    per_sequence = -(-max_model_len // CPU_BLOCK_SIZE) * block_bytes
    return bounded_cache_bytes(block_bytes, per_sequence, _QUESTIONS_AT_ONCE, at_least=1)
