"""Grammars in processes of their own: however long one computes, steps go on, and it can be ended at any moment.

The engine asks for a sequence's next mask as soon as it has its tokens, and plans the sequence when the mask is there.
For an ordinary grammar that is a fraction of a millisecond, for which a step waits. Who is slower is planned later,
alone in a process that goes after all others; who exceeds what a token or a request may take fails, alone.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from quire.errors import InvalidRequestError, InvariantError
from quire.structured.compile_queue import CompileJob, CompileQueue
from quire.structured.link import Hub, Link
from quire.structured.output import agreement
from quire.structured.packets import ANSWER, ANSWER_SECONDS, FULL_BYTES, LAST, OVER, QUERY, SLOW, SPENT, CellLimits
from quire.structured.spec import StructuredOutputs

PATIENCE_S: Final = 0.01
"""So long a step waits for masks at least, unless they are of grammars that are known to be slow."""
_SLOW_AT_ONCE: Final = 2
_MOST_GRAMMARS: Final = 64
"""That are kept, each in a process or two where no request runs."""
_COMPANY: Final = 16
"""Sequences that one cell follows before another is started for more: their masks of a step are made one after another."""
_MOST_CELLS: Final = 8
"""Of one grammar, not counting slow ones, and no more than there are cores."""
_TOKENS_IN_PACKET: Final = 16384
_ASKED_AT_ONCE: Final = 8
"""Questions that go in one packet: fewer, and each costs the engine and the cell more than its tokens; more, and the cell
would begin later."""


class IsolatedGrammars:
    """What the engine asks for; `start` starts a nursery that speaks at the other end of the socket given, and that
    hurries, or goes after all others, until it is ready."""

    def __init__(self, start: Callable[[Any, bool], None], limits: CellLimits, cache_bytes: int, at_once: int) -> None:
        self.limits = limits
        self.hub = Hub()
        self.queue = CompileQueue(at_once, limits.compile_seconds)
        self.failed: list[RequestGrammar] = []
        """Of running requests; reading takes them out."""
        self.num_over = 0
        """Sequences seen so far that have nothing more to say."""
        self._start = start
        self.cache_bytes = cache_bytes
        self._nursery: Link | None = None
        self._nursery_hurries = self._nursery_ready = False
        self._homes: OrderedDict[tuple[str, bytes], _Home] = OrderedDict()
        self._slow: list[_Cell] = []
        """Cells that are known to be slow and compute; all but the first few are paused."""
        self.numbers = itertools.count(1)
        self.waiting: dict[_Cell, None] = {}
        """Cells that owe an answer."""
        self.unsent: dict[_Cell, None] = {}
        """Cells with questions that were not sent yet."""

    # ---- from the engine

    def submit(self, spec: StructuredOutputs, tenant: str = "", stop_ids: frozenset[int] = frozenset()
               ) -> RequestGrammar:
        """Ask for a grammar; returns at once."""
        key = (tenant, spec.key)
        home = self._homes.get(key)
        if home is None:
            home = self._homes[key] = _Home(self, key, spec, tenant)
        self._homes.move_to_end(key)
        claim = RequestGrammar(self, home, spec.field, stop_ids)
        home.add(claim)
        self._evict()
        self.ask_now()
        return claim

    @property
    def owes_masks(self) -> bool:
        return bool(self.waiting)

    def pump(self, patience: float = 0.0) -> None:
        """Take in what the processes say; wait so long for masks of requests that run and are not known to be slow."""
        until = time.monotonic() + patience
        self.ask_now()
        while self.hub.pump(0.0):
            pass
        self.ask_now()
        while patience and any(cell.worth_waiting for cell in self.waiting):
            left = until - time.monotonic()
            if left <= 0:
                break
            self.hub.pump(left)
            self.ask_now()
        for cell in list(self.waiting):
            cell.judge()
        self.ask_now()
        self.queue.turn()

    def ask_now(self) -> None:
        """Send the questions that wait for company: whoever will not ask for more before it waits calls this."""
        while self.unsent:
            next(iter(self.unsent)).send_asked()

    def wait(self, seconds: float) -> None:
        """Until anything comes, but no longer than that."""
        self.ask_now()
        self.hub.pump(seconds)
        self.pump()

    def close(self) -> None:
        self.hub.close()

    # ---- for the processes

    def warm(self) -> None:
        """Start the nursery before the first grammar is needed, after all other work."""
        if self._nursery is None and importlib.util.find_spec("xgrammar") is not None:
            self._begin_nursery(hurry=False)

    def begin_grammar(self, home: _Home, low: bool) -> Link:
        if self._nursery is None or self._nursery.closed or not (self._nursery_ready or self._nursery_hurries):
            nursery = self._begin_nursery(hurry=True)
        else:
            nursery = self._nursery
        link, theirs = self.hub.pair(home.take, home.gone)
        order = {"spec": home.spec.to_dict(), "low": low}
        nursery.send(json.dumps(order, ensure_ascii=False).encode(), theirs)
        return link

    def _begin_nursery(self, hurry: bool) -> Link:
        """In place of one that does not hurry and is not ready, if there is one."""
        if self._nursery is not None:
            self._nursery.close()
        self._nursery_hurries, self._nursery_ready = hurry, False
        self._nursery, theirs = self.hub.pair(self._take_nursery, lambda: None)
        with theirs:
            self._start(theirs, hurry)
        return self._nursery

    def _take_nursery(self, data: bytes) -> None:
        """It says one thing: that it is ready."""
        self._nursery_ready = True

    def forget(self, home: _Home) -> None:
        self._homes.pop(home.key, None)
        home.close()

    def _evict(self) -> None:
        """Drop the least recently used idle ones while there are too many or they are too large."""
        for home in list(self._homes.values()):
            held = sum(each.num_bytes for each in self._homes.values())
            if len(self._homes) <= _MOST_GRAMMARS and held <= self.cache_bytes:
                return
            if not home.claims:
                self.forget(home)

    def note_slow(self, cell: _Cell) -> None:
        """Only some such cells compute at once."""
        self._slow.append(cell)
        self._share_slow()

    def answered(self, cell: _Cell) -> None:
        """It owes nothing more, or has gone."""
        self.waiting.pop(cell, None)
        if cell in self._slow:
            self._slow.remove(cell)
            cell.link.resume()
            self._share_slow()

    def asked(self, cell: _Cell) -> None:
        self.waiting[cell] = None
        if cell.slow and cell not in self._slow:
            self._slow.append(cell)
            self._share_slow()

    def _share_slow(self) -> None:
        for place, cell in enumerate(self._slow):
            (cell.link.resume if place < _SLOW_AT_ONCE else cell.link.pause)()


class _Home:
    """One tenant's grammar: the process that compiles it, and the cell that new requests join."""

    def __init__(self, grammars: IsolatedGrammars, key: tuple[str, bytes], spec: StructuredOutputs,
                 tenant: str) -> None:
        self.grammars, self.key, self.spec = grammars, key, spec
        self.claims: set[RequestGrammar] = set()
        self.num_bytes = 0
        self.ready = False
        self._cells: list[_Cell] = []
        """Those that requests may join."""
        self._job = CompileJob(tenant, lambda low: grammars.begin_grammar(self, low), self._fail)
        grammars.queue.add(self._job)

    def add(self, claim: RequestGrammar) -> None:
        self.claims.add(claim)
        if self.ready:
            claim.begin()

    def leave(self, claim: RequestGrammar) -> None:
        self.claims.discard(claim)
        if not self.claims and not self.ready:
            self.grammars.forget(self)

    def take(self, data: bytes) -> None:
        """What the process says when it has compiled, or has not."""
        said = json.loads(data)
        if "error" in said:
            self._fail(said["error"])
            return
        self.num_bytes = said["num_bytes"]
        if self.num_bytes > self.grammars.cache_bytes:
            self._fail(f"needs {self.num_bytes} bytes when compiled, and grammar_cache_memory is "
                       f"{self.grammars.cache_bytes}: simplify it")
            return
        self.ready = True
        self.grammars.queue.remove(self._job)
        for claim in list(self.claims):
            claim.begin()

    def gone(self) -> None:
        """Its process has ended: the kernel has ended it, for its memory or its time, or the compiler broke."""
        self._fail("could not be compiled: it took too much memory or time, or the compiler broke on it: simplify it")

    def _fail(self, reason: str) -> None:
        for claim in list(self.claims):
            claim.fail(reason)
        self.grammars.forget(self)

    def cell(self) -> _Cell:
        """The one for requests that come now: that with the fewest, or a new one where all have many and a core is left
        for it."""
        self._cells = [cell for cell in self._cells if cell.open]
        found = min(self._cells, key=lambda cell: cell.num_members, default=None)
        most = min(_MOST_CELLS, len(os.sched_getaffinity(0)))
        if found is None or (found.num_members >= _COMPANY and len(self._cells) < most):
            found = self.new_cell()
            self._cells.append(found)
        return found

    def spares(self, cell: _Cell) -> bool:
        """Are there others for requests that come later?"""
        return any(other.open for other in self._cells if other is not cell)

    def new_cell(self) -> _Cell:
        cell = _Cell(self)
        cell.link, theirs = self.grammars.hub.pair(cell.take, cell.gone)
        assert self._job.link is not None
        self._job.link.send(b"{}", theirs)
        return cell

    def close(self) -> None:
        self.grammars.queue.remove(self._job)
        for cell in self._cells:
            cell.link.close()
            self.grammars.answered(cell)
        if self._job.link is not None:
            self._job.link.close()


