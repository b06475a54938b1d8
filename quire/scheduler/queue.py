"""Order of the requests that wait."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import takewhile

from quire.scheduler.draft import Planned
from quire.scheduler.lowest import Lowest
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
        self._counts = Lowest()
        """The same in their order."""
        self._turns = Lowest()
        """Tenants that wait by that count, and those who are equal by who has waited longest."""
        self._away: set[str] = set()
        """Tenants that have a count and do not wait."""
        self._level = 0
        """The highest count at which a request was admitted: where a new tenant begins if no other is present."""
        self._size = 0

    def add(self, request: Request) -> None:
        self._line(request.tenant)[request.request_id] = request
        self._changed(request.tenant, 1)

    def put_back(self, request: Request) -> None:
        _put_first(self._line(request.tenant), request)
        self._changed(request.tenant, 1)

    def peek(self) -> Request:
        return next(iter(self._lines[self._turns.first()].values()))

    def pop(self) -> Request:
        tenant = self._turns.first()
        self._level = max(self._level, self._served[tenant])
        request = self._lines[tenant].popitem(last=False)[1]
        self._changed(tenant, -1)
        return request

    def remove(self, request: Request) -> None:
        del self._lines[request.tenant][request.request_id]
        self._changed(request.tenant, -1)

    def charge(self, planned: Iterable[Planned]) -> None:
        ran: dict[str, int] = {}
        for seq, entry, _ in planned:
            tenant = seq.request.tenant
            ran[tenant] = ran.get(tenant, 0) + entry.num_tokens
        for tenant, tokens in ran.items():
            self._serve(tenant, self._served.get(tenant, self._level) + tokens)
        for tenant in self._away - ran.keys():
            # Nothing waits and nothing ran: it begins anew when it comes back, level with the others.
            self._level = max(self._level, self._served.pop(tenant))
            self._counts.discard(tenant)
        self._away = {tenant for tenant in ran if tenant not in self._lines}

    def _line(self, tenant: str) -> OrderedDict[str, Request]:
        """A tenant that was away comes back with the lowest count there is."""
        if tenant not in self._served:
            self._serve(tenant, self._counts.lowest[0] if len(self._counts) else self._level)
        return self._lines.setdefault(tenant, OrderedDict())

    def _serve(self, tenant: str, count: int) -> None:
        self._served[tenant] = count
        self._counts.set(tenant, (count, 0))
        self._rank(tenant)

    def _rank(self, tenant: str) -> None:
        line = self._lines.get(tenant)
        if line:
            self._turns.set(tenant, (self._served[tenant], next(iter(line.values())).arrival_index))

    def _changed(self, tenant: str, by: int) -> None:
        """A tenant's line has grown or shrunk."""
        self._size += by
        if self._lines[tenant]:
            self._away.discard(tenant)
            self._rank(tenant)
        else:
            del self._lines[tenant]
            self._turns.discard(tenant)
            self._away.add(tenant)

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
