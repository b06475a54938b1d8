"""A rank in a process of its own, started through `quire/child.py` with SOCKET PARENT_PID."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from quire.child import end_with_parent
from quire.ranks.frames import FrameSocket
from quire.ranks.rank import Rank


def main(argv: list[str]) -> int:
    fd, parent = map(int, argv)
    end_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # when to stop is the engine's decision
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("300")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return Rank(FrameSocket(socket.socket(fileno=fd))).run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait for the engine would keep it