class _Cell:
    """A process with matchers. It answers in order, so that the first who waits is the one it computes for."""

    link: Link

    def __init__(self, home: _Home) -> None:
        self.home = home
        self.slow = False
        self._members: dict[int, IsolatedSequence] = {}
        self._asked: deque[tuple[int, IsolatedSequence]] = deque()
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._num_unsent = 0
        """Of those asked, the last so many are not sent yet."""
        self._cpu = 0.0
        """Seconds that it had computed when it began with the first of those."""

    @property
    def num_members(self) -> int:
        return len(self._members)

    @property
    def open(self) -> bool:
        """May a request join it?"""
        return not self.slow and not self.link.closed

    @property
    def worth_waiting(self) -> bool:
        """Will it soon answer for a request that could be planned then?"""
        return not self.slow and any(seq.claim.started for _, seq in self._asked)

    def join(self, seq: IsolatedSequence, spent: float = 0.0) -> None:
        self._members[seq.number] = seq
        self._tell(start=seq.number, request=seq.claim.number, stop_ids=sorted(seq.claim.stop_ids), spent=spent)

    def leave(self, seq: IsolatedSequence) -> None:
        """End at once what no request needs any more."""
        self._members.pop(seq.number, None)
        if self._asked and self._asked[0][1] is seq and (self.slow or not self._members):
            self._end()
            for other in self._members.values():
                other.move(self.home.cell())
        elif not self._members and (self.slow or self.home.spares(self)):
            self._end()
        else:
            self._tell(end=seq.number)

    def ask(self, seq: IsolatedSequence, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """For the masks after these tokens and after each of the drafts; the question's number."""
        if not self._asked:
            self._cpu = self.link.cpu_seconds
        serial = next(self.home.grammars.numbers) & 0xFFFFFFFF
        last = len(tokens) - len(tokens) % _TOKENS_IN_PACKET
        self.show(seq, start, tokens[:last])
        self._asked.append((serial, seq))
        self.home.grammars.asked(self)
        self._num_unsent += 1  # appending may send it
        self._append(b"Q", serial, seq, start + last, tokens[last:], drafts)
        return serial

    def show(self, seq: IsolatedSequence, start: int, tokens: Sequence[int]) -> None:
        """Tokens for which no mask is wanted yet."""
        for place in range(0, len(tokens), _TOKENS_IN_PACKET):
            self._append(b"T", 0, seq, start + place, tokens[place : place + _TOKENS_IN_PACKET], ())

    def _append(self, kind: bytes, serial: int, seq: IsolatedSequence, start: int, tokens: Sequence[int],
                drafts: Sequence[int]) -> None:
        head = QUERY.pack(kind, serial, seq.number, start, len(tokens), len(drafts))
        packet = head + array("I", (*tokens, *drafts)).tobytes()
        self._unsent.append(packet)
        self._unsent_bytes += len(packet)
        self.home.grammars.unsent[self] = None
        if len(self._unsent) >= _ASKED_AT_ONCE or self._unsent_bytes >= FULL_BYTES:
            self.send_asked()

    def send_asked(self) -> None:
        unsent = self._unsent
        self._drop_unsent()
        if unsent:
            self.link.send(b"".join(unsent))

    def _tell(self, **fields: Any) -> None:
        """After the questions that came before."""
        self.send_asked()
        self.link.tell(**fields)

    def take(self, data: bytes) -> None:
        """What the cell answers."""
        at = 0
        while at < len(data):
            _, serial, _, flags, size = ANSWER.unpack_from(data, at)
            at += ANSWER.size + size
            self._take(serial, data[at - size : at], flags)
        if self._asked:
            self._cpu = self.link.cpu_seconds

    def _take(self, serial: int, mask: bytes, flags: int) -> None:
        if not self._asked or self._asked[0][0] != serial:
            return
        _, seq = self._asked[0]
        if flags & LAST:
            self._asked.popleft()
            if not self._asked:
                self.home.grammars.answered(self)
        if flags & SLOW and not self.slow:
            self._set_apart(seq.claim)
        if seq.number in self._members:
            seq.take(serial, mask, flags)

    def judge(self) -> None:
        """Has it computed for too long at one mask to have company?"""
        limit = self.home.grammars.limits.mask_quick_seconds + ANSWER_SECONDS
        if self.slow or not self._asked or self.link.cpu_seconds - self._cpu < limit:
            return
        slow = self._asked[0][1].claim
        if not slow.running:  # its request has gone
            self._end()
            self._move_others(None)
            return
        self._set_apart(slow)

    def _set_apart(self, slow: RequestGrammar) -> None:
        """One request has it to itself from now on."""
        self.slow = True
        self._move_others(slow)
        if self._asked:
            self.home.grammars.note_slow(self)

    def gone(self) -> None:
        """The kernel has ended it, for what it computed when it ended."""
        self.home.grammars.answered(self)
        culprit = self._asked[0][1].claim if len(self._asked) > self._num_unsent else None
        self._drop_unsent()
        self._move_others(culprit)
        if culprit is not None:
            limits = self.home.grammars.limits
            culprit.fail(f"needs more than this engine gives a structured output: {1e3 * limits.token_seconds:g} ms of "
                         f"computing for one token, or {limits.memory_bytes} bytes of memory: simplify it")

    def _move_others(self, stays: RequestGrammar | None) -> None:
        others = [seq for seq in self._members.values() if seq.claim is not stays]
        for seq in others:
            del self._members[seq.number]
        self._asked = deque(pair for pair in self._asked if pair[1].claim is stays)
        for seq in others:
            if not self.link.closed:
                self._tell(end=seq.number)
            seq.move(self.home.cell())

    def _end(self) -> None:
        self.link.close()
        self._asked.clear()
        self._drop_unsent()
        self.home.grammars.answered(self)

    def _drop_unsent(self) -> None:
        self.home.grammars.unsent.pop(self, None)
        self._unsent, self._unsent_bytes, self._num_unsent = [], 0, 0


class RequestGrammar:
    """A request's claim on a grammar, and what its sequences share. Settled when its first mask is there."""

    def __init__(self, grammars: IsolatedGrammars, home: _Home, field: str, stop_ids: frozenset[int]) -> None:
        self.grammars, self._home, self._field = grammars, home, field
        self.stop_ids = stop_ids
        self.number = next(grammars.numbers)
        self.running = True
        self.refusal: InvalidRequestError | None = None
        self._sequences: list[IsolatedSequence] = []
        self._handed_out = 0

    @property
    def started(self) -> bool:
        """It has sequences that run."""
        return self._handed_out > 0

    @property
    def settled(self) -> bool:
        return self.refusal is not None or bool(self._sequences and self._sequences[0].ready([]))

    def result(self) -> RequestGrammar:
        if self.refusal is not None:
            raise self.refusal
        return self

    def wait(self, seconds: float) -> None:
        if not self.settled:
            self.grammars.wait(seconds)

    def begin(self) -> None:
        """The grammar is compiled: have the first mask made, which is that of all its sequences."""
        self._sequences.append(IsolatedSequence(self, self._home.cell()))

    def start(self, stop_ids: frozenset[int]) -> IsolatedSequence:
        """For one more sequence."""
        if self._handed_out:
            first = self._sequences[0]
            # All in one cell, which counts what they compute together.
            cell = first.cell if first.cell.open else self._home.cell()
            self._sequences.append(IsolatedSequence(self, cell, first.first_mask))
        self._handed_out += 1
        return self._sequences[-1]

    def fail(self, reason: str) -> None:
        if self.refusal is None and self.running:
            said = reason if reason.startswith(self._field) else f"{self._field} {reason}"
            self.refusal = InvalidRequestError(said, field=self._field)
            self.grammars.failed.append(self)

    def release(self) -> None:
        """The request has ended, or is given up."""
        if self.running:
            self.running = False
            for seq in self._sequences:
                seq.end()
            self._home.leave(self)


class IsolatedSequence:
    """Where one sequence stands, as far as it is known here; the matcher is in a cell."""

    masks_of_all = None
    """Masks are made one by one in the cells, as their tokens come."""

    def __init__(self, claim: RequestGrammar, cell: _Cell, first_mask: bytes | None = None) -> None:
        self.claim = claim
        self.number = next(claim.grammars.numbers)
        self.first_mask = first_mask
        self.is_over = False
        self._cell = cell
        self._told: list[int] = []
        self._mask = first_mask
        """After those tokens; None while it is being made."""
        self._serial = 0
        """Of the question for it."""
        self._drafts: list[int] = []
        self._draft_masks: list[bytes] = []
        self._draft_serial = 0
        self._asked_at = 0.0
        cell.join(self)
        if first_mask is None:
            self._ask(0)

    # ---- what the scheduler asks

    def ready(self, output: Sequence[int]) -> bool:
        """Is the mask after `output` there? If it was never asked for, it is from now on."""
        told = self._told
        same = agreement(output, told, len(told))
        if same < len(told):
            self._told = list(output)
            self._ask(0)
        elif same < len(output):
            told.extend(output[same:])
            self._ask(same)
        return self._mask is not None

    def draft(self, output: Sequence[int], drafts: Sequence[int]) -> None:
        """Have the masks after these drafts made, too."""
        if self.ready(output):
            self._drafts, self._draft_masks = list(drafts), []
            self._draft_serial = self._cell.ask(self, len(self._told), (), self._drafts)

    def drafted(self, drafts: Sequence[int]) -> bool:
        return self._drafts == list(drafts) and len(self._draft_masks) == 1 + len(drafts)

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        """Of an output for which `ready` said so; with drafts if `drafted` did."""
        if not self.ready(output) or self._mask is None or (drafts and not self.drafted(drafts)):
            raise InvariantError("a structured output was planned without its mask")
        return list(self._draft_masks) if drafts else [self._mask]

    def over(self, output: Sequence[int], must_know: bool = False) -> bool:
        """Asks for the next mask. Whether that says that the text is over shows soon (`is_over`): it is waited for, a
        little, only by who must know."""
        if not self.ready(output) and must_know and not self._cell.slow:
            self.claim.grammars.pump(PATIENCE_S)
        return self.is_over

    @property
    def cell(self) -> _Cell:
        return self._cell

    @property
    def seconds_waited(self) -> float:
        """For the mask."""
        return 0.0 if self._mask is not None else time.monotonic() - self._asked_at

    def _ask(self, start: int) -> None:
        self._mask, self._drafts, self._draft_masks = None, [], []
        self._asked_at = time.monotonic()
        self._serial = self._cell.ask(self, start, self._told[start:], ())

    # ---- what the cell says

    def take(self, serial: int, mask: bytes, flags: int) -> None:
        if flags & SPENT:
            seconds = self.claim.grammars.limits.request_seconds
            self.claim.fail(f"has used up the {seconds:g} s of computing that a structured output gets: simplify it")
        if serial == self._draft_serial:
            self._draft_masks.append(mask)
        if serial != self._serial:
            return
        self._mask = mask
        if not self._told:
            self.first_mask = mask
        if flags & OVER:
            self.is_over = True
            self.claim.grammars.num_over += 1

    def move(self, cell: _Cell) -> None:
        """Its matcher is made anew in another cell, from the tokens."""
        self._cell = cell
        cell.join(self)
        self._drafts, self._draft_masks = [], []
        if self._mask is None:
            self._serial = cell.ask(self, 0, self._told, ())
        else:
            cell.show(self, 0, self._told)

    def end(self) -> None:
        self._cell.leave(self)
