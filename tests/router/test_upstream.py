"""HTTP to one server, which may answer anything: what it says is read within bounds, or it is an UpstreamError."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.router import upstream
from quire.router.upstream import Upstream, UpstreamError
from tests.router.fakes import FakeServer, chunk, fakes, stream_head, whole


def says(*pieces: bytes, close: bool = True, after: Callable[[], Coroutine[Any, Any, None]] | None = None) -> Any:
    async def say(path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if after is not None:
            await after()
        return not close

    return say


def ask(server: FakeServer, times: int = 1) -> list[tuple[int, bytes]]:
    async def main(address: str) -> list[tuple[int, bytes]]:
        client = Upstream(address)
        found = [await client.ask("POST", "/v1/completions", [(b"x-a", b"b")], b"{}", timeout=30.0)
                 for _ in range(times)]
        client.cut("done")
        return found

    with fakes(server) as (address,):
        return asyncio.run(main(address))


def test_a_connection_is_used_again() -> None:
    server = FakeServer()
    assert ask(server, times=5) == [(200, b'{"text":"a"}')] * 5
    assert server.connections == 1
    assert server.asked[0][1]["x-a"] == "b" and server.asked[0][2] == b"{}"


@pytest.mark.parametrize("pieces", [
    (b"HTTP/1.1 200 OK\r\n\r\nall ", b"of it"),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\nall ", b"of it"),
    (stream_head() + chunk(b"all "), chunk(b"of it") + chunk(b"")),
])
def test_bodies_of_every_form_are_read_to_their_end(pieces: tuple[bytes, ...]) -> None:
    assert ask(FakeServer(says(*pieces))) == [(200, b"all of it")]


@pytest.mark.parametrize("pieces", [
    (b"SSH-2.0-OpenSSH_9.6\r\n",),
    (b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",),
    (b"HTTP/1.1 100 Continue\r\n\r\n",),
    (b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",),
    (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",),
    (b"HTTP/1.1 200 OK\r\nx: ", b"y" * (1 << 17)),
    (b"HTTP/1.1 200 OK\r\n" + b"".join(b"h%d: v\r\n" % i for i in range(20000)),),
    (stream_head() + chunk(b"half"),),
    (),
])
def test_nonsense_is_an_error_and_nothing_else(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(UpstreamError) as error:
        ask(FakeServer(says(*pieces)))
    assert error.value.reached


def test_headers_that_do_not_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_HEAD_SECONDS", 0.2)
    forever = asyncio.Event

    async def wait() -> None:
        await forever().wait()

    with pytest.raises(UpstreamError, match="headers do not end"):
        ask(FakeServer(says(b"HTTP/1.1 200 OK\r\nx: y\r\n", after=wait)))


def test_nobody_there_is_known_not_to_have_got_it() -> None:
    with fakes(FakeServer()) as (address,):
        pass

    async def main() -> None:
        await Upstream(address).ask("GET", "/", timeout=10.0)

    with pytest.raises(UpstreamError) as error:
        asyncio.run(main())
    assert not error.value.reached


def test_more_than_was_asked_for_is_not_taken_for_the_next_answer() -> None:
    server = FakeServer(says(whole(b"one") + whole(b"two"), close=False))
    assert ask(server, times=3) == [(200, b"one")] * 3
    assert server.connections == 3


def test_a_large_answer_is_not_read_ahead_of_its_reader() -> None:
    sent = [0]

    async def say(path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(stream_head())
        for _ in range(256):
            writer.write(chunk(b"x" * (1 << 16)))
            await writer.drain()
            sent[0] += 1
        writer.write(chunk(b""))
        return True

    async def main(address: str) -> int:
        client = Upstream(address)
        answer = await client.request("GET", "/")
        await asyncio.sleep(0.3)  # however long nobody reads
        early, size = sent[0], 0
        while piece := await answer.read():
            size += len(piece)
        answer.close()
        client.cut("done")
        assert size == 256 << 16
        return early

    with fakes(FakeServer(say)) as (address,):
        assert asyncio.run(main(address)) < 200


@pytest.mark.parametrize("url", ["ftp://host", "http://", "host:80", "http://user:secret@host", "http://h/?q"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Upstream(url)
