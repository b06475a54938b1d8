"""Plans as bytes: what the scheduler's side writes once for all ranks, and what each rank reads.

A step that decodes what the step before decoded, one token further, is the common one. It crosses as one number: which
of the recent steps it continues. Encoder and decoder remember the same recent steps, so every message must be read, in
order. Where such a plan says nothing else but which blocks its sequences get, at most one each, its message is a short
one of its own kind, and little is done for it on either side: ranks wait for that.
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
from quire.scheduler.diffs import Diff, OneBlockDiffs
from quire.scheduler.plan import (
    BlockCopy,
    BlockMove,
    PlanEntry,
    RowStart,
    StepPlan,
    TransferStart,
)

INT = "i"
"""Rows, positions, tokens, block numbers: 32 bits."""
LONG = "q"
_STEADY = Struct("<BqI")
"""Of a plan that continues a recent step and has no more than blocks: which one, its own number, how many blocks."""
_HEAD = Struct("<BqB8I")
"""Of any other."""
_DRAFTS_FOLLOW, _HEAD_RESTS = 1, 2
"""Bits of its flags."""
_RESTING = 64
"""Added to the recent step where the head rests."""
_ANY = 255
"""Its first byte, where the other kind has the place of a recent step."""
_START = Struct("<iiiQ")
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

    def encode(self, plan: StepPlan, learned: Sequence[Learned] = ()) -> bytes:
        place = _NONE
        if plan.entries:
            self._latest = None
            if plan.decoding is not None:
                place = self._continued(*plan.decoding)
        if place != _NONE and not (learned or plan.freed_rows or plan.starts or plan.copies or plan.transfers
                                   or plan.cancels):
            blocks = _one_block_each(plan.diffs)
            if blocks is not None and not plan.drafts_follow:
                resting = _RESTING if plan.head_rests else 0
                return _STEADY.pack(place + resting, plan.step, len(plan.diffs)) + blocks
        return self._encode_any(plan, learned, place)

    def _encode_any(self, plan: StepPlan, learned: Sequence[Learned], place: int) -> bytes:
        """`place`: of the recent step that it continues."""
        out = FieldWriter()
        flags = _DRAFTS_FOLLOW * plan.drafts_follow | _HEAD_RESTS * plan.head_rests
        out.data += _HEAD.pack(_ANY, plan.step, flags, len(plan.freed_rows), len(plan.starts), len(plan.diffs),
                               len(plan.copies), len(plan.transfers), len(plan.cancels), len(learned),
                               len(plan.entries))
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
            self._write_entries(out, plan, place)
        return bytes(out.data)

    def _write_entries(self, out: FieldWriter, plan: StepPlan, place: int) -> None:
        entries = plan.entries
        if place != _NONE:
            out.data.append(_CONTINUES + place)
        elif plan.decoding is None:
            out.data.append(_OTHER)
            out.column(INT, [entry.row for entry in entries])
            out.column(INT, [entry.start for entry in entries])
            _write_rest(out, entries)
        else:
            rows, starts = plan.decoding
            out.data.append(_DECODES)
            out.column(INT, rows)
            out.column(INT, starts)
            self._latest = _Decoding(rows, starts)
            self._recent = [self._latest, *self._recent[: _RECENT - 1]]

    def _continued(self, rows: list[int], starts: list[int]) -> int:
        """Are these the sequences of a recent step, one token further? Its place, or none. Lists of numbers are
        compared in C; to look at hundreds of entries would take longer than all else that is done for a plan."""
        for place, known in enumerate(self._recent):
            if not known.moved:
                known.move_on()
            if known.starts == starts and known.rows == rows:
                known.moved, self._latest = False, known
                return place
        return _NONE


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
        self._spare = StepPlan(0)

    def prepare(self) -> None:
        """The step is over, and there is time until the next: it is likely to continue this one."""
        if self._latest is not None:
            self._latest.move_on()
        if self._spare.entries:
            self._spare = StepPlan(0)

    def decode(self, data: bytes) -> tuple[StepPlan, list[Learned]]:
        place, step, count = _STEADY.unpack_from(data)
        if place == _ANY:
            return self._decode_any(data)
        if len(data) != _STEADY.size + OneBlockDiffs.SIZE * count:
            raise ValueError("a plan has more or fewer bytes than its blocks")
        if self._spare.entries:  # there was no time to prepare another
            self._spare = StepPlan(0)
        plan = self._spare
        plan.step, plan.entries, plan.head_rests = step, self._moved_on(place % _RESTING), place >= _RESTING
        if count:
            plan.diffs = OneBlockDiffs(data[_STEADY.size :])
        return plan, []

    def _decode_any(self, data: bytes) -> tuple[StepPlan, list[Learned]]:
        _, step, flags, freed, starts, diffs, copies, transfers, cancels, learned, entries = _HEAD.unpack_from(data)
        source = FieldReader(data, _HEAD.size)
        plan = StepPlan(step, drafts_follow=bool(flags & _DRAFTS_FOLLOW), head_rests=bool(flags & _HEAD_RESTS))
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
            return self._moved_on(kind - _CONTINUES)
        rows, starts = (source.column(INT, count) for _ in range(2))
        if kind == _OTHER:
            return _read_rest(source, rows, starts)
        self._latest = _Entries([PlanEntry(row, start, 1, True) for row, start in zip(rows, starts, strict=True)])
        self._recent = [self._latest, *self._recent[: _RECENT - 1]]
        return self._latest.entries

    def _moved_on(self, place: int) -> list[PlanEntry]:
        """The entries of a step that continues a recent one."""
        self._latest = known = self._recent[place]
        if not known.moved:
            known.move_on()
        known.moved = False
        return known.entries


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


@functools.lru_cache(maxsize=1024)
def _numbers(count: int) -> Struct:
    return Struct(f"<{count}i")


def _one_block_each(diffs: Sequence[Diff]) -> bytes | None:
    """Sequences that decode get a block now and then, one each; None: these get others."""
    if not diffs:
        return b""
    rows, groups, starts, blocks = zip(*diffs, strict=True)
    try:
        numbers = [number for (number,) in blocks]
    except ValueError:
        return None
    return _numbers(4 * len(numbers)).pack(*rows, *groups, *starts, *numbers)


def _write_diffs(out: FieldWriter, diffs: Sequence[Diff]) -> None:
    single = _one_block_each(diffs)
    out.data.append(single is not None)
    if single is not None:
        out.data += single
        return
    out.column(INT, [len(blocks) for _, _, _, blocks in diffs])
    for row, group, start, blocks in diffs:
        out.column(INT, (row, group, start, *blocks))


def _read_diffs(source: FieldReader, count: int) -> Sequence[Diff]:
    if source.take(1)[0]:
        return OneBlockDiffs(source.take(OneBlockDiffs.SIZE * count))
    found: list[Diff] = []
    for size in source.column(INT, count):
        row, group, start, *blocks = source.column(INT, 3 + size)
        found.append((row, group, start, blocks))
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
