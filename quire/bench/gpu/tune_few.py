"""Times GEMMs of up to eight rows with norm, gate and residual (`quire.kernels.cuda.few_gemm`) against those in use.

    python -m quire.bench.gpu.tune_few [--rows 5 8] [--sets NAME ...] [--write TABLE]

A set is the sizes of all GEMMs of a layer. Every GEMM is first compared with float32, then timed by
itself (with its norm, gate or residual), then all of a layer one after another as a decode step has them, but for
attention: there it counts how soon a kernel gets its weights while the one before ends. All are timed in turns.
`--write` puts the set with the fastest layer (at the first number of rows) into a GEMM table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from quire.bench.gpu.cases import READ_BANDWIDTH
from quire.bench.gpu.tune_wide import weights_of

Sizes = tuple[int, ...]
"""Fours of features, warps, lines ahead, blocks of a multiprocessor (`FewShape`)."""
SETS: dict[str, Sizes] = {
    "16 features": (4, 4, 2, 5),
    "16 features, 8 warps": (4, 8, 2, 2),
    "16 features, 1 line": (4, 8, 1, 3),
    "16 features, 4 lines": (4, 4, 4, 3),
    "8 features": (2, 4, 4, 5),
    "32 features": (8, 8, 1, 2),
    "32 features, 4 warps": (8, 4, 1, 4),
}
_COPIES = 4
_EPS = 1e-6


def gemms() -> dict[str, tuple[int, int]]:
    """Features and width of a layer's, and of the vocabulary's."""
    from quire.bench.gpu.cases import MODELS

    return {**weights_of(), "vocabulary": (MODELS["8b"]["vocab_size"], MODELS["8b"]["hidden_size"])}


def fused(name: str) -> dict[str, bool]:
    """What a GEMM of a layer has inside."""
    return {"norm": name in ("qkv", "gate_up", "vocabulary"), "gated": name == "gate_up",
            "residual": name in ("o", "down")}


def variants(sets: list[str]) -> list[Any]:
    from quire.kernels.cuda.few_gemm import FewShape, Variant

    found = []
    for each in sets:
        for name, (_, width) in gemms().items():
            shape = FewShape.of(SETS[each])
            found.append(Variant(shape, shape.lines(width), early=True, **fused(name)))
    return found


def compile_all(sets: list[str]) -> None:
    """In threads: the compiler does not hold Python's lock."""
    from quire.kernels.cuda import nvrtc
    from quire.kernels.cuda.few_gemm import OPTIONS

    begin, wanted = time.perf_counter(), variants(sets)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda each: nvrtc.compiled(each.source(), OPTIONS), wanted))
    print(f"{len(wanted)} kernels compiled in {time.perf_counter() - begin:.1f} s", flush=True)


