"""Decode attention: one new token per sequence over its paged keys, split over keys, bound by memory bandwidth.

One program reads one piece of a sequence's keys for one KV head and attends with all query heads that share it. The
program that finishes a sequence last joins the pieces, always in their order: no second kernel is launched, and the
result does not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention_split import PIECE_STEP, DecodeSplit
from quire.kernels.types import HeadShape, LayerCache

LOG2_E = 1.4426950408889634
TWO_NUMBERS = tl.constexpr(
    "{ .reg .b16 a, b; .reg .b32 x; prmt.b32 x, $2, 0, 0x3120; mov.b32 {a, b}, x; cvt.rn.f16x2.e4m3x2 $0, a; "
    "cvt.rn.f16x2.e4m3x2 $1, b; }"
)
"""Of two words of two numbers in fp8 each: the first numbers of both in fp16, and the second ones."""


@dataclass(slots=True)
class DecodeScratch:
    """Partial results of the pieces, read by the program that joins them. All layers of a model share it."""

    partial: Tensor
    """float32 [tasks * kv heads, group, head_dim]"""
    summary: Tensor
    """float32 [2, tasks * kv heads, group]: maxima and sums of the pieces."""
    arrived: Tensor
    """int32 [sequences * kv heads]: pieces done; the joiner sets it back to 0."""

    @classmethod
    def allocate(cls, tasks: int, num_seqs: int, shape: HeadShape, device: torch.device | str) -> DecodeScratch:
        group = shape.num_heads // shape.num_kv_heads
        size = tasks * shape.num_kv_heads
        return cls(
            torch.empty(size, group, shape.head_dim, dtype=torch.float32, device=device),
            torch.empty(2, size, group, dtype=torch.float32, device=device),
            torch.zeros(num_seqs * shape.num_kv_heads, dtype=torch.int32, device=device),
        )


@triton.jit(do_not_specialize=["num_parts"])
def _decode_kernel(
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
    scale,
    softcap,
    window,
    kv_scales,
    num_parts,
    sinks,
    q_stride,
    table_stride,
    detours,
    detour_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    GROUP_POW: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    STEP: tl.constexpr,
    JOIN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HALVES: tl.constexpr,
    CARRIED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    SINKS: tl.constexpr,
    DETOUR: tl.constexpr,
    SCALED: tl.constexpr,
):
    head = tl.program_id(0)
    # An earlier kernel than the previous one wrote the split, so it is read while the previous one still runs.
    seq, task, row, length, step = load_task(
        task_seq, task_piece, piece_count, piece_length, context_len, rows, HAS_ROWS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if seq >= 0:
        table = tables + row.to(tl.int64) * table_stride
        span = piece_span(task, length, window, step, STEP)
        WIDTH: tl.constexpr = DIM // 2 if HALVES else BLOCK_DIM
        member = tl.arange(0, GROUP_PAD)
        dim = tl.arange(0, WIDTH)
        used = (member < GROUP)[:, None] & (dim < DIM)[None, :]
        heads = qkv + seq.to(tl.int64) * q_stride + (head * GROUP + member)[:, None] * DIM + dim[None, :]
        q = tl.load(heads, mask=used, other=0.0)
        q_high = q
        if HALVES:
            q_high = tl.load(heads + WIDTH, mask=used, other=0.0)
        detour = detours + seq.to(tl.int64) * detour_stride
        attend_piece(
            q, q_high, out, seq, head, task, span, (table, k_cache, v_cache, detour),
            (partial, summary, arrived, num_parts), (scale, softcap, kv_scales, sinks), NUM_HEADS, NUM_KV, GROUP,
            GROUP_PAD, GROUP_POW, DIM, BLOCK_DIM, PAGE, KEYS, JOIN, SOFTCAP, HALVES, CARRIED, PRECISION, SINKS, DETOUR,
            SCALED)


@triton.jit
def along(detour, position, seen):
    """Where the keys at these positions of a sequence lie along its block table: `StepContext.detours`."""
    first = tl.load(detour)
    later = seen & (position >= first)
    return tl.where(later, tl.load(detour + 1 + (position - first), mask=later, other=0), position)


@triton.jit
def head_scales(kv_scales, head, NUM_KV: tl.constexpr, SCALED: tl.constexpr):
    """What the keys and the values of a KV head are multiplied by as they are read."""
    if SCALED:
        return tl.load(kv_scales + head), tl.load(kv_scales + NUM_KV + head)
    else:
        return 1.0, 1.0


@triton.jit
def query_for(q, scale, k_cache):
    """The query as keys of the cache are multiplied by it. One instruction makes two fp16 numbers of two in fp8,
    exactly; to bf16 it takes three. The scale of scores is in it then, so that it fits."""
    if k_cache.dtype.element_ty == tl.float8e4nv and q.dtype != tl.float32:
        return (q.to(tl.float32) * scale).to(tl.float16)
    else:
        return q


@triton.jit
def score_scale(q, scale, k_cache):
    """What is left for scores to be multiplied by after `query_for`."""
    if k_cache.dtype.element_ty == tl.float8e4nv and q.dtype != tl.float32:
        return 1.0
    else:
        return scale


@triton.jit
def load_pairs(v_cache, base, seen, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """The even and the odd features of values in fp8, each [keys, BLOCK_DIM / 2] in fp16.

    They are read as words of two bytes: shared memory turns those by an instruction as tensor cores want values, while
    single bytes are gathered one by one (128 loads a thread for 128 keys, which took longer than the memory).
    """
    pair = tl.arange(0, BLOCK_DIM // 2)
    words = v_cache.to(tl.pointer_type(tl.uint16), bitcast=True) + (base // 2)[:, None] + pair[None, :]
    word = tl.load(words, mask=seen[:, None] & (pair < DIM // 2)[None, :], other=0)
    return tl.inline_asm_elementwise(
        TWO_NUMBERS, "=r,=r,r", [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def load_task(task_seq, task_piece, piece_count, piece_length, context_len, rows, HAS_ROWS: tl.constexpr):
    """What this program does: (sequence or -1, (task, piece, pieces of the sequence), row of its block table, length of
    its context, keys of a piece). A program without a sequence gets the numbers of the first one."""
    number = tl.program_id(1)
    seq = tl.load(task_seq + number)
    owner = tl.maximum(seq, 0)
    piece = tl.load(task_piece + number)
    pieces = tl.load(piece_count + owner)
    step = tl.load(piece_length)
    length = tl.load(context_len + owner)
    row = owner
    if HAS_ROWS:
        row = tl.load(rows + owner)
    return seq, (number, piece, pieces), row, length, step


@triton.jit
def piece_span(task, length, window, step, STEP: tl.constexpr):
    """(First visible key of the sequence, first key of the piece, the end of its keys)."""
    visible = tl.maximum(length - window, 0)
    begin = visible // STEP * STEP + task[1] * step
    return visible, begin, tl.minimum(begin + step, length)


@triton.jit
def attend_piece(
    q, q_high, out, seq, head, task, span, cache, scratch, scores_of, NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, GROUP_POW: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, JOIN: tl.constexpr, SOFTCAP: tl.constexpr, HALVES: tl.constexpr,
    CARRIED: tl.constexpr, PRECISION: tl.constexpr, SINKS: tl.constexpr, DETOUR: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The keys [begin, end) of one sequence and KV head under the first GROUP rows of q [GROUP_PAD, BLOCK_DIM]; the
    program that is done last joins the sequence's pieces.

    `task`: (its number, its piece, how many the sequence has). `span`: (first visible key, begin, end). `cache`: (block
    table, keys, values, detour of the sequence: it counts with DETOUR, which does not go with CARRIED). `scratch`:
    (partial, summary, arrived, size of partial). `scores_of`: (scale, soft cap, scales of keys and values, sinks).

    With HALVES, q and q_high are the two halves of the features, as a rotation leaves them, and keys, values and
    sums come in halves too; values in fp8 come as even and odd features (`load_pairs`); every sum has the order it has
    without. With SINKS the first piece's softmax begins with
    the head's sink, as if it were a key without a value.
    """
    number, piece, pieces = task
    visible, begin, end = span
    # Where a tile is shorter than what pieces begin at a multiple of, the first ones may hold no visible key: their
    # maximum would be that of nothing.
    begin = tl.maximum(begin, visible // KEYS * KEYS)
    table, k_cache, v_cache, detour = cache
    partial, summary, arrived, num_parts = scratch
    scale, softcap, kv_scales, sinks = scores_of
    k_scale, v_scale = head_scales(kv_scales, head, NUM_KV, SCALED)
    scale = scale * k_scale
    left = score_scale(q, scale, k_cache)
    q_high = query_for(q_high, scale, k_cache)
    q = query_for(q, scale, k_cache)
    WIDTH: tl.constexpr = DIM // 2 if HALVES else BLOCK_DIM
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, WIDTH)
    in_dim = dim < DIM
    PAIRS: tl.constexpr = BLOCK_DIM >= 32 and q.dtype == tl.float16 and v_cache.dtype.element_ty == tl.float8e4nv
    TWO: tl.constexpr = HALVES or PAIRS
    VALUES: tl.constexpr = BLOCK_DIM // 2 if TWO else BLOCK_DIM
    # Features of the first sums; those of the second ones are so much further.
    FURTHER: tl.constexpr = 1 if PAIRS else VALUES
    feature = tl.arange(0, VALUES) * (2 if PAIRS else 1)
    used = (member < GROUP)[:, None] & (feature < DIM)[None, :]
    key = tl.arange(0, KEYS)
    maximum = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + member, mask=member < GROUP, other=0.0) * 1.4426950408889634
        maximum = tl.where(piece == 0, sink, maximum)
        total = tl.where(piece == 0, total + 1.0, total)
    acc = tl.zeros([GROUP_PAD, VALUES], tl.float32)
    acc_high = acc
    block = tl.load(table + (begin + key) // PAGE, mask=(begin + key >= visible) & (begin + key < end), other=0)
    for start in range(begin, end, KEYS):
        position = start + key
        seen = (position >= visible) & (position < end)
        place = position
        if DETOUR:
            place = along(detour, position, seen)
        if not CARRIED:
            block = tl.load(table + place // PAGE, mask=seen, other=0)
        base = ((block.to(tl.int64) * NUM_KV + head) * PAGE + place % PAGE) * DIM
        if CARRIED:
            # Block numbers are loaded one iteration early: the loads of keys then wait for no other load and can be
            # pipelined.
            later = position + KEYS
            block = tl.load(table + later // PAGE, mask=(later >= visible) & (later < end), other=0)
        loads = seen[:, None] & in_dim[None, :]
        k = tl.load(k_cache + base[:, None] + dim[None, :], mask=loads, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HALVES:
            k = tl.load(k_cache + base[:, None] + (dim + WIDTH)[None, :], mask=loads, other=0.0).to(q.dtype)
            scores = tl.dot(q_high, tl.trans(k), scores, input_precision=PRECISION)
        scores = scores * left
        if SOFTCAP:
            # scores come in units of log2: back to natural for the cap, which is a tanh
            z = scores * (0.6931471805599453 / softcap)
            scores = softcap * 1.4426950408889634 * (1.0 - 2.0 / (1.0 + tl.exp2(2.885390081777927 * z)))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(maximum - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        weights = weights.to(q.dtype)
        if PAIRS:
            v, v_odd = load_pairs(v_cache, base, seen, DIM, BLOCK_DIM)
            acc = tl.dot(weights, v, acc * shrink[:, None])
            acc_high = tl.dot(weights, v_odd, acc_high * shrink[:, None])
        else:
            v = tl.load(v_cache + base[:, None] + dim[None, :], mask=loads, other=0.0).to(q.dtype)
            acc = tl.dot(weights, v, acc * shrink[:, None], input_precision=PRECISION)
            if HALVES:
                v = tl.load(v_cache + base[:, None] + (dim + WIDTH)[None, :], mask=loads, other=0.0).to(q.dtype)
                acc_high = tl.dot(weights, v, acc_high * shrink[:, None], input_precision=PRECISION)
        maximum = higher
    acc = acc * v_scale
    target = out + seq.to(tl.int64) * (NUM_HEADS * DIM) + (head * GROUP + member)[:, None] * DIM + feature[None, :]
    if pieces == 1:
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=used)
        if TWO:
            high = acc_high * v_scale / total[:, None]
            tl.store(target + FURTHER, high.to(out.dtype.element_ty), mask=used)
    else:
        mine = (number * NUM_KV + head) * GROUP
        part = partial + (mine + member)[:, None].to(tl.int64) * DIM + feature[None, :]
        tl.store(part, acc, mask=used)
        if TWO:
            tl.store(part + FURTHER, acc_high * v_scale, mask=used)
        tl.store(summary + mine + member, maximum, mask=member < GROUP)
        tl.store(summary + num_parts * GROUP + mine + member, total, mask=member < GROUP)
        # Every thread's stores come before the one thread's atomic that publishes them.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + seq * NUM_KV + head, 1, sem="acq_rel")
        if before == pieces - 1:
            heads = out + seq.to(tl.int64) * (NUM_HEADS * DIM) + head * GROUP * DIM
            join_pieces(partial, summary, heads, num_parts, (number - piece) * NUM_KV + head, pieces, NUM_KV, GROUP,
                        GROUP_POW, DIM, BLOCK_DIM, JOIN)
            tl.store(arrived + seq * NUM_KV + head, 0)


@triton.jit
def join_pieces(
    partial,
    summary,
    target,
    num_parts,
    first,
    pieces,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    JOIN: tl.constexpr,
):
    """Weighted mean of the pieces of one sequence and KV head, JOIN of them at a time."""
    member = tl.arange(0, GROUP_POW)
    dim = tl.arange(0, BLOCK_DIM)
    lane = tl.arange(0, JOIN)
    peak = tl.full([GROUP_POW], float("-inf"), tl.float32)
    for start in range(0, pieces, JOIN):
        index = start + lane
        part = ((first + index * NUM_KV) * GROUP)[:, None] + member[None, :]
        real = (index < pieces)[:, None] & (member < GROUP)[None, :]
        peak = tl.maximum(
            peak,
            tl.max(tl.load(summary + part, mask=real, other=float("-inf"), cache_modifier=".cg"), axis=0),
        )
    total = tl.zeros([GROUP_POW], tl.float32)
    acc = tl.zeros([GROUP_POW, BLOCK_DIM], tl.float32)
    for start in range(0, pieces, JOIN):
        index = start + lane
        part = ((first + index * NUM_KV) * GROUP)[:, None] + member[None, :]
        real = (index < pieces)[:, None] & (member < GROUP)[None, :]
        height = tl.load(summary + part, mask=real, other=float("-inf"), cache_modifier=".cg")
        # Padding members have no peak; 0 instead keeps their weight from being NaN.
        share = tl.exp2(height - tl.where(peak == float("-inf"), 0.0, peak)[None, :])
        weight = tl.load(summary + num_parts * GROUP + part, mask=real, other=0.0, cache_modifier=".cg")
        total += tl.sum(share * weight, axis=0)
        values = tl.load(
            partial + part[:, :, None].to(tl.int64) * DIM + dim[None, None, :],
            mask=real[:, :, None] & (dim < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += tl.sum(values * share[:, :, None], axis=0)
    used = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    tl.store(
        target + member[:, None] * DIM + dim[None, :],
        (acc / total[:, None]).to(target.dtype.element_ty),
        mask=used,
    )


def decode_attention(
    qkv: Tensor,
    cache: LayerCache,
    tables: Tensor,
    rows: Tensor | None,
    context_len: Tensor,
    split: DecodeSplit,
    scratch: DecodeScratch,
    shape: HeadShape,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    keys: int = 128,
    num_warps: int = 4,
    num_stages: int = 2,
    halves: bool = False,
    carried: bool = False,
    pdl: bool = False,
    sinks: Tensor | None = None,
    detours: Tensor | None = None,
) -> Tensor:
    """[S, Hq*hd] for the S sequences of `split`, whose queries are the first S rows of qkv.

    Sequence s has its block table in row `rows[s]` (s itself without `rows`) of int32 `tables`. Nothing is written
    for a sequence of no length. `halves` takes the features in two halves, for fewer addresses; with `carried` the
    places of the next keys are known a turn early, so that `num_stages` tiles can be on their way. Bits stay the same.
    `sinks` float32 [Hq] are scores without a value, which take part in each head's softmax. `detours`: as in
    `StepContext`; then nothing is carried.
    """
    group = shape.num_heads // shape.num_kv_heads
    carried = carried and detours is None
    if out is None:
        out = torch.empty(context_len.shape[0], shape.num_heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    ieee = qkv.dtype == torch.float32
    launch = {"num_warps": num_warps, "num_stages": num_stages, **({"launch_pdl": True} if pdl else {})}
    _decode_kernel[(shape.num_kv_heads, split.tasks)](
        qkv, cache.k, cache.v, out, tables, tables if rows is None else rows, context_len,
        split.sequence, split.piece, split.count, split.length,
        scratch.partial, scratch.summary, scratch.arrived,
        scale * LOG2_E,
        0.0 if softcap is None else softcap,
        1 << 30 if window is None else window,
        context_len if cache.scales is None else cache.scales,
        scratch.partial.shape[0],
        context_len if sinks is None else sinks,
        qkv.stride(0), tables.stride(0),
        tables if detours is None else detours,
        0 if detours is None else detours.stride(0),
        shape.num_heads, shape.num_kv_heads, group,
        max(16, triton.next_power_of_2(group)),
        triton.next_power_of_2(group),
        shape.head_dim,
        max(16, triton.next_power_of_2(shape.head_dim)),
        cache.block_size,
        keys,
        PIECE_STEP,
        8,
        softcap is not None,
        rows is not None,
        halves and shape.head_dim >= 32 and shape.head_dim & (shape.head_dim - 1) == 0,
        carried,
        "ieee" if ieee else "tf32",
        pdl, sinks is not None, detours is not None, cache.scales is not None,
        **launch,
    )  # fmt: skip
    return out
