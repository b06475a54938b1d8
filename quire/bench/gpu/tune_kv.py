"""`python -m quire.bench.gpu.tune_kv`: attention over keys and values in fp8 beside bf16, by every kernel that might
serve. A JSON line for each batch: of each way microseconds, and by how much it is off from "bf16" at most.

"bf16" and "fp8" are what the engine runs. Decode steps: "KEYS WARPS STAGES PROGRAMS" are other sizes of the fp8 kernel,
with pieces for so many programs a multiprocessor; "few" the kernel of few sequences. Chunks of prompts: "tiles" convert
the keys that they read, "unpack" is the pass over the pages alone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from quire.bench.gpu.tune import graph_seconds

DECODES = ((1, 128000), (8, 32000), (32, 1024), (256, 1024))
CHUNKS = ((8192, 8192), (8192, 65536), (8192, 122880))
"""Sequences, and their keys; queries of a chunk, and the keys before it."""
LONG_SIZES = ((128, 4, 3, 1), (128, 4, 3, 2), (128, 4, 3, 3), (128, 8, 3, 1), (128, 8, 3, 2), (128, 4, 4, 1),
              (128, 4, 4, 2), (64, 4, 4, 2), (64, 4, 4, 3), (64, 4, 4, 4), (64, 4, 3, 4))  # fmt: skip
SHORT_SIZES = ((64, 4, 3, 1), (64, 4, 3, 4), (64, 4, 3, 8), (64, 4, 3, 16), (64, 4, 4, 1), (64, 4, 4, 4),
               (64, 4, 4, 16), (128, 4, 3, 1), (128, 4, 3, 4), (128, 4, 3, 16))  # fmt: skip
_PAGE, _SCALE, _LEAST_BYTES = 16, 0.088, 2e8
_DEVICE = "cuda"
Way = Callable[[int, Any], Any]
"""Given which copy of the cache to read, and where to write."""


class _Batch:
    """One step's attention, over caches that together are too large for the L2 cache."""

    def __init__(self, heads: int, count: int, queries: int, before: int) -> None:
        import torch

        from quire.kernels.types import HeadShape, HeadTurn, pair_cache

        self.shape = HeadShape(heads, 8, 128)
        self.count, self.queries, self.before, self.length = count, queries, before, before + queries
        pages = -(-self.length // _PAGE)
        copies = max(1, min(16, math.ceil(_LEAST_BYTES / (count * pages * _PAGE * 8 * 128 * 2))))
        half = partial(torch.randn, device=_DEVICE, dtype=torch.bfloat16)
        size = (count * pages, 8, _PAGE, 128)
        narrow = [[half(size).to(torch.float8_e4m3fn) for _ in range(2)] for _ in range(copies)]
        self.narrow = [pair_cache(k, v, _PAGE) for k, v in narrow]
        self.wide = [pair_cache(k.bfloat16(), v.bfloat16(), _PAGE) for k, v in narrow]
        self.table = torch.randperm(count * pages, device=_DEVICE).int().view(count, pages)
        self.starts = torch.arange(count + 1, dtype=torch.int32, device=_DEVICE) * queries
        self.lengths = torch.full((count,), self.length, dtype=torch.int32, device=_DEVICE)
        self.qkv = half(count * queries, self.shape.width)
        angles = torch.rand(self.length, 64, device=_DEVICE) * 6
        self.turn = HeadTurn(torch.cat((angles.cos(), angles.sin()), 1))

    def out(self) -> Any:
        return self.qkv.new_zeros(len(self.qkv), self.shape.num_heads * 128)


def measure(heads: int, count: int, queries: int, before: int) -> dict[str, Any]:
    batch, found = _Batch(heads, count, queries, before), dict[str, Any]()
    want = None
    for name, way in _decode_ways(batch) if queries == 1 else _chunk_ways(batch):
        try:
            got = batch.out()
            way(0, got)
            want = got.clone() if want is None else want
            off = None if name == "unpack" else round((got.float() - want.float()).abs().max().item(), 4)
            seconds = graph_seconds([partial(way, copy, got) for copy in range(len(batch.wide))], repeats=3)
            found[name] = {"us": round(1e6 * seconds, 2), "off": off}
        except Exception as error:
            print(f"{name}, {heads} heads, {count} x {queries}: {error!r}"[:300], file=sys.stderr)
    pairs = count * (queries * before + queries * (queries + 1) // 2)
    return {"bench": "gpu", "case": "fp8 kv", "heads": heads, "sequences": count, "queries": queries,
            "keys": batch.length, "gflop": round(4e-9 * heads * 128 * pairs, 2),
            "mb_of_fp8": round(count * batch.length * 2048e-6, 2), "ways": found}  # fmt: skip


def _decode_ways(batch: _Batch) -> Iterator[tuple[str, Way]]:
    from quire.kernels.decode_lengths import Lengths, lengths_of

    long = lengths_of([batch.length] * batch.count) is Lengths.LONG
    for name, caches in (("bf16", batch.wide), ("fp8", batch.narrow)):
        yield name, partial(_in_use, batch, caches, _step(batch, caches, long))
    if long and batch.count <= 2:
        yield "few", partial(_in_use, batch, batch.narrow, _step(batch, batch.narrow, False))
    for sizes in LONG_SIZES if long else SHORT_SIZES:
        yield " ".join(map(str, sizes)), _sized(batch, sizes)


def _step(batch: _Batch, caches: list[Any], long: bool) -> tuple[Any, Any]:
    """The engine's attention over such a cache, and the context of the step."""
    from quire.attention.triton import DeviceContext, TritonAttention
    from quire.kernels.decode_lengths import Lengths

    attention = TritonAttention(batch.qkv.device, batch.qkv.dtype, pdl=batch.qkv.is_cuda,
                                same_type=caches is batch.wide)  # fmt: skip
    split = attention.allocate_split(batch.count, batch.shape, long)
    ctx = DeviceContext(batch.starts, batch.starts, batch.lengths, (batch.table,), (batch.starts,),
                        num_decodes=batch.count, splits=(split,), fuse_rope=True,
                        lengths=Lengths.LONG if long else Lengths.MIDDLE)  # fmt: skip
    attention.prepare(ctx, (None,))
    attention.reserve(batch.shape, split.tasks, batch.count)
    return attention, ctx


def _in_use(batch: _Batch, caches: list[Any], step: tuple[Any, Any], copy: int, out: Any) -> None:
    attention, ctx = step
    out.copy_(attention(batch.qkv, caches[copy], ctx, 0, batch.shape, _SCALE, None, None, batch.turn))


def _sized(batch: _Batch, sizes: tuple[int, ...]) -> Way:
    from quire.kernels.triton.attention_decode import DecodeScratch
    from quire.kernels.triton.attention_rope import rope_decode_attention
    from quire.kernels.triton.attention_split import DecodeSplit, split_decode
    from quire.kernels.triton.linear_prefetch import multiprocessors

    keys, warps, stages, programs = sizes
    cuda = batch.qkv.is_cuda
    extra = max(1, programs * multiprocessors(batch.qkv.device) // 8)
    split = DecodeSplit.allocate(batch.count, extra, batch.qkv.device)
    split_decode(split, batch.lengths, None)
    scratch = DecodeScratch.allocate(split.tasks, batch.count, batch.shape, batch.qkv.device)

    def run(copy: int, out: Any) -> None:
        rope_decode_attention(
            batch.qkv, batch.narrow[copy], batch.table, None, batch.lengths, split, scratch, batch.shape, _SCALE,
            batch.turn, out=out, keys=keys, num_warps=warps, num_stages=stages, prefetch=cuda, carried=True, pdl=cuda)

    return run


def _chunk_ways(batch: _Batch) -> Iterator[tuple[str, Way]]:
    import numpy as np
    import torch

    from quire.attention.triton import _WIDE
    from quire.kernels.triton import hopper_prefill, unpacked_pages
    from quire.kernels.triton.attention_mixed import MixedShape, mixed_attention, query_tiles

    starts, counts = np.full(batch.count, batch.before), np.full(batch.count, batch.queries)
    device = batch.qkv.device
    seqs, firsts, _ = hopper_prefill.split_tiles(starts, counts, batch.shape)
    sent = [torch.from_numpy(part).to(device) for part in (seqs, firsts)]
    tiles = sent[0], sent[1]
    sizes = MixedShape(_WIDE.rows, _WIDE.keys, 8, _WIDE.stages)
    group = batch.shape.num_heads // batch.shape.num_kv_heads
    sent = [torch.from_numpy(part).to(device) for part in query_tiles(counts, sizes.tokens_of(group))]
    small = sent[0], sent[1]
    of_step = batch.starts, batch.lengths
    room = unpacked_pages.PageRoom.allocate(batch.shape, _PAGE, batch.count * batch.table.shape[1] * _PAGE,
                                            batch.qkv.dtype, device)  # fmt: skip
    chosen = unpacked_pages.choose_pages(starts, counts, _PAGE, room.pages)
    pages = unpacked_pages.UnpackedPages(*(torch.from_numpy(part).to(device) for part in chosen))

    def unpack(copy: int) -> Any:
        return unpacked_pages.unpack_pages(batch.narrow[copy], batch.table, None, pages, room)

    def prefill(cache: Any, table: Any, rows: Any, out: Any) -> None:
        hopper_prefill.hopper_prefill(batch.qkv, cache, table, rows, *of_step, *tiles, batch.shape, _SCALE, out=out)

    yield "bf16", lambda copy, out: prefill(batch.wide[copy], batch.table, None, out)
    yield "fp8", lambda copy, out: prefill(unpack(copy), room.table(), pages.first, out)
    yield "unpack", lambda copy, out: unpack(copy)
    yield "tiles", lambda copy, out: mixed_attention(
        batch.qkv, batch.narrow[copy], batch.table, None, *of_step, *small, batch.shape, _SCALE, out=out, sizes=sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", type=int, default=[32])
    parser.add_argument("--only", choices=("decode", "chunks"))
    args = parser.parse_args()
    for heads in args.heads:
        for queries, before in CHUNKS if args.only != "decode" else ():
            print(json.dumps(measure(heads, 1, queries, before)), flush=True)
        for count, keys in DECODES if args.only != "chunks" else ():
            print(json.dumps(measure(heads, count, 1, keys - 1)), flush=True)


if __name__ == "__main__":
    main()
