"""Ctrl-C between steps: the first one is noted and honoured when the engine is at rest, the second at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """While active, SIGINT sets a flag; `check` raises KeyboardInterrupt for it. Outside the main thread: nothing."""

    def __init__(self) -> None:
        self._noted = False
        self._previous: signal._HANDLER = None
        self._installed = False

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            if callable(self._previous) or self._previous is signal.SIG_DFL:
                signal.signal(signal.SIGINT, self._note)
                self._installed = True
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._noted:
            raise KeyboardInterrupt
        self._noted = True

    def check(self) -> None:
        if self._noted:
            self._noted = False
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)
        if kind is None:
            self.check()
