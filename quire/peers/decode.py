"""The side that asks others for prompts: one attempt after the other, and then it computes what has not come itself.

A transfer's number is never used again, so it is also the epoch of its writes: once a transfer is shut, whatever still
arrives for it is refused, and its blocks can be handed out again.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.errors import InvariantError, QuireError
from quire.kvcache.reservations import Reservation
from quire.peers.link import Inbox, Link
from quire.peers.messages import Abort, First, Prefill
from quire.peers.mover import KVMover
from quire.peers.stats import PeerStats
from quire.scheduler.remote import FirstToken
from quire.scheduler.request import Request, Status

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

log = logging.getLogger("quire.peers")


@dataclass(slots=True, eq=False)
class Asking:
    """A request whose prompt another engine computes, or is about to."""

    request: Request
    reservation: Reservation
    peers: list[str]
    """Whom to ask next, in this order."""
    deadline: float
    """Without news until then, the next one is asked."""
    link: Link | None = None
    transfer: int | None = None
    """The transfer that is open, once the link is up."""


class DecodeSide:
    def __init__(self, core: EngineCore, inbox: Inbox, mover: KVMover, link_to: Callable[[str], Link],
                 stats: PeerStats, patience: float, vocab_size: int, num_groups: int) -> None:
        """`link_to` gives a link to an address, perhaps one that is not up yet. `patience`: seconds without news of a
        transfer after which another engine is asked."""
        self._core = core
        self._scheduler, self._cache = core.scheduler, core.scheduler.cache
        self._inbox, self._mover, self._link_to, self._stats = inbox, mover, link_to, stats
        self._patience = patience
        self._vocab_size, self._num_groups = vocab_size, num_groups
        self.num_changes = 0
        """Requests that stopped waiting for others so far."""
        self._asking: list[Asking] = []
        self._by_transfer: dict[int, Asking] = {}
        # Numbers of another life of this engine must not be taken for ours.
        self._numbers = itertools.count(secrets.randbits(40) << 20)

    def __len__(self) -> int:
        return len(self._asking)

    # ---- the core's tick

    def tick(self) -> None:
        now = self._scheduler.clock()
        for request, reservation in self._scheduler.take_asking():
            remote = request.remote
            asking = Asking(request, reservation, [] if remote is None else list(remote.peers), now)
            self._asking.append(asking)
            self._next(asking, None)
        for asking in list(self._asking):
            self._look(asking, now)

    def _look(self, asking: Asking, now: float) -> None:
        request, link = asking.request, asking.link
        if request.status is not Status.ARRIVING or request.reservation != asking.reservation.number:
            self._end(asking, abort=True)
        elif request.fetch is not None and request.fetch.over:
            self._end(asking, abort=request.fetch.error is not None)
        elif link is None or link.closed:
            self._next(asking, "no prefill engine is known" if link is None else f"{link.name}: {link.error}")
        elif now >= asking.deadline:
            self._next(asking, f"{link.name}: no news for {self._patience:g} s")
        elif asking.transfer is None and link.up:
            self._ask(asking, link)

    # ---- one attempt after the other

    def _next(self, asking: Asking, failure: str | None) -> None:
        """Ask the next one, or go on without."""
        self._shut(asking, abort=True)
        if failure is not None:
            self._stats.prompts_failed += 1
            log.warning("prefill of %s on another engine failed: %s", asking.request.request_id, failure)
        fetch = asking.request.fetch
        kv_is_here = asking.reservation.complete
        if not asking.peers or kv_is_here or fetch is None or self._core.executor.failure is not None:
            # With all of its KV here, computing the last token once more is less than asking for it.
            self._stats.prompts_computed_here += 1
            self._scheduler.go_without(asking.request, failure or "no prefill engine is left to ask")
            self._end(asking, abort=False)
            return
        asking.link = self._link_to(asking.peers.pop(0))
        self._renew(asking)
        if asking.link.up:
            self._ask(asking, asking.link)

    def _ask(self, asking: Asking, link: Link) -> None:
        request, reservation = asking.request, asking.reservation
        asking.transfer = transfer = next(self._numbers)
        self._by_transfer[transfer] = asking
        start, size = reservation.num_arrived, self._cache.block_size
        held = reservation.kv.tables[: self._num_groups]
        tables = [list(table.blocks) for table in held]
        starts = [max(start, table.first_live * size) for table in held]
        if min(starts) > start:  # all windows have passed what is before
            self._cache.reservations.arrived(reservation.number, start, min(starts))
            start = min(starts)
        try:
            ticket = self._mover.open(transfer, link.theirs or {}, tables, starts, reservation.num_tokens,
                                      self._on_arrival(asking, transfer), self._on_failure(asking, transfer))
        except QuireError as error:
            self._next(asking, f"{link.name}: {error}")
            return
        first_token = request.fetch is not None and request.fetch.token_due
        self._stats.prompts_asked += 1
        self._renew(asking)
        link.send(Prefill(
            transfer, list(request.prompt_token_ids[: reservation.num_tokens]), first_token,
            replace(request.params, structured_outputs=None, bad_words=None, stop=None), request.seed,
            sorted(request.eos_token_ids), request.bad_words, request.cache_key, request.priority, request.tenant[:256],
            start, starts, reservation.num_tokens, ticket).to_data())

    def _renew(self, asking: Asking) -> None:
        """There was news: wait for more."""
        asking.deadline = self._scheduler.clock() + self._patience
        late = asking.deadline + self._patience
        self._cache.reservations.renew(asking.reservation.number, late)
        if asking.request.fetch is not None:
            asking.request.fetch.until = late

    def _shut(self, asking: Asking, abort: bool) -> None:
        transfer, link = asking.transfer, asking.link
        if transfer is None:
            return
        self._mover.shut(transfer)
        del self._by_transfer[transfer]
        asking.transfer = None
        if abort and link is not None:
            link.send(Abort(transfer).to_data())

    def _end(self, asking: Asking, abort: bool) -> None:
        """The request no longer waits for another engine; a closed transfer cannot write into its blocks."""
        self.num_changes += 1
        self._shut(asking, abort)
        self._cache.reservations.confirm(asking.reservation.number)
        self._core.self_check.disturb()
        if asking in self._asking:
            self._asking.remove(asking)

    # ---- what comes

    def _on_arrival(self, asking: Asking, transfer: int) -> Callable[[int, int], None]:
        return lambda start, end: self._inbox.put(lambda: self._arrived(asking, transfer, start, end))

    def _on_failure(self, asking: Asking, transfer: int) -> Callable[[str], None]:
        return lambda reason: self._inbox.put(lambda: self.failed(transfer, reason))

    def _arrived(self, asking: Asking, transfer: int, start: int, end: int) -> None:
        """KV was written while the transfer was open, so it is right whatever has become of the transfer since."""
        before = asking.reservation.num_arrived
        if not self._cache.reservations.arrived(asking.reservation.number, start, end):
            return
        self._core.self_check.disturb()
        self._stats.tokens_received += asking.reservation.num_arrived - before
        if asking.transfer == transfer:
            self._renew(asking)
        self._scheduler.look()
        self._finish_if_there(asking)

    def first(self, message: First) -> None:
        asking = self._by_transfer.get(message.transfer)
        if asking is None:
            return
        self._core.self_check.disturb()
        self._renew(asking)
        wrong = self._wrong_with(asking.request, message.first)
        if wrong is not None:
            self.failed(message.transfer, wrong)
            return
        try:
            self._scheduler.take_first_token(asking.request, message.first)
        except InvariantError as error:
            self._next(asking, str(error))
            return
        self._finish_if_there(asking)

    def _wrong_with(self, request: Request, first: FirstToken) -> str | None:
        """Why what came is not an answer to what was asked."""
        params = request.params
        if first.token >= self._vocab_size:
            return f"its first token {first.token} is outside the vocabulary"
        if (first.logprobs is None) != (params.logprobs is None) or len(first.logprobs or [None]) != 1:
            return "its first token has other log-probabilities than were asked for"
        wanted = 0 if params.prompt_logprobs is None else request.num_prompt_tokens - 1
        if len(first.prompt_logprobs or []) != wanted:
            return f"it has log-probabilities of {len(first.prompt_logprobs or [])} prompt tokens, not of {wanted}"
        return None

    def _finish_if_there(self, asking: Asking) -> None:
        request = asking.request
        if asking in self._asking and request.finished:  # with its first token
            self._stats.prompts_arrived += 1
            self._end(asking, abort=True)
        elif asking in self._asking and request.fetch is not None and request.fetch.over and not request.fetch.error:
            self._stats.prompts_arrived += 1
            self._end(asking, abort=False)

    def news(self, transfer: int) -> None:
        """The other side works on it."""
        asking = self._by_transfer.get(transfer)
        if asking is not None:
            self._renew(asking)

    def failed(self, transfer: int, reason: str) -> None:
        asking = self._by_transfer.get(transfer)
        if asking is not None:
            self._next(asking, f"{asking.link.name if asking.link else 'the other engine'}: {reason}")

    def close(self) -> None:
        for asking in list(self._asking):
            self._end(asking, abort=True)
