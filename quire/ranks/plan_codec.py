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
_ONE_BLOCK = Struct("<iiii")
_COPY = Struct("<iii")
_TRANSFER = Struct("<q?")
_ODD = Struct("<iiiiiI")
_NONE = -1
_OTHER, _DECODES, _CONTINUES = range(3)
"""Kinds of entries: any; those of a step that only decodes; those of such a step before, moved on. The last and the
numbers after it say which."""
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
    """Of the step that would continue it, once `moved`."""
    moved: bool = False

    def move_on(self) -> None:
        if not self.moved:
            self.starts = [start + 1 for start in self.starts]
        self.moved = True


class PlanEncoder:
    def __init__(self) -> None:
        self._recent: list[_Decoding] = []
        self._latest: _Decoding | None = None

    def prepare(self) -> None:
        """The plan is sent, and there is time until the next: it is likely to continue this one."""
        if self._latest is not None:
            self._latest.move_on()

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
            _write_diffs(out, plan.diffs)
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
            self._write_entries(out, plan)
        return out.data

    def _write_entries(self, out: FieldWriter, plan: StepPlan) -> None:
        entries, self._latest = plan.entries, None
        if plan.decoding is None:
            out.data.append(_OTHER)
            out.column(INT, [entry.row for entry in entries])
            out.column(INT, [entry.start for entry in entries])
            _write_rest(out, entries)
        elif not self._continues(out, *plan.decoding):
            rows, starts = plan.decoding
            out.data.append(_DECODES)
            out.column(INT, rows)
            out.column(INT, starts)
            self._latest = _Decoding(rows, starts)
            self._recent = [self._latest, *self._recent[: _RECENT - 1]]

    def _continues(self, out: FieldWriter, rows: list[int], starts: list[int]) -> bool:
        """Are these the sequences of a recent step, one token further? Lists of numbers are compared in C; to look at
        hundreds of entries would take longer than all else that is done for a plan."""
        for place, known in enumerate(self._recent):
            known.move_on()
            if known.starts == starts and known.rows == rows:
                known.moved, self._latest = False, known
                out.data.append(_CONTINUES + place)
                return True
        return False


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
        step, freed, starts, diffs, copies, transfers, cancels, learned, entries = _HEAD.unpack_from(data)
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
        told = [_read_learned(source) for _ in range(learned)] if learned else []
        if entries:
            plan.entries = self._read_entries(source, entries)
        if not source.at_end:
            raise ValueError("a plan is followed by bytes that are no part of it")
        return plan, told

    def _read_entries(self, source: FieldReader, count: int) -> list[PlanEntry]:
        kind = source.take(1)[0]
        self._latest = None
        if kind >= _CONTINUES:
            self._latest = known = self._recent[kind - _CONTINUES]
            known.move_on()
            known.moved = False
            return known.entries
        rows, starts = (source.column(INT, count) for _ in range(2))
        if kind == _OTHER:
            return _read_rest(source, rows, starts)
        self._latest = _Entries([PlanEntry(row, start, 1, True) for row, start in zip(rows, starts, strict=True)])
        self._recent = [self._latest, *self._recent[: _RECENT - 1]]
        return self._latest.entries


def _write_rest(out: FieldWriter, entries: list[PlanEntry]) -> None:
    """Of entries of all kinds, all but their rows and starts."""
    out.column(INT, [entry.num_tokens for entry in entries])
    out.data += bytes([entry.sample for entry in entries])
    odd = [place for place, entry in enumerate(entries) if entry.says_more]
    out.numbers(INT, odd)
    for place in odd:
        _write_odd(out, entries[place])


def _read_rest(source: FieldReader, rows: list[int], starts: list[int]) -> list[PlanEntry]:
    counts = source.column(INT, len(rows))
    entries = list(map(PlanEntry, rows, starts, counts, map(bool, source.take(len(rows)))))
    for place in source.numbers(INT):
        _read_odd(source, entries[place])
    return entries


def _write_diffs(out: FieldWriter, diffs: list[TableDiff]) -> None:
    sizes = [len(diff.blocks) for diff in diffs]
    if sizes.count(1) == len(sizes):  # sequences that decode get a block now and then, one each
        pack = _ONE_BLOCK.pack
        out.data.append(1)
        out.data += b"".join([pack(diff.row, diff.group, diff.start, diff.blocks[0]) for diff in diffs])
        return
    out.data.append(0)
    out.column(INT, sizes)
    for diff in diffs:
        out.column(INT, (diff.row, diff.group, diff.start, *diff.blocks))


def _read_diffs(source: FieldReader, count: int) -> list[TableDiff]:
    if source.take(1)[0]:
        numbers = source.take(count * _ONE_BLOCK.size)
        return [TableDiff(row, group, start, [block]) for row, group, start, block in _ONE_BLOCK.iter_unpack(numbers)]
    found = []
    for size in source.column(INT, count):
        row, group, start, *blocks = source.column(INT, 3 + size)
        found.append(TableDiff(row, group, start, blocks))
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
