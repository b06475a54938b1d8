"""Order of the requests that wait."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import takewhile

from quire.scheduler.draft import Planned
from quire.scheduler.request import Request

_FEW = 16
"""Entries of removed requests that a heap keeps in any case."""


class WaitingQueue(ABC):
    """Requests not running yet or not any more; a preempted one is `put_back` and goes before its equals."""

    @abstractmethod
    def add(self, request: Request) -> None: ...

    @abstractmethod
    def put_back(self, request: Request) -> None: ...

    @abstractmethod
    def peek(self) -> Request: ...

    @abstractmethod
    def pop(self) -> Request: ...

    @abstractmethod
    def remove(self, request: Request) -> None: ...

    def set_aside(self, request: Request) -> None:
        """Take the head out, to look at those behind it; `put_back`, the last one first, restores the order."""
        self.remove(request)

    def outranks(self, waiting: Request, running: Request) -> bool:
        """May `waiting` take the place of `running`?"""
        return False

    def charge(self, planned: Iterable[Planned]) -> None:  # noqa: B027 (most queues keep no accounts)
        """A step was planned; for queues that share out what is computed."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue(WaitingQueue):
    """First come, first served; O(1) at both ends and for removal."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        _put_first(self._requests, request)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityQueue(WaitingQueue):
    """Lowest priority number first, then first come; a preempted request keeps its time of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        # By time of arrival, since an id may come again with another priority.
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        self._requests[request.arrival_index] = request
        heapq.heappush(self._heap, (request.priority, request.arrival_index))

    put_back = add

    def peek(self) -> Request:
        # Removed requests leave their heap entry behind until it surfaces, or most entries are such.
        while self._heap[0][1] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][1]]

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._requests[request.arrival_index]
        return request

    def remove(self, request: Request) -> None:
        del self._requests[request.arrival_index]
        if len(self._heap) > 2 * len(self._requests) + _FEW:
            self._heap = [(each.priority, index) for index, each in self._requests.items()]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=lambda r: (r.priority, r.arrival_index)))


class FairQueue(WaitingQueue):
    """Counts the tokens computed for each tenant; among those who wait the lowest count is next.

    A tenant that was away comes back with at least the lowest count of those present: nobody saves up credit
    while asking for nothing. Within a tenant first come is first served, a preempted request first of all.
    """

    def __init__(self) -> None:
        self._lines: dict[str, OrderedDict[str, Request]] = {}
        self._served: dict[str, int] = {}
        """Tokens computed for every tenant that waits, or was part of the last step."""
        self._level = 0
        """The highest count at which anybody was admitted: where newcomers begin if nobody else is there."""
        self._size = 0

    def add(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._served:
            self._served[tenant] = min(self._served.values(), default=self._level)
        self._line(tenant)[request.request_id] = request
        self._size += 1

    def put_back(self, request: Request) -> None:
        line = self._line(request.tenant)
        self._served.setdefault(request.tenant, min(self._served.values(), default=self._level))
        _put_first(line, request)
        self._size += 1

    def peek(self) -> Request:
        return next(iter(self._lines[self._next_tenant()].values()))

    def pop(self) -> Request:
        tenant = self._next_tenant()
        self._level = max(self._level, self._served[tenant])
        request = self._lines[tenant].popitem(last=False)[1]
        self._shrink(tenant)
        return request

    def remove(self, request: Request) -> None:
        del self._lines[request.tenant][request.request_id]
        self._shrink(request.tenant)

    def charge(self, planned: Iterable[Planned]) -> None:
        served = self._served
        active = set(self._lines)
        for seq, entry, _ in planned:
            tenant = seq.request.tenant
            active.add(tenant)
            served[tenant] = served.get(tenant, self._level) + entry.num_tokens
        for tenant in [tenant for tenant in served if tenant not in active]:
            # Nothing waits and nothing ran: it begins anew when it comes back, level with the others.
            self._level = max(self._level, served.pop(tenant))

    def _line(self, tenant: str) -> OrderedDict[str, Request]:
        return self._lines.setdefault(tenant, OrderedDict())

    def _next_tenant(self) -> str:
        # Ties go to whoever has waited longest.
        def turn(tenant: str) -> tuple[int, int]:
            return self._served[tenant], next(iter(self._lines[tenant].values())).arrival_index

        return min(self._lines, key=turn)

    def _shrink(self, tenant: str) -> None:
        self._size -= 1
        if not self._lines[tenant]:
            del self._lines[tenant]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Tenant by tenant, the next one first."""
        for tenant in sorted(self._lines, key=lambda t: self._served[t]):
            yield from list(self._lines[tenant].values())


def _put_first(line: OrderedDict[str, Request], request: Request) -> None:
    """Before all others, but for those that came earlier and were overtaken while they waited for something."""
    overtaken = list(takewhile(lambda other: other.num_overtaken > 0 and other.arrival_index < request.arrival_index,
                               line.values()))
    line[request.request_id] = request
    for other in (request, *reversed(overtaken)):
        line.move_to_end(other.request_id, last=False)


QUEUES: dict[str, type[WaitingQueue]] = {"fcfs": FCFSQueue, "priority": PriorityQueue, "fair": FairQueue}
