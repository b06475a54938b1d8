"""Ranks as threads of this process: all that ranks in processes do, but for dying. For tests and the fuzzer."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from quire.ranks.executor import RankExecutor
from quire.ranks.frames import FrameSocket
from quire.ranks.group import RankGroup
from quire.ranks.launch import SEND_SECONDS, RankHandle
from quire.ranks.local import LocalLauncher
from quire.ranks.rank import Rank

_JOIN_SECONDS = 10.0


class _RankThread:
    """A rank in a thread; it ends when it reads an empty plan."""

    local = True

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(SEND_SECONDS)
        self.link, self.pid = FrameSocket(ours), os.getpid()
        self._thread = threading.Thread(target=Rank(FrameSocket(theirs), leave=_nothing).run, daemon=True)
        self._thread.start()

    def ended(self, seconds: float) -> str | None:
        self._thread.join(seconds)
        return None if self._thread.is_alive() else "its thread has ended"

    def stopped(self) -> bool:
        return False

    def end(self) -> None:
        self.link.close()

    def kill(self) -> None:
        self.link.close()
        self._thread.join(_JOIN_SECONDS)


def _nothing() -> None:
    pass


class _ThreadLauncher(LocalLauncher):
    def _rank(self) -> RankHandle:
        return _RankThread()


class ThreadExecutor(RankExecutor):
    def close(self) -> None:
        self.end_plans()
        super().close()


def start_threads(executor: ThreadExecutor, worker: dict[str, Any]) -> None:
    """Connect an executor to ranks that run `worker`."""
    launcher = _ThreadLauncher(executor.places, worker)
    group = RankGroup(launcher, lambda sizes: sizes[0], executor)
    executor.connect(group, launcher.ring)
    group.start()
    group.ready.result()
