"""Latent attention (MLA) over paged latents: all heads read one vector of a token, as its key and as its value.

Queries come in the latent space, [T, heads * (rank + rope)]. A program takes a block of heads (`shape.blocks`), so
that a latent is read once for all of them. One new token per sequence: a program takes one piece of the sequence's keys
(`DecodeSplit`), and the last one joins the pieces. Any number of tokens: tiles of tokens, keys folded at fixed absolute
positions, so that a query's result depends on its own sequence alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.torch_attention import softmax_attention
from quire.kernels.triton.attention_decode import LOG2_E, DecodeScratch, join_pieces
from quire.kernels.triton.attention_mixed import MixedShape
from quire.kernels.triton.attention_split import HOPPER_SHARED, PIECE_STEP, DecodeSplit
from quire.kernels.types import LatentShape, LayerCache


@dataclass(frozen=True, slots=True)
class LatentDecode:
    """Keys read at once, warps, stages, and programs that each multiprocessor should get."""

    keys: int = 32
    warps: int = 8
    stages: int = 2
    programs: int = 1


FEW_HEADS, MANY_HEADS = LatentDecode(32, 4, 3, 2), LatentDecode(64, 8, 2, 1)
"""Of at most 16 heads in a block, where bytes bind, and of more, where FLOPs do. H200, 2026-11-16, 64 sequences of
2,000: 16 heads 53.9 us, 64% of the bandwidth (joining all pieces at once: 93 us); 128 heads 160 us, 222 TFLOP/s, where
a tile of 64 keys takes 5 us, of which tensor cores need 1.6. `latent_hopper` does better where it fits."""


def decode_sizes(shape: LatentShape, element_size: int, shared: int = HOPPER_SHARED) -> LatentDecode:
    """What fits so many bytes of shared memory: the queries of a block, and the tiles that are on their way."""
    heads = max(16, triton.next_power_of_2(shape.blocks.group))
    wanted = FEW_HEADS if heads <= 16 else MANY_HEADS
    for sizes in (wanted, LatentDecode(32, 8, 2, 1)):
        if sum(_widths(shape)[1::2]) * element_size * (heads + sizes.keys * sizes.stages) <= 0.97 * shared:
            return sizes
    return LatentDecode(16, 8, 2, 1)


def latent_pieces(num_seqs: int, shape: LatentShape, programs: int, multiprocessors: int) -> int:
    """Pieces that the keys of a decode batch are cut into, at most as many as sequences more: as many for every
    sequence. A piece leaves its sums [heads, rank] in float32, which is as much as some hundred latents, so there are
    no more of them than fill the chip."""
    wanted = max(1, multiprocessors * programs // shape.blocks.num_kv_heads)
    return wanted // num_seqs * num_seqs if wanted >= num_seqs else wanted


@triton.jit
def _fold_latents(
    q, q_rope, acc, maximum, total, block, position, present, seen, latents, scale,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys at `position`, which lie in `block`, into the running softmax of the rows of q; `seen` [rows, keys]
    or [1, keys]."""
    dim = tl.arange(0, BLOCK_RANK)
    turned = tl.arange(0, BLOCK_ROPE)
    base = (block.to(tl.int64) * PAGE + position % PAGE) * (RANK + ROPE)
    c = tl.load(
        latents + base[:, None] + dim[None, :], mask=present[:, None] & (dim < RANK)[None, :], other=0.0
    ).to(q.dtype)
    r = tl.load(
        latents + base[:, None] + (RANK + turned)[None, :], mask=present[:, None] & (turned < ROPE)[None, :], other=0.0
    ).to(q.dtype)
    scores = tl.dot(q, tl.trans(c), input_precision=PRECISION)
    scores = tl.dot(q_rope, tl.trans(r), scores, input_precision=PRECISION) * scale
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, axis=1))
    # A row that has seen no key yet stays at -inf; 0 instead keeps it from becoming NaN.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(maximum - level)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(q.dtype), c, acc * shrink[:, None], input_precision=PRECISION)
    return acc, higher, total


