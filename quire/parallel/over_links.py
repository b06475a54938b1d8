"""A group of tensor ranks that talk over links, two for every pair: for ranks on several machines."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from time import perf_counter_ns

import torch
from torch import Tensor

from quire.errors import RankLostError
from quire.parallel.collectives import Link, TensorGroup, receive_tensor, send_tensor


class LinkGroup(TensorGroup):
    """Ranks exchange in pairs, in rounds: in round d rank r meets rank r ^ d, and the lower one speaks first.

    So nobody sends to one who sends to somebody else, and no buffer can fill up in a circle.
    """

    def __init__(self, rank: int, size: int, to: Mapping[int, Link], of: Mapping[int, Link]) -> None:
        """`to` and `of`: the links to and from every other rank; one object may serve both ways."""
        super().__init__(rank, size)
        self._to, self._of = to, of

    def exchange(self, mine: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        flat = mine.reshape(-1).contiguous()
        found = [flat] * self.size
        rounds = 1
        while rounds < self.size:
            rounds *= 2
        began = perf_counter_ns()
        for distance in range(1, rounds):
            other = self.rank ^ distance
            if other >= self.size:
                continue
            if self.rank < other:
                self._send(other, flat)
            found[other] = self._receive(other, flat.dtype)
            if self.rank > other:
                self._send(other, flat)
        self.waited_ns += perf_counter_ns() - began
        return found

    def _send(self, other: int, flat: Tensor) -> None:
        send_tensor(self._to[other], torch.tensor([flat.numel()], dtype=torch.int64))
        send_tensor(self._to[other], flat)

    def _receive(self, other: int, dtype: torch.dtype) -> Tensor:
        length = int(receive_tensor(self._of[other], (1,), torch.int64))
        return receive_tensor(self._of[other], (length,), dtype)

    def close(self) -> None:
        for link in {*self._to.values(), *self._of.values()}:
            link.close()


class SocketLink(Link):
    """Both directions of a connected stream socket, whose other side has been checked by whoever connected it."""

    def __init__(self, connection: socket.socket, timeout: float | None = None) -> None:
        super().__init__()
        self._socket = connection
        connection.settimeout(timeout)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise RankLostError(f"the connection to another rank is lost: {error}") from error

    def receive(self, into: memoryview) -> None:
        began, done = perf_counter_ns(), 0
        try:
            while done < len(into):
                count = self._socket.recv_into(into[done:])
                if count == 0:
                    raise RankLostError("the connection to another rank is lost: it was closed")
                done += count
        except OSError as error:
            raise RankLostError(f"the connection to another rank is lost: {error}") from error
        self.waited_ns += perf_counter_ns() - began

    def close(self) -> None:
        self._socket.close()
