"""Prefill attention over paged keys, for any number of new tokens per sequence: prompts, chunks, mixed batches.

A program takes a tile of queries: some consecutive tokens of one sequence with all query heads that share a KV head,
stacked as rows of one matrix, so that each key is read once for all of them. Keys are folded in tiles at fixed
absolute positions, so a query's result depends on nothing but its own sequence (see `tile_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.torch_attention import softmax_attention
from quire.kernels.triton.attention_decode import LOG2_E, along, head_scales, query_for, score_scale
from quire.kernels.types import HeadShape, LayerCache


@dataclass(frozen=True, slots=True)
class MixedShape:
    """Compile-time sizes: rows of queries in a tile, keys folded at once, warps and stages."""

    rows: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 3

    def rows_of(self, group: int) -> int:
        """Rows of a tile with so many query heads to a KV head: a token's heads stay together, however many."""
        return max(self.rows, triton.next_power_of_2(group))

    def tokens_of(self, group: int) -> int:
        return self.rows_of(group) // group


@triton.jit
def _fold_keys(
    first, last, q, softmax, cache, reaches, scores_of, NUM_KV: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DETOUR: tl.constexpr, PRECISION: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """The running softmax of a tile with the keys [first, last) folded in, KEYS at a time.

    With CARRIED (and MASKED) block numbers are loaded one iteration early: the loads of keys then wait for no other
    load and can be pipelined.

    `softmax`: (sum of weighted values, maximum, sum of weights). `cache`: (block table, keys, values, KV head, detour
    of the sequence, which counts with DETOUR).
    `reaches`: (first and last + 1 key of the tile, last key of each row, window). `scores_of`: (scale, soft cap).
    """
    acc, maximum, total = softmax
    block = _blocks(first, cache, reaches, PAGE, KEYS) if CARRIED else 0
    for start in range(first, last, KEYS):
        here = block
        if CARRIED:
            block = _blocks(start + KEYS, cache, reaches, PAGE, KEYS)
        acc, maximum, total = _fold(
            start, here, q, acc, maximum, total, cache, reaches, scores_of, NUM_KV, DIM, BLOCK_DIM, PAGE, KEYS, MASKED,
            WINDOW, SOFTCAP, DETOUR, PRECISION, CARRIED)
    return acc, maximum, total


@triton.jit
def _blocks(start, cache, reaches, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Blocks of the keys [start, start + KEYS) that the tile sees."""
    position = start + tl.arange(0, KEYS)
    return tl.load(cache[0] + position // PAGE, mask=(position >= reaches[0]) & (position < reaches[1]), other=0)


@triton.jit
def _fold(
    start, block, q, acc, maximum, total, cache, reaches, scores_of, NUM_KV: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DETOUR: tl.constexpr, PRECISION: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """One iteration of `_fold_keys`: the keys [start, start + KEYS), in `block` with CARRIED."""
    table, k_cache, v_cache, head, detour = cache
    begin, limit, reach, window = reaches
    scale, softcap = scores_of
    dim = tl.arange(0, BLOCK_DIM)
    position = start + tl.arange(0, KEYS)
    if MASKED:
        present = (position >= begin) & (position < limit)
    place = position
    if DETOUR:
        place = along(detour, position, position < limit)
    if not CARRIED:
        if MASKED:
            block = tl.load(table + place // PAGE, mask=present, other=0)
        else:
            block = tl.load(table + place // PAGE)
    base = ((block.to(tl.int64) * NUM_KV + head) * PAGE + place % PAGE) * DIM
    places = base[:, None] + dim[None, :]
    if MASKED:
        loads = present[:, None] & (dim < DIM)[None, :]
        k = tl.load(k_cache + places, mask=loads, other=0.0).to(q.dtype)
    elif DIM == BLOCK_DIM:
        k = tl.load(k_cache + places).to(q.dtype)
    else:
        k = tl.load(k_cache + places, mask=(dim < DIM)[None, :], other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    left = scale
    if SOFTCAP:
        z = scores * scale * (0.6931471805599453 / softcap)
        scores = softcap * 1.4426950408889634 * (1.0 - 2.0 / (1.0 + tl.exp2(2.885390081777927 * z)))
        left = 1.0
    if MASKED:
        seen = (position[None, :] <= reach[:, None]) & present[None, :]
        if WINDOW:
            seen = seen & (position[None, :] > reach[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, axis=1) * left)
    # A row that has seen no key yet stays at -inf; 0 instead keeps it from becoming NaN.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(tl.fma(scores, left, -level[:, None]))
    shrink = tl.exp2(maximum - level)
    total = tl.fma(total, shrink, tl.sum(weights, axis=1))
    if MASKED:
        v = tl.load(v_cache + places, mask=loads, other=0.0).to(q.dtype)
    elif DIM == BLOCK_DIM:
        v = tl.load(v_cache + places).to(q.dtype)
    else:
        v = tl.load(v_cache + places, mask=(dim < DIM)[None, :], other=0.0).to(q.dtype)
    acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def _mixed_kernel(
    qkv,
    k_cache,
    v_cache,
    out,
    tables,
    rows,
    query_start,
    context_len,
    tile_seq,
    tile_first,
    detours,
    scale,
    softcap,
    window,
    kv_scales,
    sinks,
    q_stride,
    table_stride,
    detour_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DETOUR: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    tile = tl.program_id(1)
    seq = tl.load(tile_seq + tile)
    if seq >= 0:
        first = tl.load(tile_first + tile)
        begin_q = tl.load(query_start + seq)
        queries = tl.load(query_start + seq + 1) - begin_q
        length = tl.load(context_len + seq)
        row = seq
        if HAS_ROWS:
            row = tl.load(rows + seq)
        table = tables + row.to(tl.int64) * table_stride
        TOKENS: tl.constexpr = ROWS // GROUP
        index = tl.arange(0, ROWS)
        token = first + index // GROUP
        dim = tl.arange(0, BLOCK_DIM)
        real = (index < TOKENS * GROUP) & (token < queries)
        used = real[:, None] & (dim < DIM)[None, :]
        place = (begin_q + token).to(tl.int64)
        column = (head * GROUP + index % GROUP)[:, None] * DIM + dim[None, :]
        q = tl.load(qkv + place[:, None] * q_stride + column, mask=used, other=0.0)
        k_scale, v_scale = head_scales(kv_scales, head, NUM_KV, SCALED)
        scale = scale * k_scale
        left = score_scale(q, scale, k_cache)
        q = query_for(q, scale, k_cache)
        reach = length - queries + token
        last = tl.minimum(first + TOKENS, queries)
        limit = length - queries + last
        begin = 0
        if WINDOW:
            begin = tl.maximum(length - queries + first - window + 1, 0)
        acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if SINKS:
            # The softmax begins with the head's sink, as if it were a key without a value.
            maximum = tl.load(sinks + head * GROUP + index % GROUP) * 1.4426950408889634
            total += 1.0
        softmax = (acc, maximum, total)
        cache = (table, k_cache, v_cache, head, detours + seq.to(tl.int64) * detour_stride)
        reaches = (begin, limit, reach, window)
        scores_of = (left, softcap)
        if ONCE:
            acc, _maximum, total = _fold_keys(
                begin // KEYS * KEYS, limit, q, softmax, cache, reaches, scores_of, NUM_KV, DIM, BLOCK_DIM, PAGE, KEYS,
                True, WINDOW, SOFTCAP, DETOUR, PRECISION, not DETOUR)
        else:
            # Keys that every row sees need no mask; a window's edge and the diagonal do.
            open_end = (length - queries + first + 1) // KEYS * KEYS
            open_begin = 0
            if WINDOW:
                edge = tl.maximum(length - queries + last - window, 0)
                open_begin = tl.minimum((edge + KEYS - 1) // KEYS * KEYS, open_end)
                softmax = _fold_keys(
                    begin // KEYS * KEYS, open_begin, q, softmax, cache, reaches, scores_of, NUM_KV, DIM, BLOCK_DIM,
                    PAGE, KEYS, True, WINDOW, SOFTCAP, DETOUR, PRECISION, False)
            softmax = _fold_keys(
                open_begin, open_end, q, softmax, cache, reaches, scores_of, NUM_KV, DIM, BLOCK_DIM, PAGE, KEYS, False,
                WINDOW, SOFTCAP, DETOUR, PRECISION, False)
            acc, _maximum, total = _fold_keys(
                open_end, limit, q, softmax, cache, reaches, scores_of, NUM_KV, DIM, BLOCK_DIM, PAGE, KEYS, True,
                WINDOW, SOFTCAP, DETOUR, PRECISION, False)
        # One division a row, not one a feature.
        result = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
        tl.store(out + place[:, None] * (NUM_HEADS * DIM) + column, result.to(out.dtype.element_ty), mask=used)


def query_tiles(counts: np.ndarray, tokens_per_tile: int, first_seq: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(sequence, first token) of every tile of a batch with these numbers of queries.

    The tiles with the most keys come last in a sequence; they go first, so that the short ones fill the end.
    """
    tiles = -(-counts // tokens_per_tile)
    seqs = np.repeat(np.arange(len(counts)), tiles)
    index = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    order = np.argsort(-index, kind="stable")
    return (seqs[order] + first_seq).astype(np.int32), (index[order] * tokens_per_tile).astype(np.int32)


def mixed_attention(
    qkv: Tensor,
    cache: LayerCache,
    tables: Tensor,
    rows: Tensor | None,
    query_start: Tensor,
    context_len: Tensor,
    tile_seq: Tensor,
    tile_first: Tensor,
    shape: HeadShape,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    detours: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    sizes: MixedShape = MixedShape(),
    exact: bool = False,
    once: bool = False,
    pdl: bool = False,
    late: bool = False,
) -> Tensor:
    """[T, Hq*hd]: causal attention of the queries in the tiles; a tile whose sequence is -1 does nothing.

    `detours`: as in `StepContext`, of sequences of one query. `sinks` float32 [Hq]: scores without a value, which take
    part in each head's softmax.
    `exact` forbids fused multiply-adds but those of the source, which `hopper_prefill` makes too: the compiler's own
    were in the loop without a mask only, so a query's bits depended on where its chunk began.

    `once`: all keys in one loop, which masks and knows its blocks a turn early: for tiles of one query, that wait for
    memory more than they compute. With `exact` it makes the same operations in the same order. `late`: the kernel of an
    early launch (`pdl`) begins when the one before has ended all the same.
    """
    group = shape.num_heads // shape.num_kv_heads
    if out is None:
        out = torch.empty(qkv.shape[0], shape.num_heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    ieee = qkv.dtype == torch.float32
    _mixed_kernel[(shape.num_kv_heads, tile_seq.shape[0])](
        qkv, cache.k, cache.v, out, tables, tables if rows is None else rows, query_start, context_len,
        tile_seq, tile_first,
        tables if detours is None else detours,
        scale * LOG2_E,
        0.0 if softcap is None else softcap,
        0 if window is None else window,
        context_len if cache.scales is None else cache.scales,
        context_len if sinks is None else sinks,
        qkv.stride(0),
        tables.stride(0),
        0 if detours is None else detours.stride(0),
        shape.num_heads, shape.num_kv_heads, group, shape.head_dim,
        max(16, triton.next_power_of_2(shape.head_dim)),
        cache.block_size,
        sizes.rows_of(group),
        sizes.keys,
        window is not None,
        softcap is not None,
        detours is not None,
        rows is not None,
        "ieee" if ieee else "tf32",
        sinks is not None,
        cache.scales is not None,
        once,
        pdl,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        enable_fp_fusion=not exact,
        **({"launch_pdl": True} if pdl and not late else {}),
    )  # fmt: skip
    return out


def attention_reference(
    qkv: Tensor,
    cache: LayerCache,
    tables: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    shape: HeadShape,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    detours: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What both attention kernels compute, in float32, one sequence at a time."""
    q = qkv.view(qkv.shape[0], -1, shape.head_dim)[:, : shape.num_heads].float()
    out = torch.zeros_like(q)
    starts = query_start.tolist()
    for s, length in enumerate(context_len.tolist()):
        lo, hi = starts[s], starts[s + 1]
        if lo == hi or length == 0:
            continue
        places = torch.arange(length, device=q.device)
        if detours is not None and int(detours[s, 0]) < length:
            first = int(detours[s, 0])
            places[first:] = detours[s, 1 : 1 + length - first].long()
        blocks, offsets = tables[s, places // cache.block_size].long(), places % cache.block_size
        k, v = (part[blocks, :, offsets].float().transpose(0, 1) for part in (cache.k, cache.v))
        if cache.scales is not None:
            k, v = k * cache.scales[0, :, None, None], v * cache.scales[1, :, None, None]
        reach = torch.arange(length - (hi - lo), length, device=q.device)
        keys = torch.arange(length, device=q.device)
        seen = keys[None, :] <= reach[:, None]
        if window is not None:
            seen &= keys[None, :] > reach[:, None] - window
        out[lo:hi] = softmax_attention(q[lo:hi], k, v, seen, scale, softcap, sinks)
    return out.reshape(qkv.shape[0], -1).to(qkv.dtype)
