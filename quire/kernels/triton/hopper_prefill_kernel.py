"""The kernel of `hopper_prefill`, in Gluon: attention over paged keys by one or two warp groups and a loading warp.

One warp copies keys and values, page by page, into two rings; warp groups take 64 rows of queries each: two for chunks,
so that one computes its softmax while the other multiplies, one for steps that decode, whose tiles have the heads of
one token. A warp group also issues its next scores before it waits for the sum of weighted values. A head's 128
features come in two halves, since the copy engine swizzles 128 bytes: each half of the scores' sum goes on where the
other ended, and each half of the values has sums of its own, so no order changes.

Its operations on a row are those of `attention_mixed`, in the same order. What tiles there are and where their keys lie
was written by earlier kernels than the one before: with PDL it is read while that one still runs.

Where few sequences decode, the PARTS of a piece of work are two programs: both compute all scores, each sums one half
of the values. A tile's 64 rows take a multiprocessor's time whatever they hold, and others have nothing to do.

With TURN a step that decodes comes as the projection left it, and norm, rotation and the write of its keys and values
are part of this kernel, with the bits of `rope_cache`. Then all keys but the step's own were written by earlier steps,
so that they are copied before the kernel before has ended; its own key and value take their places in the rings, where
the copies have brought anything, or half of what is being written.
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

from quire.kernels.triton.head_turn import turned_heads

_TURNED = gl.constexpr(16)
"""Rows of the tile of query heads that are normed and rotated: as few as fill a warp group."""


@gluon.jit
def _tile(item, tile_seq, tile_first, query_start, context_len, NUM_KV: gl.constexpr, TOKENS: gl.constexpr,
          KEYS: gl.constexpr, PADDED: gl.constexpr):  # fmt: skip
    """Of a program's piece of work: KV head, sequence, first token, first row and number of its queries, keys before
    them, and turns of keys that some row of the tile sees. With PADDED a tile may be of no sequence: it has neither
    queries nor turns."""
    head, tile = item % NUM_KV, item // NUM_KV
    owner = gl.load(tile_seq + tile)
    seq = owner
    if PADDED:
        seq = gl.maximum(owner, 0)
    first = gl.load(tile_first + tile)
    begin = gl.load(query_start + seq)
    queries = gl.load(query_start + seq + 1) - begin
    before = gl.load(context_len + seq) - queries
    turns = (before + gl.minimum(first + TOKENS, queries) + KEYS - 1) // KEYS
    if PADDED:
        queries = gl.where(owner < 0, 0, queries)
        turns = gl.where(owner < 0, 0, turns)
    return head, seq, first, begin, queries, before, turns


@gluon.jit
def _page_rows(table, place, last, head, NUM_KV: gl.constexpr, PAGE: gl.constexpr, PAGES: gl.constexpr):
    """Rows of the cache where some pages of a sequence begin, the last one again for those behind it: all are known
    before the first is copied."""
    found = ((gl.load(table + place) * NUM_KV + head) * PAGE,)
    for page in gl.static_range(1, PAGES):
        found = found + ((gl.load(table + gl.minimum(place + page, last)) * NUM_KV + head) * PAGE,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _copy_keys(cache, ring, full, free, stage, parity, pages, first, PAGE: gl.constexpr, HALVES: gl.constexpr):
    """A turn of keys (or values) into a stage, once it is free: so many halves of the features, from `first` on."""
    KEYS: gl.constexpr = ring.shape[1]
    WIDTH: gl.constexpr = ring.shape[2]
    mbarrier.wait(free.index(stage), parity)
    mbarrier.expect(full.index(stage), HALVES * KEYS * WIDTH * 2)
    for page in gl.static_range(KEYS // PAGE):
        for half in gl.static_range(HALVES):
            target = ring.index(HALVES * stage + half).slice(page * PAGE, PAGE, dim=0)
            tma.async_copy_global_to_shared(cache, [pages[page], (first + half) * WIDTH], full.index(stage), target)


@gluon.jit
def _load_tiles(
    k_cache, v_cache, k_ring, v_ring, k_full, k_free, v_full, v_free, tables, rows, tile_seq, tile_first, query_start,
    context_len, num_items, table_stride, STAGES: gl.constexpr, NUM_KV: gl.constexpr, TOKENS: gl.constexpr,
    PAGE: gl.constexpr, HAS_ROWS: gl.constexpr, WAITS: gl.constexpr, PADDED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    KEYS: gl.constexpr = k_ring.shape[1]
    done = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        part = item % PARTS
        head, seq, _first, _begin, queries, before, turns = _tile(
            item // PARTS, tile_seq, tile_first, query_start, context_len, NUM_KV, TOKENS, KEYS, PADDED)
        row = seq
        if HAS_ROWS:
            row = gl.load(rows + seq)
        table = tables + row.to(gl.int64) * table_stride
        last = (before + queries - 1) // PAGE
        for turn in range(turns):
            stage, parity = (done + turn) % STAGES, ((done + turn) // STAGES + 1) & 1
            pages = _page_rows(table, turn * (KEYS // PAGE), last, head, NUM_KV, PAGE, KEYS // PAGE)
            if WAITS:
                gdc_wait()
            _copy_keys(k_cache, k_ring, k_full, k_free, stage, parity, pages, 0, PAGE, 2)
            _copy_keys(v_cache, v_ring, v_full, v_free, stage, parity, pages, part, PAGE, 2 // PARTS)
        done += turns


@gluon.jit
def _start_scores(q_low, q_high, ring, full, turn, STAGES: gl.constexpr, SUMS: gl.constexpr):
    """Issues the products of a turn's keys; not waited for."""
    ROWS: gl.constexpr = q_low.shape[0]
    KEYS: gl.constexpr = ring.shape[1]
    stage = turn % STAGES
    mbarrier.wait(full.index(stage), turn // STAGES & 1)
    scores = gl.zeros((ROWS, KEYS), gl.float32, SUMS)
    low, high = ring.index(2 * stage), ring.index(2 * stage + 1)
    scores = warpgroup_mma(q_low, low.permute((1, 0)), scores, use_acc=False, is_async=True)
    return warpgroup_mma(q_high, high.permute((1, 0)), scores, is_async=True)


@gluon.jit
def _softmax(scores, start, open_end, reach, scale, maximum, total, SUMS: gl.constexpr):
    """Folds a turn's scores in: (its weights, by what older sums shrink, maximum, total)."""
    KEYS: gl.constexpr = scores.shape[1]
    if start >= open_end:
        position = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SUMS))
        scores = gl.where(position[None, :] <= reach[:, None], scores, float("-inf"))
    # Every row sees the first key: no maximum stays at -inf. One fused multiply-add a score.
    higher = gl.maximum(maximum, gl.max(scores, axis=1) * scale)
    weights = gl.exp2(gl.fma(scores, scale, -higher[:, None]))
    shrink = gl.exp2(maximum - higher)
    total = gl.fma(total, shrink, gl.sum(weights, axis=1))
    return weights, shrink, higher, total


