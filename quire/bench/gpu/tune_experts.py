"""Times the GEMMs of experts and the attention over latents on this GPU, and prints lines for the tables in the code.

`python -m quire.bench.gpu.tune_experts` tries sizes for each regime of Qwen3-30B-A3B (one token, 32, 256, 512, 16,384),
and for decoding over latents with 16 and 128 heads (64 sequences of 2,000). A candidate that does not agree with the
first one is left out. Kernels are compiled beforehand by several processes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.bench.gpu.cases import FLOPS, MODELS, READ_BANDWIDTH, distinct_experts
from quire.bench.gpu.tune import graphs_seconds
from quire.child import child_environment, module_command

CONFIG = MODELS["30b-a3b"]
EXPERTS, TOP_K = CONFIG["num_experts"], CONFIG["num_experts_per_tok"]
HIDDEN, INNER = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
REGIMES = {32: 16, 256: 32, 512: 64, 2048: 128, 16384: 128}
"""Tokens of a step: rows of a block."""
_AGREES = 2e-2
_BYTES = 2

FEW_UP = ((1, 2048, 4), (2, 2048, 4), (4, 2048, 8), (2, 1024, 4), (4, 1024, 4), (4, 512, 2), (8, 512, 2), (2, 512, 2))
FEW_DOWN = ((4, 256, 1), (4, 256, 2), (8, 256, 2), (8, 256, 4), (2, 1024, 4), (4, 1024, 4), (4, 512, 2), (2, 256, 1))
SMALL = ((32, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 5), (128, 64, 4, 4), (128, 128, 8, 3),
         (32, 256, 4, 3), (16, 256, 4, 3))  # fmt: skip
"""Columns, depth, warps, stages of blocks whose weights' bytes decide."""
WIDE = {
    64: ((64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 3), (128, 64, 8, 4)),
    128: ((64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 8, 4), (256, 64, 8, 3)),
}
HOPPER = (64, 0, 2, 1)
"""Stands for the kernel of `latent_hopper`, which has one size."""
LATENT = {
    16: (*itertools.product((32,), (4, 8), (3,), (1, 2)), *itertools.product((64,), (4, 8), (2, 3), (1, 2)), HOPPER),
    128: ((64, 8, 2, 1), (32, 8, 3, 1), (32, 8, 4, 1), HOPPER),
}
"""By heads: keys, warps, stages, programs on a multiprocessor. Fewer warps have not the registers for 64 heads."""
_LATENT_SEQS, _LATENT_KEYS, _LATENT_LAYERS = 64, 2000, 8
"""Calls in a graph, as layers of a model: of a graph of two calls, its own start is a good part of the time."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to tune: its candidates by name, a way to call each on one of several inputs, and its limit."""

    name: str
    candidates: Mapping[str, Callable[[int], Any]]
    inputs: int
    seconds: float
    """What the hardware needs at least."""
    note: str = ""


def parts(dry: bool) -> Iterator[Part]:
    yield from few_parts(dry)
    for tokens, rows in REGIMES.items():
        yield from block_parts(tokens, rows, dry)
    for heads in (16, 128):
        yield latent_part(heads, dry)


def few_parts(dry: bool) -> Iterator[Part]:
    """One token: each call reads eight experts of its own, so that none is in the second cache."""
    import torch

    from quire.kernels.triton.expert_few import FewShape, few_down, few_up

    calls = 1 if dry else EXPERTS // TOP_K
    up, down = _weights(TOP_K if dry else EXPERTS)
    x, inner = _rows(1, HIDDEN), _rows(TOP_K, INNER)
    gains = torch.rand(1, TOP_K, device="cuda")
    chosen = torch.arange(calls * TOP_K, dtype=torch.int32, device="cuda").view(calls, 1, TOP_K)
    ups = {str(s): partial(lambda c, i: few_up(x, up, None, chosen[i], "silu", None, sizes=c), FewShape(*s))
           for s in FEW_UP}  # fmt: skip
    downs = {str(s): partial(lambda c, i: few_down(inner, down, None, chosen[i], gains, sizes=c), FewShape(*s))
             for s in FEW_DOWN}  # fmt: skip
    one = HIDDEN * INNER * TOP_K * _BYTES
    yield Part("up, 1 token", ups, calls, 2 * one / READ_BANDWIDTH, "expert_few.UP")
    yield Part("down, 1 token", downs, calls, one / READ_BANDWIDTH, "expert_few.DOWN")


