"""Orders of waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.scheduler.plan import PlanEntry
from quire.scheduler.queue import FairQueue, FCFSQueue, PriorityQueue, WaitingQueue
from quire.scheduler.request import Request
from tests.scheduler.simulation import make_request


def request(name: str, index: int, priority: int = 0) -> Request:
    made = make_request(name, [1], priority=priority)
    made.arrival_index = index
    return made


def names(queue: WaitingQueue) -> list[str]:
    """In the order of iteration, which must be the order of popping."""
    listed = [r.request_id for r in queue]
    popped = []
    while len(queue):
        assert queue.peek().request_id == listed[len(popped)]
        popped.append(queue.pop().request_id)
    assert popped == listed
    return popped


@pytest.mark.parametrize("queue", [FCFSQueue(), PriorityQueue()])
def test_equals_leave_in_order_of_arrival(queue: WaitingQueue) -> None:
    for i, name in enumerate("abc"):
        queue.add(request(name, i))
    assert names(queue) == ["a", "b", "c"]


@pytest.mark.parametrize("queue", [FCFSQueue(), PriorityQueue()])
def test_a_preempted_request_goes_before_its_equals(queue: WaitingQueue) -> None:
    first = request("first", 0)
    queue.add(request("second", 1))
    queue.put_back(first)
    assert names(queue) == ["first", "second"]


def test_priority_goes_before_arrival() -> None:
    queue = PriorityQueue()
    for i, (name, priority) in enumerate([("low", 5), ("high", -1), ("middle", 0)]):
        queue.add(request(name, i, priority))
    assert names(queue) == ["high", "middle", "low"]


@pytest.mark.parametrize("queue", [FCFSQueue(), PriorityQueue()])
def test_a_removed_request_is_gone_wherever_it_stood(queue: WaitingQueue) -> None:
    requests = [request(name, i) for i, name in enumerate("abc")]
    for r in requests:
        queue.add(r)
    queue.remove(requests[0])
    queue.remove(requests[1])
    assert len(queue) == 1 and names(queue) == ["c"]


def test_an_id_that_comes_again_stands_where_its_new_priority_puts_it() -> None:
    queue = PriorityQueue()
    old = request("a", 0, priority=0)
    queue.add(old)
    queue.remove(old)
    queue.add(request("b", 1, priority=1))
    queue.add(request("a", 2, priority=2))
    assert names(queue) == ["b", "a"]


class NaiveFairQueue:
    """The rule of the fair queue as it is told, looking at every tenant each time."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.served: dict[str, int] = {}
        self.level = 0

    def add(self, request: Request) -> None:
        self.served.setdefault(request.tenant, min(self.served.values(), default=self.level))
        self.waiting.append(request)

    def peek(self) -> Request:
        heads: dict[str, Request] = {}
        for request in self.waiting:
            heads.setdefault(request.tenant, request)
        return min(heads.values(), key=lambda head: (self.served[head.tenant], head.arrival_index))

    def pop(self) -> Request:
        request = self.peek()
        self.level = max(self.level, self.served[request.tenant])
        self.waiting.remove(request)
        return request

    def charge(self, tenants: list[str]) -> None:
        for tenant in tenants:
            self.served[tenant] = self.served.get(tenant, self.level) + 3
        for tenant in set(self.served) - set(tenants) - {request.tenant for request in self.waiting}:
            self.level = max(self.level, self.served.pop(tenant))


@given(st.lists(st.tuples(st.sampled_from(["add", "add", "pop", "remove", "charge"]), st.integers(0, 5)), max_size=60))
def test_the_fair_queue_keeps_its_rule_without_looking_at_every_tenant(actions: list[tuple[str, int]]) -> None:
    queue, model = FairQueue(), NaiveFairQueue()
    running: list[Request] = []
    for number, (action, which) in enumerate(actions):
        if action == "add":
            new = make_request(f"r{number}", [1], tenant=f"t{which}")
            new.arrival_index = number
            queue.add(new)
            model.add(new)
        elif action == "charge":
            ran = [request.tenant for request in running[-which:]] if which else []
            queue.charge([(r.sequences[0], PlanEntry(0, 0, 3, False), 0) for r in running[-which:]] if which else [])
            model.charge(ran)
        elif model.waiting:
            if action == "pop":
                assert queue.peek() is model.peek()
                running.append(queue.pop())
                assert model.pop() is running[-1]
            else:
                gone = model.waiting[which % len(model.waiting)]
                queue.remove(gone)
                model.waiting.remove(gone)
        assert len(queue) == len(model.waiting)
