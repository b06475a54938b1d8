"""`python -m quire.bench.gpu.tune_fixed_attention`: attention of deterministic mode by every kernel that might serve.

Of each: microseconds, and what share of its elements has the bits of the first kernel ("mixed"). A JSON line for each
batch. "once STAGES": decode steps in one loop; "prefill": `hopper_prefill`, "paged STAGES PROGRAMS" its tiles of 64
rows for decode steps. "cudnn": what plain mode has for fresh prompts, "wide" its tiles; and with 64 keys at a time
"once of 64" and "prefill of 64": these give other bits, "off" says by how much at most.

Decode steps with norm, rotation and KV write: "apart STAGES PROGRAMS" by two kernels, "turned STAGES PROGRAMS" by one,
"plain" as plain mode does it, with other bits. Their first kernel, to whose bits they are compared, is "apart".
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from quire.bench.gpu.tune import graph_seconds

DECODES = ((1, 384), (1, 4000), (32, 1152), (256, 1064))
PROMPTS = ((4, 4096, 0), (16, 1024, 0), (8, 1000, 24), (1, 8192, 24576), (1, 8192, 118784), (4, 700, 20011))
"""Sequences, and their keys; sequences, and their queries after so many keys."""
_PAGED = ((3, 1), (2, 1), (1, 1), (1, 2))
"""Stages, and programs on a multiprocessor."""
_TURNED = ((3, 1), (1, 2))
_ROTATED = ("apart", "turned", "plain")
_PAGE, _SCALE, _LEAST_BYTES = 16, 0.088, 2e8
_DEVICE = "cuda"
Way = Callable[[Any, Any], Any]
"""Given a cache and where to write."""


class _Batch:
    """One step's attention, over caches that together are too large for the L2 cache."""

    def __init__(self, heads: int, count: int, queries: int, before: int) -> None:
        import torch

        from quire.kernels.types import HeadShape, pair_cache

        self.shape = HeadShape(heads, 8, 128)
        self.count, self.queries, self.before, self.length = count, queries, before, before + queries
        pages = -(-self.length // _PAGE)
        copies = max(1, min(16, math.ceil(_LEAST_BYTES / (count * pages * _PAGE * 8 * 128 * 4))))
        half = partial(torch.randn, device=_DEVICE, dtype=torch.bfloat16)
        size = (count * pages, 8, _PAGE, 128)
        self.caches = [pair_cache(half(size), half(size), _PAGE) for _ in range(copies)]
        self.table = torch.randperm(count * pages, device=_DEVICE).int().view(count, pages)
        self.starts = torch.arange(count + 1, dtype=torch.int32, device=_DEVICE) * queries
        self.lengths = torch.full((count,), self.length, dtype=torch.int32, device=_DEVICE)
        self.qkv = half(count * queries, self.shape.width)
        self.spare = self.qkv.clone()
        """Rows that a rotation may change."""
        self.positions = (self.lengths - 1).long()
        self.slots = self.table[:, -1].long() * _PAGE + (self.length - 1) % _PAGE
        angles = torch.rand(self.length, 64, device=_DEVICE) * 6
        self.rope = torch.cat((angles.cos(), angles.sin()), 1)
        self.gain = torch.rand(128, device=_DEVICE) + 0.5

    @property
    def turn(self) -> Any:
        from quire.kernels.types import HeadTurn

        return HeadTurn(self.rope, self.gain, self.gain, 1e-6)

    def out(self) -> Any:
        return self.qkv.new_zeros(len(self.qkv), self.shape.num_heads * 128)


def measure(heads: int, count: int, queries: int, before: int, begin: tuple[str, ...] = ("",)) -> dict[str, Any]:
    """`begin`: how the names of the ways to be timed begin."""
    import torch

    from quire.kernels.triton.hopper_prefill import DECODE

    batch, found = _Batch(heads, count, queries, before), dict[str, Any]()
    base, rotated = batch.out(), batch.out()
    if queries == 1:
        _apart(batch, DECODE, batch.caches[0], rotated)  # this writes the newest keys
    _mixed(batch, {}, batch.caches[0], base)
    for name, way in ((name, way) for name, way in _ways(batch) if name.startswith(begin)):
        want = rotated if name.startswith(_ROTATED) else base
        try:
            got = batch.out()
            batch.spare.copy_(batch.qkv)
            way(batch.caches[0], got)
            same = (got.view(torch.int16) == want.view(torch.int16)).double().mean().item()
            off = round((got.float() - want.float()).abs().max().item(), 4)
            seconds = graph_seconds([partial(way, cache, got) for cache in batch.caches], repeats=3)
            found[name] = {"us": round(1e6 * seconds, 2), "same": math.floor(same * 1e5) / 1e5, "off": off}
        except Exception as error:
            print(f"{name}, {heads} heads, {count} x {queries}: {error!r}"[:300], file=sys.stderr)
    pairs = count * (queries * before + queries * (queries + 1) // 2)
    return {"bench": "gpu", "case": "fixed attention", "heads": heads, "sequences": count, "queries": queries,
            "keys": batch.length, "gflop": round(4e-9 * heads * 128 * pairs, 2),
            "mb": round(count * batch.length * 4096e-6, 2), "ways": found}  # fmt: skip


def _ways(batch: _Batch) -> Iterator[tuple[str, Way]]:
    from quire.attention.triton import _FIXED, _WIDE
    from quire.kernels.triton.hopper_prefill import PREFILL, PrefillShape

    yield "mixed", partial(_mixed, batch, {})
    yield "mixed early", partial(_mixed, batch, {"pdl": True})
    if batch.queries == 1:
        for stages in (2, 3):
            yield f"once {stages}", partial(_mixed, batch, {"once": True, "pdl": True, "stages": stages})
        yield "once of 64", partial(_mixed, batch, {"once": True, "pdl": True, "sizes": _FIXED})
        for stages, programs in _PAGED:
            sizes = PrefillShape(PREFILL.keys, stages, groups=1, programs=programs)
            yield f"paged {stages} {programs}", partial(_paged, batch, sizes)
        for stages, programs in _TURNED:
            sizes = PrefillShape(PREFILL.keys, stages, groups=1, programs=programs)
            yield f"apart {stages} {programs}", partial(_apart, batch, sizes)
            yield f"turned {stages} {programs}", partial(_turned, batch, sizes)
        yield "plain", _plain(batch)
    else:
        yield "prefill", partial(_paged, batch, PREFILL)
        yield "wide", partial(_mixed, batch, {"sizes": _WIDE, "exact": False})
        yield "prefill of 64", partial(_paged, batch, PrefillShape(64, 5))
        if not batch.before:
            yield "cudnn", partial(_cudnn, batch)


def _mixed(batch: _Batch, options: dict[str, Any], cache: Any, out: Any) -> None:
    import numpy as np

    from quire.attention.triton import _FIXED_HOPPER
    from quire.kernels.triton.attention_mixed import mixed_attention, query_tiles

    options = {"exact": True, **options}
    sizes = options.pop("sizes", _FIXED_HOPPER)
    sizes = replace(sizes, stages=options.pop("stages", sizes.stages))
    tokens = sizes.tokens_of(batch.shape.num_heads // batch.shape.num_kv_heads)
    tile_seq, tile_first = _on_device(batch, *query_tiles(np.full(batch.count, batch.queries), tokens))
    mixed_attention(batch.qkv, cache, batch.table, None, batch.starts, batch.lengths, tile_seq, tile_first,
                    batch.shape, _SCALE, out=out, sizes=sizes, **options)  # fmt: skip


def _paged(batch: _Batch, sizes: Any, cache: Any, out: Any) -> None:
    import numpy as np

    from quire.kernels.triton import hopper_prefill
    from quire.kernels.triton.attention_mixed import query_tiles

    queries = np.full(batch.count, batch.queries)
    seqs, firsts = query_tiles(queries, sizes.tokens_of(batch.shape))
    if batch.queries > 1:
        seqs, firsts, _ = hopper_prefill.split_tiles(np.full(batch.count, batch.before), queries, batch.shape, sizes)
    tile_seq, tile_first = _on_device(batch, seqs, firsts)
    hopper_prefill.hopper_prefill(batch.qkv, cache, batch.table, None, batch.starts, batch.lengths, tile_seq,
                                  tile_first, batch.shape, _SCALE, out=out, sizes=sizes,
                                  pdl=batch.queries == 1)  # fmt: skip


def _decoding(batch: _Batch, sizes: Any, rows: Any, cache: Any, out: Any, raw: Any = None) -> None:
    import numpy as np

    from quire.kernels.triton.hopper_prefill import hopper_prefill

    seqs, firsts = np.arange(batch.count, dtype=np.int32), np.zeros(batch.count, np.int32)
    tile_seq, tile_first = _on_device(batch, seqs, firsts)
    hopper_prefill(rows, cache, batch.table, None, batch.starts, batch.lengths, tile_seq, tile_first, batch.shape,
                   _SCALE, out=out, sizes=sizes, pdl=True, raw=raw)  # fmt: skip


def _apart(batch: _Batch, sizes: Any, cache: Any, out: Any) -> None:
    from quire.kernels.triton.rope_cache import rope_and_cache

    rope_and_cache(batch.spare, cache, batch.slots, batch.positions, batch.shape, batch.rope, batch.gain, batch.gain,
                   1e-6, pdl=batch.qkv.is_cuda, heads_at_once=8)  # fmt: skip
    _decoding(batch, sizes, batch.spare, cache, out)


def _turned(batch: _Batch, sizes: Any, cache: Any, out: Any) -> None:
    from quire.kernels.triton.hopper_prefill import RawHeads

    _decoding(batch, sizes, batch.qkv, cache, out, RawHeads(batch.turn, batch.positions, batch.slots))


def _plain(batch: _Batch) -> Way:
    from quire.attention.triton import DeviceContext, TritonAttention

    attention = TritonAttention(batch.qkv.device, batch.qkv.dtype, pdl=batch.qkv.is_cuda, same_type=True)
    split = attention.allocate_split(batch.count, batch.shape)
    ctx = DeviceContext(batch.positions, batch.starts, batch.lengths, (batch.table,), (batch.slots,),
                        num_decodes=batch.count, splits=(split,), fuse_rope=True)  # fmt: skip
    attention.prepare(ctx, (None,))

    def attend(cache: Any, out: Any) -> None:
        options = {"window": None, "softcap": None, "out": out}
        attention._decode(batch.qkv, cache, batch.table, ctx, split, batch.shape, _SCALE, batch.turn, options)

    return attend


def _cudnn(batch: _Batch, cache: Any, out: Any) -> None:
    from quire.attention.triton import _dense, dense_attention

    with dense_attention():
        _dense(batch.qkv, batch.count, batch.shape, _SCALE, out)


_KEPT: dict[bytes, Any] = {}


def _on_device(batch: _Batch, *parts: Any) -> list[Any]:
    """Copied once: while a graph is captured nothing may come from the host."""
    import torch

    for part in parts:
        if part.tobytes() not in _KEPT:
            _KEPT[part.tobytes()] = torch.from_numpy(part).to(batch.qkv.device)
    return [_KEPT[part.tobytes()] for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 32])
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--ways", nargs="+", default=[""], metavar="NAME", help="ways whose names begin so")
    args = parser.parse_args()
    for heads in args.heads:
        for count, keys in DECODES if args.only != "prefill" else ():
            print(json.dumps(measure(heads, count, 1, keys - 1, tuple(args.ways))), flush=True)
        for count, queries, before in PROMPTS if args.only != "decode" else ():
            print(json.dumps(measure(heads, count, queries, before, tuple(args.ways))), flush=True)


if __name__ == "__main__":
    main()
