"""What an engine's loop waits for when it has nothing to do: a message, KV that arrives, news of a grammar."""

from __future__ import annotations

import socket

import zmq

from quire.scheduler.arrivals import ArrivalBox
from quire.structured.isolated import IsolatedGrammars


class Doorbell:
    """Waits for the inbox and for `arrivals` at once: threads that report there write into a socket that is polled.
    Where grammars have processes of their own, what these say ends the wait, too."""

    def __init__(self, inbox: zmq.Socket[bytes], arrivals: ArrivalBox, grammars: IsolatedGrammars | None = None
                 ) -> None:
        self._inbox = inbox
        self._heard, self._rung = socket.socketpair()
        self._heard.setblocking(False)
        self._rung.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(self._heard.fileno(), zmq.POLLIN)
        if grammars is not None:
            self._poller.register(grammars.hub.fileno(), zmq.POLLIN)
        arrivals.on_ring = self._ring

    def _ring(self) -> None:
        try:
            self._rung.send(b"!")
        except OSError:
            pass  # the socket is full, so it was rung already, or its reader has gone

    def wait(self, milliseconds: int) -> bool:
        """Until something comes, but no longer than that; is there a message?"""
        found = dict(self._poller.poll(milliseconds))
        if self._heard.fileno() in found:
            try:
                while self._heard.recv(4096):
                    pass
            except BlockingIOError:
                pass
        return self._inbox in found
