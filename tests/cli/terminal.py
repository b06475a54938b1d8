"""A person at a terminal, for tests of what commands show there."""

from __future__ import annotations

import codecs
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable

import pytest

from tests.cli.conftest import PATIENCE, command, environment


class Terminal:
    """A person at a terminal: types, and waits for what should appear."""

    def __init__(self, *words: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            # A test run started in the background may ignore Ctrl-C; a person's shell does not.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(sys.executable, command(*words), environment() | {"TERM": "xterm"})
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, text: str) -> str:
        """Everything up to and including `text`."""
        self._read_until(lambda: text in self._unread, text)
        before, _, self._unread = self._unread.partition(text)
        return before + text

    def press_until(self, key: str, text: str) -> None:
        """Press a key, and again each second, until `text` appears.

        A Ctrl-C that arrives just before Python's readline sleeps shows only at the next key:
        a person presses again."""
        deadline = time.monotonic() + PATIENCE
        while text not in self._unread:
            assert time.monotonic() < deadline, f"no {text!r} in {self._unread[-2000:]!r}"
            self.type(key)
            until = time.monotonic() + 1.0
            while text not in self._unread and select.select([self.fd], [], [], max(0.0, until - time.monotonic()))[0]:
                self._read()
        self.wait_for(text)

    def wait_for_more(self, count: int) -> None:
        self._read_until(lambda: len(self._unread) >= count, f"{count} characters")
        self._unread = ""

    def _read_until(self, there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not there():
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {what!r} in {self._unread[-2000:]!r}"
            self._read()

    def _read(self) -> None:
        try:
            self._unread += self._decoder.decode(os.read(self.fd, 65536))
        except OSError:
            pytest.fail(f"the command ended too early: {self._unread[-2000:]!r}")

    def finish(self) -> tuple[int, str]:
        """The exit code, and all that was written until the end."""
        while True:
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # how Linux says that the other side has closed
                break
            if not data:
                break
            self._unread += self._decoder.decode(data)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self._unread

    def close(self) -> None:
        os.close(self.fd)
