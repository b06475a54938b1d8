"""Changes to logits before a draw, for all rows of a step at once: masks, biases, bans, penalties.

Penalties read counts of each row's tokens that stay on the device from step to step: a word for each token of the
vocabulary, whose lowest bit says that the prompt holds it and whose other bits how often it was drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import sampled_row
from quire.kernels.triton.sampling_parts import EDITED, HEAD, RAW, WORDS, load_float, masked, read_logits

_RING = tl.constexpr(sampled_row.RING)
_OWNER = tl.constexpr(sampled_row.OWNER)
_POSITION = tl.constexpr(sampled_row.POSITION)
_MASK = tl.constexpr(sampled_row.MASK)
_ALLOWED = tl.constexpr(sampled_row.ALLOWED)
_SLOT = tl.constexpr(sampled_row.SLOT)
_COUNTED = tl.constexpr(sampled_row.COUNTED)
_NUM_PROMPT = tl.constexpr(sampled_row.NUM_PROMPT)
_REPETITION = tl.constexpr(sampled_row.REPETITION)
_FREQUENCY = tl.constexpr(sampled_row.FREQUENCY)
_PRESENCE = tl.constexpr(sampled_row.PRESENCE)
_NUM_CHANGES = tl.constexpr(sampled_row.NUM_CHANGES)
_CHANGES_AT = tl.constexpr(sampled_row.CHANGES_AT)
_PREFIXES_AT = tl.constexpr(sampled_row.PREFIXES_AT)
_CHANGE_WORDS = tl.constexpr(sampled_row.CHANGE_WORDS)
_COUNT_BLOCK = 256
_CHANGE_BLOCK = 128
_CHANGE_PROGRAMS = 64
_ADVANCE_BLOCK = 256
Peaks = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""The largest entries of raw blocks and of edited ones, where the latter lie, and those of groups within blocks."""


