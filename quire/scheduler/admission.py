"""Starts waiting requests: from the prompt, from KV that tiers hold of it, or with the KV they had before a swap."""

from __future__ import annotations

from quire.errors import InvariantError
from quire.kvcache.connector import Lookup
from quire.kvcache.table import PrefixMatch
from quire.scheduler.arriving import Arriving
from quire.scheduler.draft import AdmissionResult, Draft
from quire.scheduler.endings import Endings
from quire.scheduler.giving_way import GivingWay
from quire.scheduler.groups import blocks_owed, blocks_to_go_on, extra_blocks
from quire.scheduler.leaders import PrefixLeaders
from quire.scheduler.request import Request, Sequence
from quire.scheduler.running import RunningPlanner
from quire.scheduler.state import SchedulerState
from quire.structured.gate import fail_if_slow, mask_ready

_MOST_OVERTAKING = 64
"""Requests that may start before an earlier one that waits for a prefix leader, a mask or KV in transfer."""
_MOST_ASIDE = 16
"""Requests that one step sets aside in this way."""


class Admissions:
    def __init__(self, state: SchedulerState, endings: Endings, giving_way: GivingWay, planner: RunningPlanner,
                 arriving: Arriving) -> None:
        self._state = state
        self._endings = endings
        self._giving_way = giving_way
        self._planner = planner
        self._arriving = arriving

    def admit(self, draft: Draft) -> None:
        """Start requests whose KV has arrived, then waiting requests in queue order, while there is room."""
        state, running = self._state, self._state.roster.running
        # Memory freed for running sequences goes to them first, or a new request would take it again, for ever.
        if (state.short and running) or not state.policy.admits(len(running)):
            return
        self._seat_arrived(draft)
        aside: list[Request] = []
        try:
            self._admit_waiting(draft, aside)
        finally:
            for request in reversed(aside):
                state.waiting.put_back(request)
        # A request started above may need no transfer after all, if its blocks were still on the device.
        self._seat_arrived(draft)

    def _admit_waiting(self, draft: Draft, aside: list[Request]) -> None:
        """In queue order. A request that waits for something other than memory or token budget is set aside, and those
        behind it may start; but only `_MOST_OVERTAKING` of them, then the queue waits for it."""
        state = self._state
        while draft.budget > 0 and len(state.waiting) and not draft.preempted:
            request = state.waiting.peek()
            if request in draft.made_way:
                break
            came = self._admit(draft, request)
            if came is AdmissionResult.AGAIN:
                continue
            if came is AdmissionResult.WAITS and request.num_overtaken < _MOST_OVERTAKING and len(aside) < _MOST_ASIDE:
                state.waiting.set_aside(request)
                aside.append(request)
            elif came is AdmissionResult.DONE:
                for passed in aside:
                    passed.num_overtaken += 1
            elif came is not AdmissionResult.NO_ROOM or not self._giving_way.make_way(draft, request):
                break

    def _admit(self, draft: Draft, request: Request) -> AdmissionResult:
        """Try to start the request at the head of the queue."""
        if not mask_ready(request.live[0]):
            if request.num_overtaken >= _MOST_OVERTAKING:
                fail_if_slow(request)
            return AdmissionResult.WAITS
        if self._asks_another_engine(request):
            return self._reserve(request)
        if not self._state.roster.has_rows_for(request):
            return AdmissionResult.NO_ROOM
        if request.swapped is not None:
            return self._swap_in(draft, request)
        return self._begin(draft, request)

    # ---- from the prompt

    def _begin(self, draft: Draft, request: Request) -> AdmissionResult:
        """Start a request from its prompt, or from all the tokens it knows after a preemption."""
        seq, cache = request.live[0], self._state.cache
        # Siblings that already have output tokens fork from the leader at the end of the prompt.
        held_at = seq.num_prompt_tokens if seq.num_output_tokens and len(request.live) > 1 else None
        known = held_at or len(seq.tokens)
        # Prompt log-probabilities need the logits of every prompt token, so a cached prefix is of no use.
        match, lookups = cache.no_match(), None
        if not seq.lacks_prompt_logprobs:
            lookups = self._lookups(request, seq, known)
            if lookups is None:
                self._state.roster.arrive(request)
                return AdmissionResult.DONE
            # A cached prefix must include the window blocks that will be sent to another engine.
            most = known if request.windows_kept_at is None else min(known, request.windows_kept_at + 1)
            match = cache.match(seq.kv, seq.tokens, lookups, most)
        # One slot more than known tokens: without room for the next token it would be preempted at once.
        length = min(len(seq.tokens) + 1, request.max_len)
        if match.num_outside:
            tokens = 1
        else:
            tokens = self._state.chunks.first(draft, seq, match.num_tokens, known - match.num_tokens,
                                              self._state.roster.running.values())
            if cache.prefix_caching and self._follows(draft, seq, match, known):
                return AdmissionResult.WAITS
            if tokens <= 0:
                return AdmissionResult.LATER
        if not cache.fits(length, match, tokens, extra_blocks(request, cache)):
            return AdmissionResult.NO_ROOM
        came = self._start(draft, seq, match, tokens, held_at)
        if came is AdmissionResult.AGAIN:
            request.lookups = lookups
        return came

    def _lookups(self, request: Request, seq: Sequence, known: int) -> list[Lookup] | None:
        """The tiers' answers about its tokens; None if a tier cannot answer at once."""
        if request.computes:
            return []
        lookups = self._state.cache.ask(seq.kv, seq.tokens, known) if request.lookups is None else request.lookups
        if request.lookups is None and not all(lookup.settled for lookup in lookups):
            request.lookups = lookups
            now = self._state.clock()
            for lookup, tier in zip(lookups, self._state.cache.tiers, strict=True):
                lookup.deadline = now + tier.lookup_timeout
            return None
        return lookups

    def _follows(self, draft: Draft, seq: Sequence, match: PrefixMatch, known: int) -> bool:
        """Is another sequence computing most of the missing prefix, so that it will be cached soon?"""
        running = self._state.roster.running
        if not running or seq.lacks_prompt_logprobs:
            return False
        if draft.leaders is None:
            draft.leaders = PrefixLeaders(running.values(), self._state.cache.block_size)
        return draft.leaders.has_one_for(seq, match.num_tokens, known)

    def _start(self, draft: Draft, seq: Sequence, match: PrefixMatch, tokens: int,
               held_at: int | None) -> AdmissionResult:
        cache, request = self._state.cache, seq.request
        try:
            fetch = cache.open(seq.kv, match, tokens)
            if fetch is None:
                request.lookups = None
                return AdmissionResult.AGAIN if match.lost else AdmissionResult.LATER
            if not match.num_outside and not cache.extend(seq.kv, match.num_tokens + tokens, match.num_tokens):
                raise InvariantError("the cache promised room for a sequence and then had none")
        except InvariantError as error:
            self._endings.quarantine(seq, error)
            return AdmissionResult.DONE
        request.lookups = None
        seq.held_at = held_at
        self._count(request, seq, match)
        seq.num_computed = seq.num_confirmed = match.num_tokens
        if match.num_outside:
            self._arriving.begin(request, fetch)
            return AdmissionResult.DONE
        self._state.roster.seat(request, [seq])
        if draft.leaders is not None:
            draft.leaders.add(seq)
        self._planner.plan(draft, seq, tokens)
        return AdmissionResult.DONE

    def _count(self, request: Request, seq: Sequence, match: PrefixMatch) -> None:
        request.counts.tier_hits += match.num_outside
        request.counts.tier_hit_tokens += match.outside_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = match.num_tokens
            request.first_scheduled_time = self._state.clock()
            self._state.cache.count_query(len(seq.tokens), match)
            if self._state.on_start is not None:
                self._state.on_start(request)
        else:
            again = len(seq.tokens) - match.num_tokens
            again += sum(other.num_output_tokens for other in request.live[1:])
            self._state.stats.recomputed_tokens += again
            request.counts.recomputed_tokens += again

    # ---- from a prompt that another engine computes

    def _asks_another_engine(self, request: Request) -> bool:
        """Ask when it is at the head of the queue; it needs no row meanwhile. At most `max_num_seqs` requests do so."""
        remote, seq = request.remote, request.live[0]
        if remote is None or remote.given_up or seq.num_output_tokens or request.swapped is not None:
            return False
        return len(self._state.roster.arriving) < self._state.limits.max_num_seqs

    def _reserve(self, request: Request) -> AdmissionResult:
        """Reserve blocks for the part of the prompt that is not cached; `take_asking` then tells the other engine."""
        state, seq, remote = self._state, request.live[0], request.remote
        if remote is None:
            return AdmissionResult.LATER
        match = state.cache.match(seq.kv, seq.tokens) if not seq.lacks_prompt_logprobs else state.cache.no_match()
        end = seq.num_prompt_tokens - (not remote.first_token)
        if end - match.num_tokens < max(1, remote.least_tokens):
            remote.given_up = True
            return AdmissionResult.AGAIN
        try:
            reservation = state.cache.reserve(seq.kv, match, end, state.clock() + state.limits.fetch_timeout,
                                              position=seq.num_prompt_tokens - 1)
        except InvariantError as error:
            self._endings.quarantine(seq, error)
            return AdmissionResult.DONE
        if reservation is None:
            return AdmissionResult.LATER if state.cache.room_is_coming else AdmissionResult.NO_ROOM
        request.reservation = reservation.number
        reservation.fetch.token_due = remote.first_token
        reservation.fetch.until = reservation.deadline
        self._count(request, seq, match)
        seq.num_computed = seq.num_prompt_tokens - 1
        self._arriving.begin(request, reservation.fetch)
        state.asking.append((request, reservation))
        return AdmissionResult.DONE

    # ---- with its swapped KV

    def _swap_in(self, draft: Draft, request: Request) -> AdmissionResult:
        """Fetch a request's KV back from the host; it continues where it was."""
        swapped, swapper, roster = request.swapped, self._state.preemption.swapper, self._state.roster
        if swapped is None or swapper is None or not swapped.settled:
            return AdmissionResult.WAITS
        seats = [seq for seq in request.live if any(seq.kv is kv for kv, _ in swapped.tables)]
        if not seats or swapped.lost:
            roster.forget_swapped(request)
            return self._begin(draft, request)
        # If no other request runs, its former number of blocks suffices: the pool held it before.
        extra = 0
        if roster.running or roster.arriving:
            cache = self._state.cache
            extra = blocks_to_go_on(request, seats, cache) + blocks_owed(roster.running.values(), cache)
        if not swapper.fits(swapped, extra):
            return AdmissionResult.NO_ROOM
        fetch = swapper.back(swapped, [seq.kv for seq in seats])
        if fetch is None:
            return AdmissionResult.LATER
        request.swapped = None
        request.counts.swaps_in += 1
        request.counts.swap_bytes += fetch.num_bytes
        if len(seats) < len(request.live) and seats[0].num_output_tokens:
            seats[0].held_at = seats[0].num_prompt_tokens
        self._arriving.begin(request, fetch)
        return AdmissionResult.DONE

    # ---- when its KV has arrived

    def _seat_arrived(self, draft: Draft) -> None:
        state = self._state
        for request in self._arriving.arrived():
            # Blocks freed by preemption in this draft are for running requests, if there are any.
            if draft.budget <= 0 or (draft.preempted and state.roster.running):
                return
            seats = [seq for seq in request.live if seq.kv.tables]
            if request in draft.made_way or not state.roster.has_rows_for(request) or not self._has_turn(draft, seats):
                continue
            state.roster.seat(request, seats)
            self._planner.begin(draft, request)

    def _has_turn(self, draft: Draft, seats: list[Sequence]) -> bool:
        """Are all masks there, and may unfinished prompts compute a chunk in this step?"""
        if not all(mask_ready(seq) for seq in seats):
            return False
        for seq in seats:
            todo = (seq.held_at or len(seq.tokens)) - seq.num_computed
            if todo > 1 and self._state.chunks.first(draft, seq, seq.num_computed, todo,
                                                     self._state.roster.running.values()) <= 0:
                return False
        return True
