"""Accepts connections until a listener is closed; a moment in which that fails does not make it deaf for ever."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("quire")
_CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)
_PAUSE_SECONDS = 0.1


def accepted(listener: socket.socket) -> Iterator[tuple[socket.socket, Any]]:
    """Connections and where they come from. Ends when the listener is closed or shut down. With too many files open,
    or no memory, it tries again a moment later."""
    while True:
        try:
            made = listener.accept()
        except OSError as error:
            if listener.fileno() < 0 or error.errno in _CLOSED:
                return
            log.warning("a connection was not accepted: %s", error)
            time.sleep(_PAUSE_SECONDS)
            continue
        yield made
