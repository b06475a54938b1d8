"""The GEMMs and the attention of a model's first layer one by one: time, rate and share of the machine's limit.

`quire bench cpu --kernels --quantization int4`. The best of many runs counts, so that a busy machine changes little.
The limit of a GEMM is the larger of its bytes over the bandwidth of memory and its operations over the rate of the
arithmetic. What is read faster than memory gives it lies in a cache from run to run: only operations limit it then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from quire.bench.cpu.cpu_decoder import cpu_decoder
from quire.errors import ConfigError
from quire.kernels.types import HeadShape, StepContext
from quire.layers.attention import Attention
from quire.layers.mlp import Mlp
from quire.machine import Ceilings
from quire.models.decoder import Decoder
from quire.models.spec import DecoderSpec
from quire.ops.cpu import CpuOps
from quire.ops.cpu_panels import PanelLinear

ROWS = (1, 4, 8, 32, 256)
CONTEXTS = (128, 512, 2048, 8192)
KV_DTYPES = {"auto": "float32", "int8": "int8"}
"""`kv_cache_dtype` of the caches that attention reads, and what lies in them."""
_SECONDS = 0.2
_BLOCK = 16
_INT8_RATE = {"plain": 1, "avx2": 2, "avx-vnni": 4, "avx512-vnni": 4, "dotprod": 4, "i8mm": 8, "amx": 16}
"""Multiply-adds of int8 that an instruction set makes in the time of one fused multiply-add of float32."""


def int8_rate() -> int:
    """Of the kernel that this machine takes for integer GEMMs of many rows."""
    return _INT8_RATE[CpuOps().use_integer_kernel() or "plain"]


@dataclass(frozen=True, slots=True)
class Timed:
    """A kernel, how long it took, and what it read and computed."""

    line: dict[str, Any]
    seconds: float
    nbytes: int
    macs: int
    rate: int = 1
    """Of its multiply-adds, times that of float32."""

    def against(self, ceilings: Ceilings) -> dict[str, Any]:
        """The line to print."""
        reading, computing = self.nbytes / ceilings.read_bytes_per_s, 2 * self.macs / self.rate / ceilings.flops_per_s
        cached = reading > self.seconds
        limit = computing if cached else max(reading, computing)
        name = "operations" if limit == computing else "bandwidth"
        return {**self.line, "us": round(1e6 * self.seconds, 1), "GMAC_s": round(self.macs / self.seconds / 1e9, 1),
                "GB_s": round(self.nbytes / self.seconds / 1e9, 1), "share_of_limit": round(limit / self.seconds, 3),
                "limit": f"{name} (in a cache)" if cached else name}


def measure(model: str, quantization: str | None, threads: int | None = None) -> Iterator[Timed]:
    """One for each GEMM and number of rows, then for attention of one token over each context, in a cache of
    floats and in one of int8."""
    decoder = cpu_decoder(model, max(CONTEXTS), threads, quantization=quantization)
    spec, ops = decoder.spec, CpuOps(num_threads=threads)
    for name, weight in _weights(decoder).items():
        rate = int8_rate() if weight.format.startswith("int") else 1
        for rows in ROWS:
            x, out = torch.randn(rows, weight.in_features), torch.empty(rows, weight.out_features)
            seconds = _best(lambda x=x, weight=weight, out=out: ops.linear(x, weight, None, out))  # type: ignore[misc]
            macs = rows * weight.in_features * weight.out_features
            yield Timed({"kernel": name, "format": weight.format, "rows": rows}, seconds, weight.nbytes, macs, rate)
    for context in CONTEXTS:
        for kv_dtype in KV_DTYPES:
            yield _attention(ops, spec.with_kv_dtype(kv_dtype), context, KV_DTYPES[kv_dtype])


def _weights(decoder: Decoder) -> dict[str, PanelLinear]:
    """Of the first layer, and the head, as they lie in memory."""
    layer = decoder.layers[0]
    if not isinstance(layer.mlp, Mlp) or not isinstance(layer.attn, Attention):
        raise ConfigError("this bench times a dense MLP and plain attention: name a model without experts and latents",
                          field="model")
    linears = {"qkv": layer.attn.qkv, "out": layer.attn.out, "up": layer.mlp.up, "down": layer.mlp.down,
               "head": decoder.head}
    return {name: cast(PanelLinear, linear.packed) for name, linear in linears.items()}


def _attention(ops: CpuOps, spec: DecoderSpec, context: int, stored: str) -> Timed:
    """Of the last of so many tokens. What a cache holds is read once by each thread that has a share of its heads."""
    of = spec.layers[0].attention
    shape = HeadShape(of.num_heads, of.num_kv_heads, of.head_dim)
    blocks = -(-context // _BLOCK)
    cache = ops.allocate_cache(spec.layers[0].kv, blocks, _BLOCK)
    qkv = torch.randn(context, shape.width)
    ops.rope_and_cache(qkv, cache, _step(context, context, blocks), 0, shape, None, None, None, 1e-6)
    ctx, query = _step(context, 1, blocks), qkv[-1:].contiguous()
    seconds = _best(lambda: ops.attend(query, cache, ctx, 0, shape, shape.head_dim**-0.5, None, None))
    nbytes = spec.layers[0].kv.bytes_per_token() * context
    return Timed({"kernel": "attention", "format": stored, "rows": 1, "context": context}, seconds, nbytes,
                 2 * context * shape.num_heads * shape.head_dim)


def _step(context: int, queries: int, blocks: int) -> StepContext:
    """The last `queries` tokens of a sequence of `context`."""
    table = torch.arange(blocks, dtype=torch.int32).view(1, -1)
    own = torch.arange(context - queries, context)
    return StepContext(own, torch.tensor([0, queries], dtype=torch.int32), torch.tensor([context], dtype=torch.int32),
                       (table,), (own,))


def _best(action: Callable[[], Any]) -> float:
    best, stop = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < stop:
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best
