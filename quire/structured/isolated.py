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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

from quire.errors import InvalidRequestError, InvariantError
from quire.structured.asked_cell import AskedCell
from quire.structured.compile_queue import CompileJob, CompileQueue
from quire.structured.link import Hub, Link
from quire.structured.output import agreement
from quire.structured.packets import LAST, OVER, SPENT, CellLimits
from quire.structured.spec import StructuredOutputs

PATIENCE_S: Final = 0.01
"""So long a step waits for masks at least, unless they are of grammars that are known to be slow."""
_SLOW_AT_ONCE: Final = 2
_MOST_GRAMMARS: Final = 64
"""That are kept, each in a process or two where no request runs."""
_MOST_FIRST_MASKS: Final = 4
"""Of one grammar that are kept."""
_COMPANY: Final = 16
"""Sequences that one cell follows before another is started: it makes their masks of a step one after another."""
_MOST_CELLS: Final = 8
"""Of one grammar, not counting slow ones, and no more than there are cores."""


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
        self._homes: OrderedDict[tuple[str, bytes], GrammarHome] = OrderedDict()
        self._slow: list[AskedCell] = []
        """Cells that are known to be slow and compute; all but the first few are paused."""
        self.numbers = itertools.count(1)
        """Of claims and sequences."""
        self.serials = itertools.count(1)
        """Of questions."""
        self.waiting: dict[AskedCell, None] = {}
        """Cells that owe an answer."""
        self.unsent: dict[AskedCell, None] = {}
        """Cells with questions that were not sent yet."""

    # ---- from the engine

    def submit(self, spec: StructuredOutputs, tenant: str = "", stop_ids: frozenset[int] = frozenset()
               ) -> RequestGrammar:
        """Ask for a grammar; returns at once."""
        key = (tenant, spec.key)
        home = self._homes.get(key)
        if home is None:
            home = self._homes[key] = GrammarHome(self, key, spec, tenant)
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

    def begin_grammar(self, home: GrammarHome, low: bool) -> Link:
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

    def forget(self, home: GrammarHome) -> None:
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

    def note_slow(self, cell: AskedCell) -> None:
        """Only some such cells compute at once."""
        self._slow.append(cell)
        self._share_slow()

    def answered(self, cell: AskedCell) -> None:
        """It owes nothing more, or has gone."""
        self.waiting.pop(cell, None)
        if cell in self._slow:
            self._slow.remove(cell)
            cell.link.resume()
            self._share_slow()

    def asked(self, cell: AskedCell) -> None:
        self.waiting[cell] = None
        if cell.slow and cell not in self._slow:
            self._slow.append(cell)
            self._share_slow()

    def _share_slow(self) -> None:
        for place, cell in enumerate(self._slow):
            (cell.link.resume if place < _SLOW_AT_ONCE else cell.link.pause)()


class GrammarHome:
    """One tenant's grammar: the process that compiles it, and the cell that new requests join."""

    def __init__(self, grammars: IsolatedGrammars, key: tuple[str, bytes], spec: StructuredOutputs,
                 tenant: str) -> None:
        self.grammars, self.key, self.spec = grammars, key, spec
        self.claims: set[RequestGrammar] = set()
        self.num_bytes = 0
        self.ready = False
        self._cells: list[AskedCell] = []
        """Those that requests may join."""
        self._first_masks: dict[frozenset[int], bytes] = {}
        """By what ends the output."""
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

    def cell(self) -> AskedCell:
        """The one for requests that come now: that with the fewest, or a new one where all have many and a core is left
        for it."""
        self._cells = [cell for cell in self._cells if cell.open]
        found = min(self._cells, key=lambda cell: cell.num_members, default=None)
        most = min(_MOST_CELLS, len(os.sched_getaffinity(0)))
        if found is None or (found.num_members >= _COMPANY and len(self._cells) < most):
            found = self.new_cell()
            self._cells.append(found)
        return found

    def first_mask(self, stop_ids: frozenset[int]) -> bytes | None:
        """Of any output that begins, if it was made before: nobody waits for a cell to begin."""
        return self._first_masks.get(stop_ids)

    def keep_first_mask(self, stop_ids: frozenset[int], mask: bytes) -> None:
        if len(self._first_masks) < _MOST_FIRST_MASKS:
            self._first_masks[stop_ids] = mask

    def spares(self, cell: AskedCell) -> bool:
        """Are there others for requests that come later?"""
        return any(other.open for other in self._cells if other is not cell)

    def new_cell(self) -> AskedCell:
        cell = AskedCell(self)
        cell.link, theirs = self.grammars.hub.pair(cell.take, cell.gone)
        assert self._job.link is not None
        self._job.link.send(b"{}", theirs)
        return cell

    def close(self) -> None:
        self.grammars.queue.remove(self._job)
        for cell in self._cells:
            cell.end()
        if self._job.link is not None:
            self._job.link.close()


class RequestGrammar:
    """A request's claim on a grammar, and what its sequences share. Settled when its first mask is there."""

    def __init__(self, grammars: IsolatedGrammars, home: GrammarHome, field: str, stop_ids: frozenset[int]) -> None:
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
        known = self._home.first_mask(self.stop_ids)
        self._sequences.append(IsolatedSequence(self, self._home.cell(), known))

    def keep_first_mask(self, mask: bytes) -> None:
        """For requests that come later."""
        self._home.keep_first_mask(self.stop_ids, mask)

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

    def __init__(self, claim: RequestGrammar, cell: AskedCell, first_mask: bytes | None = None) -> None:
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
    def cell(self) -> AskedCell:
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
            if flags == LAST:
                self.claim.keep_first_mask(mask)
        if flags & OVER:
            self.is_over = True
            self.claim.grammars.num_over += 1

    def move(self, cell: AskedCell) -> None:
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
