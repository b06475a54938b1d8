"""The kernel of `latent_hopper`, in Gluon: two warps load tiles of latents by TMA, the others attend to them.

A tile is 64 keys: latents [64, rank] and rotated features [64, 64]. It is loaded once, into one stage of the ring, and
read by both MMAs: scores (all columns) and sums (the latents). `full` counts the bytes of a stage, `free` says that it
has been read. An MMA of a warp group has 64 rows. With as many heads in a block, heads are the rows of scores and sums.
With fewer heads (FEW), scores and sums are transposed: keys and features are the rows, heads the columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton.decode_task import load_task


@gluon.jit
def _box_rows(table, position, end, BOXES: gl.constexpr, BOX: gl.constexpr, PAGE: gl.constexpr):
    """First rows in the cache of the boxes of one tile. A box past the end is the sequence's last one again."""
    found = ()
    for box in gl.static_range(BOXES):
        place = gl.minimum(position + box * BOX, end - 1) // BOX * BOX
        found = found + (gl.load(table + place // PAGE) * PAGE + place % PAGE,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _load(
    latents, table, c_ring, r_ring, full, free, begin, end, FIRST: gl.constexpr, LAST: gl.constexpr,
    STAGES: gl.constexpr, PAGE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warp loads the slabs of 64 columns [FIRST, LAST) of every tile. It reads the block table a tile early."""
    BOX: gl.constexpr = latents.block_type.shape[0]
    WIDTH: gl.constexpr = latents.block_type.shape[1]
    KEYS: gl.constexpr = c_ring.shape[1]
    SLABS: gl.constexpr = c_ring.shape[2] // WIDTH
    BOXES: gl.constexpr = KEYS // BOX
    BYTES: gl.constexpr = BOXES * (LAST - FIRST) * latents.block_type.nbytes
    tiles = (end - begin + KEYS - 1) // KEYS
    if tiles > 0:
        later = _box_rows(table, begin, end, BOXES, BOX, PAGE)
        if PDL:
            gdc_wait()
        for tile in range(tiles):
            stage = tile % STAGES
            rows = later
            later = _box_rows(table, begin + (tile + 1) * KEYS, end, BOXES, BOX, PAGE)
            mbarrier.wait(free.index(stage), tile // STAGES - 1 & 1, pred=tile >= STAGES)
            mbarrier.expect(full.index(stage), BYTES)
            for box in gl.static_range(BOXES):
                for slab in gl.static_range(FIRST, LAST):
                    if slab < SLABS:
                        part = c_ring.index(stage).slice(slab * WIDTH, WIDTH, dim=1)
                    else:
                        part = r_ring.index(stage)
                    part = part.slice(box * BOX, BOX, dim=0)
                    tma.async_copy_global_to_shared(latents, [rows[box], slab * WIDTH], full.index(stage), part)


@gluon.jit
def _clear_tail(c, left, LOADED: gl.constexpr):
    """Zero the latents after the first `left`: their weights are 0, but 0 times a NaN in an unused slot is NaN."""
    WIDTH: gl.constexpr = 64
    key = gl.arange(0, c.shape[0], layout=gl.SliceLayout(1, LOADED))
    for slab in gl.static_range(c.shape[1] // WIDTH):
        part = c.slice(slab * WIDTH, WIDTH, dim=1)
        held = part.load(LOADED)
        part.store(gl.where((key < left)[:, None], held, gl.zeros_like(held)))
    fence_async_shared()


@gluon.jit
def _store_queries(queries, target, GROUP: gl.constexpr, WIDTH: gl.constexpr, LOADED: gl.constexpr):
    """Some columns of the block's query heads to shared memory; heads that are not there are 0."""
    member = gl.arange(0, target.shape[0], layout=gl.SliceLayout(1, LOADED))
    dim = gl.arange(0, target.shape[1], layout=gl.SliceLayout(0, LOADED))
    places = queries + member[:, None] * WIDTH + dim[None, :]
    target.store(gl.load(places, mask=(member < GROUP)[:, None], other=0.0))


@gluon.jit
def _of_heads(values, FEW: gl.constexpr):
    """Values of heads, to broadcast along keys or features."""
    if FEW:
        return values[None, :]
    else:
        return values[:, None]


@gluon.jit
def _scores(c, r, q_c, q_r, FEW: gl.constexpr, SCORES: gl.constexpr):
    """Both products are under way when this returns."""
    KEYS: gl.constexpr = c.shape[0]
    HEADS: gl.constexpr = q_c.shape[0]
    if FEW:
        zero = gl.zeros([KEYS, HEADS], gl.float32, SCORES)
        scores = warpgroup_mma(c, q_c.permute((1, 0)), zero, use_acc=False, is_async=True)
        return warpgroup_mma(r, q_r.permute((1, 0)), scores, is_async=True)
    else:
        zero = gl.zeros([HEADS, KEYS], gl.float32, SCORES)
        scores = warpgroup_mma(q_c, c.permute((1, 0)), zero, use_acc=False, is_async=True)
        return warpgroup_mma(q_r, r.permute((1, 0)), scores, is_async=True)


@gluon.jit
def _attend(
    queries, out, partial, summary, arrived, c_ring, r_ring, q_c, q_r, weights, full, free,
    seq, head, task, piece, pieces, begin, end, scale, num_parts,
    NUM_HEADS: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, FEW: gl.constexpr,
    PDL: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """All other warps: scores of a tile, their softmax so far, the weighted sum of its latents."""
    KEYS: gl.constexpr = c_ring.shape[1]
    RANK: gl.constexpr = c_ring.shape[2]
    HEADS: gl.constexpr = q_c.shape[0]
    KEY_AXIS: gl.constexpr = 0 if FEW else 1
    if PDL:
        gdc_wait()
    tiles = (end - begin + KEYS - 1) // KEYS
    if tiles > 0:
        _store_queries(queries, q_c, GROUP, RANK + q_r.shape[1], WIDE)
        _store_queries(queries + RANK, q_r, GROUP, RANK + q_r.shape[1], NARROW)
        fence_async_shared()
        gl.thread_barrier()
        maximum = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(KEY_AXIS, SCORES))
        totals = gl.zeros([KEYS if FEW else HEADS, HEADS if FEW else KEYS], gl.float32, SCORES)
        acc = gl.zeros([RANK if FEW else HEADS, HEADS if FEW else RANK], gl.float32, SUMS)
        key = gl.arange(0, KEYS, layout=gl.SliceLayout(1 - KEY_AXIS, SCORES))
        for tile in range(tiles):
            stage = tile % STAGES
            c = c_ring.index(stage)
            left = end - begin - tile * KEYS
            mbarrier.wait(full.index(stage), tile // STAGES & 1)
            scores = _scores(c, r_ring.index(stage), q_c, q_r, FEW, SCORES)
            scores = warpgroup_mma_wait(0, deps=(scores,)) * scale
            if left < KEYS:
                _clear_tail(c, left, NARROW)
            scores = gl.where(_of_heads(key < left, not FEW), scores, float("-inf"))
            higher = gl.maximum(maximum, gl.max(scores, axis=KEY_AXIS))
            share = gl.exp2(scores - _of_heads(higher, FEW))
            shrink = gl.exp2(maximum - higher)
            maximum = higher
            # Added up over keys after the last tile, so that no warp waits for another here.
            totals = totals * _of_heads(shrink, FEW) + share
            acc = acc * _of_heads(gl.convert_layout(shrink, gl.SliceLayout(KEY_AXIS, SUMS)), FEW)
            if FEW:
                weights.permute((1, 0)).store(share.to(c.dtype))
                fence_async_shared()
                gl.thread_barrier()
                acc = warpgroup_mma(c.permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)
            else:
                held = gl.convert_layout(share.to(c.dtype), gl.DotOperandLayout(0, SUMS, 2))
                acc = warpgroup_mma(held, c, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            gl.thread_barrier()
            mbarrier.arrive(free.index(stage))
        total = gl.sum(totals, axis=KEY_AXIS)
        OF_HEADS: gl.constexpr = gl.SliceLayout(KEY_AXIS, SUMS)
        _store_piece(
            acc, gl.convert_layout(maximum, OF_HEADS), gl.convert_layout(total, OF_HEADS), out, partial, summary,
            arrived, seq, head, task, piece, pieces, num_parts, NUM_HEADS, BLOCKS, GROUP, HEADS, RANK, FEW, SUMS,
        )  # fmt: skip


@gluon.jit
def _store_piece(
    acc, maximum, total, out, partial, summary, arrived, seq, head, task, piece, pieces, num_parts,
    NUM_HEADS: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, RANK: gl.constexpr,
    FEW: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """The result if the sequence has one piece. Else the piece; the program that is done last joins all pieces."""
    OF_HEADS: gl.constexpr = gl.SliceLayout(0 if FEW else 1, SUMS)
    member = gl.arange(0, HEADS, layout=OF_HEADS)
    dim = gl.arange(0, RANK, layout=gl.SliceLayout(1 if FEW else 0, SUMS))
    inside = _of_heads(member, FEW) * RANK + _of_heads(dim, not FEW)
    known = member < GROUP
    real = _of_heads(known, FEW)
    target = out + seq.to(gl.int64) * (NUM_HEADS * RANK) + head * GROUP * RANK + inside
    if pieces == 1:
        gl.store(target, (acc / _of_heads(total, FEW)).to(out.dtype.element_ty), mask=real)
    else:
        mine = (task * BLOCKS + head) * GROUP
        gl.store(partial + mine.to(gl.int64) * RANK + inside, acc, mask=real)
        gl.store(summary + mine + member, maximum, mask=known)
        gl.store(summary + num_parts * GROUP + mine + member, total, mask=known)
        # Every thread's stores come before the one thread's atomic that publishes them.
        gl.thread_barrier()
        if gl.atomic_add(arrived + seq * BLOCKS + head, 1, sem="acq_rel") == pieces - 1:
            gl.store(arrived + seq * BLOCKS + head, 0)
            first = ((task - piece) * BLOCKS + head) * GROUP
            peak = gl.full([HEADS], float("-inf"), gl.float32, OF_HEADS)
            for part in range(pieces):
                place = first + part * BLOCKS * GROUP
                peak = gl.maximum(peak, gl.load(summary + place + member, mask=known, other=0.0, cache_modifier=".cg"))
            acc = gl.zeros([RANK if FEW else HEADS, HEADS if FEW else RANK], gl.float32, SUMS)
            total = gl.zeros([HEADS], gl.float32, OF_HEADS)
            for part in range(pieces):
                place = first + part * BLOCKS * GROUP
                height = gl.load(summary + place + member, mask=known, other=0.0, cache_modifier=".cg")
                sizes = summary + num_parts * GROUP + place + member
                share = gl.exp2(height - peak)
                total += share * gl.load(sizes, mask=known, other=1.0, cache_modifier=".cg")
                values = partial + place.to(gl.int64) * RANK + inside
                acc += gl.load(values, mask=real, other=0.0, cache_modifier=".cg") * _of_heads(share, FEW)
            gl.store(target, (acc / _of_heads(total, FEW)).to(out.dtype.element_ty), mask=real)


@gluon.jit(do_not_specialize=["num_parts"])
def latent_kernel(
    latents, q_rows, out, tables, rows, context_len, task_seq, task_piece, piece_count, piece_length,
    partial, summary, arrived, scale, num_parts, q_stride, table_stride,
    NUM_HEADS: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, RANK: gl.constexpr,
    PAGE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, HAS_ROWS: gl.constexpr, FEW: gl.constexpr,
    PDL: gl.constexpr, SHARED: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr, WIDE: gl.constexpr,
    NARROW: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = latents.block_type.shape[1]
    SLABS: gl.constexpr = RANK // WIDTH + 1
    c_ring = gl.allocate_shared_memory(latents.dtype, [STAGES, KEYS, RANK], SHARED)
    r_ring = gl.allocate_shared_memory(latents.dtype, [STAGES, KEYS, WIDTH], SHARED)
    q_c = gl.allocate_shared_memory(latents.dtype, [1, HEADS, RANK], SHARED).index(0)
    q_r = gl.allocate_shared_memory(latents.dtype, [1, HEADS, WIDTH], SHARED).index(0)
    weights = q_r
    if FEW:
        weights = gl.allocate_shared_memory(latents.dtype, [1, HEADS, KEYS], SHARED).index(0)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    head = gl.program_id(0) % BLOCKS
    task = gl.program_id(0) // BLOCKS
    # The split and the tables are older than the previous kernel, so they are read while that one still runs.
    seq, numbers, row, length, step = load_task(
        task, task_seq, task_piece, piece_count, piece_length, context_len, rows, HAS_ROWS)
    piece = numbers[1]
    pieces = numbers[2]
    owner = gl.maximum(seq, 0)
    table = tables + row.to(gl.int64) * table_stride
    queries = q_rows + owner.to(gl.int64) * q_stride + head * GROUP * (RANK + WIDTH)
    begin = gl.where(seq < 0, 0, piece * step)
    end = gl.where(seq < 0, 0, gl.minimum(begin + step, length))
    gl.warp_specialize(
        [
            (
                _attend,
                (queries, out, partial, summary, arrived, c_ring, r_ring, q_c, q_r, weights, full, free, seq, head,
                 task, piece, pieces, begin, end, scale, num_parts, NUM_HEADS, BLOCKS, GROUP, STAGES, FEW, PDL, SCORES,
                 SUMS, WIDE, NARROW),
            ),
            (_load, (latents, table, c_ring, r_ring, full, free, begin, end, 0, SLABS // 2, STAGES, PAGE, PDL)),
            (_load, (latents, table, c_ring, r_ring, full, free, begin, end, SLABS // 2, SLABS, STAGES, PAGE, PDL)),
        ],
        [1, 1],
        [40, 40],
    )  # fmt: skip