class Layers:
    """The GEMMs of some layers, whose weights are too large for the cache."""

    def __init__(self, rows: int) -> None:
        import torch

        from quire.ops.triton import TritonOps

        torch.manual_seed(rows)
        self.rows, self.ops = rows, TritonOps("cuda", torch.bfloat16, pdl=True, few_rows=False)
        sizes = gemms()
        self.packed = [
            {name: self.ops.pack_linear(torch.randn(*size, device="cuda", dtype=torch.bfloat16) / size[1] ** 0.5)
             for name, size in sizes.items()} for _ in range(_COPIES)]  # fmt: skip
        self.inputs = {name: torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
                       for name, (_, width) in sizes.items()}  # fmt: skip
        hidden = sizes["o"][0]
        self.residual = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        self.gain = torch.rand(hidden, device="cuda").add(0.5).bfloat16()

    def few(self, sizes: Sizes, name: str, layer: int, x: Any, residual: Any) -> Any:
        from quire.kernels.cuda.few_gemm import FewShape, fits, linear_few_rows

        shape, weight, what = FewShape.of(sizes), self.packed[layer][name].weight, fused(name)
        gain = self.gain if what["norm"] else None
        if not fits(x, weight, shape, gain):
            raise ValueError(f"{name} does not take {sizes}")
        found = linear_few_rows(x, weight, residual if what["residual"] else None, shape=shape, norm=gain, eps=_EPS,
                                gated=what["gated"], pdl=True)  # fmt: skip
        if found is None:
            raise RuntimeError("the kernel cannot be made")
        return found

    def now(self, name: str, layer: int, x: Any, residual: Any) -> Any:
        """As steps of so many rows run today: sums are added by the next norm."""
        packed = self.packed[layer][name]
        if fused(name)["norm"]:
            x = self.ops.add_rms_norm(residual, x, self.gain, _EPS)
        found = self.ops.linear(x, packed)
        return self.ops.act_mul(found, "silu") if name == "gate_up" else found

    def fault(self, sizes: Sizes, name: str) -> str:
        """What is wrong with a kernel; empty if nothing is."""
        import torch

        from quire.kernels.triton.linear_few import linear_reference

        x, what = self.inputs[name], fused(name)
        want = linear_reference(
            x, self.packed[0][name].weight, None, self.residual if what["residual"] else None,
            norm=self.gain.float() if what["norm"] else None, eps=_EPS, gated="silu" if what["gated"] else None).float()
        first, second = (self.few(sizes, name, 0, x, self.residual) for _ in range(2))
        torch.cuda.synchronize()
        wrong = ~((first.float() - want).abs() <= 2**-6 * want.abs() + 0.02)
        if wrong.any():
            return f"{int(wrong.sum())} of {wrong.numel()} are wrong, the first at {wrong.nonzero()[0].tolist()}"
        return "" if torch.equal(first, second) else "not the same twice"

    def layer(self, sizes: Sizes | None, index: int) -> Any:
        """From the output projection to the next layer's q, k and v."""
        inputs, residual = self.inputs, self.residual
        if sizes is None:
            attended = self.now("o", index, inputs["o"], None)
            inner = self.now("gate_up", index, residual, attended)
            return self.now("qkv", index, residual, self.now("down", index, inner, None))
        rows = self.few(sizes, "o", index, inputs["o"], residual)
        inner = self.few(sizes, "gate_up", index, rows, None)
        return self.few(sizes, "qkv", index, self.few(sizes, "down", index, inner, rows), None)

    def one_row(self, index: int) -> Any:
        packed, residual = self.packed[index], self.residual[:1]
        rows = self.ops.linear(self.inputs["o"][:1], packed["o"], residual)
        inner = self.ops.norm_linear(rows, self.gain, _EPS, packed["gate_up"], "silu")
        return self.ops.norm_linear(self.ops.linear(inner, packed["down"], rows), self.gain, _EPS, packed["qkv"])


def report(rows: int, sets: list[str]) -> str:
    """The fastest: a set's name, or "now"."""
    from quire.bench.gpu.tune import graphs_seconds

    layers = Layers(rows)
    right = []
    for each in sets:
        faults = {name: fault for name in gemms() if (fault := layers.fault(SETS[each], name))}
        print("".join(f"{rows} rows {each}, {name}: {fault}\n" for name, fault in faults.items()), end="", flush=True)
        right += [] if faults else [each]
    ways: dict[str, Sizes | None] = {"now": None, **{each: SETS[each] for each in right}}

    def timed(call: Callable[[Sizes | None, int], Any]) -> dict[str, float]:
        seconds = graphs_seconds([[partial(call, way, index) for index in range(_COPIES)] for way in ways.values()], 15)
        return {name: round(1e6 * value, 1) for name, value in zip(ways, seconds, strict=True)}

    for name, (features, width) in gemms().items():

        def gemm(way: Sizes | None, index: int, name: str = name) -> Any:
            x = layers.inputs[name]
            if way is not None:
                return layers.few(way, name, index, x, layers.residual)
            return layers.now(name, index, x, layers.residual)

        limit = 2e6 * features * width / READ_BANDWIDTH
        print(f"{rows} rows {name} (limit {limit:.1f} us): {timed(gemm)}", flush=True)
    one = graphs_seconds([[partial(layers.one_row, index) for index in range(_COPIES)]], 15)[0]
    limit = sum(2e6 * features * width for features, width in weights_of().values()) / READ_BANDWIDTH
    found = timed(layers.layer)
    print(f"{rows} rows layer (limit {limit:.1f} us, one row {1e6 * one:.1f}): {found}", flush=True)
    return min(found, key=lambda name: found[name])


def write_best(path: str, best: str) -> None:
    """Other sizes for the GEMMs that the table has for this kernel."""
    from quire.bench.gpu.tune import write
    from quire.kernels.triton.gemm_table import FEW

    if best == "now":
        print("no set is faster than what runs now: the table stays as it was", flush=True)
        return
    entries = json.loads(Path(path).read_text(encoding="utf-8"))["gemms"]
    write(path, [{**entry, "sizes": list(SETS[best])} for entry in entries if entry["form"].startswith(FEW)])
    print(f"{path} has the sizes of: {best}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[5, 8])
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--write", metavar="TABLE", help="a GEMM table that gets the fastest set's sizes")
    args = parser.parse_args()
    compile_all(args.sets)
    best = [report(rows, args.sets) for rows in args.rows]
    if args.write:
        write_best(args.write, best[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
