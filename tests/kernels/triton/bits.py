"""Whether each operation of deterministic mode gives a row the same bits in any batch: operation by operation, so that
a difference says where it comes from. On any device, as `cases` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels.slices import Slices
from quire.kernels.types import HeadShape, StepContext, pair_cache
from quire.ops.triton import TritonOps
from quire.sampling.logprobs import token_logprobs
from tests.kernels.triton.cases import rand

Part = Callable[[int, int], Sequence[Tensor]]
"""What an operation makes of the rows [first, last) alone."""


def deterministic_ops(device: str, dtype: torch.dtype) -> TritonOps:
    """As the worker builds them; early launches are asked for, since that is what must not show."""
    return TritonOps(device, dtype, deterministic=True, pdl=True)


def differences(name: str, part: Part, rows: int, counts: Sequence[int]) -> list[str]:
    """Batches of `counts` rows, from the beginning, the middle and the end, against all rows at once."""
    whole = [tensor.clone() for tensor in part(0, rows)]
    found = []
    for count in counts:
        for first in sorted({0, (rows - count) // 2, rows - count}):
            alone = part(first, first + count)
            for index, (mine, base) in enumerate(zip(alone, whole, strict=True)):
                want = base[first : first + count]
                if not torch.equal(mine, want):
                    away = float((mine.double() - want.double()).abs().max())
                    place = f"result {index}: rows {first} to {first + count} of {rows}"
                    found.append(f"{name}, {place} differ by {away:.1e}")
    return found


def row_wise(device: str, dtype: torch.dtype, rows: int, hidden: int, features: int) -> Iterator[tuple[str, Part]]:
    """Norms, GEMMs and gates of `rows` rows."""
    ops = deterministic_ops(device, dtype)
    x, residual = (rand(rows, hidden, dtype=dtype, device=device) for _ in range(2))
    gain, bias = torch.rand(hidden, device=device) + 0.5, torch.randn(hidden, device=device)
    weight = rand(features, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    plain, biased = ops.pack_linear(weight), ops.pack_linear(weight, rand(features, dtype=dtype, device=device))
    added = rand(rows, features, dtype=dtype, device=device)

    def summed(first: int, last: int) -> Sequence[Tensor]:
        stream = residual[first:last].clone()
        return ops.add_rms_norm(x[first:last].clone(), stream, gain, 1e-6), stream

    yield "norm", lambda a, b: [ops.rms_norm(x[a:b].clone(), gain, 1e-6)]
    yield "sum and norm", summed
    yield "layer norm", lambda a, b: [ops.layer_norm(x[a:b].clone(), gain, bias, 1e-5)]
    yield f"GEMM {features} x {hidden}", lambda a, b: [ops.linear(x[a:b].clone(), plain)]
    yield f"GEMM {features} x {hidden}, bias and residual", lambda a, b: [
        ops.linear(x[a:b].clone(), biased, added[a:b].clone())
    ]
    sliced = ops.pack_linear(weight, None, Slices.of_width(hidden))
    yield f"GEMM {features} x {hidden}, slices", lambda a, b: [ops.linear(x[a:b].clone(), sliced)]
    for kind in ("silu", "gelu_tanh", "gelu"):
        yield f"gate {kind}", lambda a, b, k=kind: [ops.act_mul(x[a:b].clone(), k)]
    for kind in ("gelu_tanh", "gelu", "relu"):
        yield f"activation {kind}", lambda a, b, k=kind: [ops.act(x[a:b].clone(), k)]


def logits(device: str, dtype: torch.dtype, rows: int, vocab: int) -> Iterator[tuple[str, Part]]:
    """Log-probabilities, ranks and likeliest tokens."""
    values = rand(rows, vocab, dtype=dtype, device=device, scale=3.0)
    targets = torch.randint(0, vocab, (rows,), device=device)

    def ranked(first: int, last: int) -> Sequence[Tensor]:
        found = token_logprobs(values[first:last].float(), targets[first:last], 3)
        return found.logprob, found.rank, found.top_ids, found.top_logprobs

    yield f"log-probabilities of {vocab}", ranked


def rotations(device: str, dtype: torch.dtype, rows: int, shape: HeadShape) -> Iterator[tuple[str, Part]]:
    """Norm of q and k, rotation and the write to the cache."""
    ops = deterministic_ops(device, dtype)
    page = 16
    qkv = rand(rows, shape.width, dtype=dtype, device=device)
    angles = torch.rand(rows, shape.head_dim // 2, device=device) * 6
    rope = torch.cat((angles.cos(), angles.sin()), 1)
    gains = [torch.rand(shape.head_dim, device=device) + 0.5 for _ in range(2)]
    places = torch.arange(rows, device=device)

    def turned(first: int, last: int, norms: bool) -> Sequence[Tensor]:
        cache = ops.allocate_cache(shape.kv, -(-rows // page), page)
        mine, own = qkv[first:last].clone(), places[first:last].clone()
        ctx = StepContext(own, places, places, (), (own,))
        ops.rope_and_cache(mine, cache, ctx, 0, shape, rope, *(gains if norms else (None, None)), 1e-6)
        kept = (part.transpose(1, 2).flatten(0, 1)[first:last] for part in (cache.k, cache.v))
        return mine, *kept

    yield f"rope {shape}", lambda a, b: turned(a, b, False)
    yield f"q and k norm, rope {shape}", lambda a, b: turned(a, b, True)


def attention(
    device: str, dtype: torch.dtype, length: int, shape: HeadShape, window: int | None, softcap: float | None,
    fp8: bool = False,
) -> Part:
    """The queries [first, last) of one sequence as one chunk, after another sequence's. `fp8`: keys and values are."""
    ops = deterministic_ops(device, dtype)
    page = 16
    blocks = -(-length // page)
    cache = ops.allocate_cache(shape.kv, 2 * blocks, page)
    cache.k.copy_(rand(*cache.k.shape, dtype=dtype, device=device))
    cache.v.copy_(rand(*cache.v.shape, dtype=dtype, device=device))
    if fp8:
        cache = pair_cache(cache.k.to(torch.float8_e4m3fn), cache.v.to(torch.float8_e4m3fn), page)
        cache.scales = torch.linspace(0.5, 1.5, 2 * shape.num_kv_heads, device=device).view(2, -1)
    qkv = rand(length, shape.width, dtype=dtype, device=device)
    table = torch.from_numpy(np.random.default_rng(1).permutation(2 * blocks).astype(np.int32)).view(2, -1).to(device)

    def chunk(first: int, last: int) -> Sequence[Tensor]:
        other = (last - first) % 5
        starts = torch.tensor([0, other, other + last - first], dtype=torch.int32, device=device)
        lengths = torch.tensor([other, last], dtype=torch.int32, device=device)
        rows = torch.cat((qkv[:other], qkv[first:last]))
        none = torch.zeros(len(rows), dtype=torch.int64, device=device)
        ctx = StepContext(none, starts, lengths, (table,), (none,))
        return [ops.attend(rows, cache, ctx, 0, shape, 0.2, window, softcap)[other:]]

    return chunk
