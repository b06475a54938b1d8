"""Decode attention over the projection's raw q, k, v: norm, rotation and the KV write are part of it, in one launch.

Every program norms and rotates the query heads it needs, beside each other as rows of one small tile, in which the
sequence's new key and value are two more rows. The program of the last piece writes these to the cache and then reads
its keys like any other, so that a step attends to what later ones read, in the order of the kernel without rotation.
A query may see no key of the same step but its own: one new token per sequence, no drafts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention_decode import (
    LOG2_E,
    DecodeScratch,
    attend_piece,
    head_scales,
    load_task,
    piece_span,
)
from quire.kernels.triton.attention_split import PIECE_STEP, DecodeSplit
from quire.kernels.triton.rope_cache import in_cache
from quire.kernels.types import HeadShape, HeadTurn, LayerCache

_LINE = 128
"""Bytes of a line of the L2 cache."""
_LEAST_HALF = 16
"""Fewest features of half a head that a tensor core multiplies."""
_WIDEST = 128
"""Wider heads (Gemma's 256) were never tried in this kernel on a chip: they rotate in a kernel of their own."""


@triton.jit(do_not_specialize=["num_parts"])
def _rope_decode_kernel(
    qkv,
    k_cache,
    v_cache,
    out,
    tables,
    rows,
    context_len,
    task_seq,
    task_piece,
    piece_count,
    piece_length,
    partial,
    summary,
    arrived,
    rope,
    q_norm,
    k_norm,
    eps,
    scale,
    softcap,
    window,
    kv_scales,
    num_parts,
    sinks,
    q_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    GROUP_POW: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    STEP: tl.constexpr,
    JOIN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr,
    LINES: tl.constexpr,
    CARRIED: tl.constexpr,
    PDL: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
):
    head = tl.program_id(0)
    # The previous kernel writes only qkv: everything else is read while it still runs.
    seq, task, row, length, step = load_task(
        task_seq, task_piece, piece_count, piece_length, context_len, rows, HAS_ROWS)
    if HAS_ROWS:
        row = tl.maximum(row, 0)
    table = tables + row.to(tl.int64) * table_stride
    span = piece_span(task, length, window, step, STEP)
    if PREFETCH:  # noqa: SIM102 (one is decided by the compiler)
        if seq >= 0:
            _prefetch_keys(k_cache, v_cache, table, head, span, NUM_KV, DIM, PAGE, KEYS, LINES)
    HALF: tl.constexpr = DIM // 2
    member = tl.arange(0, GROUP_PAD)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    is_k = member == GROUP
    is_v = member == GROUP + 1
    turns = member <= GROUP
    newest = tl.maximum(length - 1, 0)
    # Read once per row, so that they come in the layout of q, k and v and cross no shared memory.
    angles = rope + newest.to(tl.int64) * DIM + pair + member * 0
    cos = tl.load(angles, mask=turns, other=0.0)
    sin = tl.load(angles + HALF, mask=turns, other=0.0)
    if NORM:
        gains = tl.where(is_k, k_norm, q_norm) + pair
        low_gain = tl.load(gains, mask=turns, other=0.0)
        high_gain = tl.load(gains + HALF, mask=turns, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if seq >= 0:
        other = tl.where(is_k, NUM_HEADS + head, NUM_HEADS + NUM_KV + head)
        column = tl.where(member < GROUP, head * GROUP + member, other)
        start = qkv + seq.to(tl.int64) * q_stride + column * DIM + pair
        a = tl.load(start, mask=member < GROUP + 2, other=0.0).to(tl.float32)
        b = tl.load(start + HALF, mask=member < GROUP + 2, other=0.0).to(tl.float32)
        if NORM:
            square = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
            factor = tl.rsqrt(square / DIM + eps)[:, None]
            a = tl.where(turns, a * factor * low_gain, a)
            b = tl.where(turns, b * factor * high_gain, b)
        turned = a * cos - b * sin
        b = tl.where(turns, b * cos + a * sin, b)
        a = tl.where(turns, turned, a)
        kind = qkv.dtype.element_ty
        low = a.to(kind)
        high = b.to(kind)
        if span[2] == length:
            block = tl.load(table + newest // PAGE).to(tl.int64)
            place = ((block * NUM_KV + head) * PAGE + newest % PAGE) * DIM + pair + member * 0
            stored = k_cache.dtype.element_ty
            # Rounded to the activations' type first, as the kernel of steps with prompts does it.
            k_scale, v_scale = head_scales(kv_scales, head, NUM_KV, SCALED)
            near = in_cache(low, is_k, k_scale, v_scale, SCALED).to(stored)
            far = in_cache(high, is_k, k_scale, v_scale, SCALED).to(stored)
            tl.store(k_cache + place, near, mask=is_k)
            tl.store(k_cache + place + HALF, far, mask=is_k)
            tl.store(v_cache + place, near, mask=is_v)
            tl.store(v_cache + place + HALF, far, mask=is_v)
            # The loop below reads them back: the barrier makes one warp's stores visible to the others' loads.
            tl.debug_barrier()
        # Two dots over half the features each: with the halves joined, K was no longer loaded by wide instructions.
        attend_piece(
            low, high, out, seq, head, task, span, (table, k_cache, v_cache, table),
            (partial, summary, arrived, num_parts), (scale, softcap, kv_scales, sinks), NUM_HEADS, NUM_KV, GROUP,
            GROUP_PAD, GROUP_POW, DIM, DIM, PAGE, KEYS, JOIN, SOFTCAP, True, CARRIED, PRECISION, SINKS, False, SCALED)


@triton.jit
def _prefetch_keys(
    k_cache, v_cache, table, head, span, NUM_KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Prefetch the first KEYS keys and values of a piece into the L2 cache, without waiting for them."""
    visible, begin, end = span
    position = tl.maximum(tl.minimum(begin + tl.arange(0, KEYS), end - 1), visible)
    block = tl.load(table + position // PAGE).to(tl.int64)
    base = ((block * NUM_KV + head) * PAGE + position % PAGE) * DIM
    place = base[:, None] + tl.arange(0, LINES)[None, :] * (DIM // LINES)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; prefetch.global.L2 [$2]; mov.u32 $0, 0;",
        "=r,l,l",
        [(k_cache + place).to(tl.uint64), (v_cache + place).to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def rope_fits(shape: HeadShape, turn: HeadTurn) -> bool:
    """Whether the kernel knows such heads: rotated whole, in halves of a power of two, normed both or neither."""
    half = shape.head_dim // 2
    return (
        turn.rope is not None
        and turn.rope.shape[1] == shape.head_dim == 2 * half
        and half >= _LEAST_HALF
        and half & (half - 1) == 0
        and shape.head_dim <= _WIDEST
        and (turn.q_norm is None) == (turn.k_norm is None)
    )


def rope_decode_attention(
    qkv: Tensor,
    cache: LayerCache,
    tables: Tensor,
    rows: Tensor | None,
    context_len: Tensor,
    split: DecodeSplit,
    scratch: DecodeScratch,
    shape: HeadShape,
    scale: float,
    turn: HeadTurn,
    *,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    keys: int = 128,
    num_warps: int = 4,
    num_stages: int = 2,
    prefetch: bool = False,
    carried: bool = False,
    pdl: bool = False,
) -> Tensor:
    """`rope_and_cache` and `decode_attention` of the S sequences of `split`, whose newest tokens are the rows of qkv.

    Sequence s is at position context_len[s] - 1, whose key and value go to its place in the block table; one of no
    length writes nothing. qkv itself stays as it is. `prefetch` loads old keys into the L2 cache while the previous
    kernel still runs; `carried` as in `decode_attention`.
    """
    group = shape.num_heads // shape.num_kv_heads
    if out is None:
        out = torch.empty(context_len.shape[0], shape.num_heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    launch: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    _rope_decode_kernel[(shape.num_kv_heads, split.tasks)](
        qkv, cache.k, cache.v, out, tables, tables if rows is None else rows, context_len,
        split.sequence, split.piece, split.count, split.length,
        scratch.partial, scratch.summary, scratch.arrived,
        turn.rope,
        turn.rope if turn.q_norm is None else turn.q_norm,
        turn.rope if turn.k_norm is None else turn.k_norm,
        turn.eps,
        scale * LOG2_E,
        0.0 if softcap is None else softcap,
        1 << 30 if window is None else window,
        context_len if cache.scales is None else cache.scales,
        scratch.partial.shape[0], context_len if turn.sinks is None else turn.sinks, qkv.stride(0), tables.stride(0),
        NUM_HEADS=shape.num_heads,
        NUM_KV=shape.num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group + 2)),
        GROUP_POW=triton.next_power_of_2(group),
        DIM=shape.head_dim,
        PAGE=cache.block_size,
        KEYS=keys,
        STEP=PIECE_STEP,
        JOIN=8,
        SOFTCAP=softcap is not None,
        HAS_ROWS=rows is not None,
        NORM=turn.q_norm is not None,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        PREFETCH=prefetch,
        LINES=max(1, shape.head_dim * cache.k.element_size() // _LINE),
        CARRIED=carried,
        PDL=pdl,
        SINKS=turn.sinks is not None,
        SCALED=cache.scales is not None,
        **launch,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