def block_parts(tokens: int, rows: int, dry: bool) -> Iterator[Part]:
    import torch

    from quire.kernels.routing import RoutedRows, RouterSpec
    from quire.kernels.triton.expert_linear import ExpertShape, down_experts, sum_pairs, up_experts
    from quire.kernels.triton.route import block_experts, choose

    count = 8 if dry else tokens
    up, down = _weights(TOP_K if dry else EXPERTS)
    logits = torch.randn(count, EXPERTS, device="cuda")
    chosen = logits[:, : up.shape[0]].topk(TOP_K).indices.int()
    x, inner = _rows(count, HIDDEN), _rows(count * TOP_K, INNER)
    gains = torch.rand(count, TOP_K, device="cuda")
    blocks = block_experts(chosen, EXPERTS, rows)
    sizes = [ExpertShape(rows, *each, copied=copied)
             for each in (SMALL if rows < 64 else WIDE[rows]) for copied in (False, True)]  # fmt: skip
    ups = {_named(c): partial(lambda c, _: up_experts(x, up, None, chosen, blocks, "silu", None, c), c)
           for c in sizes if 2 * c.columns * rows <= 256 * 128}  # fmt: skip
    downs = {_named(c): partial(lambda c, _: down_experts(inner, down, None, chosen, gains, blocks, c), c)
             for c in sizes}  # fmt: skip
    one = HIDDEN * INNER
    read = distinct_experts(EXPERTS, TOP_K, tokens) * one * _BYTES / READ_BANDWIDTH
    flops = 2 * tokens * TOP_K * one / FLOPS
    bound = "bytes" if read > flops else "FLOPs"
    moved = tokens * TOP_K * (HIDDEN + INNER) * _BYTES / READ_BANDWIDTH
    yield Part(f"up, {tokens} tokens", ups, 1, max(2 * read, 2 * flops), bound)
    yield Part(f"down, {tokens} tokens", downs, 1, max(read, flops), bound)
    load = torch.zeros(EXPERTS, dtype=torch.int64, device="cuda")
    slots = torch.zeros(count, dtype=torch.int64, device="cuda")
    routed = RoutedRows(RouterSpec(EXPERTS, TOP_K), logits, None, slots, load)
    yield Part(f"routing, {tokens} tokens", {"choose": lambda _: choose(routed)[1]}, 1, moved, "-")
    yield Part(f"sorting, {tokens} tokens", {"blocks": lambda _: block_experts(chosen, EXPERTS, rows).counts},
               1, moved, "-")  # fmt: skip
    found = down_experts(inner, down, None, chosen, gains, blocks, sizes[0])
    yield Part(f"summing, {tokens} tokens", {"sum": lambda _: sum_pairs(found, TOP_K)}, 1, moved, "-")


