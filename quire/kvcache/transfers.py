"""Blocks on their way between the device and its tiers: who holds both ends until a transfer has reported.

A transfer keeps a hold of its own on every block that it touches, on both sides, whatever becomes of the sequences
that asked for it. So a late write can only land in a block that was not handed out again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from quire.kvcache.connector import KVConnector
from quire.kvcache.table import SequenceKV


@dataclass(slots=True)
class Move:
    """One block of a transfer: on the device, in the tier, and the prefix that it holds."""

    group: int
    device: int
    place: int
    key: bytes | None = None


@dataclass(slots=True, eq=False)
class Fetch:
    """KV that one request waits for, perhaps from several tiers."""

    pending: set[tuple[int, int]] = field(default_factory=set)
    """(group, block of the device) that has not arrived."""
    open: list[Transfer] = field(default_factory=list)
    """Transfers that have not reported to be finished."""
    error: str | None = None
    """Why some of it will not come."""
    num_bytes: int = 0
    awaited: bool = False
    """Another engine writes it into blocks reserved for that."""
    token_due: bool = False
    """The engine that writes it also samples the first token, which has not arrived yet."""
    until: float | None = None
    """When to look again at a token that is due."""

    @property
    def over(self) -> bool:
        """All that will come has come."""
        return not (self.open or self.awaited or self.token_due) or self.error is not None

    def missing_from(self, kv: SequenceKV) -> int:
        """The first entry of its tables whose block has not arrived; their length if all have."""
        for i in range(max((len(table.blocks) for table in kv.tables), default=0)):
            for group, table in enumerate(kv.tables):
                if i < len(table.blocks) and (group, table.blocks[i]) in self.pending:
                    return i
        return max((len(table.blocks) for table in kv.tables), default=0)


@dataclass(slots=True, eq=False)
class Transfer:
    """Moves between the device and one tier, made in their order.

    Until it is finished it holds its `chains`, whole prefixes as sequences do. Without chains it holds the device's
    block of each move until that is made.
    """

    number: int
    tier: KVConnector
    out: bool
    moves: list[Move]
    chains: list[SequenceKV] | None = None
    fetch: Fetch | None = None
    stores: bool = False
    """Its moves are copies of prefixes that the tier asked for."""
    leaves: bool = False
    """Its blocks were evicted: they are free once they are copied."""
    num_done: int = 0
    finished: bool = False
    error: str | None = None
    deadline: float | None = None
    let_go: bool = False
    """The device's blocks were released before they were copied out: the copy cannot be trusted."""

    @property
    def over(self) -> bool:
        return self.finished or self.let_go


@dataclass(slots=True)
class TransferStats:
    """Running totals that the metrics report."""

    started: int = 0
    failed: int = 0
    timed_out: int = 0


