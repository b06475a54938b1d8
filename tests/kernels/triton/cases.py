"""One check per kernel against its torch reference, on any device: the interpreter's tests and the GPU's
share them.

Every check draws fresh random inputs, poisons outputs with NaN first, and returns the relative error it saw.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.kernels import step_reference
from quire.kernels.cuda import attention_cluster
from quire.kernels.routing import Clamp, RoutedRows, RouterSpec
from quire.kernels.slices import Slices, add_in_tree, finish_tree, rank_run
from quire.kernels.triton import (
    activation,
    attention_decode,
    attention_few,
    attention_fresh,
    attention_mixed,
    attention_rope,
    attention_split,
    copy,
    draw,
    expert_few,
    expert_linear,
    inputs,
    latent_attention,
    latent_rope,
    linear_few,
    linear_fixed,
    linear_row,
    norm,
    rope_cache,
    route,
)
from quire.kernels.types import NO_DETOUR, HeadShape, HeadTurn, LatentShape, LayerCache, pair_cache

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative error that rounding of inputs and outputs explains; a wrong index is far beyond it."""


def error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; infinite if anything is not finite (so an unwritten output shows)."""
    got, want = got.double(), want.double()
    if not bool(torch.isfinite(got).all()):
        return math.inf
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def close(got: Tensor, want: Tensor, factor: float = 1.0) -> float:
    found = error(got, want)
    limit = LIMIT[got.dtype] * factor
    if not found <= limit:
        raise AssertionError(f"relative error {found:.2e} is more than {limit:.1e}")
    return found


def rand(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def check_norms(device: str, dtype: torch.dtype, rows: int, hidden: int) -> float:
    x, residual = (
        rand(rows, hidden, dtype=dtype, device=device),
        rand(rows, hidden, dtype=dtype, device=device),
    )
    weight, bias = torch.rand(hidden, device=device) + 0.5, torch.randn(hidden, device=device)
    worst = close(norm.rms_norm(x, weight, 1e-6), norm.rms_norm_reference(x, weight, 1e-6))
    worst = max(worst, close(norm.layer_norm(x, weight, bias, 1e-5), norm.layer_norm_reference(x, weight, bias, 1e-5)))
    worst = max(worst, close(norm.layer_norm(x, weight, None, 1e-5), norm.layer_norm_reference(x, weight, None, 1e-5)))
    mine, other = residual.clone(), residual.clone()
    got = norm.add_rms_norm(x, mine, weight, 1e-6)
    worst = max(worst, close(got, norm.add_rms_norm_reference(x, other, weight, 1e-6)), close(mine, other))
    if not torch.equal(got, norm.rms_norm(mine, weight, 1e-6)):
        raise AssertionError("the fused norm is not the norm of the sum")
    return worst


def check_activations(device: str, dtype: torch.dtype, rows: int, width: int) -> float:
    worst = 0.0
    x = rand(rows, 2 * width, dtype=dtype, device=device, scale=3.0)
    for kind in ("silu", "gelu_tanh", "gelu"):
        worst = max(worst, close(activation.act_mul(x, kind), activation.act_mul_reference(x, kind)))
    for kind in activation.KINDS:
        worst = max(worst, close(activation.act(x, kind), activation.act_reference(x, kind)))
    return worst


def make_cache(device: str, dtype: torch.dtype, shape: HeadShape, num_blocks: int, block_size: int) -> LayerCache:
    size = (num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
    return pair_cache(rand(*size, dtype=dtype, device=device), rand(*size, dtype=dtype, device=device), block_size)


def check_rope_cache(
    device: str,
    dtype: torch.dtype,
    shape: HeadShape,
    tokens: int,
    block_size: int,
    *,
    rotary: int | None,
    norms: bool,
) -> float:
    num_blocks = tokens // block_size + 3
    qkv = rand(tokens, shape.width, dtype=dtype, device=device)
    cache, other = make_cache(device, dtype, shape, num_blocks, block_size), None
    other = pair_cache(cache.k.clone(), cache.v.clone(), block_size)
    slots = torch.randperm(num_blocks * block_size, device=device)[:tokens]
    slots[0] = -1
    positions = torch.randint(0, 300, (tokens,), device=device)
    angles = torch.rand(300, (rotary or 2) // 2, device=device) * 6
    rope = None if rotary is None else torch.cat((angles.cos(), angles.sin()), 1)
    gains = [torch.rand(shape.head_dim, device=device) + 0.5 if norms else None for _ in range(2)]
    mine, want = qkv.clone(), qkv.clone()
    rope_cache.rope_and_cache(mine, cache, slots, positions, shape, rope, *gains, 1e-6)
    rope_cache.rope_and_cache_reference(want, other, slots, positions, shape, rope, *gains, 1e-6)
    return max(close(mine, want), close(cache.k, other.k), close(cache.v, other.v))


def paged_batch(
    device: str, dtype: torch.dtype, shape: HeadShape, block_size: int, queries: list[int], lengths: list[int]
) -> tuple[Tensor, LayerCache, Tensor, Tensor, Tensor]:
    """qkv, cache, shuffled block tables, query_start, context_len of a batch."""
    counts = [-(-length // block_size) for length in lengths]
    cache = make_cache(device, dtype, shape, sum(counts) + 2, block_size)
    blocks = list(range(sum(counts) + 2))
    random.shuffle(blocks)
    table = torch.zeros(len(lengths), max(max(counts), 1) + 1, dtype=torch.int32)
    for s, count in enumerate(counts):
        table[s, :count] = torch.tensor(blocks[:count], dtype=torch.int32)
        del blocks[:count]
    start = torch.tensor(np.cumsum([0, *queries]), dtype=torch.int32, device=device)
    qkv = rand(int(start[-1]), shape.width, dtype=dtype, device=device)
    return qkv, cache, table.to(device), start, torch.tensor(lengths, dtype=torch.int32, device=device)


def make_sinks(device: str, shape: HeadShape) -> Tensor:
    """Of each head another: below all scores, among them, above them."""
    return torch.linspace(-8.0, 12.0, shape.num_heads, device=device)[torch.randperm(shape.num_heads)]


def check_decode(
    device: str,
    dtype: torch.dtype,
    shape: HeadShape,
    block_size: int,
    lengths: list[int],
    *,
    window: int | None = None,
    softcap: float | None = None,
    extra: int = 8,
    keys: int = 128,
    rows: bool = False,
    halves: bool = False,
    carried: bool = False,
    pdl: bool = False,
    sinks: bool = False,
    tree: bool = False,
    repeat: int = 1,
) -> float:
    qkv, cache, table, start, length = paged_batch(device, dtype, shape, block_size, [1] * len(lengths), lengths)
    detours = make_detours(lengths, device) if tree else None
    split = attention_split.DecodeSplit.allocate(len(lengths), extra, device)
    attention_split.split_decode(split, length, window)
    scratch = attention_decode.DecodeScratch.allocate(split.tasks, len(lengths), shape, device)
    where = None
    kernel_table = table
    if rows:
        order = torch.randperm(len(lengths), device=device)
        kernel_table = torch.empty_like(table)
        kernel_table[order] = table
        where = order.to(torch.int32)
    scores = make_sinks(device, shape) if sinks else None
    want = attention_mixed.attention_reference(
        qkv, cache, table, start, length, shape, 0.2, window=window, softcap=softcap, sinks=scores, detours=detours
    )
    worst, first = 0.0, None
    for _ in range(repeat):
        out = torch.full((len(lengths), shape.num_heads * shape.head_dim), math.nan, dtype=dtype, device=device)
        attention_decode.decode_attention(
            qkv,
            cache,
            kernel_table,
            where,
            length,
            split,
            scratch,
            shape,
            0.2,
            window=window,
            softcap=softcap,
            out=out,
            keys=keys,
            halves=halves,
            carried=carried,
            pdl=pdl,
            sinks=scores,
            detours=detours,
        )
        real = length > 0
        worst = max(worst, close(out[real], want[real], 2.0))
        if first is not None and not torch.equal(first, out[real]):
            raise AssertionError("two runs differ: the pieces race")
        first = out[real]
    if int(scratch.arrived.abs().sum()):
        raise AssertionError("a counter of arrived pieces was not set back")
    return worst


def make_detours(lengths: list[int], device: str) -> Tensor:
    """The last keys of every sequence but the last lie in another order than that of their positions."""
    rows = []
    for s, length in enumerate(lengths):
        first = length - min(length, 5)
        last = s == len(lengths) - 1
        rows.append([NO_DETOUR, *[-1] * 5] if last else [first, *range(length - 1, first - 1, -1), *[-1] * 5][:6])
    return torch.tensor(rows, dtype=torch.int32, device=device)


def check_rope_decode(
    device: str,
    dtype: torch.dtype,
    shape: HeadShape,
    block_size: int,
    lengths: list[int],
    *,
    norms: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    extra: int = 8,
    keys: int = 128,
    rows: bool = False,
    kv_dtype: torch.dtype | None = None,
    kv_scale: float = 1.0,
    prefetch: bool = False,
    carried: bool = False,
    pdl: bool = False,
    sinks: bool = False,
    few: bool = False,
    clusters: attention_cluster.ClusterSizes | None = None,
    repeat: int = 1,
) -> float:
    """The fused kernel (`few`: that of one or two sequences; with `clusters` the one in CUDA C, of these sizes) beside
    the references of both it stands for, and beside those two kernels."""
    stored = kv_dtype or dtype
    qkv, cache, table, start, length = paged_batch(device, dtype, shape, block_size, [1] * len(lengths), lengths)
    scales = None
    if kv_scale != 1.0:  # of each head of keys and of values another one
        scales = kv_scale * torch.linspace(1.0, 2.0, 2 * shape.num_kv_heads, device=device).view(2, -1)

    def cache_of(k: Tensor, v: Tensor) -> LayerCache:
        return replace(pair_cache(k, v, block_size), scales=scales)

    cache = cache_of(cache.k.to(stored), cache.v.to(stored))
    angles = torch.rand(max(lengths) + 1, shape.head_dim // 2, device=device) * 6
    rope = torch.cat((angles.cos(), angles.sin()), 1)
    gains = [torch.rand(shape.head_dim, device=device) + 0.5 if norms else None for _ in range(2)]
    newest = (length - 1).clamp(min=0).long()
    block = table.long().gather(1, newest[:, None] // block_size)[:, 0]
    slots = torch.where(length > 0, block * block_size + newest % block_size, -1)
    split = attention_split.DecodeSplit.allocate(len(lengths), extra, device)
    attention_split.split_decode(split, length, window)
    scratch = attention_decode.DecodeScratch.allocate(split.tasks, len(lengths), shape, device)
    where, kernel_table = None, table
    if rows:
        where = torch.randperm(len(lengths), device=device).to(torch.int32)
        kernel_table = torch.empty_like(table)
        kernel_table[where.long()] = table
        where[length == 0] = -1
    seen = {"window": window, "softcap": softcap}

    def copy_of(original: LayerCache) -> LayerCache:
        return cache_of(original.k.clone(), original.v.clone())

    # The kernel of few sequences rounds a key once, as the cache holds it; the others to their own type first.
    wide = torch.float32 if few else dtype
    # Neither rounds what it divides by a scale before it is in the cache's type.
    keys_and_values = (part.to(torch.float32, copy=True) for part in (cache.k, cache.v))
    want_cache, turned = cache_of(*keys_and_values), qkv.to(wide, copy=True)
    norm_and_turn = (slots, newest, shape, rope, *gains, 1e-6)
    rope_cache.rope_and_cache_reference(turned, want_cache, *norm_and_turn)
    turned = turned.to(dtype)
    apart, apart_cache = qkv.clone(), copy_of(cache)
    rope_cache.rope_and_cache(apart, apart_cache, *norm_and_turn)
    # Triton's interpreter loses the carry of a mantissa that rounds up to the next power of two, so 0.499 becomes 0.25.
    loses = kv_dtype is not None and device == "cpu"
    narrow = apart_cache if loses and not few else want_cache
    want_cache = cache_of(narrow.k.to(stored).to(dtype), narrow.v.to(stored).to(dtype))
    scores = make_sinks(device, shape) if sinks else None
    want = attention_mixed.attention_reference(
        turned, want_cache, table, start, length, shape, 0.2, sinks=scores, **seen
    )
    batch = (kernel_table, where, length, split, scratch, shape, 0.2)
    two = attention_decode.decode_attention(apart, apart_cache, *batch, keys=keys, sinks=scores, **seen)
    real, worst, first = length > 0, 0.0, None
    # A feature of a key that was rounded twice may be a step of fp8 away, which float16 notices more than bfloat16.
    twice = 4.0 if few and kv_dtype is not None else 1.0
    apart = max(4.0, 6.4e-2 / LIMIT[dtype]) if twice > 1.0 else 4.0 if few else 2.0
    for _ in range(repeat):
        mine, raw = copy_of(cache), qkv.clone()
        out = torch.full((len(lengths), shape.num_heads * shape.head_dim), math.nan, dtype=dtype, device=device)
        turn = HeadTurn(rope, *gains, 1e-6, scores)
        if clusters is not None:
            found = attention_cluster.cluster_decode_attention(
                raw, mine, kernel_table, where, length, shape, 0.2, turn, window=window, out=out, sizes=clusters,
                pdl=pdl)
            assert found is not None
        elif few:
            attention_few.few_decode_attention(raw, mine, *batch, turn, window=window, out=out, pdl=pdl)
        else:
            attention_rope.rope_decode_attention(
                raw, mine, *batch, turn, out=out, keys=keys, prefetch=prefetch, carried=carried, pdl=pdl, **seen
            )
        # The interpreter rounds a dot of Triton more than one of Gluon.
        worst = max(worst, close(out[real], want[real], 2.0))
        for part, whole, other in ((mine.k, want_cache.k, apart_cache.k), (mine.v, want_cache.v, apart_cache.v)):
            worst = max(worst, close(part.to(dtype), whole))
            if not (loses and few):
                worst = max(worst, close(part.to(dtype), other.to(dtype), twice))
        if not (loses and few):
            worst = max(worst, close(out[real], two[real], apart))
        if not bool(out[~real].isnan().all()) or not torch.equal(raw, qkv):
            raise AssertionError("padding or qkv was written to")
        if first is not None and not torch.equal(first, out[real]):
            raise AssertionError("two runs differ: the pieces race")
        first = out[real]
    if int(scratch.arrived.abs().sum()):
        raise AssertionError("a counter of arrived pieces was not set back")
    _check_untouched(cache, mine, slots)
    return worst


def _check_untouched(before: LayerCache, after: LayerCache, slots: Tensor) -> None:
    """Every place of the cache but those of the step's tokens is as it was."""
    written = torch.zeros(before.k.shape[0] * before.block_size, dtype=torch.bool, device=slots.device)
    written[slots[slots >= 0]] = True
    for a, b in ((before.k, after.k), (before.v, after.v)):
        a, b = (part.float().transpose(1, 2).flatten(0, 1) for part in (a, b))
        if not torch.equal(a[~written], b[~written]) or bool((a[written] == b[written]).all(-1).any()):
            raise AssertionError("another place than the new tokens' was written to, or one of theirs was not")


