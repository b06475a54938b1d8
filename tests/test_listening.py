"""A listener goes on after a moment without files or memory, and ends when it is closed."""

from __future__ import annotations

import errno
import socket
import threading

import pytest

from quire import listening


class OutOfFiles(socket.socket):
    """Fails a few times before it accepts."""

    failures = 3

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


def test_too_many_open_files_make_nobody_deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_PAUSE_SECONDS", 0.0)
    with OutOfFiles() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        found: list[object] = []

        def accept() -> None:
            for made, where in listening.accepted(listener):
                made.close()
                found.append(where)

        thread = threading.Thread(target=accept)
        thread.start()
        for _ in range(2):
            socket.create_connection(listener.getsockname(), timeout=30).close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        assert not thread.is_alive() and listener.failures == 0


def test_a_closed_listener_ends() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.close()
    assert list(listening.accepted(listener)) == []