class TransferLedger:
    """Every transfer from the draft of its plan to its last report."""

    def __init__(self, give_back: Callable[[int, list[int]], None], left: Callable[[int, int], None],
                 free: Callable[[SequenceKV], None]) -> None:
        """`give_back` releases blocks of a group, `left` a block that was evicted, `free` a whole chain."""
        self._give_back, self._left, self._free = give_back, left, free
        self.drafted: list[Transfer] = []
        """To be started by the plan being drafted."""
        self.under_way: dict[int, Transfer] = {}
        self.cancels: list[int] = []
        """Numbers of transfers to cancel in the plan being drafted."""
        self.stats = TransferStats()
        self._number = 0

    # ---- begin

    def start(self, tier: KVConnector, out: bool, moves: list[Move], chains: list[SequenceKV] | None = None,
              fetch: Fetch | None = None, stores: bool = False, leaves: bool = False) -> Transfer:
        """The tier's ends are held by the caller, and the device's too, unless `chains` hold them: both are handed
        over."""
        self._number += 1
        transfer = Transfer(self._number, tier, out, moves, chains, fetch, stores, leaves)
        if fetch is not None:
            fetch.open.append(transfer)
            fetch.pending.update((move.group, move.device) for move in moves)
        self.drafted.append(transfer)
        return transfer

    def add_leaving(self, tier: KVConnector, move: Move) -> None:
        """An evicted block is copied out: with the others of this draft."""
        for transfer in self.drafted:
            if transfer.leaves and transfer.tier is tier:
                transfer.moves.append(move)
                return
        self.start(tier, True, [move], stores=True, leaves=True)

    def take_drafted(self, now: float, timeout: float, block_bytes: Sequence[int] = ()) -> list[Transfer]:
        """For a plan that is submitted now; they have `timeout` seconds, or less where their tier has less patience."""
        taken, self.drafted = self.drafted, []
        for transfer in taken:
            num_bytes = sum(block_bytes[move.group] for move in transfer.moves) if block_bytes else 0
            patience = None if transfer.out else transfer.tier.patience(num_bytes)
            transfer.deadline = now + (timeout if patience is None else min(timeout, patience))
            self.under_way[transfer.number] = transfer
        self.stats.started += len(taken)
        return taken

    def take_cancels(self) -> list[int]:
        cancels, self.cancels = self.cancels, []
        return [number for number in cancels if number in self.under_way]

    # ---- progress

    def report(self, number: int, num_done: int, finished: bool, error: str | None = None) -> None:
        """So many moves of a transfer are made. Numbers that are not known are of before a reset."""
        transfer = self.under_way.get(number)
        if transfer is None:
            return
        while transfer.num_done < min(num_done, len(transfer.moves)):
            self._settle(transfer, transfer.moves[transfer.num_done], made=True)
            transfer.num_done += 1
        if error is not None:
            transfer.error = transfer.error or error
            if transfer.fetch is not None:
                transfer.fetch.error = transfer.fetch.error or error
        if not finished:
            return
        del self.under_way[number]
        if transfer.num_done < len(transfer.moves) and transfer.error is None:
            transfer.error = "the transfer ended early"
        for move in transfer.moves[transfer.num_done :]:
            self._settle(transfer, move, made=False)
        self._finish(transfer)

    def _settle(self, transfer: Transfer, move: Move, made: bool) -> None:
        """Let go of both ends of one move."""
        tier = transfer.tier
        if transfer.stores and move.key is not None:
            tier.settled(move.group, move.place, move.key, made and not transfer.let_go)
        else:
            tier.give_back(move.group, move.place)
        if made and transfer.fetch is not None:
            transfer.fetch.pending.discard((move.group, move.device))
        self._release(transfer, move)

    def _release(self, transfer: Transfer, move: Move) -> None:
        if transfer.chains is not None or transfer.let_go:
            return
        if transfer.leaves:
            self._left(move.group, move.device)
        else:
            self._give_back(move.group, [move.device])

    def _finish(self, transfer: Transfer) -> None:
        transfer.finished = True
        if transfer.error is not None:
            self.stats.failed += 1
        if not transfer.let_go:
            for chain in transfer.chains or ():
                self._free(chain)
        fetch = transfer.fetch
        if fetch is not None:
            fetch.open.remove(transfer)
            fetch.error = fetch.error or transfer.error

    # ---- giving up

    def cancel(self, fetch: Fetch) -> None:
        """Cancel it. Its blocks come free when its transfers have reported their end."""
        for transfer in list(fetch.open):
            if transfer in self.drafted:
                self.drafted.remove(transfer)
                for move in transfer.moves:
                    self._settle(transfer, move, made=False)
                fetch.open.remove(transfer)
            else:
                self.cancels.append(transfer.number)
        fetch.error = fetch.error or "cancelled"

    def expire(self, now: float) -> None:
        """Stop waiting for transfers that are late. What may still be written stays held until it is reported."""
        for transfer in list(self.under_way.values()):
            if transfer.deadline is None or now < transfer.deadline:
                continue
            transfer.deadline = None
            self.stats.timed_out += 1
            self.cancels.append(transfer.number)
            if transfer.fetch is not None:
                transfer.tier.late()
                transfer.fetch.error = transfer.fetch.error or "its KV did not arrive in time"
            if transfer.out:
                self._abandon(transfer)

    def _abandon(self, transfer: Transfer) -> None:
        """A late read does no harm: what it read is discarded."""
        transfer.error = "the copy was not made in time"
        for move in transfer.moves[transfer.num_done :]:
            self._release(transfer, move)
        for chain in transfer.chains or ():
            self._free(chain)
        transfer.let_go = True

    # ---- looking

    @property
    def deadlines(self) -> Iterator[float]:
        return (t.deadline for t in self.under_way.values() if t.deadline is not None)

    @property
    def frees_blocks(self) -> bool:
        """Blocks of the device will come free once transfers have reported that are not late yet."""
        late_or_due = [*self.drafted, *self.under_way.values()]
        return any(t.out and not t.let_go for t in late_or_due) or any(
            t.fetch is not None and t.fetch.error is not None and t.deadline is not None for t in late_or_due)

    @property
    def num_blocks(self) -> int:
        """Of the device, whose move is not made yet."""
        return sum(len(t.moves) - t.num_done for t in self._all())

    def _all(self) -> Iterable[Transfer]:
        return [*self.drafted, *self.under_way.values()]

    def held_on_device(self, group: int) -> Iterator[int]:
        """Blocks that transfers hold, once for each hold; for self-examination."""
        for transfer in self._all():
            if transfer.let_go:
                continue
            if transfer.chains is None:
                yield from (move.device for move in transfer.moves[transfer.num_done :] if move.group == group)
            for chain in transfer.chains or ():
                for table in chain.tables[group : group + 1]:
                    yield from table.blocks[table.first_live :]

    def held_in_tier(self, tier: KVConnector, group: int) -> list[int]:
        return [move.place for transfer in self._all() if transfer.tier is tier
                for move in transfer.moves[transfer.num_done :] if move.group == group]
