"""Define the error by which an environment says that it cannot go on."""

from __future__ import annotations


class EpisodeFailure(Exception):
    """Raised where an environment cannot go on for a reason that is not its own, e.g. a lost server.

    Args:
        cause: one of `env_messages.CAUSES`."""

    def __init__(self, cause: str, why: str) -> None:
        super().__init__(why)
        self.cause = cause
