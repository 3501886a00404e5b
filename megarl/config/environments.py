"""Read --env and --env-python: one environment for all rows, or several by name.

    --env my_env.py:Env
    --env calculator=calc.py:Env search=search.py:Env --env-python search=venvs/search/bin/python

Of several environments a row has the one whose name is its `data_source`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megarl.config.schema import EpisodeConfig


REMOTE = ("http", "https")
"""Schemes of environments that `megarl env-serve` serves."""
SCHEMES = ("reasoning-gym", "skyrl-gym", "openenv", *REMOTE)
"""Beginnings of a value that names no file: SCHEME:NAME."""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """One environment of a job."""

    name: str | None
    """`data_source` of its rows; None for the environment of all rows."""
    target: str
    """The class of the environment, path/to/file.py:Class, or SCHEME:NAME."""
    python: str | None = None
    """Interpreter of its processes; None for this one."""

    @property
    def scheme(self) -> str | None:
        """One of `SCHEMES`; None for a file."""
        scheme = self.target.partition(":")[0]
        return scheme if scheme in SCHEMES else None

    @property
    def is_remote(self) -> bool:
        """Whether `megarl env-serve` serves it, on this host or another."""
        return self.scheme in REMOTE

    def __str__(self) -> str:
        """Return the value of --env."""
        return self.target if self.name is None else f"{self.name}={self.target}"


def split_name(value: str) -> tuple[str | None, str]:
    """Return the name and the rest of NAME=REST. The name is None if there is none.

    A "=" in a path that exists or in a URL ends no name."""
    name, equals, rest = value.partition("=")
    if not equals or os.path.exists(value.rpartition(":")[0] or value) or name.partition(":")[0] in SCHEMES:
        return None, value
    return name, rest


def environments(config: EpisodeConfig) -> tuple[EnvSpec, ...]:
    """Return the environments of --env, each with its interpreter of --env-python; () without --env."""
    python_of = dict(split_name(value) for value in config.env_python or ())
    named = (split_name(value) for value in config.env or ())
    return tuple(EnvSpec(name, target, python_of.get(name, python_of.get(None))) for name, target in named)


def of_source(specs: Sequence[EnvSpec], data_source: object) -> EnvSpec | None:
    """Return the environment of the rows of a data source; None if there is none."""
    return next((spec for spec in specs if spec.name in (None, data_source)), None)


def names(specs: Iterable[EnvSpec]) -> list[str]:
    """Return the names of the environments that have one."""
    return [spec.name for spec in specs if spec.name is not None]


def flags_of_environments(config: EpisodeConfig) -> list[str]:
    """Return the words of --env and --env-python; [] without an environment."""
    python = ["--env-python", *config.env_python] if config.env_python else []
    return ["--env", *config.env, *python] if config.env else []
