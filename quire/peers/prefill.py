"""The side that computes prompts for other engines: runs them beside its own, and sends KV while more is computed.

Blocks that are being read are under a lease of their own. So whatever becomes of the request, of the link or of the
other engine, no block that a thread still reads is handed out again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.errors import QuireError
from quire.kvcache.table import SequenceKV
from quire.peers.lane import Range
from quire.peers.link import Inbox, Link
from quire.peers.messages import Failed, First, Prefill, Sent, Working
from quire.peers.stats import PeerStats
from quire.sampling.params import SamplingParams
from quire.sampling.token_logprobs import LogprobRecord
from quire.scheduler.remote import FirstToken
from quire.scheduler.request import FinishReason, Request
from quire.scheduler.updates import SequenceUpdate

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


@dataclass(slots=True, eq=False)
class Served:
    """One prompt that is computed for another engine."""

    link: Link
    asked: Prefill
    request: Request
    queued: int
    """KV of tokens before this one was handed to the lane, or is not wanted."""
    told: float
    """When the other side last heard of it."""
    sending: int = 0
    """Ranges that the lane has and has not reported."""
    prompt_logprobs: list[LogprobRecord] = field(default_factory=list)
    ended: bool = False
    """The request is over: all that will be computed is."""
    cancelled: bool = False


class PrefillSide:
    def __init__(self, core: EngineCore, inbox: Inbox, lane: Callable[[Link, Range], None], stats: PeerStats,
                 lease: float, vocab_size: int, num_groups: int) -> None:
        """`lane` queues a range for a link's thread."""
        self._core = core
        self._scheduler, self._cache = core.scheduler, core.scheduler.cache
        self._inbox, self._lane, self._stats = inbox, lane, stats
        self._lease = lease
        self._vocab_size, self._num_groups = vocab_size, num_groups
        self._served: dict[tuple[Link, int], Served] = {}
        self._of_request: dict[Request, Served] = {}

    def __len__(self) -> int:
        return len(self._served)

    # ---- what the other side asks for

    def take(self, link: Link, asked: Prefill) -> None:
        """Begin, or say why not. An invalid request fails alone."""
        if (link, asked.transfer) in self._served:
            return  # it came twice
        now = self._scheduler.clock()
        try:
            request = self._request(link, asked)
            self._core.add(request)
        except QuireError as error:
            self.refuse(link, asked.transfer, str(error))
            return
        served = Served(link, asked, request, asked.start, now)
        self._served[link, asked.transfer] = served
        self._of_request[request] = served
        self._stats.prefills_taken += 1
        link.send(Working(asked.transfer).to_data())

    def refuse(self, link: Link, transfer: int, reason: str) -> None:
        self._stats.prefills_refused += 1
        link.send(Failed(transfer, reason).to_data())

    def _request(self, link: Link, asked: Prefill) -> Request:
        groups = self._cache.groups[: self._num_groups]
        if len(asked.starts) != len(groups):
            raise QuireError(f"starts names {len(asked.starts)} cache groups, and there are {len(groups)}")
        if not asked.tokens or max(asked.tokens) >= self._vocab_size:
            raise QuireError("the prompt is empty or has a token id outside the vocabulary")
        params = _one_token(asked.params if asked.first_token else SamplingParams(temperature=0.0))
        params.validate_for_vocab(self._vocab_size)
        kept = [max(start, asked.start) + group.window - 1
                for start, group in zip(asked.starts, groups, strict=True) if group.window is not None]
        return Request(
            request_id=f"prefill {asked.transfer} for {link.name}",
            prompt_token_ids=asked.tokens,
            params=params,
            seed=asked.seed,
            arrival_time=self._scheduler.clock(),
            eos_token_ids=frozenset(token for token in asked.eos if token < self._vocab_size),
            bad_words=asked.bad_words,
            priority=asked.priority,
            cache_key=asked.cache_key,
            tenant=asked.tenant,
            lease_seconds=self._lease,
            windows_kept_at=min(kept, default=None),
        )

    def abort(self, link: Link, transfer: int) -> None:
        served = self._served.get((link, transfer))
        if served is not None:
            self._cancel(served)
            self._forget_if_over(served)

    def link_closed(self, link: Link) -> None:
        for served in [each for each in self._served.values() if each.link is link]:
            self._cancel(served)
            self._forget_if_over(served)

    def _cancel(self, served: Served) -> None:
        """Cancelled: stop computing, give back the blocks that no thread reads."""
        if served.cancelled:
            return
        served.cancelled = True
        self._stats.prefills_cancelled += 1
        if not served.ended:
            served.ended = True
            self._core.abort(served.request.request_id)
        self._let_go(served)

    def _let_go(self, served: Served) -> None:
        """Give the blocks of its sequence back; while a thread reads them, that thread does it when it has finished."""
        lease = self._cache.leases.get(served.request.sequences[0].lease or -1)
        if lease is not None and not lease.readers:
            self._cache.leases.release(lease.number)

    # ---- while it is computed

    def tick(self) -> None:
        """Send what has been computed since, renew leases of those who are heard from, tell those who wait."""
        now = self._scheduler.clock()
        for served in list(self._served.values()):
            if not served.ended:
                self._send_confirmed(served)
                if now - served.told > self._lease / 2:
                    served.told = now
                    served.link.send(Working(served.asked.transfer).to_data())
            elif served.request.sequences[0].lease is not None:
                self._cache.leases.renew(served.request.sequences[0].lease, served.link.heard + self._lease)

    def _send_confirmed(self, served: Served) -> None:
        """Whole blocks only: the sequence goes on writing into the last one."""
        seq, size = served.request.sequences[0], self._cache.block_size
        ready = min(seq.num_confirmed // size * size, served.asked.end)
        if ready <= served.queued or not seq.kv.tables or seq.row < 0:
            return
        lease = self._cache.leases.grant(self._cache.fork(seq.kv, ready // size), ready, self._scheduler.clock())
        self._send(served, lease.kv, lease.number, ready)

    def _send(self, served: Served, kv: SequenceKV, lease: int, end: int) -> None:
        start, served.queued = served.queued, end
        self._cache.leases.hold(lease)
        served.sending += 1
        tables = [list(table.blocks) for table in kv.tables[: self._num_groups]]

        def done(num_bytes: int, error: str | None) -> None:
            self._inbox.put(lambda: self._range_sent(served, lease, end - start, num_bytes, error))

        self._lane(served.link, Range(served.asked.ticket, tables, start, end, done, lambda: not served.cancelled))

    def _range_sent(self, served: Served, lease: int, tokens: int, num_bytes: int, error: str | None) -> None:
        """On the core's thread: the lane reads those blocks no more."""
        served.sending -= 1
        self._core.self_check.disturb()
        self._cache.leases.release(lease)
        self._stats.bytes_sent += num_bytes
        if error is None:
            self._stats.tokens_sent += tokens
        elif not served.cancelled:
            self._fail(served, f"its KV could not be sent: {error}")
        self._forget_if_over(served)

    def _fail(self, served: Served, reason: str) -> None:
        self._stats.prefills_failed += 1
        served.link.send(Failed(served.asked.transfer, reason).to_data())
        served.cancelled = True
        if not served.ended:
            served.ended = True
            self._core.abort(served.request.request_id)
        self._let_go(served)

    # ---- when it has ended

    def claim(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Take news of its own requests out; the rest is for others."""
        if not self._of_request:
            return updates
        others = []
        for update in updates:
            served = self._of_request.get(update.request)
            if served is None:
                others.append(update)
            else:
                self._news(served, update)
        return others

    def _news(self, served: Served, update: SequenceUpdate) -> None:
        served.prompt_logprobs += update.prompt_logprobs or []
        seq = update.sequence
        if not seq.finished:
            return
        del self._of_request[update.request]
        if served.ended:
            return
        served.ended = True
        if seq.error is not None or seq.finish_reason is FinishReason.ABORT or not update.new_tokens:
            self._fail(served, seq.error or "the request was aborted over there")
        else:
            if served.asked.first_token:
                first = FirstToken(update.new_tokens[0], update.logprobs, served.prompt_logprobs or None)
                served.link.send(First(served.asked.transfer, first).to_data())
            self._send_rest(served)
        self._forget_if_over(served)

    def _send_rest(self, served: Served) -> None:
        number = served.request.sequences[0].lease
        lease = self._cache.leases.get(number or -1)
        if served.queued >= served.asked.end:
            self._let_go(served)
        elif lease is None or number is None:
            self._fail(served, "its blocks were gone before they could be sent")
        else:
            self._send(served, lease.kv, number, served.asked.end)

    def _forget_if_over(self, served: Served) -> None:
        if not served.ended or served.sending or self._served.pop((served.link, served.asked.transfer), None) is None:
            return
        if not served.cancelled:
            self._stats.prefills_done += 1
            served.link.send(Sent(served.asked.transfer).to_data())


def _one_token(params: SamplingParams) -> SamplingParams:
    """What the first token depends on; how the request goes on is the other side's."""
    return dataclasses.replace(params, n=1, best_of=None, max_tokens=1, min_tokens=min(params.min_tokens, 1), stop=None,
                               bad_words=None, structured_outputs=None, include_stop_str_in_output=False)