def check_split(device: str, lengths: list[int], extra: int, window: int | None) -> None:
    length = torch.tensor(lengths, dtype=torch.int32, device=device)
    mine, want = (attention_split.DecodeSplit.allocate(len(lengths), extra, device) for _ in range(2))
    attention_split.split_decode(mine, length, window)
    attention_split.split_decode_reference(want, length, window)
    real = want.sequence >= 0
    same = (
        torch.equal(mine.sequence, want.sequence)
        and torch.equal(mine.piece[real], want.piece[real])
        and torch.equal(mine.count, want.count)
        and torch.equal(mine.length, want.length)
    )
    if not same:
        raise AssertionError(f"split of {lengths} differs")


def check_mixed(
    device: str,
    dtype: torch.dtype,
    shape: HeadShape,
    block_size: int,
    queries: list[int],
    contexts: list[int],
    *,
    window: int | None = None,
    softcap: float | None = None,
    tree: bool = False,
    sinks: bool = False,
    fp8: bool = False,
    exact: bool = True,
    sizes: attention_mixed.MixedShape = attention_mixed.MixedShape(32, 32, 4, 2),  # noqa: B008
) -> float:
    """`exact`: also that deterministic mode's two loops over the keys agree, bit for bit."""
    lengths = [q + c for q, c in zip(queries, contexts, strict=True)]
    qkv, cache, table, start, length = paged_batch(device, dtype, shape, block_size, queries, lengths)
    if fp8:
        cache = pair_cache(cache.k.to(torch.float8_e4m3fn), cache.v.to(torch.float8_e4m3fn), block_size)
        cache.scales = torch.linspace(0.5, 1.5, 2 * shape.num_kv_heads, device=device).view(2, -1)
    group = shape.num_heads // shape.num_kv_heads
    seqs, firsts = (
        torch.from_numpy(a).to(device) for a in attention_mixed.query_tiles(np.array(queries), sizes.tokens_of(group))
    )
    detours = make_detours(lengths, device) if tree else None
    scores = make_sinks(device, shape) if sinks else None
    want = attention_mixed.attention_reference(
        qkv, cache, table, start, length, shape, 0.2, window=window, softcap=softcap, detours=detours, sinks=scores
    )
    run = partial(
        attention_mixed.mixed_attention, qkv, cache, table, None, start, length, seqs, firsts, shape, 0.2,
        window=window, softcap=softcap, detours=detours, sinks=scores, sizes=sizes,
    )  # fmt: skip
    if exact and not torch.equal(run(exact=True), run(exact=True, once=True)):
        raise AssertionError("keys in one loop give other bits than in three")
    out = torch.full_like(want, math.nan)
    run(out=out)
    return close(out, want, 2.0)


