"""A process with matchers as the engine sees it: who is in it, what it was asked, and who is to blame if it is slow."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from quire.structured.link import Link
from quire.structured.packets import ANSWER, ANSWER_SECONDS, FULL_BYTES, LAST, QUERY, SLOW

_TOKENS_IN_PACKET: Final = 16384
_ASKED_AT_ONCE: Final = 8
"""Questions that go in one packet: with fewer, sending takes longer than asking; with more, the cell begins later."""


class Claim(Protocol):
    """A request that a cell works for."""

    number: int
    stop_ids: frozenset[int]
    running: bool

    @property
    def started(self) -> bool: ...

    def fail(self, reason: str) -> None: ...


class Member(Protocol):
    """A sequence whose matcher is in a cell."""

    number: int

    @property
    def claim(self) -> Claim: ...

    def take(self, serial: int, mask: bytes, flags: int) -> None: ...

    def move(self, cell: AskedCell) -> None: ...


class Home(Protocol):
    """The grammar that a cell follows; `grammars` are all of the engine's."""

    @property
    def grammars(self) -> Any: ...

    def cell(self) -> AskedCell: ...

    def new_cell(self) -> AskedCell: ...

    def spares(self, cell: AskedCell) -> bool: ...


class AskedCell:
    """A process with matchers. It answers in order, so that the first who waits is the one it computes for."""

    link: Link

    def __init__(self, home: Home) -> None:
        self.home = home
        self.slow = False
        self._members: dict[int, Member] = {}
        self._asked: deque[tuple[int, Member]] = deque()
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
        return not self.slow and not self.link.closed and any(seq.claim.started for _, seq in self._asked)

    def join(self, seq: Member, spent: float = 0.0) -> None:
        self._members[seq.number] = seq
        self._tell(start=seq.number, request=seq.claim.number, stop_ids=sorted(seq.claim.stop_ids), spent=spent)

    def leave(self, seq: Member) -> None:
        """End at once what no request needs any more."""
        self._members.pop(seq.number, None)
        if self._asked and self._asked[0][1] is seq and (self.slow or not self._members):
            self.end()
            for other in self._members.values():
                other.move(self.home.cell())
        elif not self._members and (self.slow or self.home.spares(self)):
            self.end()
        else:
            self._tell(end=seq.number)

    def ask(self, seq: Member, start: int, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """For the masks after these tokens and after each of the drafts; the question's number."""
        if not self._asked:
            self._cpu = self.link.cpu_seconds
        serial = next(self.home.grammars.serials) & 0xFFFFFFFF
        last = len(tokens) - len(tokens) % _TOKENS_IN_PACKET
        self.show(seq, start, tokens[:last])
        self._asked.append((serial, seq))
        self.home.grammars.asked(self)
        self._num_unsent += 1  # appending may send it
        self._append(b"Q", serial, seq, start + last, tokens[last:], drafts)
        return serial

    def show(self, seq: Member, start: int, tokens: Sequence[int]) -> None:
        """Tokens for which no mask is wanted yet."""
        for place in range(0, len(tokens), _TOKENS_IN_PACKET):
            self._append(b"T", 0, seq, start + place, tokens[place : place + _TOKENS_IN_PACKET], ())

    def _append(self, kind: bytes, serial: int, seq: Member, start: int, tokens: Sequence[int],
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
            self.end()
            self._move_others(None)
            return
        self._set_apart(slow)

    def _set_apart(self, slow: Claim) -> None:
        """One request has it to itself from now on."""
        self.slow = True
        self._move_others(slow)
        if self._asked:
            self.home.grammars.note_slow(self)

    def gone(self) -> None:
        """It has ended, for what it computed then: for the first who waits, or for one of those asked with it, since
        masks of the same packet may have died too. If these are several, nobody is blamed, and each goes on in a cell
        of its own, where who did it is alone."""
        self.home.grammars.answered(self)
        sent = list(self._asked)[: len(self._asked) - self._num_unsent]
        suspects = list({seq.claim.number: seq.claim for _, seq in sent[:_ASKED_AT_ONCE]}.values())
        self._drop_unsent()
        if len(suspects) > 1:
            for claim in suspects:
                self._move_together(claim, self.home.new_cell())
        culprit = suspects[0] if len(suspects) == 1 else None
        self._move_others(culprit)
        if culprit is not None:
            limits = self.home.grammars.limits
            culprit.fail(f"needs more than this engine gives a structured output: {1e3 * limits.token_seconds:g} ms of "
                         f"computing for one token, or {limits.memory_bytes} bytes of memory: simplify it")

    def _move_together(self, claim: Claim, cell: AskedCell) -> None:
        for seq in [seq for seq in self._members.values() if seq.claim is claim]:
            del self._members[seq.number]
            seq.move(cell)

    def _move_others(self, stays: Claim | None) -> None:
        others = [seq for seq in self._members.values() if seq.claim is not stays]
        for seq in others:
            del self._members[seq.number]
        self._asked = deque(pair for pair in self._asked if pair[1].claim is stays)
        for seq in others:
            if not self.link.closed:
                self._tell(end=seq.number)
            seq.move(self.home.cell())

    def end(self) -> None:
        self.link.close()
        self._asked.clear()
        self._drop_unsent()
        self.home.grammars.answered(self)

    def _drop_unsent(self) -> None:
        self.home.grammars.unsent.pop(self, None)
        self._unsent, self._unsent_bytes, self._num_unsent = [], 0, 0
