"""All that an engine has to do with other engines, on the core's thread: links, both sides, and time.

Threads only put events into the inbox. The core calls `tick` before and after each step, and when it is woken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from quire.errors import InvalidRequestError, PeerError
from quire.peers.decode import DecodeSide
from quire.peers.lane import Lane, Range, SendLane
from quire.peers.link import Inbox, Link
from quire.peers.messages import Abort, Failed, First, Message, Prefill, parse, refused_alone
from quire.peers.mover import Data, KVMover
from quire.peers.prefill import PrefillSide
from quire.peers.stats import PeerStats
from quire.scheduler.remote import RemotePrefill
from quire.scheduler.request import Request
from quire.scheduler.updates import SequenceUpdate

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

log = logging.getLogger("quire.peers")

Connect = Callable[[str], Link]
_CLOSE_SECONDS = 5.0
_LEAST_GREETING_SECONDS = 2.0


class Listener(Protocol):
    address: tuple[str, int]

    def close(self) -> None: ...


class PeerHub:
    def __init__(self, core: EngineCore, mover: KVMover, vocab_size: int, num_groups: int, *, computes: bool,
                 asks: bool, lease: float, patience: float, least_tokens: int = 1) -> None:
        """`computes` prompts for others, `asks` others for prompts; `lease`: seconds without a sign of life after which
        a link counts as dead."""
        self.core = core
        self.mover = mover
        self.stats = PeerStats()
        self.inbox = Inbox(core.executor.arrivals.ring)
        self.lease = lease
        self._most_greeting = max(lease, _LEAST_GREETING_SECONDS)
        """To find another engine, to connect, and to prove who both are: all of that together."""
        self.computes, self.asks = computes, asks
        self.connect: Connect | None = None
        """Opens a link to an address; set by the code that owns the sockets."""
        self.listener: Listener | None = None
        """Where other engines reach this one."""
        self.default_peers: list[str] = []
        """Prefill engines for requests that name none, in turn."""
        self._turn = 0
        self._least_tokens = least_tokens
        self._links: dict[str, Link] = {}
        """Those that were made here, by address."""
        self._held_off: dict[str, float] = {}
        """By address that did not answer: when to try again."""
        self._open: list[Link] = []
        self._lanes: dict[Link, Lane] = {}
        self.make_lane: Callable[[Link], Lane] = self._make_lane
        self._prefill = PrefillSide(core, self.inbox, self._queue, self.stats, lease, vocab_size,
                                    num_groups)
        self._decode = DecodeSide(core, self.inbox, mover, self.link_to, self.stats, patience, vocab_size, num_groups)
        core.peers = self
        core.scheduler.peer_metrics = self.metrics

    # ---- requests

    def prepare(self, request: Request, peers: Sequence[str] | None = None) -> None:
        """Let a request ask these engines for its prompt, where that can be done; None: those that are configured."""
        params = request.params
        if peers and not self.asks:
            raise InvalidRequestError("prefill names engines to ask for the prompt, which needs kv_role 'decode' or "
                                      "'both'", field="prefill")
        if peers is None and self.default_peers and self.asks:
            self._turn += 1
            first = self._turn % len(self.default_peers)
            peers = self.default_peers[first:] + self.default_peers[:first]
        alone = not request.grouped and params.structured_outputs is None
        if not peers or request.num_prompt_tokens < 2 or (params.prompt_logprobs is not None and not alone):
            return
        request.remote = RemotePrefill(list(peers), alone, self._least_tokens)

    def claim(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        return self._prefill.claim(updates)

    # ---- time

    def tick(self) -> bool:
        """Take in what threads have brought; true if that may have changed what the scheduler can plan."""
        before = self._decode.num_changes
        stirred = self.inbox.run_all() > 0
        if stirred:
            self.core.self_check.disturb()
        now = self.core.scheduler.clock()
        failure = self.core.executor.failure
        for link in list(self._open):
            if failure is not None:  # without this its heartbeats would keep the other side holding blocks in vain
                link.close(f"its engine has failed: {failure}")
            if link.closed:
                self._lost(link)
                stirred = True
            elif link.theirs is not None and now - link.heard > self.lease:
                link.close(f"no sign of life for {self.lease:g} s")
                self._lost(link)
                stirred = True
            elif link.theirs is None and now - link.made > self._most_greeting:
                link.close(f"it has not introduced itself within {self._most_greeting:g} s")
                self._lost(link)
                stirred = True
        self._prefill.tick()
        self._decode.tick()
        return stirred or self._decode.num_changes > before

    @property
    def busy(self) -> bool:
        """Something is under way between this engine and another."""
        return bool(len(self._prefill) or len(self._decode))

    def metrics(self) -> dict[str, int | float]:
        return {**self.stats.flat(), "kv_links": sum(link.up for link in self._open),
                "kv_prefills_open": len(self._prefill), "kv_prompts_open": len(self._decode)}

    # ---- links

    def link_to(self, address: str) -> Link:
        link = self._links.get(address)
        if link is not None and link.closed and self.core.scheduler.clock() < self._held_off.get(address, 0.0):
            return link  # it failed a moment ago: do not make other requests wait for another attempt
        if link is None or link.closed:
            if self.connect is None:
                raise PeerError("this engine has no way to reach another")
            link = self._links[address] = self.connect(address)
            self.add_link(link)
        return link

    def add_link(self, link: Link) -> None:
        """A link that was made here, or whose other end was."""
        link.made = self.core.scheduler.clock()
        self._open.append(link)

    def received(self, link: Link, data: object) -> None:
        """Called on a link's thread for everything that comes through it."""
        link.heard = self.core.scheduler.clock()
        try:
            message = parse(data)
        except PeerError as error:
            transfer = refused_alone(data)
            if transfer is not None:
                self.inbox.put(partial(self._prefill.refuse, link, transfer, str(error)))
                return
            link.close(f"it said what it must not: {error}")
            self.inbox.put(lambda: None)
            return
        if message is not None:
            self.inbox.put(lambda: self._handle(link, message))

    def changed(self, link: Link) -> None:
        """Called on a link's thread when it is up, or closed."""
        self.inbox.put(lambda: None)

    def _handle(self, link: Link, message: Message) -> None:
        if link.closed:
            return
        if isinstance(message, Prefill):
            if self.computes:
                self._prefill.take(link, message)
            else:
                link.send(Failed(message.transfer, "this engine computes no prompts for others").to_data())
        elif isinstance(message, Abort):
            self._prefill.abort(link, message.transfer)
        elif isinstance(message, First):
            self._decode.first(message)
        elif isinstance(message, Failed):
            self._decode.failed(message.transfer, message.reason)
        else:
            self._decode.news(message.transfer)

    def _lost(self, link: Link) -> None:
        self._open.remove(link)
        dead = link.theirs is None or self.core.scheduler.clock() - link.heard > self.lease
        if dead and self._links.get(link.name) is link:
            self._held_off[link.name] = self.core.scheduler.clock() + self.lease
        self.stats.links_lost += 1
        log.info("the link to %s was closed: %s", link.name, link.error)
        self._prefill.link_closed(link)
        lane = self._lanes.pop(link, None)
        if lane is not None:
            lane.stop()

    def _queue(self, link: Link, job: Range) -> None:
        lane = self._lanes.get(link)
        if lane is None:
            lane = self._lanes[link] = self.make_lane(link)
        lane.put(job)

    def _make_lane(self, link: Link) -> Lane:
        theirs: Data = link.theirs or {}
        return SendLane(lambda: self.mover.sender(theirs), f"quire-kv-to-{link.name}")

    def close(self) -> None:
        """Let go of links, threads and memory. Idempotent."""
        self._decode.close()
        lanes = list(self._lanes.values())
        for link in list(self._open):
            link.close("the engine shuts down")
            self._lost(link)
        for lane in lanes:
            lane.join(_CLOSE_SECONDS)
        self.inbox.run_all()
        if self.listener is not None:
            self.listener.close()
        self.mover.close()
