"""Plans as bytes: what the scheduler's side writes once for all ranks, and what each rank reads.

A step that decodes what the step before decoded, one token further, is the common one. It crosses as one number: which
of the recent steps it continues. Encoder and decoder remember the same recent steps, so every message must be read, in
order.
"""

from __future__ import annotations

import functools
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct

from quire.ranks.fields import FieldReader, FieldWriter
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import (
    BlockCopy,
    BlockMove,
    PlanEntry,
    RowStart,
    StepPlan,
    TableDiff,
    TransferStart,
)

INT = "i"
"""Rows, positions, tokens, block numbers: 32 bits."""
LONG = "q"
_HEAD = Struct("<q8I")
_START = Struct("<iiiQ")
_COPY = Struct("<iii")
_TRANSFER = Struct("<q?")
_ODD = Struct("<iiiiiI")
_NONE = -1
_RECENT = 16
"""Steps that a later one may continue: at least as many as there are stages with different sequences in them."""


@dataclass(frozen=True, slots=True)
class Learned:
    """Tokens that were drawn for a row since the plan before: stages that do not draw learn them from here."""

    row: int
    position: int
    """Of the first of them."""
    tokens: Sequence[int]


@dataclass(slots=True)
class _Decoding:
    """A step in which every entry decodes one token and nothing else."""

    rows: list[int]
    starts: list[int]
    ahead: int = 1
    """Steps that have continued it, and one: the next begins so many tokens later."""

    def goes_on(self, entries: list[PlanEntry]) -> bool:
        """Are these its sequences, one token further? Asked at every step, so it asks the least: an entry that decodes
        has nothing more than masks (see `PlanEntry`)."""
        if len(entries) != len(self.rows):
            return False
        ahead = self.ahead
        for entry, row, start in zip(entries, self.rows, self.starts, strict=True):
            if (entry.row != row or entry.start - ahead != start or entry.num_tokens != 1 or not entry.sample
                    or entry.masks):
                return False
        return True


class PlanEncoder:
    def __init__(self) -> None:
        self._recent: list[_Decoding] = []

    def encode(self, plan: StepPlan, learned: Sequence[Learned] = ()) -> bytearray:
        out = FieldWriter()
        out.data += _HEAD.pack(plan.step, len(plan.freed_rows), len(plan.starts), len(plan.diffs), len(plan.copies),
                               len(plan.transfers), len(plan.cancels), len(learned), len(plan.entries))
        if plan.freed_rows:
            out.column(INT, plan.freed_rows)
        before: list[int] = []
        for start in plan.starts:
            _write_start(out, start, before)
            before = start.token_ids
        if plan.diffs:
            numbers: list[int] = []
            for diff in plan.diffs:
                numbers += diff.row, diff.group, diff.start, len(diff.blocks)
            for diff in plan.diffs:
                numbers += diff.blocks
            out.column(INT, numbers)
        for copy in plan.copies:
            out.data += _COPY.pack(copy.group, copy.source, copy.target)
        for transfer in plan.transfers:
            _write_transfer(out, transfer)
        if plan.cancels:
            out.column(LONG, plan.cancels)
        for each in learned:
            out.column(INT, (each.row, each.position))
            out.numbers(INT, each.tokens)
        if plan.entries:
            self._write_entries(out, plan.entries)
        return out.data

    def _write_entries(self, out: FieldWriter, entries: list[PlanEntry]) -> None:
        for place, known in enumerate(self._recent):
            if known.goes_on(entries):
                known.ahead += 1
                out.data.append(1 + place)
                return
        rows = [entry.row for entry in entries]
        starts = [entry.start for entry in entries]
        odd = [place for place, entry in enumerate(entries) if entry.says_more]
        if not odd and all(entry.decodes for entry in entries):
            self._recent = [_Decoding(rows, starts), *self._recent[: _RECENT - 1]]
        out.data.append(0)
        out.column(INT, rows)
        out.column(INT, starts)
        out.column(INT, [entry.num_tokens for entry in entries])
        out.data += bytes([entry.sample for entry in entries])
        out.numbers(INT, odd)
        for place in odd:
            _write_odd(out, entries[place])


@dataclass(slots=True)
class _Entries:
    """Of a step in which every entry decodes one token and nothing else."""

    entries: list[PlanEntry]
    moved: bool = False
    """They are those of the next step already."""

    def move_on(self) -> None:
        if not self.moved:
            for entry in self.entries:
                entry.start += 1
        self.moved = True


