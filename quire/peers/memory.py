"""A network between engines of one process, in one thread and with a clock of its own: links, lanes, and faults.

The fuzzer plays engines of numbers over it, and the page two small engines.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import KVTransferError
from quire.peers.hub import PeerHub
from quire.peers.lane import Range
from quire.peers.link import Link
from quire.peers.messages import Data
from quire.peers.mover import Arrived, KVSends, Tables

Slots = list[dict[int, int]]
"""By cache group and position: what is moved."""


@dataclass(frozen=True, slots=True)
class RangeFault:
    """How one range that is sent behaves."""

    waits: float = 0
    """Ticks before its blocks are read."""
    travels: float = 0
    """Ticks from there to its arrival."""
    again: float = 0
    """Comes a second time so many ticks later (0: it does not)."""
    cut: float | None = None
    """Which share of it is written before it breaks off."""


@dataclass(slots=True)
class Landing:
    tables: Tables
    starts: Sequence[int]
    arrived: Arrived


class MemoryMover(ABC):
    """Which transfers are open is checked when a range lands, as the epoch of a real one is."""

    def __init__(self, engine: int) -> None:
        self.engine = engine
        self.landings: dict[int, Landing] = {}

    @abstractmethod
    def read(self, tables: Tables, starts: Sequence[int], start: int, end: int) -> Slots:
        """What the blocks of a range hold."""

    @abstractmethod
    def write(self, landing: Landing, slots: Slots, share: float) -> None:
        """Put the first `share` of a range into blocks."""

    def describe(self) -> Data:
        return {"engine": self.engine}

    def check(self, theirs: Data, receives: bool) -> None:  # noqa: B027 (engines of one process are of one model)
        pass

    def open(self, transfer: int, theirs: Data, tables: Tables, starts: Sequence[int], end: int, arrived: Arrived,
             failed: Callable[[str], None]) -> Data:
        self.landings[transfer] = Landing(tables, starts, arrived)
        return {"transfer": transfer, "starts": list(starts)}

    def shut(self, transfer: int) -> None:
        del self.landings[transfer]

    def sender(self, theirs: Data) -> KVSends:
        raise KVTransferError("here KV travels over lanes of the network")

    def close(self) -> None:  # noqa: B027 (there is nothing to let go of)
        pass


class NetLink(Link):
    def __init__(self, net: Net, owner: int, name: str) -> None:
        super().__init__(name)
        self.net, self.owner = net, owner
        self.other: NetLink = self

    def send(self, data: dict[str, Any]) -> None:
        if not self.closed:
            self.net.post(self.other, json.dumps(data))

    def close(self, reason: str) -> None:
        if self.error is None:
            self.error = reason
            self.net.post(self.other, None)


@dataclass(slots=True)
class Flight:
    """A range on its way."""

    job: Range
    source: int
    target: int
    fault: RangeFault
    due: float
    lane: NetLane
    slots: Slots | None = None
    begun: bool = False
    """A thread is reading its blocks, and is done with that a tick later, whatever becomes of its link."""
    reported: bool = False


@dataclass(slots=True, eq=False)
class NetLane:
    net: Net
    link: NetLink
    stopped: bool = False

    def put(self, job: Range) -> None:
        self.net.launch(self, job)

    def stop(self) -> None:
        """What has been read may still arrive; the blocks are not read any more."""
        self.stopped = True
        self.net.forget(self)

    def join(self, seconds: float) -> None:
        pass


@dataclass(slots=True)
class Node:
    """One engine on the network."""

    hub: PeerHub
    mover: MemoryMover
    paused_until: float = 0.0
    killed: bool = False


@dataclass(slots=True)
class Net:
    clock: Callable[[], float]
    range_faults: dict[int, RangeFault]
    delays: dict[int, int]
    nodes: list[Node] = field(default_factory=list)
    links: list[NetLink] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    mail: list[tuple[float, int, NetLink, str | None]] = field(default_factory=list)
    num_messages: int = 0
    num_ranges: int = 0
    reading: float = 1
    """How long a thread reads the blocks of a range."""
    travels: Callable[[Range], float] = lambda job: 0
    """How long a range is on its way that has no fault."""

    def add(self, node: Node) -> None:
        number = len(self.nodes)
        self.nodes.append(node)
        node.hub.connect = lambda address: self._connect(number, int(address))
        node.hub.make_lane = lambda link: NetLane(self, link) if isinstance(link, NetLink) else _no_lane()

    def stopped(self, engine: int) -> bool:
        return self.nodes[engine].killed or self.clock() < self.nodes[engine].paused_until

    @property
    def quiet(self) -> bool:
        return not self.flights and not self.mail

    # ---- links

    def _connect(self, source: int, target: int) -> Link:
        here, there = NetLink(self, source, f"engine {target}"), NetLink(self, target, f"engine {source}")
        here.other, there.other = there, here
        if self.stopped(target):
            here.error = "nobody answers"
            return here
        here.theirs, there.theirs = {"engine": target}, {"engine": source}
        here.heard = there.heard = float(self.clock())
        self.links += [here, there]
        self.nodes[target].hub.add_link(there)
        return here

    def cut(self) -> None:
        for link in self.links:
            link.close("the link broke")

    def kill(self, engine: int) -> None:
        self.nodes[engine].killed = True
        for link in self.links:
            if link.owner == engine:
                link.close("it was killed")
        self.flights = [flight for flight in self.flights if flight.source != engine or flight.slots is not None]

    def post(self, link: NetLink, text: str | None) -> None:
        self.num_messages += 1
        due = self.clock() + self.delays.get(self.num_messages, 0)
        # A link keeps the order of what is sent through it.
        due = max([due, *(at for at, _, other, _ in self.mail if other is link)])
        self.mail.append((due, self.num_messages, link, text))

    def hold_back(self, engine: int, since: int, until: float) -> None:
        """What an engine has sent after message number `since` leaves it only then: when its step is over."""
        self.mail = [(max(due, until) if number > since and link.other.owner == engine else due, number, link, text)
                     for due, number, link, text in self.mail]
        for flight in self.flights:
            if flight.source == engine and not flight.begun:
                flight.due = max(flight.due, until)

    def tick(self) -> None:
        now = self.clock()
        for link in self.links:
            if not link.closed and not self.stopped(link.owner) and now % max(1, int(self._lease(link)) // 4) == 0:
                link.send({"kind": "ping"})
        waiting = sorted(self.mail, key=lambda each: each[:2])
        self.mail = []
        for each in waiting:
            due, _, link, text = each
            if self.nodes[link.owner].killed or link.closed:
                continue
            if due > now or self.stopped(link.owner):
                self.mail.append(each)
            elif text is None:
                link.close("the other side has closed the link")
            else:
                self.nodes[link.owner].hub.received(link, json.loads(text))
        self._fly(now)

    def _lease(self, link: NetLink) -> float:
        return self.nodes[link.owner].hub.lease

    # ---- ranges

    def launch(self, lane: NetLane, job: Range) -> None:
        fault = self.range_faults.get(self.num_ranges, RangeFault())
        self.num_ranges += 1
        link = lane.link
        self.flights.append(Flight(job, link.owner, link.other.owner, fault, self.clock() + fault.waits, lane))

    def forget(self, lane: NetLane) -> None:
        for flight in [each for each in self.flights if each.lane is lane]:
            if flight.slots is None and not flight.begun:
                self.flights.remove(flight)
            if flight.slots is not None or not flight.begun:
                self._report(flight, "the link is closed")

    def _fly(self, now: float) -> None:
        for flight in list(self.flights):
            if flight.slots is None and not self.stopped(flight.source) and now >= flight.due:
                self._read(flight, now)
            if flight.slots is not None and not self.stopped(flight.target) and now >= flight.due:
                self.flights.remove(flight)
                self._land(flight, now)

    def _read(self, flight: Flight, now: float) -> None:
        job = flight.job
        if not flight.begun and job.wanted():
            flight.begun, flight.due = True, now + self.reading
            return
        if not flight.begun:
            self.flights.remove(flight)
            self._report(flight, "nobody waits for it any more")
            return
        flight.slots = self.nodes[flight.source].mover.read(job.tables, job.ticket["starts"], job.start, job.end)
        flight.due = now + flight.fault.travels + self.travels(job)

    def _land(self, flight: Flight, now: float) -> None:
        mover, job = self.nodes[flight.target].mover, flight.job
        landing = mover.landings.get(job.ticket["transfer"])
        if landing is None or flight.slots is None:
            self._report(flight, "the transfer is shut")
            return
        if flight.fault.cut is not None:
            mover.write(landing, flight.slots, flight.fault.cut)
            self._report(flight, "it was cut in the middle")
            return
        mover.write(landing, flight.slots, 1.0)
        landing.arrived(job.start, job.end)
        self._report(flight, None)
        if flight.fault.again:
            self.flights.append(Flight(job, flight.source, flight.target, RangeFault(), now + flight.fault.again,
                                       flight.lane, flight.slots, reported=True))

    def _report(self, flight: Flight, error: str | None) -> None:
        if not flight.reported:
            flight.reported = True
            flight.job.done(sum(len(each) for each in flight.slots or []), error)


def _no_lane() -> NetLane:
    raise KVTransferError("this network has links of its own only")
