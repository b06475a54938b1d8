"""Splits the keys of a decode batch over programs: how long a piece is, and which piece each program takes.

A captured graph has a fixed grid while context lengths change every step, so the split is computed on the device, once
per step, for all layers of a cache group. Pieces are just short enough to keep the chip full: one sequence of 4,000
keys becomes some 30 pieces, 256 of them about 5 each, so that no long sequence is left running alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE_STEP = 64
"""A piece is a multiple of this many keys, and starts at a multiple of it."""
LEAST_PIECE = 128
"""Shorter ones do not repay their joining: one sequence of 400 keys takes 7.6 us in 4 pieces, 8.4 in 7."""


@dataclass(slots=True)
class DecodeSplit:
    """The split of one step. `tasks` is a bound that a graph can be captured with; unused tasks are -1."""

    sequence: Tensor
    """int32 [tasks]: whose keys, or -1."""
    piece: Tensor
    """int32 [tasks]: which piece of them; the pieces of a sequence are neighbours, in order."""
    count: Tensor
    """int32 [sequences]: how many pieces a sequence has."""
    length: Tensor
    """int32 [1]: keys in a piece."""

    @property
    def tasks(self) -> int:
        return self.sequence.shape[0]

    @classmethod
    def allocate(cls, num_seqs: int, extra: int, device: torch.device | str) -> DecodeSplit:
        """Room for `num_seqs` sequences cut into at most `num_seqs + extra` pieces."""

        def ints(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        return cls(ints(num_seqs + extra), ints(num_seqs + extra), ints(num_seqs), ints(1))


def extra_pieces(
    num_seqs: int, num_kv_heads: int, multiprocessors: int, long: bool = False, narrow: bool = False
) -> int:
    """Pieces beyond one per sequence, as so many programs a multiprocessor; `long`: see `decode_lengths`. `narrow`:
    keys in fp8, of which one program does not have enough bytes on their way.

    H200, 2026-11-15, 32 heads of 8 KV heads, about 1,040 keys, microseconds: 8 sequences 19.6 with 32 pieces (16: 20.7,
    64: 23.9); 32 sequences 40.5 with 16 (33: 45.3, 66: 48.7); 64 sequences 80.9 with 66 (132: 83.0); 256 sequences 269
    with 264 (528: 272). One sequence of 4,000 keys: 15.3 with 16 (33: 23).
    """
    few = _LONG_NARROW if narrow else 1
    wanted = few if long else next((many for most, many in _PROGRAMS if num_seqs <= most), _MOST_PROGRAMS)
    return max(1, multiprocessors * wanted // num_kv_heads)


_PROGRAMS = ((4, 1), (16, 2), (40, 1), (96, 4), (128, 8))
"""Up to so many sequences: programs a multiprocessor."""
_MOST_PROGRAMS = 16
_WHOLE = 17, 40
"""Fewest and most rows of a step whose sequences' keys are not cut into pieces, as a rule."""
_LONG_NARROW = 3


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Keys read at once, warps and stages of the decode kernel."""

    keys: int
    warps: int = 4
    stages: int = 3
    carried: bool = True
    """Block numbers of the next keys are loaded one iteration early, so that all stages have a tile in flight."""


HOPPER_SHARED = 227 << 10
"""Bytes of shared memory that a program may have there."""


def decode_shape(
    num_seqs: int, head_dim: int, element_size: int, shared: int = HOPPER_SHARED, long: bool = False, timed: bool = True
) -> DecodeShape:
    """Measured with the pieces above, bf16 heads of 128: one sequence 9.4 us with 128 keys at once (64 keys: 12.6), 32
    sequences 40.5 with 64 (128 keys: 57, since fewer programs fit). Where a program has all keys of a sequence, 32 at
    once begin sooner: case c of Qwen3-8B and 0.6B 3,869 and 14,511 tok/s (2026-11-19; with 64 3,768 and 14,268), but
    case a, with up to 256 sequences, 9,463 and 23,742. Larger heads and float32 take what surely fits the shared
    memory, and so does a chip that has less of it (`shared`) than the tiles on their way need. `timed`: a step
    of the kind that those figures are of: keys of 16 bits, at least eight KV heads, no window, no draft tree."""
    careful = DecodeShape(64, stages=2, carried=False)
    if head_dim > 128 or element_size > 2:
        return careful
    wanted = DecodeShape(128) if num_seqs <= 2 or long else DecodeShape(64)
    if _WHOLE[0] <= num_seqs <= _WHOLE[1] and head_dim > 64 and timed and not long:
        wanted = DecodeShape(32, stages=6)
    for shape in (wanted, DecodeShape(64)):
        if shape.stages * 2 * shape.keys * triton.next_power_of_2(head_dim) * element_size <= 0.9 * shared:
            return shape
    return careful


@triton.jit(do_not_specialize=["num_seqs", "extra"])
def _split_kernel(
    context_len,
    sequence,
    piece,
    count,
    length_out,
    num_seqs,
    extra,
    window,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    FIXED: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Each program computes the whole split (a handful of instructions) and writes its own pieces."""
    me = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    lengths = tl.load(context_len + places, mask=places < num_seqs, other=0)
    first = tl.maximum(lengths - window, 0) // STEP * STEP
    spans = tl.where(lengths > 0, lengths - first, 0)
    if FIXED > 0:
        length = FIXED
    else:
        length = tl.maximum((tl.sum(spans, axis=0) + extra - 1) // extra, LEAST)
        length = (length + STEP - 1) // STEP * STEP
    pieces = (spans + length - 1) // length
    before = tl.sum(tl.where(places < me, pieces, 0), axis=0)
    mine = tl.sum(tl.where(places == me, pieces, 0), axis=0)
    for start in range(0, mine, 64):
        index = start + tl.arange(0, 64)
        tl.store(sequence + before + index, tl.zeros_like(index) + me, mask=index < mine)
        tl.store(piece + before + index, index, mask=index < mine)
    tl.store(count + me, mine)
    if me == 0:
        tl.store(length_out, length)
        total = tl.sum(pieces, axis=0)
        for start in range(total, num_seqs + extra, 256):
            index = start + tl.arange(0, 256)
            tl.store(sequence + index, tl.zeros_like(index) - 1, mask=index < num_seqs + extra)


_NO_WINDOW = 1 << 30


def split_decode(split: DecodeSplit, context_len: Tensor, window: int | None, fixed: int = 0) -> None:
    """Fill `split` for sequences of these lengths (0: padding), of which only a window may be visible.

    `fixed` gives every piece that length whatever the batch; `split` must then have room for them all.
    """
    num_seqs = context_len.shape[0]
    _split_kernel[(num_seqs,)](
        context_len,
        split.sequence,
        split.piece,
        split.count,
        split.length,
        num_seqs,
        split.tasks - num_seqs,
        _NO_WINDOW if window is None else window,
        triton.next_power_of_2(num_seqs),
        PIECE_STEP,
        fixed,
        LEAST_PIECE,
        num_warps=4,
    )


def split_decode_reference(split: DecodeSplit, context_len: Tensor, window: int | None, fixed: int = 0) -> None:
    lengths = context_len.tolist()
    firsts = [max(0, n - (_NO_WINDOW if window is None else window)) // PIECE_STEP * PIECE_STEP for n in lengths]
    spans = [n - first if n else 0 for n, first in zip(lengths, firsts, strict=True)]
    extra = split.tasks - len(lengths)
    length = fixed or -(-max(-(-sum(spans) // extra), LEAST_PIECE) // PIECE_STEP) * PIECE_STEP
    counts = [-(-span // length) for span in spans]
    tasks = [(s, p) for s, n in enumerate(counts) for p in range(n)]
    split.sequence.fill_(-1)
    for index, (seq, piece) in enumerate(tasks):
        split.sequence[index], split.piece[index] = seq, piece
    split.count.copy_(torch.tensor(counts, dtype=torch.int32))
    split.length.fill_(length)