class PlanDecoder:
    """Entries of decoding steps are the same objects from step to step, moved on: they are valid until the next
    `decode` or `prepare`."""

    def __init__(self) -> None:
        self._recent: list[_Entries] = []
        self._latest: _Entries | None = None

    def prepare(self) -> None:
        """The step is over, and there is time until the next: it is likely to continue this one."""
        if self._latest is not None:
            self._latest.move_on()

    def decode(self, data: bytes) -> tuple[StepPlan, list[Learned]]:
        step, *counts = _HEAD.unpack_from(data)
        freed, starts, diffs, copies, transfers, cancels, learned, entries = counts
        source = FieldReader(data, _HEAD.size)
        plan = StepPlan(step)
        if freed:
            plan.freed_rows = source.column(INT, freed)
        for _ in range(starts):
            plan.starts.append(_read_start(source, plan.starts[-1].token_ids if plan.starts else []))
        if diffs:
            plan.diffs = _read_diffs(source, diffs)
        if copies:
            plan.copies = [BlockCopy(*_COPY.unpack(source.take(_COPY.size))) for _ in range(copies)]
        if transfers:
            plan.transfers = [_read_transfer(source) for _ in range(transfers)]
        if cancels:
            plan.cancels = source.column(LONG, cancels)
        told = [_read_learned(source) for _ in range(learned)]
        if entries:
            plan.entries = self._read_entries(source, entries)
        if not source.at_end:
            raise ValueError("a plan is followed by bytes that are no part of it")
        return plan, told

    def _read_entries(self, source: FieldReader, count: int) -> list[PlanEntry]:
        continued = source.take(1)[0]
        self._latest = None
        if continued:
            self._latest = known = self._recent[continued - 1]
            known.move_on()
            known.moved = False
            return known.entries
        rows, starts, counts = (source.column(INT, count) for _ in range(3))
        samples = list(map(bool, source.take(count)))
        entries = list(map(PlanEntry, rows, starts, counts, samples))
        odd = source.numbers(INT)
        for place in odd:
            _read_odd(source, entries[place])
        if not odd and counts.count(1) == count and False not in samples:
            self._latest = _Entries(entries)
            self._recent = [self._latest, *self._recent[: _RECENT - 1]]
        return entries


def _read_diffs(source: FieldReader, count: int) -> list[TableDiff]:
    heads = source.column(INT, 4 * count)
    rows, groups, starts, sizes = (heads[part::4] for part in range(4))
    blocks = source.column(INT, sum(sizes))
    if sizes.count(1) == count:  # sequences that decode get a block now and then
        return list(map(TableDiff, rows, groups, starts, [[block] for block in blocks]))
    found, at = [], 0
    for row, group, start, size in zip(rows, groups, starts, sizes, strict=True):
        found.append(TableDiff(row, group, start, blocks[at : at + size]))
        at += size
    return found


def _read_learned(source: FieldReader) -> Learned:
    row, position = source.column(INT, 2)
    return Learned(row, position, source.numbers(INT))


def _write_odd(out: FieldWriter, entry: PlanEntry) -> None:
    first, shares = entry.prompt_logprobs_from, entry.shares
    out.data += _ODD.pack(_NONE if first is None else first, _NONE if shares is None else shares,
                          entry.candidates, entry.device_drafts, entry.draft_depth, len(entry.masks))
    out.numbers(INT, entry.drafts)
    out.numbers(INT, entry.parents)
    out.numbers(INT, entry.given)
    out.data += entry.masks


def _read_odd(source: FieldReader, entry: PlanEntry) -> None:
    first, shares, candidates, device_drafts, depth, masks = _ODD.unpack(source.take(_ODD.size))
    entry.prompt_logprobs_from = None if first == _NONE else first
    entry.shares = None if shares == _NONE else shares
    entry.candidates, entry.device_drafts, entry.draft_depth = candidates, device_drafts, depth
    entry.drafts = tuple(source.numbers(INT))
    entry.parents = tuple(source.numbers(INT))
    entry.given = tuple(source.numbers(INT))
    entry.masks = source.take(masks)


def _write_start(out: FieldWriter, start: RowStart, before: list[int]) -> None:
    """`before`: the tokens of the start before this one. Samples of one prompt start together, and send it once."""
    out.data += _START.pack(start.row, start.num_prompt_tokens, start.sequence_index, start.seed)
    repeated = start.token_ids is before or start.token_ids == before
    out.data.append(repeated)
    if not repeated:
        out.numbers(INT, start.token_ids)
    out.numbers(INT, start.stop_ids)
    out.numbers(INT, [len(word) for word in start.bad_words])
    for word in start.bad_words:
        out.column(INT, word)
    out.blob(_params_bytes(start.params))


def _read_start(source: FieldReader, before: list[int]) -> RowStart:
    row, num_prompt_tokens, sequence_index, seed = _START.unpack(source.take(_START.size))
    token_ids = before if source.take(1)[0] else source.numbers(INT)
    stop_ids, lengths = (source.numbers(INT) for _ in range(2))
    bad_words = [source.column(INT, length) for length in lengths]
    return RowStart(row, token_ids, num_prompt_tokens, _params_of(source.blob()), seed, sequence_index, stop_ids,
                    bad_words)


_DEFAULTS = SamplingParams().to_dict()


def _params_bytes(params: SamplingParams) -> bytes:
    """What is not as by default. A shape of structured outputs crosses as some shape: ranks get it as masks."""
    changed = {name: value for name, value in params.to_dict().items() if value != _DEFAULTS[name]}
    if "structured_outputs" in changed:
        changed["structured_outputs"] = {"json_object": True}
    return json.dumps(changed).encode()


@functools.lru_cache(maxsize=1024)
def _params_of(data: bytes) -> SamplingParams:
    fields = json.loads(data)
    if fields.get("logit_bias"):
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    return SamplingParams.from_dict(fields)


def _write_transfer(out: FieldWriter, transfer: TransferStart) -> None:
    out.data += _TRANSFER.pack(transfer.number, transfer.out)
    out.text(transfer.tier)
    part: Callable[[BlockMove], int]
    for part in (lambda m: m.group), (lambda m: m.device), (lambda m: m.tier):
        out.numbers(INT, array(INT, map(part, transfer.moves)))


def _read_transfer(source: FieldReader) -> TransferStart:
    number, out = _TRANSFER.unpack(source.take(_TRANSFER.size))
    tier = source.text()
    moves = list(map(BlockMove, *(source.numbers(INT) for _ in range(3))))
    return TransferStart(number, tier, out, moves)
