"""Play environments of other libraries by name: --env reasoning-gym:TASK, skyrl-gym:NAME or openenv:URL.

http:// and https:// are servers of `megarl env-serve` (remote_env.py). The library is imported in the
environment's process only, from the Python that --env-python names. Of megarl this module imports nothing at
first, and no package but the library."""

from __future__ import annotations

import asyncio
import difflib
import functools
import json
import urllib.request
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]


def _prompt(row: dict[str, Any]) -> list[Message]:
    prompt = row["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _unknown(kind: str, name: str, known: list[str]) -> ValueError:
    near = difflib.get_close_matches(name, known, 1) or known[:1]
    return ValueError(f"{kind} has no {name!r} among its {len(known)}. Try {near[0]}.")


class ReasoningGym:
    """One question of a task of reasoning-gym, which judges the answer.

    The row's `extra_info` has `index`, `seed` and `size` of the task's data set, and its other parameters as
    `config`; `examples/reasoning_gym_rows.py` writes such rows."""

    @classmethod
    def of(cls, task: str) -> Callable[[], ReasoningGym]:
        from reasoning_gym.factory import DATASETS

        if task not in DATASETS:
            raise _unknown("reasoning-gym", task, sorted(DATASETS))
        return functools.partial(cls, task)

    def __init__(self, task: str) -> None:
        self._task = task

    def reset(self, row: dict[str, Any]) -> list[Message]:
        info = row["extra_info"]
        config = json.dumps(info.get("config") or {}, sort_keys=True)
        self._dataset = _reasoning_gym(self._task, info["seed"], info["size"], config)
        self._entry, prompt = self._dataset[info["index"]], _prompt(row)
        if self._entry["question"] not in "\n".join(message["content"] for message in prompt):
            raise ValueError(
                f"entry {info['index']} of {self._task} with seed {info['seed']} is not the question of the row. Write "
                "the rows anew with the installed reasoning-gym"
            )
        return prompt

    def step(self, text: str) -> tuple[list[Message], float, bool]:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(text)
        return [], self._dataset.score_answer(text.strip() if answer is None else answer, self._entry), True


@functools.lru_cache(maxsize=32)
def _reasoning_gym(task: str, seed: int, size: int, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(config))


class SkyRLGym:
    """An environment that is registered in SkyRL-Gym.

    It gets the row's columns, and those of `extra_info` beside them, as SkyRL gives them. Its configuration
    is `extra_info.env_config`."""

    @classmethod
    def of(cls, name: str) -> Callable[[], SkyRLGym]:
        import skyrl_gym

        if name not in skyrl_gym.registry:
            raise _unknown("skyrl-gym", name, sorted(skyrl_gym.registry))
        return functools.partial(cls, name)

    def __init__(self, name: str) -> None:
        self._name = name

    def reset(self, row: dict[str, Any]) -> list[Message]:
        import skyrl_gym
        from omegaconf import OmegaConf

        info, truth = row["extra_info"], row["reward_model"]["ground_truth"]
        extras = {**row, "reward_spec": {"method": "rule", "ground_truth": truth}, **info}
        config = OmegaConf.create(info.get("env_config") or {})
        self._env = skyrl_gym.make(self._name, env_config=config, extras=extras)
        messages, _ = self._env.init(_prompt(row))
        return messages

    def step(self, text: str) -> tuple[list[Message], float | None, bool]:
        step = self._env.step(text)
        return step["observations"], step["reward"], step["done"]

    def close(self) -> None:
        self._env.close()


class OpenEnv:
    """An environment that OpenEnv serves at a URL.

    The model's answer is the action: the text if the action has one field, else a JSON object. The first
    observation follows the row's prompt. `extra_info.reset` has the arguments of its reset, such as
    `seed`."""

    @classmethod
    def of(cls, url: str) -> Callable[[], OpenEnv]:
        import openenv.core  # noqa: F401 - the error names the package

        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=30) as reply:
                fields = json.load(reply)["action"]["properties"].keys() - {"metadata"}
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"no OpenEnv server tells its actions at {url}/schema: {error}") from error
        return functools.partial(cls, url, *fields) if len(fields) == 1 else functools.partial(cls, url)

    def __init__(self, url: str, field: str | None = None) -> None:
        from openenv.core import GenericEnvClient

        # The deadline of a call is --env-timeout-s; this one must not come before.
        self._env, self._field = GenericEnvClient(base_url=url, message_timeout_s=86_400.0), field

    async def reset(self, row: dict[str, Any]) -> list[Message]:
        await self._env.connect()
        result = await self._env.reset(**(row["extra_info"].get("reset") or {}))
        *before, last = _prompt(row)
        seen = _observed(result.observation)
        return [*before, {**last, "content": f"{last['content']}\n\n{seen}" if seen else last["content"]}]

    async def step(self, text: str) -> tuple[list[Message], float | None, bool]:
        try:
            action = {self._field: text} if self._field is not None else dict(json.loads(text))
            result = await self._env.step(action)
        except (ValueError, TypeError) as error:
            return [{"role": "user", "content": f"error: the action is no JSON object: {error}"}], None, False
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            return [{"role": "user", "content": f"error: {error}"}], None, False  # the model's mistake
        seen = [] if result.done else [{"role": "user", "content": _observed(result.observation)}]
        return seen, result.reward, result.done

    async def close(self) -> None:
        await asyncio.wait_for(self._env.close(), 10)


def _observed(observation: dict[str, Any]) -> str:
    """Return an observation as text: the only text in it, else its fields as JSON."""
    shown = {key: value for key, value in observation.items() if key not in ("done", "reward", "metadata")}
    shown = {key: value for key, value in shown.items() if value not in (None, "", [], {})}
    texts = [value for value in shown.values() if isinstance(value, str)]
    if len(texts) == len(shown) <= 1:
        return "".join(texts)
    return json.dumps(shown, ensure_ascii=False)


def _remote(scheme: str, address: str) -> Callable[[], Any]:
    from megarl.episodes.remote_env import RemoteEnv  # imports aiohttp

    return RemoteEnv.of(scheme, address)


ADAPTERS: dict[str, Callable[[str], Callable[[], Any]]] = {
    "reasoning-gym": ReasoningGym.of,
    "skyrl-gym": SkyRLGym.of,
    "openenv": OpenEnv.of,
    "http": functools.partial(_remote, "http"),
    "https": functools.partial(_remote, "https"),
}
"""Scheme of a value of --env -> makes the class of the environment that the rest names."""
PACKAGES = {
    "reasoning-gym": "reasoning-gym",
    "skyrl-gym": "skyrl-gym",
    "openenv": "openenv-core",
    "http": "aiohttp",
    "https": "aiohttp",
}
"""Scheme -> the package to install."""
