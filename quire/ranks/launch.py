"""Starts ranks as processes of this machine, and ends them."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Protocol

from quire.child import child_environment, explain_exit, module_command
from quire.ranks.frames import FrameSocket

SEND_SECONDS = 5.0
"""A rank that takes no message for so long is lost."""
_REAP_SECONDS = 20.0
"""What SIGKILL does not end within so long hangs in the kernel."""


def is_stopped(pid: int) -> bool:
    """Was a process of this machine stopped, or has it ended? One that waits for a processor was not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "TtZX"


class RankHandle(Protocol):
    """A rank as the engine sees it, wherever it runs."""

    link: FrameSocket
    pid: int
    local: bool
    """It shares this machine's memory, so plans come to it through the ring."""

    def ended(self, seconds: float) -> str | None:
        """What ended it, if that has happened or happens within so long."""

    def stopped(self) -> bool | None:
        """Was it stopped (SIGSTOP), or is it gone? None where that cannot be found out."""

    def end(self) -> None:
        """Tell it that it is not needed any more."""

    def kill(self) -> None:
        """End it, whatever it does."""


class RankProcess:
    """A rank in a process of this machine. The thread that starts it must live as long as it does."""

    local = True

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(SEND_SECONDS)
        try:
            self._process = subprocess.Popen(
                module_command("quire.ranks.process", str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL, stdout=2, env=child_environment(), pass_fds=[theirs.fileno()],
                start_new_session=True)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.link = FrameSocket(ours)
        self.pid = self._process.pid

    def ended(self, seconds: float) -> str | None:
        try:
            code = self._process.wait(seconds) if seconds else self._process.poll()
        except subprocess.TimeoutExpired:
            return None
        if code == 0:  # a rank ends by itself only when it hears no more of the engine
            return "its connection to the engine was lost"
        return None if code is None else explain_exit(code)

    def stopped(self) -> bool:
        return is_stopped(self.pid)

    def end(self) -> None:
        self.link.close()

    def kill(self) -> None:
        self.link.close()
        if self._process.poll() is None:
            self._process.kill()
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
