"""Run rollouts of the package `verifiers` in a Python of its own: the environment of `verifiers_pool.VerifiersPool`.

    python verifiers_env.py NAME OUT.jsonl [CONFIG.json]      write the tasks of an environment as rows of training data

env_process.py loads this file. It imports nothing of megarl, and `verifiers` when it is used."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

_LOCAL = "127.0.0.1"
_ADVICE = "Make the data with `python verifiers_env.py NAME OUT.jsonl`, in the Python of --env-python."
_environments: dict[str, Any] = {}
_opened = contextlib.AsyncExitStack()
_lock = asyncio.Lock()


class Rollout:
    """One rollout of a task. `step` runs it from its beginning to its score."""

    _running: asyncio.Task[float] | None = None

    def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        self._how = row["how"]
        self._task = (row["row"].get("extra_info") or {}).get("task")
        if not isinstance(self._task, dict):
            raise TypeError(f"the row has no task of verifiers in extra_info.task. {_ADVICE}")
        return [{"role": "user", "content": ""}]  # the first prompt is verifiers' to write

    async def step(self, text: str) -> tuple[list[dict[str, str]], float, bool]:
        self._running = asyncio.ensure_future(_run(self._how, self._task))
        return [], await self._running, True

    def close(self) -> None:
        if self._running is not None:
            self._running.get_loop().call_soon_threadsafe(self._running.cancel)


def load(name: str, settings: dict[str, Any]) -> Any:
    """Return an environment of verifiers.

    Args:
        settings: fields of its configuration. By default the agent of an environment with one runs on this machine."""
    from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

    given = {**settings, "taskset": {**settings.get("taskset", {}), "id": name}}
    if "agent" in env_config_type(name, given.get("id") or "").model_fields:
        agent = given.get("agent", {})
        given["agent"] = {**agent, "runtime": agent.get("runtime", {"type": "subprocess"})}
    return load_environment(resolve_env_config(given))


async def _environment(how: dict[str, Any]) -> Any:
    """Return the environment, which serves until the process ends."""
    key = json.dumps([how["name"], how["settings"]], sort_keys=True)
    async with _lock:
        if key not in _environments:
            hosts = os.environ.get("NO_PROXY")
            os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, (hosts, _LOCAL)))
            environment = load(how["name"], how["settings"])
            await _opened.enter_async_context(environment.serving())
            _environments[key] = environment
    return _environments[key]


async def _run(how: dict[str, Any], task_data: dict[str, Any]) -> float:
    """Return the reward of one rollout: that of its trace, or the mean over the traces of several trained agents.

    Raises: RuntimeError with verifiers' reason if the rollout has failed."""
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
    from verifiers.v1.types import SamplingConfig

    environment = await _environment(how)
    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate(task_data), environment.config.taskset.task)
    # The header tells the episode. verifiers would read a key from a variable of the whole process.
    endpoint = {"base_url": how["url"], "api_key_var": "MEGARL_NO_KEY", "headers": {"x-api-key": how["key"]}}
    if how["client"] == "train":
        client = TrainClientConfig(**endpoint, renderer_model_name=how["tokenizer"])
    else:
        client = EvalClientConfig(**endpoint)
    context = ModelContext(model="policy", client=client, sampling=SamplingConfig())
    # without the retries of `run_slot`: an answer of a lost attempt must not be trained on with a later reward
    episode = await environment.run_episode(task, context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(
            "; ".join(f"{error.type}: {error.message}" for error in errors) or "the rollout is not ok"
        )
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    return sum(trace.reward for trace in trained) / len(trained)


def write_rows(name: str, path: str, settings: dict[str, Any]) -> int:
    """Write the tasks of an environment as rows of training data. Returns their number."""
    environment, count = load(name, settings), 0
    if not environment.taskset.bounded:
        raise ValueError(f"{name} has tasks without end. Give its configuration a limit.")
    with open(path, "w", encoding="utf-8") as file:
        for task in environment.taskset:
            data = task.data
            prompt = [{"role": "user", "content": data.prompt_text or data.name or name}]
            if data.system_prompt:
                prompt = [{"role": "system", "content": data.system_prompt}, *prompt]
            row = {
                "data_source": name,
                "prompt": prompt,
                "extra_info": {"task": data.model_dump(mode="json")},
            }
            file.write(json.dumps(row) + "\n")
            count += 1
    return count


if __name__ == "__main__":
    _name, _path, *_config = sys.argv[1:]
    _settings: dict[str, Any] = {}
    if _config:
        with open(_config[0], encoding="utf-8") as _file:
            _settings = json.load(_file)
    print(f"{write_rows(_name, _path, _settings)} rows in {_path}")
