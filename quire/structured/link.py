"""Processes of grammars as the engine sees them: packets to and from each, and a way to stop or end it."""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from quire.structured.packets import PACKET_BYTES


class Hub:
    """All of them: waits for what any of them says."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self.links: dict[int, Link] = {}
        self.space = bytearray(PACKET_BYTES)
        """For the packet that is being read: fresh memory of that size for each would take longer than reading it."""

    def pair(self, on_packet: Callable[[bytes], None], on_gone: Callable[[], None]) -> tuple[Link, socket.socket]:
        """A new link, and the socket that the process at its other end gets."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):  # a packet must fit whatever the system's default is
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
        ours.setblocking(False)
        link = Link(self, ours, on_packet, on_gone)
        self.links[ours.fileno()] = link
        self._poll.register(ours.fileno(), select.EPOLLIN)
        return link, theirs

    def fileno(self) -> int:
        """Readable when `pump` would find something."""
        return self._poll.fileno()

    def pump(self, seconds: float) -> bool:
        """Take in what has come, or comes within so long; false if nothing did."""
        found = self._poll.poll(max(0.0, seconds))
        for fd, events in found:
            link = self.links.get(fd)
            if link is not None:
                link.ready(events)
        return bool(found)

    def watch_writes(self, fd: int, wanted: bool) -> None:
        self._poll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def forget(self, fd: int) -> None:
        del self.links[fd]
        self._poll.unregister(fd)

    def close(self) -> None:
        for link in list(self.links.values()):
            link.close()
        self._poll.close()


class Link:
    """One process. Its first packet tells its id."""

    def __init__(self, hub: Hub, sock: socket.socket, on_packet: Callable[[bytes], None],
                 on_gone: Callable[[], None]) -> None:
        self._hub, self._socket = hub, sock
        self._on_packet, self._on_gone = on_packet, on_gone
        self._unsent: deque[tuple[bytes, socket.socket | None]] = deque()
        self._pid = 0
        self._pidfd = -1
        self._paused = False
        self._watched = False
        self.closed = False

    # ---- to and fro

    def tell(self, **fields: Any) -> None:
        self.send(json.dumps(fields).encode())

    def send(self, data: bytes, handed_over: socket.socket | None = None) -> None:
        """Never waits; what a process that has gone does not take is lost."""
        if self.closed:
            if handed_over is not None:
                handed_over.close()
            return
        self._unsent.append((data, handed_over))
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            data, handed_over = self._unsent[0]
            try:
                if handed_over is None:
                    self._socket.send(data)
                else:
                    fds = array.array("i", [handed_over.fileno()])
                    self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            except BlockingIOError:
                self._watch_writes(True)
                return
            except OSError:
                pass  # it has gone, which the next read shows
            self._unsent.popleft()
            if handed_over is not None:
                handed_over.close()
        self._watch_writes(False)

    def _watch_writes(self, wanted: bool) -> None:
        if wanted is not self._watched:
            self._watched = wanted
            self._hub.watch_writes(self._socket.fileno(), wanted)

    def ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        while not self.closed:
            try:
                size = self._socket.recv_into(self._hub.space)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            data = bytes(memoryview(self._hub.space)[:size])
            if not data:
                self.close()
                self._on_gone()
            elif not self._pid and data.startswith(b'{"pid"'):
                self._met(data)
            else:
                self._on_packet(data)

    def _met(self, data: bytes) -> None:
        hello = json.loads(data)
        self._pid = hello["pid"]
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(self._pid)
        if self._paused:
            self._signal(signal.SIGSTOP)
        if "error" in hello:
            self._on_packet(data)

    # ---- what it costs, and power over it

    @property
    def cpu_seconds(self) -> float:
        """That it has computed so far; 0 where that cannot be known."""
        if self._pid <= 0:
            return 0.0
        try:
            return time.clock_gettime((~self._pid << 3) | 2)  # the clock of another process's processor time
        except OSError:
            return 0.0

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self.closed:
            return
        if not self._pid:  # it may have told its id, or learns from its socket that nobody wants it
            with contextlib.suppress(OSError):
                data = self._socket.recv(PACKET_BYTES)
                if data.startswith(b'{"pid"'):
                    self._met(data)
        self.closed = True
        self._signal(signal.SIGKILL)
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._hub.forget(self._socket.fileno())
        self._socket.close()
        for _, handed_over in self._unsent:
            if handed_over is not None:
                handed_over.close()
        self._unsent.clear()