@gluon.jit
def _shrink(low, high, by, VALUES: gl.constexpr, HALVES: gl.constexpr):
    """The sums of values, times a number for each row."""
    by = gl.convert_layout(by, gl.SliceLayout(1, VALUES), assert_trivial=True)[:, None]
    low = low * by
    if HALVES == 2:
        high = high * by
    return low, high


@gluon.jit
def _start_values(p, low, high, ring, full, turn, STAGES: gl.constexpr, HALVES: gl.constexpr):
    """Issues the products of a turn's values; not waited for. With one half there is no `high`."""
    stage = turn % STAGES
    mbarrier.wait(full.index(stage), turn // STAGES & 1)
    low = warpgroup_mma(p, ring.index(HALVES * stage), low, is_async=True)
    if HALVES == 2:
        high = warpgroup_mma(p, ring.index(2 * stage + 1), high, is_async=True)
    return low, high


@gluon.jit
def _wait_values(low, high, HALVES: gl.constexpr):
    if HALVES == 2:
        low, high = warpgroup_mma_wait(0, deps=(low, high))
    else:
        low = warpgroup_mma_wait(0, deps=(low,))
    return low, high


@gluon.jit
def _forget(ring, full, clean, turn, present, forgotten, WHO: gl.constexpr, STAGES: gl.constexpr, STORED: gl.constexpr,
            HALVES: gl.constexpr):  # fmt: skip
    """Zeros for the values of a turn from number `present` of them on: what lies there is nobody's or another's, and
    zero times it need not be zero. The first warp group writes them, both meet; `forgotten`: how often so far."""
    if WHO == 0:
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        row = gl.arange(0, ring.shape[1], layout=gl.SliceLayout(1, STORED))
        for half in gl.static_range(HALVES):
            place = ring.index(HALVES * stage + half)
            values = place.load(STORED)
            place.store(gl.where((row < present)[:, None], values, gl.zeros_like(values)))
        fence_async_shared()
        gl.thread_barrier()
    mbarrier.arrive(clean.index(0))
    mbarrier.wait(clean.index(0), forgotten & 1)


@gluon.jit
def _turn(qkv, turn, newest, head, part, begin, q_stride, NUM_HEADS: gl.constexpr, NUM_KV: gl.constexpr,
          GROUP: gl.constexpr, PAGE: gl.constexpr, NORM: gl.constexpr, PDL: gl.constexpr, STORED: gl.constexpr,
          HALVES: gl.constexpr):  # fmt: skip
    """Norms and rotates a token's query heads and key of one KV head. Queries lie in `newest[0]` then, both halves, the
    key and the value in `newest[1]` and in the cache; where programs share the head, of values and of the cache's keys
    each has its half."""
    slots, positions, rope, q_norm, k_norm, eps, k_out, v_out = turn
    queries, own = newest
    WIDTH: gl.constexpr = queries.shape[2]
    DIM: gl.constexpr = 2 * WIDTH
    member = gl.arange(0, _TURNED, layout=gl.SliceLayout(1, STORED))[:, None]
    dim = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STORED))[None, :]
    slot = gl.load(slots + begin)
    angle = rope + gl.load(positions + begin) * DIM + dim
    angles = (gl.load(angle), gl.load(angle + WIDTH))
    q_gains = angles
    k_gains = angles
    if NORM:
        q_gains = (gl.load(q_norm + dim), gl.load(q_norm + WIDTH + dim))
        k_gains = (gl.load(k_norm + dim), gl.load(k_norm + WIDTH + dim))
    if PDL:
        gdc_wait()
    row = qkv + begin.to(gl.int64) * q_stride + dim
    heads = row + (head * GROUP + member) * DIM
    q_low = gl.load(heads, mask=member < GROUP, other=0.0)
    q_high = gl.load(heads + WIDTH, mask=member < GROUP, other=0.0)
    key = row + (NUM_HEADS + head) * DIM
    k_low = gl.load(key)
    k_high = gl.load(key + WIDTH)
    value = key + NUM_KV * DIM + part * WIDTH
    v_low = gl.load(value)
    v_high = v_low
    if HALVES == 2:
        v_high = gl.load(value + WIDTH)
    kind: gl.constexpr = k_low.dtype
    low, high = turned_heads(q_low, q_high, q_gains, angles, eps, _TURNED, WIDTH, NORM, STORED)
    queries.index(0).slice(0, _TURNED, dim=0).store(low.to(kind))
    queries.index(1).slice(0, _TURNED, dim=0).store(high.to(kind))
    low, high = turned_heads(k_low, k_high, k_gains, angles, eps, 1, WIDTH, NORM, STORED)
    found = (low.to(kind), high.to(kind), v_low, v_high)
    place = ((slot // PAGE * NUM_KV + head) * PAGE + slot % PAGE) * DIM + dim
    real = (dim >= 0) & (slot >= 0)
    for half in gl.static_range(2):
        own.index(half).store(found[half])
        mine = real
        if HALVES == 1:
            mine = real & (part == half)
        gl.store(k_out + place + half * WIDTH, found[half], mask=mine)
    for half in gl.static_range(HALVES):
        own.index(2 + half).store(found[2 + half])
        gl.store(v_out + place + (part + half) * WIDTH, found[2 + half], mask=real)
    gl.thread_barrier()


@gluon.jit
def _put_newest(ring, full, own, FIRST: gl.constexpr, turn, last, STAGES: gl.constexpr, STORED: gl.constexpr,
                CLEANS: gl.constexpr, HALVES: gl.constexpr):  # fmt: skip
    """The step's own key (or value) at row `last` of a turn's, zeros behind it where CLEANS: what lies there is
    nobody's or another's, and zero times it need not be zero. Its halves lie in `own` from FIRST on."""
    KEYS: gl.constexpr = ring.shape[1]
    WIDTH: gl.constexpr = ring.shape[2]
    STRIP: gl.constexpr = 32 if CLEANS else 16
    stage = turn % STAGES
    mbarrier.wait(full.index(stage), turn // STAGES & 1)
    row = gl.arange(0, STRIP, layout=gl.SliceLayout(1, STORED))[:, None]
    at = last % STRIP
    nothing = gl.zeros((STRIP, WIDTH), ring.dtype, STORED)
    for strip in gl.static_range(KEYS // STRIP):
        if last // STRIP == strip:
            for half in gl.static_range(HALVES):
                place = ring.index(HALVES * stage + half).slice(strip * STRIP, STRIP, dim=0)
                rest = gl.where(row < at, place.load(STORED), nothing)
                place.store(gl.where(row == at, own.index(FIRST + half).load(STORED), rest))
        elif CLEANS and last // STRIP < strip:
            for half in gl.static_range(HALVES):
                ring.index(HALVES * stage + half).slice(strip * STRIP, STRIP, dim=0).store(nothing)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _fold_keys(
    q_low, q_high, k_ring, v_ring, k_full, k_free, v_full, v_free, clean, own, done, turns, keys, forgotten, open_end,
    reach, scale, WHO: gl.constexpr, STAGES: gl.constexpr, TURN: gl.constexpr, SUMS: gl.constexpr,
    VALUES: gl.constexpr, P: gl.constexpr, STORED: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """All turns of a tile, of a sequence of so many keys: (sums of values, in halves, and of weights)."""
    ROWS: gl.constexpr = q_low.shape[0]
    KEYS: gl.constexpr = k_ring.shape[1]
    WIDTH: gl.constexpr = k_ring.shape[2]
    last = keys - 1 - (turns - 1) * KEYS
    maximum = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SUMS))
    total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, SUMS))
    low = gl.zeros((ROWS, WIDTH), gl.float32, VALUES)
    high = gl.zeros((ROWS, WIDTH), gl.float32, VALUES)
    if TURN:  # noqa: SIM102 (one is decided by the compiler)
        if turns == 1:
            _put_newest(k_ring, k_full, own, 0, done, last, STAGES, STORED, False, 2)
    scores = warpgroup_mma_wait(0, deps=(_start_scores(q_low, q_high, k_ring, k_full, done, STAGES, SUMS),))
    mbarrier.arrive(k_free.index(done % STAGES))
    weights, _nothing, maximum, total = _softmax(scores, 0, open_end, reach, scale, maximum, total, SUMS)
    p = gl.convert_layout(weights.to(k_ring.dtype), P)
    for turn in range(1, turns):
        if TURN:  # noqa: SIM102
            if turn == turns - 1:
                _put_newest(k_ring, k_full, own, 0, done + turn, last, STAGES, STORED, False, 2)
        low, high = _start_values(p, low, high, v_ring, v_full, done + turn - 1, STAGES, HALVES)
        scores = _start_scores(q_low, q_high, k_ring, k_full, done + turn, STAGES, SUMS)
        if HALVES == 2:
            low, high, scores = warpgroup_mma_wait(0, deps=(low, high, scores))
        else:
            low, scores = warpgroup_mma_wait(0, deps=(low, scores))
        mbarrier.arrive(v_free.index((done + turn - 1) % STAGES))
        mbarrier.arrive(k_free.index((done + turn) % STAGES))
        weights, shrink, maximum, total = _softmax(
            scores, turn * KEYS, open_end, reach, scale, maximum, total, SUMS)
        low, high = _shrink(low, high, shrink, VALUES, HALVES)
        p = gl.convert_layout(weights.to(k_ring.dtype), P)
    if TURN:
        _put_newest(v_ring, v_full, own, 2, done + turns - 1, last, STAGES, STORED, True, HALVES)
    elif keys < turns * KEYS:
        _forget(v_ring, v_full, clean, done + turns - 1, last + 1, forgotten, WHO, STAGES, STORED, HALVES)
    low, high = _start_values(p, low, high, v_ring, v_full, done + turns - 1, STAGES, HALVES)
    low, high = _wait_values(low, high, HALVES)
    mbarrier.arrive(v_free.index((done + turns - 1) % STAGES))
    return low, high, total


@gluon.jit
def _store(target, low, high, used, STORED: gl.constexpr, HALVES: gl.constexpr):
    """Results of a tile, as far as this program has them."""
    WIDTH: gl.constexpr = low.shape[1]
    gl.store(target, gl.convert_layout(low, STORED), mask=used)
    if HALVES == 2:
        gl.store(target + WIDTH, gl.convert_layout(high, STORED), mask=used)


@gluon.jit
def _attend_tiles(
    qkv, k_ring, v_ring, k_full, k_free, v_full, v_free, clean, tile_seq, tile_first, query_start, context_len, out,
    turn, newest, num_items, scale, kv_scales, q_stride, WHO: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    NUM_HEADS: gl.constexpr, NUM_KV: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, TURN: gl.constexpr,
    NORM: gl.constexpr, PDL: gl.constexpr, SCALED: gl.constexpr, SUMS: gl.constexpr, VALUES: gl.constexpr,
    STORED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """A warp group: its rows of one tile after another. Padding, a sequence without keys, gets zeros. With SCALED keys
    and values of a head are what is stored times its `kv_scales`: its scores and its sums are multiplied by them."""
    ROWS: gl.constexpr = 64
    KEYS: gl.constexpr = k_ring.shape[1]
    WIDTH: gl.constexpr = k_ring.shape[2]
    DIM: gl.constexpr = 2 * WIDTH
    TOKENS: gl.constexpr = GROUPS * ROWS // GROUP
    Q: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    P: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    HALVES: gl.constexpr = 2 // PARTS
    done, forgotten = 0, 0
    if TURN:
        for half in gl.static_range(2):
            newest[0].index(half).store(gl.zeros((ROWS, WIDTH), k_ring.dtype, STORED))
        gl.thread_barrier()
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        part = item % PARTS
        head, _seq, first, begin, queries, before, turns = _tile(
            item // PARTS, tile_seq, tile_first, query_start, context_len, NUM_KV, TOKENS, KEYS, GROUPS == 1)
        # The queries, through the layout in which rows are read and stored.
        index = WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
        dim = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STORED))
        token = first + index // GROUP
        used = (token < queries)[:, None] & (dim < WIDTH)[None, :]
        column = (head * GROUP + index % GROUP)[:, None] * DIM + dim[None, :]
        place = (begin + token).to(gl.int64)[:, None]
        source = qkv + (place * q_stride + column)
        target = out + (place * (NUM_HEADS * DIM) + column) + part * WIDTH
        kind = out.dtype.element_ty
        if GROUPS == 1 and turns == 0:
            if PDL:
                gdc_wait()
            nothing = gl.zeros((ROWS, WIDTH), kind, STORED)
            _store(target, nothing, nothing, used, STORED, HALVES)
        else:
            if TURN:
                _turn(qkv, turn, newest, head, part, begin, q_stride, NUM_HEADS, NUM_KV, GROUP, PAGE, NORM, PDL, STORED,
                      HALVES)
                q_low = newest[0].index(0).load(Q)
                q_high = newest[0].index(1).load(Q)
            else:
                if PDL:
                    gdc_wait()
                q_low = gl.convert_layout(gl.load(source, mask=used, other=0.0), Q)
                q_high = gl.convert_layout(gl.load(source + WIDTH, mask=used, other=0.0), Q)
            mine = WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
            reach = before + first + mine // GROUP
            open_end = (before + first + 1) // KEYS * KEYS
            of_scores = scale
            if SCALED:
                of_scores = scale * gl.load(kv_scales + head)
            low, high, total = _fold_keys(
                q_low, q_high, k_ring, v_ring, k_full, k_free, v_full, v_free, clean, newest[1], done, turns,
                before + queries, forgotten, open_end, reach, of_scores, WHO, STAGES, TURN, SUMS, VALUES, P, STORED,
                HALVES)
            by = 1.0 / gl.where(total > 0, total, 1.0)  # one division a row, not one a feature
            if SCALED:
                by = by * gl.load(kv_scales + NUM_KV + head)
            low, high = _shrink(low, high, by, VALUES, HALVES)
            _store(target, low.to(kind), high.to(kind), used, STORED, HALVES)
        done += turns
        if before + queries < turns * KEYS:
            forgotten += 1


@gluon.jit(do_not_specialize=["num_items"])
def hopper_prefill_kernel(
    k_cache, v_cache, qkv, out, tables, rows, query_start, context_len, tile_seq, tile_first, slots, positions, rope,
    q_norm, k_norm, eps, k_out, v_out, num_items, scale, kv_scales, q_stride, table_stride,
    NUM_HEADS: gl.constexpr, NUM_KV: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, HAS_ROWS: gl.constexpr, GROUPS: gl.constexpr, TURN: gl.constexpr, NORM: gl.constexpr,
    PDL: gl.constexpr, SCALED: gl.constexpr, REGISTERS: gl.constexpr, RING: gl.constexpr, SUMS: gl.constexpr,
    VALUES: gl.constexpr, STORED: gl.constexpr, OWN: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """`slots` to `v_out` are of the turn of heads, and count with TURN."""
    WIDTH: gl.constexpr = k_cache.block_type.shape[1]
    k_ring = gl.allocate_shared_memory(k_cache.dtype, [2 * STAGES, KEYS, WIDTH], RING)
    v_ring = gl.allocate_shared_memory(k_cache.dtype, [2 // PARTS * STAGES, KEYS, WIDTH], RING)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    newest = (k_ring, k_ring)
    clean = k_full
    if TURN:
        newest = (gl.allocate_shared_memory(k_cache.dtype, [2, 64, WIDTH], RING),
                  gl.allocate_shared_memory(k_cache.dtype, [4, 1, WIDTH], OWN))
    else:
        # Not with TURN, which does not wait for it: to the compiler the place of such a barrier is free, and what was
        # exchanged there was overwritten by the barrier's state when another kernel's barriers came to the
        # multiprocessor (8B's shapes, an H200, 2026-11-18).
        clean = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(clean.index(0), count=GROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=GROUPS)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    turn = (slots, positions, rope, q_norm, k_norm, eps, k_out, v_out)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_attend_tiles, (qkv, k_ring, v_ring, k_full, k_free, v_full, v_free, clean, tile_seq, tile_first,
                                 query_start, context_len, out, turn, newest, num_items, scale, kv_scales, q_stride, 0,
                                 GROUPS, STAGES, NUM_HEADS, NUM_KV, GROUP, PAGE, TURN, NORM, PDL, SCALED, SUMS, VALUES,
                                 STORED, PARTS)),
                (_load_tiles, (k_cache, v_cache, k_ring, v_ring, k_full, k_free, v_full, v_free, tables, rows,
                               tile_seq, tile_first, query_start, context_len, num_items, table_stride, STAGES, NUM_KV,
                               GROUPS * 64 // GROUP, PAGE, HAS_ROWS, PDL and not TURN, GROUPS == 1, PARTS)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend_tiles, (qkv, k_ring, v_ring, k_full, k_free, v_full, v_free, clean, tile_seq, tile_first,
                                 query_start, context_len, out, turn, newest, num_items, scale, kv_scales, q_stride, 0,
                                 GROUPS, STAGES, NUM_HEADS, NUM_KV, GROUP, PAGE, TURN, NORM, PDL, SCALED, SUMS, VALUES,
                                 STORED, PARTS)),
                (_attend_tiles, (qkv, k_ring, v_ring, k_full, k_free, v_full, v_free, clean, tile_seq, tile_first,
                                 query_start, context_len, out, turn, newest, num_items, scale, kv_scales, q_stride, 1,
                                 GROUPS, STAGES, NUM_HEADS, NUM_KV, GROUP, PAGE, TURN, NORM, PDL, SCALED, SUMS, VALUES,
                                 STORED, PARTS)),
                (_load_tiles, (k_cache, v_cache, k_ring, v_ring, k_full, k_free, v_full, v_free, tables, rows,
                               tile_seq, tile_first, query_start, context_len, num_items, table_stride, STAGES, NUM_KV,
                               GROUPS * 64 // GROUP, PAGE, HAS_ROWS, PDL and not TURN, GROUPS == 1, PARTS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