@triton.jit
def _count_kernel(stage, tokens, counts, tokens_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Add the tokens of a row that are not counted yet."""
    me = stage + HEAD + tl.program_id(0) * WORDS
    owner, slot = tl.load(me + _OWNER), tl.load(me + _SLOT)
    if (owner >= 0) & (slot >= 0):
        position, num_prompt = tl.load(me + _POSITION), tl.load(me + _NUM_PROMPT)
        mine = counts + slot.to(tl.int64) * VOCAB
        for start in range(tl.load(me + _COUNTED), position, BLOCK):
            place = start + tl.arange(0, BLOCK)
            known = place < position
            token = tl.load(tokens + owner.to(tl.int64) * tokens_stride + place, mask=known, other=0)
            tl.atomic_or(mine + token, 1, mask=known & (place < num_prompt))
            tl.atomic_add(mine + token, 2, mask=known & (place >= num_prompt))


@triton.jit(do_not_specialize=["rows"])
def _advance_kernel(stage, rows, slots, BLOCK: tl.constexpr):
    """Leave the rows as the step after this one needs them, if it is of the same rows."""
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        me = stage + HEAD + row * WORDS
        position = tl.load(me + _POSITION, mask=row < rows, other=0)
        tl.store(me + _COUNTED, position, mask=row < rows)
        tl.store(me + _POSITION, position + 1, mask=row < rows)
    tl.store(stage + _RING, (tl.load(stage + _RING) + 1) % slots)


@triton.jit
def _change_kernel(
    stage, tokens, edited, tokens_stride, VOCAB: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Biases and bans. Bans add -inf, so that changes of one token may come in any order."""
    changes = stage + tl.load(stage + _CHANGES_AT)
    prefixes = stage + tl.load(stage + _PREFIXES_AT)
    count = tl.load(stage + _NUM_CHANGES)
    for start in range(tl.program_id(0) * BLOCK, count, PROGRAMS * BLOCK):
        index = start + tl.arange(0, BLOCK)
        real = index < count
        change = changes + index * _CHANGE_WORDS
        row = tl.load(change, mask=real, other=0)
        token = tl.load(change + 1, mask=real, other=0)
        value = tl.load(change + 2, mask=real, other=0).to(tl.float32, bitcast=True)
        prefix = prefixes + tl.load(change + 3, mask=real, other=0)
        length = tl.load(change + 4, mask=real, other=0)
        me = stage + HEAD + row * WORDS
        owner, position = tl.load(me + _OWNER, mask=real, other=0), tl.load(me + _POSITION, mask=real, other=0)
        text = tokens + owner.to(tl.int64) * tokens_stride + position - length
        matches = real & (owner >= 0)
        for place in range(0, tl.max(length)):
            inside = matches & (place < length)
            same = tl.load(prefix + place, mask=inside, other=0) == tl.load(text + place, mask=inside, other=0)
            matches = matches & (same | (place >= length))
        tl.atomic_add(edited + row.to(tl.int64) * VOCAB + token, value, mask=matches)


@triton.jit
def _penalised(values, me, slot, counts, token, VOCAB: tl.constexpr):
    """Repetition first (divide positive, multiply negative values), then frequency and presence are subtracted."""
    word = tl.load(counts + slot.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=0)
    repetition = load_float(me + _REPETITION)
    drawn = (word >> 1).to(tl.float32)
    repeated = tl.where(values > 0, tl.div_rn(values, tl.zeros_like(values) + repetition), values * repetition)
    owed = load_float(me + _FREQUENCY) * drawn + tl.where(drawn > 0, load_float(me + _PRESENCE), 0.0)
    return tl.where(word != 0, repeated - owed, values)


@triton.jit
def _store_peak(values, peak, place, sub, row, block, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
                SUBS: tl.constexpr):  # fmt: skip
    """SUBS: also the largest of each of so many groups of the block."""
    # A NaN must not hide: as +inf it makes the row's maximum infinite, which is reported.
    values = tl.where(values == values, values, float("inf"))
    best, where = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(peak + row * BLOCKS + block, best)
    tl.store(place + row * BLOCKS + block, block * BLOCK + where)
    if SUBS:
        groups = tl.max(tl.reshape(values, [SUBS, BLOCK // SUBS]), axis=1)
        tl.store(sub + (row * BLOCKS + block) * SUBS + tl.arange(0, SUBS), groups)


@triton.jit
def _edit_kernel(
    logits, edited, stage, counts, raw_peak, peak, place, sub, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, MASKS: tl.constexpr,
    PENALTIES: tl.constexpr, STORE: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """A block of a row. FIRST: read it and apply masks; LAST: apply penalties and find its largest entry."""
    block, row = tl.program_id(0), tl.program_id(1)
    me = stage + HEAD + row * WORDS
    if tl.load(me + _OWNER) >= 0:
        token = block * BLOCK + tl.arange(0, BLOCK)
        if FIRST:
            values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, RAW)
            found = tl.max(tl.where(values == values, values, float("inf")))
            tl.store(raw_peak + row * BLOCKS + block, found)
            if MASKS:
                values = masked(values, stage, tl.load(me + _MASK), token, MASK_WORDS)
                values = masked(values, stage, tl.load(me + _ALLOWED), token, MASK_WORDS)
        else:
            values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, EDITED)
        if LAST:
            if PENALTIES:
                slot = tl.load(me + _SLOT)
                if slot >= 0:
                    values = _penalised(values, me, slot, counts, token, VOCAB)
            _store_peak(values, peak, place, sub, row, block, BLOCKS, BLOCK, SUBS)
        if STORE:
            tl.store(edited + row.to(tl.int64) * VOCAB + token, values, mask=token < VOCAB)


@triton.jit
def _masked_peak_kernel(
    logits, stage, peak, place, sub, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, SOURCE: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """The largest entry of a block among what the row's grammar allows, before any other change."""
    block, row = tl.program_id(0), tl.program_id(1)
    if tl.load(stage + HEAD + row * WORDS + _OWNER) >= 0:
        token = block * BLOCK + tl.arange(0, BLOCK)
        values = read_logits(logits, logits, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
        _store_peak(values, peak, place, sub, row, block, BLOCKS, BLOCK, SUBS)


def count_tokens(stage: Tensor, rows: int, tokens: Tensor, counts: Tensor) -> None:
    """Bring the counts of the staged rows up to the position that each draws."""
    _count_kernel[(rows,)](stage, tokens, counts, tokens.stride(0), counts.shape[1], _COUNT_BLOCK, num_warps=4)


def advance(stage: Tensor, rows: int, slots: int) -> None:
    """The staged rows draw their next position, into the next of the ring's slots."""
    _advance_kernel[(1,)](stage, rows, slots, _ADVANCE_BLOCK, num_warps=4)


def change_logits(stage: Tensor, tokens: Tensor, edited: Tensor) -> None:
    """The staged biases and bans."""
    _change_kernel[(_CHANGE_PROGRAMS,)](
        stage, tokens, edited, tokens.stride(0), edited.shape[1], _CHANGE_PROGRAMS, _CHANGE_BLOCK, num_warps=4)


def edit_logits(
    stage: Tensor, rows: int, logits: Tensor, edited: Tensor, counts: Tensor, peaks: Peaks,
    mask_words: int, block: int, *, first: bool = True, last: bool = True, masks: bool, penalties: bool, store: bool,
) -> None:  # fmt: skip
    """`store`: `edited` gets the rows."""
    raw_peak, peak, place, sub = peaks
    vocab = logits.shape[1]
    blocks = triton.cdiv(vocab, block)
    # Rounded after every operation, as torch does it.
    _edit_kernel[(blocks, rows)](
        logits, edited, stage, counts, raw_peak, peak, place, peak if sub is None else sub, logits.stride(0), vocab,
        mask_words, blocks, block, first, last, masks, penalties, store, _groups(sub),
        num_warps=4 if store else 1, enable_fp_fusion=False)


def masked_peaks(
    stage: Tensor, rows: int, logits: Tensor, peak: Tensor, place: Tensor, sub: Tensor | None, mask_words: int,
    block: int, source: int,
) -> None:  # fmt: skip
    vocab = logits.shape[1]
    blocks = triton.cdiv(vocab, block)
    _masked_peak_kernel[(blocks, rows)](
        logits, stage, peak, place, peak if sub is None else sub, logits.stride(0), vocab, mask_words, blocks, block,
        source, _groups(sub), num_warps=1)


def _groups(sub: Tensor | None) -> int:
    return 0 if sub is None else sub.shape[2]
