"""Accept connections in a loop of select, also while this process may open no further file.

    acceptor = Acceptor(selector, listener)
    for key, _ in selector.select(acceptor.retry_s):
        if key.fileobj is listener and (connection := acceptor.accept()) is not None:
            ...

A connection that cannot be accepted keeps the listener readable, so that select would return at once for ever.
The listener is therefore left out of the selector for a second. Imports no torch."""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time

logger = logging.getLogger(__name__)
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY_S = 1.0
SIGN_IN_S = 60.0
"""Seconds after which a connection that has not signed in is closed, so that strangers cannot use up the
descriptors of this process."""


class Acceptor:
    """Accepts the connections of a listener, which it registers with a selector."""

    def __init__(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        self._selector, self._listener = selector, listener
        self._retry_at: float | None = None
        self._has_told = False
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    @property
    def retry_s(self) -> float | None:
        """Seconds that the next select may take; None for any time. The listener is watched again if they are over."""
        if self._retry_at is None:
            return None
        if (left := self._retry_at - time.monotonic()) > 0:
            return left
        self._retry_at = None
        self._selector.register(self._listener, selectors.EVENT_READ)
        return None

    def accept(self) -> socket.socket | None:
        """Return the connection that waits, or None if it has gone, or if it must wait."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _OUT_OF_FILES:
                self._wait(error)
            else:
                logger.debug("a connection failed: %s", error)
            return None
        if self._has_told:
            logger.warning("connections are accepted again")
        self._has_told = False
        return connection

    def close(self) -> None:
        self._listener.close()

    def _wait(self, error: OSError) -> None:
        if not self._has_told:
            logger.warning(
                "processes of this job that connect now have to wait, because this one can open no "
                "socket for them: %s. A limit on open files (ulimit -n) must be raised before the job starts; "
                "docs/scale.md says to what",
                error.strerror,
            )
        self._has_told = True
        self._retry_at = time.monotonic() + _RETRY_S
        self._selector.unregister(self._listener)