@triton.jit(do_not_specialize=["num_parts"])
def _decode_kernel(
    q_rows, latents, out, tables, rows, context_len, task_seq, task_piece, piece_count, piece_length,
    partial, summary, arrived, scale, num_parts, q_stride, table_stride,
    NUM_HEADS: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    GROUP_POW: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, HAS_ROWS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    task = tl.program_id(1)
    seq = tl.load(task_seq + task)
    # Earlier kernels than the previous one wrote the split and the tables: read them while that one still runs.
    owner = tl.maximum(seq, 0)
    piece = tl.load(task_piece + task)
    step = tl.load(piece_length)
    pieces = tl.load(piece_count + owner)
    length = tl.load(context_len + owner)
    row = owner
    if HAS_ROWS:
        row = tl.maximum(tl.load(rows + owner), 0)
    table = tables + row.to(tl.int64) * table_stride
    begin = piece * step
    end = tl.minimum(begin + step, length)
    key = tl.arange(0, KEYS)
    # Block numbers are loaded one iteration early: the loads of latents then wait for no other load and can be
    # pipelined.
    later = tl.load(table + (begin + key) // PAGE, mask=(begin + key < end) & (seq >= 0), other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if seq >= 0:
        member = tl.arange(0, GROUP_PAD)
        dim = tl.arange(0, BLOCK_RANK)
        turned = tl.arange(0, BLOCK_ROPE)
        real = member < GROUP
        heads = q_rows + seq.to(tl.int64) * q_stride + (head * GROUP + member)[:, None] * (RANK + ROPE)
        q = tl.load(heads + dim[None, :], mask=real[:, None] & (dim < RANK)[None, :], other=0.0)
        q_rope = tl.load(heads + RANK + turned[None, :], mask=real[:, None] & (turned < ROPE)[None, :], other=0.0)
        maximum = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        acc = tl.zeros([GROUP_PAD, BLOCK_RANK], tl.float32)
        for start in range(begin, end, KEYS):
            position = start + key
            present = position < end
            block = later
            later = tl.load(table + (position + KEYS) // PAGE, mask=position + KEYS < end, other=0)
            acc, maximum, total = _fold_latents(
                q, q_rope, acc, maximum, total, block, position, present, present[None, :], latents, scale,
                RANK, BLOCK_RANK, ROPE, BLOCK_ROPE, PAGE, PRECISION,
            )  # fmt: skip
        used = real[:, None] & (dim < RANK)[None, :]
        target = out + seq.to(tl.int64) * (NUM_HEADS * RANK) + head * GROUP * RANK
        if pieces == 1:
            place = target + member[:, None] * RANK + dim[None, :]
            tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=used)
        else:
            mine = (task * BLOCKS + head) * GROUP
            tl.store(partial + (mine + member)[:, None].to(tl.int64) * RANK + dim[None, :], acc, mask=used)
            tl.store(summary + mine + member, maximum, mask=real)
            tl.store(summary + num_parts * GROUP + mine + member, total, mask=real)
            # Every thread's stores come before the one thread's atomic that publishes them.
            tl.debug_barrier()
            before = tl.atomic_add(arrived + seq * BLOCKS + head, 1, sem="acq_rel")
            if before == pieces - 1:
                first = (task - piece) * BLOCKS + head
                join_pieces(
                    partial, summary, target, num_parts, first, pieces, BLOCKS, GROUP, GROUP_POW, RANK, BLOCK_RANK, 1
                )  # fmt: skip
                tl.store(arrived + seq * BLOCKS + head, 0)


@triton.jit
def _tile_kernel(
    q_rows, latents, out, tables, rows, query_start, context_len, tile_seq, tile_first, scale, q_stride, table_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.program_id(1)
    seq = tl.load(tile_seq + tile)
    if seq >= 0:
        first = tl.load(tile_first + tile)
        begin = tl.load(query_start + seq)
        count = tl.load(query_start + seq + 1) - begin
        length = tl.load(context_len + seq)
        place = seq
        if HAS_ROWS:
            place = tl.load(rows + seq)
        table = tables + place.to(tl.int64) * table_stride
        index = tl.arange(0, ROWS)
        token = first + index // GROUP
        real = (index < ROWS // GROUP * GROUP) & (token < count)
        reach = tl.where(real, length - count + token, -1)
        dim = tl.arange(0, BLOCK_RANK)
        turned = tl.arange(0, BLOCK_ROPE)
        column = head * GROUP + index % GROUP
        heads = q_rows + (begin + token)[:, None].to(tl.int64) * q_stride + column[:, None] * (RANK + ROPE)
        q = tl.load(heads + dim[None, :], mask=real[:, None] & (dim < RANK)[None, :], other=0.0)
        q_rope = tl.load(heads + RANK + turned[None, :], mask=real[:, None] & (turned < ROPE)[None, :], other=0.0)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_RANK], tl.float32)
        limit = tl.minimum(length, length - count + first + ROWS // GROUP)
        key = tl.arange(0, KEYS)
        later = tl.load(table + key // PAGE, mask=key < limit, other=0)
        for start in range(0, limit, KEYS):
            position = start + key
            seen = position[None, :] <= reach[:, None]
            block = later
            later = tl.load(table + (position + KEYS) // PAGE, mask=position + KEYS < limit, other=0)
            acc, maximum, total = _fold_latents(
                q, q_rope, acc, maximum, total, block, position, position < limit, seen, latents, scale,
                RANK, BLOCK_RANK, ROPE, BLOCK_ROPE, PAGE, PRECISION,
            )  # fmt: skip
        total = tl.where(real, total, 1.0)
        target = out + ((begin + token).to(tl.int64) * NUM_HEADS + column)[:, None] * RANK + dim[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None] & (dim < RANK)[None, :])


def latent_decode(
    q: Tensor, cache: LayerCache, tables: Tensor, rows: Tensor | None, context_len: Tensor, split: DecodeSplit,
    scratch: DecodeScratch, shape: LatentShape, scale: float, *, out: Tensor | None = None,
    sizes: LatentDecode | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """[S, heads * rank] for the S sequences of `split`, whose queries are the first S rows of q; `scratch` is that of
    `shape.blocks`. Block tables as in `decode_attention`."""
    blocks, sizes = shape.blocks, sizes or decode_sizes(shape, q.element_size())
    if out is None:
        out = torch.empty(context_len.shape[0], shape.num_heads * shape.rank, dtype=q.dtype, device=q.device)
    _decode_kernel[(blocks.num_kv_heads, split.tasks)](
        q, cache.latents, out, tables, tables if rows is None else rows, context_len, split.sequence, split.piece,
        split.count, split.length, scratch.partial, scratch.summary, scratch.arrived, scale * LOG2_E,
        scratch.partial.shape[0], q.stride(0), tables.stride(0), shape.num_heads, blocks.num_kv_heads, blocks.group,
        max(16, triton.next_power_of_2(blocks.group)), triton.next_power_of_2(blocks.group), *_widths(shape),
        cache.block_size, min(sizes.keys, PIECE_STEP), rows is not None, _precision(q), pdl,
        num_warps=sizes.warps, num_stages=sizes.stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def latent_tiles(
    q: Tensor, cache: LayerCache, tables: Tensor, rows: Tensor | None, query_start: Tensor, context_len: Tensor,
    tile_seq: Tensor, tile_first: Tensor, shape: LatentShape, scale: float, *, out: Tensor | None = None,
    sizes: MixedShape = MixedShape(64, 32, 8, 2), exact: bool = False,  # noqa: B008 (frozen)
) -> Tensor:  # fmt: skip
    """[T, heads * rank]: causal attention of the queries in the tiles (`query_tiles`, by `shape.blocks.group`); a tile
    whose sequence is -1 does nothing. `exact` forbids fused multiply-adds."""
    blocks = shape.blocks
    if out is None:
        out = torch.empty(q.shape[0], shape.num_heads * shape.rank, dtype=q.dtype, device=q.device)
    _tile_kernel[(blocks.num_kv_heads, tile_seq.shape[0])](
        q, cache.latents, out, tables, tables if rows is None else rows, query_start, context_len, tile_seq,
        tile_first, scale * LOG2_E, q.stride(0), tables.stride(0), shape.num_heads, blocks.group, *_widths(shape),
        cache.block_size, max(16, sizes.rows_of(blocks.group)), sizes.keys, rows is not None, _precision(q),
        num_warps=sizes.warps, num_stages=sizes.stages, enable_fp_fusion=not exact,
    )  # fmt: skip
    return out


def _widths(shape: LatentShape) -> tuple[int, int, int, int]:
    rank, rope = shape.rank, shape.rope_dim
    return rank, max(16, triton.next_power_of_2(rank)), rope, max(16, triton.next_power_of_2(rope))


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"


def latent_reference(
    q: Tensor, cache: LayerCache, tables: Tensor, query_start: Tensor, context_len: Tensor, shape: LatentShape,
    scale: float,
) -> Tensor:  # fmt: skip
    """What both kernels compute, in float32, one sequence at a time."""
    heads = q.view(q.shape[0], shape.num_heads, shape.width).float()
    out = torch.zeros(q.shape[0], shape.num_heads, shape.rank, device=q.device)
    starts = query_start.tolist()
    for s, length in enumerate(context_len.tolist()):
        lo, hi = starts[s], starts[s + 1]
        if lo == hi or length == 0:
            continue
        blocks = tables[s, : -(-length // cache.block_size)].long()
        kept = cache.latents[blocks].float().reshape(1, -1, shape.width)[:, :length]
        reach = torch.arange(length - (hi - lo), length, device=q.device)
        seen = torch.arange(length, device=q.device)[None, :] <= reach[:, None]
        out[lo:hi] = softmax_attention(heads[lo:hi], kept, kept[..., : shape.rank], seen, scale, None)
    return out.view(q.shape[0], -1).to(q.dtype)
