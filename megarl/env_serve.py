"""Serve environments to jobs on other hosts, over HTTP: `megarl env-serve`.

    MEGARL_ENV_KEY=$KEY megarl env-serve my_env.py:Env --host 0.0.0.0 --port 8100
    MEGARL_ENV_KEY=$KEY megarl train @job.args --env http://that-host:8100

Every request needs the key in MEGARL_ENV_KEY; without one the command makes one and prints it. Nothing is
encrypted: put a proxy with TLS in front where others can listen, and give jobs its https:// address. The
environments run in processes of their own, with your rights. SIGTERM or Ctrl-C ends them all."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import secrets
import socket
import sys
from collections.abc import Sequence

from megarl.config.environments import environments
from megarl.config.errors import ConfigError, raise_errors
from megarl.config.rules_episodes import environment_errors
from megarl.config.schema import EpisodeConfig
from megarl.episodes.env_pool import ENV_KEY, EnvironmentPool
from megarl.episodes.env_server import EnvServer
from megarl.inspect.arguments import Parser, number, whole

_SHORTEST_KEY = 16


def main(argv: Sequence[str]) -> int:
    """Serve until a signal. Raises: ConfigError for arguments that cannot be used."""
    parser = Parser("env-serve", __doc__)
    parser.add_argument(
        "env", nargs="+", help="path/to/file.py:Class, or several by name, as in --env of a job"
    )
    parser.add_argument("--env-python", nargs="+", help="Python of the environments; default: this one")
    parser.add_argument("--host", default="127.0.0.1", help="interface; default: 127.0.0.1")
    parser.add_argument(
        "--port", type=whole(0, 8100, at_most=65535), default=8100, help="0 is a free one; default: 8100"
    )
    parser.add_argument(
        "--env-timeout-s", type=number(0.001, 60), default=60.0, help="of a call; default: 60"
    )
    parser.add_argument(
        "--env-episodes-per-process", type=whole(1, 16), default=16, help="episodes of a process; default: 16"
    )
    parser.add_argument(
        "--max-episodes", type=whole(1, 1024), default=1024, help="open episodes at a time; default: 1024"
    )
    parser.add_argument(
        "--idle-timeout-s",
        type=number(30, 60),
        default=60.0,
        help="end the episodes of a job that has not been heard for so long; default: 60",
    )
    arguments = parser.parse(argv)
    python = arguments.env_python
    config = EpisodeConfig(env=(*arguments.env,), env_python=None if python is None else (*python,))
    errors = [*environment_errors(config)]
    key, is_given = os.environ.get(ENV_KEY), ENV_KEY in os.environ
    if is_given and len(key or "") < _SHORTEST_KEY:
        errors.append(
            f"{ENV_KEY}: must have at least {_SHORTEST_KEY} characters. Try {secrets.token_urlsafe(24)}."
        )
    raise_errors(errors)
    key = key or secrets.token_urlsafe(24)
    limits = arguments.env_timeout_s, arguments.env_episodes_per_process
    with EnvironmentPool(environments(config), *limits) as pool:
        try:
            pool.load()
            server = EnvServer(pool, key, arguments.max_episodes, arguments.idle_timeout_s)
            say = functools.partial(_say, arguments.host, "" if is_given else key)
            asyncio.run(server.run(arguments.host, arguments.port, say))
        except (OSError, UnicodeError) as error:
            raise ConfigError([_not_listening(arguments.host, arguments.port, error)]) from error
        except ValueError as error:
            raise ConfigError([str(error)]) from error
    return 0


def _not_listening(host: str, port: int, error: OSError | UnicodeError) -> str:
    """Return why the server cannot listen, naming --host if the host is wrong, and else --port."""
    reason = getattr(error, "strerror", None) or error
    # UnicodeError: no host can have this name
    is_unknown = isinstance(error, (socket.gaierror, UnicodeError))
    if is_unknown or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"--host ({host}): must be a name or an address of this machine: {reason}. Try --host 127.0.0.1."
        )
    return f"--port ({port}): cannot listen on {host}: {reason}. Try --port 0."


def _say(host: str, key: str, port: int) -> None:
    """Print how a job reaches the server."""
    sys.stdout.write(f"serving on http://{host}:{port}\n")
    if key:
        sys.stdout.write(f"jobs need {ENV_KEY}={key}\n")
    sys.stdout.flush()
