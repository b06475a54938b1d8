"""Order of the requests that wait."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from quire.scheduler.draft import Planned
from quire.scheduler.request import Request


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
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

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
        # Removed requests leave their heap entry behind; it is dropped when it surfaces.
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

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=lambda r: (r.priority, r.arrival_index)))


QUEUES: dict[str, type[WaitingQueue]] = {"fcfs": FCFSQueue, "priority": PriorityQueue}
