"""`python -m quire.bench.gpu.tune_clusters [--models 0.6b 8b]`: decode attention of few sequences by clusters of blocks
beside `triton.attention_few`.

A JSON line for each number of sequences and of keys. "few": that kernel; "BLOCKS WARPS": clusters of so many
blocks, of so many warps each. Of one sequence a whole layer is timed, since what counts is how soon a kernel begins
beside the GEMM before it and lets the next one begin; of more, attention by itself. "off": by how much a result is off
from that of "few" at most.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

KEYS = (40, 384, 1000, 2000, 4000, 8000, 16000)
MORE = ((2, 384), (2, 2000), (2, 6000), (4, 384), (4, 2000), (8, 384), (8, 2000))
"""Sequences, and their keys."""
SIZES = ((8, 4), (8, 8), (4, 4), (4, 8))
"""Blocks of a cluster, and warps of a block."""
_LAYERS, _PAGE, _SCALE, _EPS, _ROUNDS = 6, 16, 0.088, 1e-6, 15


class _Layers:
    """Some layers of a model, whose weights and keys are too large for the L2 cache."""

    def __init__(self, model: str, count: int, keys: int) -> None:
        import torch

        from quire.attention.triton import TritonAttention
        from quire.bench.gpu.cases import MODELS
        from quire.kernels.triton.attention_split import split_decode
        from quire.kernels.types import HeadShape, HeadTurn, pair_cache
        from quire.ops.triton import TritonOps

        torch.manual_seed(keys)
        config, half = MODELS[model], partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.shape = HeadShape(config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
        width, pages = self.shape.num_heads * self.shape.head_dim, -(-keys // _PAGE)
        self.ops = TritonOps("cuda", torch.bfloat16, pdl=True)
        sizes = {"qkv": (self.shape.width, hidden), "o": (hidden, width), "up": (2 * inner, hidden),
                 "down": (hidden, inner)}  # fmt: skip
        self.packed = [{name: self.ops.pack_linear(half(size) / size[1] ** 0.5) for name, size in sizes.items()}
                       for _ in range(_LAYERS)]  # fmt: skip
        size = (count * pages, self.shape.num_kv_heads, _PAGE, self.shape.head_dim)
        self.caches = [pair_cache(half(size), half(size), _PAGE) for _ in range(_LAYERS)]
        self.table = torch.randperm(count * pages, device="cuda").int().view(count, pages)
        self.lengths = torch.full((count,), keys, dtype=torch.int32, device="cuda")
        angles = torch.rand(keys, self.shape.head_dim // 2, device="cuda") * 6
        q_gain, k_gain = torch.rand(2, self.shape.head_dim, device="cuda") + 0.5
        self.turn = HeadTurn(torch.cat((angles.cos(), angles.sin()), 1), q_gain, k_gain, _EPS)
        self.rows, self.gain = half(count, hidden), self.ops.norm_gain(torch.ones(hidden, device="cuda"))
        self.qkv = half(count, self.shape.width)
        attention = TritonAttention(self.table.device, torch.bfloat16, pdl=True, same_type=True)
        self.split = attention.allocate_split(count, self.shape)
        split_decode(self.split, self.lengths, None)
        self.scratch = attention.reserve(self.shape, self.split.tasks, count)

    def attend(self, sizes: tuple[int, int] | None, qkv: Any, layer: int) -> Any:
        from quire.kernels.cuda.attention_cluster import ClusterSizes, cluster_decode_attention
        from quire.kernels.triton.attention_few import few_decode_attention

        given = (qkv, self.caches[layer], self.table, None, self.lengths)
        if sizes is None:
            return few_decode_attention(*given, self.split, self.scratch, self.shape, _SCALE, self.turn, pdl=True)
        found = cluster_decode_attention(*given, self.shape, _SCALE, self.turn, sizes=ClusterSizes(*sizes), pdl=True)
        if found is None:
            raise RuntimeError("the kernel cannot be made")
        return found

    def layer(self, sizes: tuple[int, int] | None, layer: int) -> Any:
        ops, packed = self.ops, self.packed[layer]
        qkv = ops.norm_linear(self.rows, self.gain, _EPS, packed["qkv"])
        rows = ops.linear(self.attend(sizes, qkv, layer), packed["o"], self.rows)
        return ops.linear(ops.norm_linear(rows, self.gain, _EPS, packed["up"], "silu"), packed["down"], rows)


def measure(model: str, count: int, keys: int) -> dict[str, Any]:
    from quire.bench.gpu.tune import graphs_seconds

    layers, off = _Layers(model, count, keys), dict[str, float]()
    ways: dict[str, tuple[int, int] | None] = {"few": None, **{f"{a} {b}": (a, b) for a, b in SIZES}}
    want = layers.attend(None, layers.qkv, 0).float()
    for name, sizes in list(ways.items()):
        try:
            off[name] = round((layers.attend(sizes, layers.qkv, 0).float() - want).abs().max().item(), 4)
        except Exception as error:
            print(f"{name}, {count} of {keys} keys: {error!r}"[:300], file=sys.stderr)
            del ways[name]

    def alone(sizes: tuple[int, int] | None, layer: int) -> Any:
        return layers.attend(sizes, layers.qkv, layer)

    call: Callable[..., Any] = layers.layer if count == 1 else alone
    seconds = graphs_seconds([[partial(call, sizes, index) for index in range(_LAYERS)] for sizes in ways.values()],
                             _ROUNDS)  # fmt: skip
    found = {name: round(1e6 * value, 2) for name, value in zip(ways, seconds, strict=True)}
    return {"bench": "gpu", "case": "clusters", "model": model, "sequences": count, "keys": keys,
            "timed": "layer" if count == 1 else "attention", "us": found, "off": off}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6b", "8b"], choices=("0.6b", "1.7b", "4b", "8b", "14b"))
    args = parser.parse_args()
    for model in args.models:
        for count, keys in (*((1, keys) for keys in KEYS), *MORE):
            print(json.dumps(measure(model, count, keys)), flush=True)


if __name__ == "__main__":
    main()