def check_fresh(
    device: str,
    dtype: torch.dtype,
    shape: HeadShape,
    queries: list[int],
    sizes: attention_mixed.MixedShape,
) -> float:
    """Prompts without context, whose keys are read where the projection left them."""
    qkv, cache, table, start, length = paged_batch(device, dtype, shape, 16, queries, queries)
    parts = qkv.view(qkv.shape[0], -1, shape.head_dim)
    for s, count in enumerate(queries):
        place = torch.arange(count, device=device)
        rows = parts[int(start[s]) : int(start[s + 1]), shape.num_heads :]
        blocks = table[s].long()[place // 16]
        cache.k[blocks, :, place % 16] = rows[:, : shape.num_kv_heads]
        cache.v[blocks, :, place % 16] = rows[:, shape.num_kv_heads :]
    want = attention_mixed.attention_reference(qkv, cache, table, start, length, shape, 0.2)
    tokens = sizes.tokens_of(shape.num_heads // shape.num_kv_heads)
    tiles = [torch.from_numpy(a).to(device) for a in attention_mixed.query_tiles(np.array(queries), tokens)]

    def attended(rows: Tensor) -> Tensor:
        out = torch.full_like(want, math.nan)
        return attention_fresh.fresh_attention(rows, start, *tiles, shape, 0.2, out=out, sizes=sizes)

    found = attended(qkv)
    broken, others = qkv.clone(), torch.ones(qkv.shape[0], dtype=torch.bool, device=device)
    others[int(start[1]) : int(start[2])] = False
    broken[~others] = math.nan
    if not torch.equal(attended(broken)[others], found[others]):
        raise AssertionError("a prompt that is not a number changed its neighbours")
    return close(found, want, 2.0)


def check_linear_few(
    device: str,
    dtype: torch.dtype,
    rows: int,
    features: int,
    width: int,
    *,
    pdl: bool = False,
    sizes: linear_few.VectorShape | None = None,
) -> float:
    x, weight = (
        rand(rows, width, dtype=dtype, device=device),
        rand(features, width, dtype=dtype, device=device),
    )
    bias, gain = rand(features, dtype=dtype, device=device), torch.rand(width, device=device) + 0.5
    residual = rand(rows, features, dtype=dtype, device=device)
    worst = 0.0
    for options in ({}, {"norm": gain, "eps": 1e-6}):
        got = linear_few.linear_vector(x, weight, bias, residual, sizes=sizes, pdl=pdl, **options)
        worst = max(worst, close(got, linear_few.linear_reference(x, weight, bias, residual, **options), 2.0))
    if features % 2 == 0:
        gated = {"norm": gain, "eps": 1e-6, "gated": "silu"}
        got = linear_few.linear_vector(x, weight, None, None, sizes=sizes, pdl=pdl, **gated)
        worst = max(worst, close(got, linear_few.linear_reference(x, weight, **gated), 2.0))
    return worst


def check_linear_fixed(device: str, dtype: torch.dtype, rows: int, features: int, width: int) -> float:
    x, weight = (
        rand(rows, width, dtype=dtype, device=device),
        rand(features, width, dtype=dtype, device=device),
    )
    bias, residual = (
        rand(features, dtype=dtype, device=device),
        rand(rows, features, dtype=dtype, device=device),
    )
    got = linear_fixed.linear_fixed(x, weight, bias, residual)
    worst = close(got, linear_few.linear_reference(x, weight, bias, residual), 2.0)
    for part in (slice(0, 1), slice(rows // 2, rows)):
        if not torch.equal(linear_fixed.linear_fixed(x[part], weight, bias, residual[part]), got[part]):
            raise AssertionError(f"rows {part} alone have other bits than among {rows}")
    return worst


def is_whole_runs(count: int, parts: int) -> bool:
    """Whether `count` slices fall into so many equal runs that are nodes of the tree."""
    run, rest = divmod(count, parts)
    return rest == 0 and run & (run - 1) == 0


def check_linear_slices(device: str, dtype: torch.dtype, rows: int, features: int, slices: Slices) -> float:
    """Each slice from zero, the slices in their tree; ranks that own runs of them give the bits of one."""
    x = rand(rows, slices.width, dtype=dtype, device=device)
    weight = rand(features, slices.width, dtype=dtype, device=device)
    bias = rand(features, dtype=dtype, device=device)
    residual = rand(rows, features, dtype=dtype, device=device)
    got = linear_fixed.linear_fixed(x, weight, bias, residual, slices)
    worst = close(got, linear_few.linear_reference(x, weight, bias, residual), 2.0)
    (whole,) = linear_fixed.linear_fixed_nodes(x, weight, slices)
    alone = [slices.columns(index, index + 1) for index in range(slices.count)]
    terms = [linear_fixed.linear_fixed_nodes(x[:, c].contiguous(), weight[:, c].contiguous(), slices.part(i, i + 1))[0]
             for i, c in enumerate(alone)]
    if not torch.equal(add_in_tree(terms), whole):
        raise AssertionError(f"{slices} are not added in their tree")
    rounds_alike = dtype != torch.bfloat16 or device != "cpu"  # Triton's interpreter has a bfloat16 of its own
    if rounds_alike and not torch.equal((whole + bias.float() + residual.float()).to(dtype), got):
        raise AssertionError("bias and residual do not come after the tree, or there is more than one rounding")
    for parts in (parts for parts in range(1, slices.count + 1) if is_whole_runs(slices.count, parts)):
        if not torch.equal(linear_fixed.linear_fixed(x, weight, bias, residual, slices, parts=parts), got):
            raise AssertionError(f"{parts} programs that share the slices give other bits")
    for size in (2, 3, 4, 8):
        nodes = {}
        for first, last in {rank_run(slices.count, rank, size) for rank in range(size)}:
            if first < last:
                part, columns = slices.part(first, last), slices.columns(first, last)
                mine = x[:, columns].contiguous(), weight[:, columns].contiguous()
                nodes |= dict(zip(part.nodes(), linear_fixed.linear_fixed_nodes(*mine, part), strict=True))
        if not torch.equal(finish_tree(slices.count, nodes), whole):
            raise AssertionError(f"{size} ranks give other bits than one for {slices}")
    for part in (slice(0, 1), slice(rows // 2, rows)):
        if not torch.equal(linear_fixed.linear_fixed(x[part], weight, bias, residual[part], slices), got[part]):
            raise AssertionError(f"rows {part} alone have other bits than among {rows}")
    return worst


def check_copies(device: str, dtype: torch.dtype, shape: HeadShape, block_size: int) -> None:
    cache = make_cache(device, dtype, shape, 9, block_size)
    other = pair_cache(cache.k.clone(), cache.v.clone(), block_size)
    source = torch.tensor([1, 4, 1], dtype=torch.int32, device=device)
    target = torch.tensor([0, 2, 8], dtype=torch.int32, device=device)
    copy.copy_blocks(cache, source, target)
    copy.copy_blocks_reference(other, source, target)
    slots = torch.randperm(9 * block_size, device=device)
    copy.copy_slots(cache, slots[:4], slots[4:8])
    copy.copy_slots_reference(other, slots[:4], slots[4:8])
    if not (torch.equal(cache.k, other.k) and torch.equal(cache.v, other.v)):
        raise AssertionError("copies differ")


def check_draw(device: str, dtype: torch.dtype, rows: int, vocab: int) -> float:
    """Share of rows that drew another token than the reference: only a draw on a boundary may."""
    logits = rand(rows, vocab, dtype=dtype, device=device, scale=3.0)
    table_rows = rows + 3
    state = torch.zeros(table_rows, step_reference.FIELDS, dtype=torch.int32, device=device)
    floats = state.view(torch.float32)
    floats[:, step_reference.TEMPERATURE] = torch.where(torch.arange(table_rows, device=device) % 3 == 0, 0.0, 0.7)
    floats[:, step_reference.LOG_MIN_P] = torch.where(
        torch.arange(table_rows, device=device) % 2 == 0, -math.inf, math.log(0.05)
    )
    state[:, 2:5] = torch.randint(-(2**31), 2**31 - 1, (table_rows, 3), device=device, dtype=torch.int64).to(
        torch.int32
    )
    owner = torch.randperm(table_rows, device=device)[:rows].to(torch.int32)
    owner[rows // 2] = -1
    position = torch.randint(1, 40, (rows,), device=device, dtype=torch.int32)
    if rows > 3:
        logits[0, 5] = math.nan
        logits[1, 3] = math.inf
    results = []
    for run in (draw.draw, step_reference.draw):
        tokens = torch.full((table_rows, 38), -7, dtype=torch.int32, device=device)
        out = torch.full((3, rows + 2, 2), -9, dtype=torch.int32, device=device)
        run(
            logits,
            state,
            owner,
            position,
            tokens,
            out,
            torch.tensor([1], dtype=torch.int32, device=device),
            draw.DrawScratch.allocate(rows, vocab, device),
        )
        results.append((tokens, out))
    if not torch.equal(results[0][1][..., 1], results[1][1][..., 1]):
        raise AssertionError("statuses differ")
    greedy = torch.isin(owner, torch.arange(0, table_rows, 3, device=device))
    if not torch.equal(results[0][1][1, :rows, 0][greedy], results[1][1][1, :rows, 0][greedy]):
        raise AssertionError("argmax differs")
    wrong = float((results[0][1] != results[1][1]).any(-1).float().sum()) / rows
    moved = float((results[0][0] != results[1][0]).any(-1).float().sum()) / rows
    if max(wrong, moved) > 0.02 + 1.0 / rows * (rows > 50):
        raise AssertionError(f"{wrong:.1%} of the rows drew another token")
    return max(wrong, moved)


def check_inputs(device: str) -> None:
    arena = torch.zeros(5000, dtype=torch.int32, device=device)
    other = arena.clone()
    places = torch.randperm(5000, device=device)[:700].to(torch.int32)
    values = torch.randint(0, 90, (700,), device=device, dtype=torch.int32)
    inputs.scatter(arena, places, values)
    step_reference.scatter(other, places, values)
    if not torch.equal(arena, other):
        raise AssertionError("scatter differs")
    tokens = torch.randint(0, 99, (6, 40), device=device, dtype=torch.int32)
    tables = tuple(torch.randint(0, 30, (6, 10), device=device, dtype=torch.int32) for _ in range(2))
    rows = torch.tensor([3, -1, 0, 5, 5], device=device, dtype=torch.int32)
    positions = torch.tensor([7, 0, 39, 1, 2], device=device, dtype=torch.int32)
    results = []
    for run in (inputs.gather_inputs, step_reference.gather_inputs):
        ids, wide, *slots = (torch.full((5,), -5, dtype=torch.int64, device=device) for _ in range(4))
        lengths = torch.full((5,), -5, dtype=torch.int32, device=device)
        run(tokens, tables, 4, rows, positions, ids, wide, tuple(slots), lengths)
        results.append([ids, wide, *slots, lengths])
    if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
        raise AssertionError("gathered inputs differ")


def check_linear_row(
    device: str,
    dtype: torch.dtype,
    features: int,
    width: int,
    sizes: linear_row.RowShape = linear_row.RowShape(),  # noqa: B008
    *,
    pdl: bool = False,
) -> float:
    x, weight = rand(1, width, dtype=dtype, device=device), rand(features, width, dtype=dtype, device=device)
    bias, gain = rand(features, dtype=dtype, device=device), torch.rand(width, device=device) + 0.5
    residual = rand(1, features, dtype=dtype, device=device)
    worst = 0.0
    for options in ({}, {"norm": gain, "eps": 1e-6}):
        out = torch.full((1, features), math.nan, dtype=dtype, device=device)
        linear_row.linear_row(x, weight, bias, residual, out=out, sizes=sizes, pdl=pdl, **options)
        worst = max(worst, close(out, linear_few.linear_reference(x, weight, bias, residual, **options), 2.0))
    if features % 2 == 0:
        got = linear_row.linear_row(x, weight, bias, norm=gain, eps=1e-6, gated="silu", sizes=sizes, pdl=pdl)
        want = linear_few.linear_reference(x, weight, bias, norm=gain, eps=1e-6, gated="silu")
        worst = max(worst, close(got, want, 2.0))
    return worst


def latent_batch(
    device: str, dtype: torch.dtype, shape: LatentShape, block_size: int, queries: list[int], lengths: list[int]
) -> tuple[Tensor, LayerCache, Tensor, Tensor, Tensor]:
    """q, cache of latents, shuffled block tables, query_start, context_len of a batch."""
    _, _, table, start, length = paged_batch(device, dtype, HeadShape(1, 1, 8), block_size, queries, lengths)
    blocks = sum(-(-each // block_size) for each in lengths) + 2
    kept = rand(blocks, 1, block_size, shape.width, dtype=dtype, device=device)
    cache = LayerCache(shape.kv, block_size, {"latent": kept})
    q = rand(int(start[-1]), shape.num_heads * shape.width, dtype=dtype, device=device)
    return q, cache, table, start, length


def check_latent_decode(
    device: str, dtype: torch.dtype, shape: LatentShape, block_size: int, lengths: list[int], *, extra: int = 8,
    rows: bool = False,
) -> float:
    q, cache, table, start, length = latent_batch(device, dtype, shape, block_size, [1] * len(lengths), lengths)
    split = attention_split.DecodeSplit.allocate(len(lengths), extra, device)
    attention_split.split_decode(split, length, None)
    blocks = shape.blocks
    scratch = attention_decode.DecodeScratch.allocate(split.tasks, len(lengths), blocks, device)
    where, kernel_table = None, table
    if rows:
        order = torch.randperm(len(lengths), device=device)
        kernel_table = torch.empty_like(table)
        kernel_table[order] = table
        where = order.to(torch.int32)
    want = latent_attention.latent_reference(q, cache, table, start, length, shape, 0.1)
    out = torch.full((len(lengths), shape.num_heads * shape.rank), math.nan, dtype=dtype, device=device)
    latent_attention.latent_decode(
        q, cache, kernel_table, where, length, split, scratch, shape, 0.1, out=out, pdl=device == "cuda" and pdl_here()
    )
    if int(scratch.arrived.abs().sum()):
        raise AssertionError("the joiner leaves its counters as it found them")
    used = length > 0
    return close(out[used], want[used], 2.0)


def pdl_here() -> bool:
    return torch.cuda.get_device_capability()[0] >= 9


def check_latent_tiles(
    device: str, dtype: torch.dtype, shape: LatentShape, block_size: int, queries: list[int], contexts: list[int],
    sizes: attention_mixed.MixedShape,
) -> float:
    lengths = [count + before for count, before in zip(queries, contexts, strict=True)]
    q, cache, table, start, length = latent_batch(device, dtype, shape, block_size, queries, lengths)
    group = shape.blocks.group
    tiles = attention_mixed.query_tiles(np.array(queries), max(16, sizes.rows_of(group)) // group)
    seqs, firsts = (torch.from_numpy(np.append(part, -1).astype(np.int32)).to(device) for part in tiles)
    want = latent_attention.latent_reference(q, cache, table, start, length, shape, 0.1)
    out = torch.full((q.shape[0], shape.num_heads * shape.rank), math.nan, dtype=dtype, device=device)
    latent_attention.latent_tiles(
        q, cache, table, None, start, length, seqs, firsts, shape, 0.1, out=out, sizes=sizes
    )
    return close(out, want, 2.0)


def check_latent_rope(device: str, dtype: torch.dtype, shape: LatentShape, tokens: int, block_size: int) -> float:
    num_blocks = tokens // block_size + 3
    q = rand(tokens, shape.num_heads * shape.width, dtype=dtype, device=device)
    kv = rand(tokens, shape.width, dtype=dtype, device=device)
    kept = rand(num_blocks, 1, block_size, shape.width, dtype=dtype, device=device)
    caches = [LayerCache(shape.kv, block_size, {"latent": kept.clone()}) for _ in range(2)]
    slots = torch.randperm(num_blocks * block_size, device=device)[:tokens]
    slots[0] = -1
    positions = torch.randint(0, 300, (tokens,), device=device)
    angles = torch.rand(300, shape.rope_dim // 2, device=device) * 6
    rope = torch.cat((angles.cos(), angles.sin()), 1)
    results = []
    for run, cache in zip((latent_rope.rope_latents, latent_rope.rope_latents_reference), caches, strict=True):
        mine = q.clone(), kv.clone()
        run(*mine, cache, slots, positions, shape, rope)
        results.append((*mine, cache.latents))
    return max(close(got, want) for got, want in zip(*results, strict=True))


def check_choice(device: str, spec: RouterSpec, tokens: int) -> None:
    logits = torch.randn(tokens, spec.num_experts, device=device)
    logits[-1] = logits[-1, :1]  # equal scores: the lower expert wins
    bias = torch.randn(spec.num_experts, device=device) * 0.3 if spec.choice_bias else None
    slots = torch.arange(tokens, device=device)
    slots[tokens // 2] = -1
    loads = [torch.ones(spec.num_experts, dtype=torch.int64, device=device) for _ in range(2)]
    rows = [RoutedRows(spec, logits, bias, slots, load) for load in loads]
    got, want = route.choose(rows[0]), route.choose_reference(rows[1])
    if not torch.equal(*loads) or int(loads[0].sum()) != spec.num_experts + (tokens - 1) * spec.top_k:
        raise AssertionError("the rows of each expert were not counted")
    if not torch.equal(got[0], want[0]):
        raise AssertionError("other experts than the reference's")
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)


def check_blocks(device: str, chosen: Tensor, num_experts: int, rows: int) -> None:
    got = route.block_experts(chosen.to(device), num_experts, rows)
    want = route.block_experts_reference(chosen, num_experts, rows)
    used = int((want.expert >= 0).sum()) * rows
    for mine, other in ((got.expert, want.expert), (got.counts, want.counts), (got.pairs[:used], want.pairs[:used])):
        if not torch.equal(mine.cpu(), other):
            raise AssertionError(f"{mine.tolist()} is not {other.tolist()}")


def check_experts(
    device: str, dtype: torch.dtype, tokens: int, spec: RouterSpec, hidden: int, inner: int, *, clamp: Clamp | None,
    biased: bool, sizes: expert_linear.ExpertShape | None,
) -> float:
    x = rand(tokens, hidden, dtype=dtype, device=device)
    up = rand(spec.num_experts, 2 * inner, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    down = rand(spec.num_experts, hidden, inner, dtype=dtype, device=device, scale=inner**-0.5)
    up_bias = rand(spec.num_experts, 2 * inner, dtype=dtype, device=device) if biased else None
    down_bias = rand(spec.num_experts, hidden, dtype=dtype, device=device) if biased else None
    logits = torch.randn(tokens, spec.num_experts, device=device)
    chosen, gains = route.choose(RoutedRows(spec, logits, None, None, None))
    want = expert_linear.experts_reference(x, up, up_bias, down, down_bias, chosen, gains, "silu", clamp)
    if sizes is None:
        residual = rand(tokens, hidden, dtype=dtype, device=device)
        shapes = expert_few.FewShape(4, 16, 4), expert_few.FewShape(8, 16, 2)
        between = expert_few.few_up(x, up, up_bias, chosen, "silu", clamp, sizes=shapes[0])
        alone = expert_few.few_down(between, down, down_bias, chosen, gains, sizes=shapes[1])
        added = expert_few.few_down(between, down, down_bias, chosen, gains, residual, sizes=shapes[1])
        chosen[0] = -1  # padding: nobody reads what comes out
        other = expert_few.few_up(x, up, up_bias, chosen, "silu", clamp, sizes=shapes[0])
        skipped = expert_few.few_down(other, down, down_bias, chosen, gains, sizes=shapes[1])
        if not torch.equal(skipped[1:], alone[1:]):
            raise AssertionError("padding changed another row")
        return max(close(alone, want, 2.0), close(added, (want.float() + residual.float()).to(dtype), 2.0))
    blocks = route.block_experts(chosen, spec.num_experts, sizes.rows)
    between = expert_linear.up_experts(x, up, up_bias, chosen, blocks, "silu", clamp, sizes)
    found = expert_linear.down_experts(between, down, down_bias, chosen, gains, blocks, sizes)
    residual = rand(tokens, hidden, dtype=dtype, device=device)
    added = close(expert_linear.sum_pairs(found, spec.top_k, residual), (want.float() + residual).to(dtype), 2.0)
    return max(added, close(expert_linear.sum_pairs(found, spec.top_k), want, 2.0))