def latent_part(heads: int, dry: bool) -> Part:
    """Decoding over latents; every call reads a cache of its own, larger than the second cache."""
    import torch

    from quire.kernels.triton.attention_decode import DecodeScratch
    from quire.kernels.triton.attention_split import DecodeSplit, split_decode
    from quire.kernels.triton.latent_attention import LatentDecode, latent_decode, latent_pieces
    from quire.kernels.triton.latent_hopper import hopper_decode
    from quire.kernels.types import LatentShape, LayerCache

    shape, seqs, length, page = LatentShape(heads, 512, 64), _LATENT_SEQS, _LATENT_KEYS, 16
    each = -(-length // page)
    copies = 1 if dry else 2
    held = [torch.randn(seqs * each, 1, page, shape.width, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    caches = [LayerCache(shape.kv, page, {"latent": part}) for part in held]
    table = torch.randperm(seqs * each, device="cuda").int().view(seqs, each)
    lengths = torch.full((seqs,), length, dtype=torch.int32, device="cuda")
    q = _rows(seqs, heads * shape.width)
    splits = {}
    for programs in {candidate[3] for candidate in LATENT[heads]}:
        split = DecodeSplit.allocate(seqs, latent_pieces(seqs, shape, programs, 132), "cuda")
        split_decode(split, lengths, None)
        splits[programs] = split, DecodeScratch.allocate(split.tasks, seqs, shape.blocks, "cuda")

    def call(candidate: tuple[int, ...], index: int) -> Any:
        split, scratch = splits[candidate[3]]
        given = (q, caches[index % copies], table, None, lengths, split, scratch, shape, 0.05)
        if candidate == HOPPER:
            return hopper_decode(*given, pdl=True)
        return latent_decode(*given, sizes=LatentDecode(*candidate), pdl=True)

    tokens = seqs * length
    read = tokens * shape.width * _BYTES / READ_BANDWIDTH
    flops = 2 * tokens * heads * (shape.width + shape.rank) / FLOPS
    names = {"wgmma" if c == HOPPER else str(c): partial(call, c) for c in LATENT[heads]}
    return Part(f"latents, {heads} heads", names, _LATENT_LAYERS, max(read, flops),
                f"{2 * tokens * heads * (shape.width + shape.rank) / 1e12:.4f} TFLOP")  # fmt: skip


def _weights(experts: int) -> tuple[Any, Any]:
    import torch

    if experts not in _HELD:
        normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        _HELD[experts] = (normal(experts, 2 * INNER, HIDDEN) * HIDDEN**-0.5,
                          normal(experts, HIDDEN, INNER) * INNER**-0.5)  # fmt: skip
    return _HELD[experts]


_HELD: dict[int, tuple[Any, Any]] = {}


def _rows(count: int, width: int) -> Any:
    import torch

    return torch.randn(count, width, device="cuda", dtype=torch.bfloat16)


def _named(shape: Any) -> str:
    values = (shape.rows, shape.columns, shape.depth, shape.warps, shape.stages)
    return f"({', '.join(map(str, values))}{', True' if shape.copied else ''})"


def timed(part: Part) -> list[tuple[float, str]]:
    """Seconds of every candidate that works and agrees with the first, fastest first."""
    import torch

    ways: list[list[Callable[[], Any]]] = []
    names, want = [], None
    for name, call in part.candidates.items():
        try:
            got = call(0).float()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"  {part.name} {name}: {str(error).strip().splitlines()[-1][:110]}", file=sys.stderr)
            continue
        want = got if want is None else want
        away = float((got - want).norm() / want.norm().clamp(min=1e-20))
        if not away < _AGREES:
            print(f"  {part.name} {name}: WRONG, relative error {away:.2g}", file=sys.stderr)
            continue
        ways.append([partial(call, index) for index in range(part.inputs)])
        names.append(name)
    return sorted(zip(graphs_seconds(ways, rounds=5), names, strict=True)) if ways else []


def compile_ahead() -> None:
    """Every candidate once, on inputs that are small, spread over processes that fill the kernel cache on disk."""
    count = min(16, os.cpu_count() or 1)
    here = module_command("quire.bench.gpu.tune_experts")
    running = [
        subprocess.Popen([*here, "--share", str(index), str(count)], env=child_environment(),
                         stderr=subprocess.DEVNULL)
        for index in range(count)
    ]  # fmt: skip
    for process in running:
        process.wait()


def _share(index: int, count: int) -> None:
    every = [call for part in parts(dry=True) for call in part.candidates.values()]
    for call in every[index::count]:
        try:
            call(0)
        except Exception:
            continue  # `timed` says what does not work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--top", type=int, default=3, help="how many candidates of each part to print (default: 3)")
    args = parser.parse_args()
    if args.share:
        _share(*args.share)
        return
    compile_ahead()
    for part in parts(dry=False):
        if args.only not in part.name:
            continue
        for place, (seconds, name) in enumerate(timed(part)[: args.top]):
            share = part.seconds / seconds
            print(f"{'BEST' if place == 0 else '    '} {part.name:<24} {name:<28} {seconds * 1e6:9.1f} us  "
                  f"{share:5.0%} of the limit ({part.note})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
