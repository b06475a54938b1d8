"""Times GEMMs whose thread blocks share what they load (`quire.kernels.cuda.wide_gemm`) against the kernels in use.

    python -m quire.bench.gpu.tune_wide [--rows 64 128 256 8192] [--only qkv o gate_up down] [--seconds 120]

Up to 1,024 rows a GEMM is timed behind a norm, as in a decode step, and the gate with its activation. Every candidate
is first compared with float32; one that is wrong is not timed. It runs in a child: a kernel that never ends takes that
child along, and the next child leaves it out.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from quire.bench.gpu.cases import MODELS
from quire.child import child_environment, module_command

Shape = tuple[int, ...]
"""Row blocks, features, stages, tiles of rows and of features in a cluster, parts (`WideShape`)."""
FEW: dict[str, tuple[Shape, ...]] = {
    "qkv": ((1, 96, 8, 1, 1, 2), (1, 48, 10, 1, 2, 1), (1, 64, 9, 1, 2, 1), (1, 96, 8, 1, 2, 1)),
    "o": ((1, 64, 9, 1, 1, 2), (1, 32, 11, 1, 2, 1), (1, 160, 6, 1, 1, 4)),
    "gate_up": ((1, 192, 5, 1, 2, 1), (1, 192, 5, 1, 1, 1)),
    "down": ((1, 64, 9, 1, 1, 2), (1, 32, 11, 1, 2, 1), (1, 160, 6, 1, 1, 4)),
}
MIDDLE: dict[str, tuple[Shape, ...]] = {
    "qkv": ((1, 96, 8, 1, 2, 1), (1, 96, 8, 2, 1, 1), (2, 96, 5, 1, 1, 2), (1, 128, 7, 2, 1, 1), (1, 96, 8, 2, 2, 1)),
    "o": ((2, 144, 4, 1, 1, 4), (1, 128, 7, 1, 1, 2), (2, 128, 4, 1, 1, 4), (1, 64, 9, 2, 1, 1), (2, 64, 5, 1, 1, 2)),
    "gate_up": ((2, 192, 4, 1, 2, 1), (2, 192, 4, 1, 1, 1), (2, 128, 4, 1, 2, 1), (1, 256, 4, 2, 1, 1)),
    "down": ((2, 144, 4, 1, 1, 4), (1, 128, 7, 1, 1, 2), (2, 128, 4, 1, 1, 4), (2, 64, 5, 1, 1, 2)),
}
MANY: tuple[Shape, ...] = ((1, 256, 4, 2, 1, 1), (2, 128, 4, 1, 2, 1), (2, 192, 4, 1, 2, 1), (2, 192, 4, 2, 1, 1),
                           (1, 256, 4, 1, 2, 1))
_FEW_ROWS, _MIDDLE_ROWS = 128, 1024
_LEAST_BYTES = 3e8
_SILENCE = 45.0
"""Seconds without a word after which a child is given up."""
_MODEL = "8b"


def weights_of(model: str = _MODEL) -> dict[str, tuple[int, int]]:
    config = MODELS[model]
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {"qkv": (query + 2 * key, hidden), "o": (hidden, query), "gate_up": (2 * inner, hidden),
            "down": (hidden, inner)}  # fmt: skip


def candidates(rows: int, name: str) -> tuple[Shape, ...]:
    if rows > _MIDDLE_ROWS:
        return MANY
    return FEW[name] if rows <= _FEW_ROWS else MIDDLE[name]


def called(shape: Shape) -> str:
    return " ".join(map(str, shape))


def jobs(counts: list[int], names: list[str]) -> Iterator[tuple[int, str, Shape]]:
    from quire.kernels.cuda.wide_gemm import can_compute

    weights = weights_of()
    for rows in counts:
        for name in names:
            for shape in candidates(rows, name):
                if can_compute(rows, *weights[name], variant_of(rows, name, shape)):
                    yield rows, name, shape


def gated_at(rows: int, name: str) -> bool:
    """Prefill's gate stays a kernel of its own: there the GEMM alone is timed."""
    return name == "gate_up" and rows <= _MIDDLE_ROWS


def variant_of(rows: int, name: str, shape: Shape, watched: bool = True) -> Any:
    from quire.kernels.cuda.wide_gemm import Variant, WideShape

    return Variant(WideShape(*shape), gated=gated_at(rows, name), early=True, watched=watched)


def compile_all(counts: list[int], names: list[str]) -> None:
    """In threads: the compiler does not hold Python's lock."""
    from quire.kernels.cuda import nvrtc
    from quire.kernels.cuda.wide_gemm import OPTIONS

    variants = {variant_of(*job) for job in jobs(counts, names)}
    begin = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda each: nvrtc.compiled(each.source(), OPTIONS), variants))
    print(f"{len(variants)} kernels compiled in {time.perf_counter() - begin:.1f} s", flush=True)


# ---- the child: compares and times


class Gemm:
    """One weight's shape at one number of rows: what runs now, and candidates."""

    def __init__(self, ops: Any, rows: int, name: str) -> None:
        import torch

        self.rows, self.name, self.ops = rows, name, ops
        self.features, self.width = weights_of()[name]
        self.gated, self.alone = gated_at(rows, name), rows > _MIDDLE_ROWS
        torch.manual_seed(rows)
        copies = max(2, math.ceil(_LEAST_BYTES / (self.features * self.width * 2)))
        self.weights = [torch.randn(self.features, self.width, device="cuda", dtype=torch.bfloat16) / self.width**0.5
                        for _ in range(copies)]
        self.x = torch.randn(rows, self.width, device="cuda", dtype=torch.bfloat16)
        self.gain = torch.ones(self.width, device="cuda", dtype=torch.bfloat16)
        self.packed = [ops.pack_linear(weight) for weight in self.weights]

    def input(self) -> Any:
        from quire.kernels.triton import norm

        return self.x if self.alone else norm.rms_norm(self.x, self.gain, 1e-6, pdl=True)

    def now(self, index: int) -> Any:
        found = self.ops.linear(self.input(), self.packed[index])
        return self.ops.act_mul(found, "silu") if self.gated else found

    def by(self, shape: Shape, index: int) -> Any:
        from quire.kernels.cuda.wide_gemm import linear_wide

        variant = variant_of(self.rows, self.name, shape)
        found = linear_wide(self.input(), self.weights[index], variant=variant, pdl=True, watched=True)
        if found is None:
            raise RuntimeError("the kernel cannot be made")
        return found

    def want(self) -> Any:
        import torch.nn.functional as F

        found = self.input().float() @ self.weights[0].float().t()
        return F.silu(found[:, : self.features // 2]) * found[:, self.features // 2 :] if self.gated else found

    def fault(self, shape: Shape) -> str:
        """What is wrong with a candidate; empty if nothing is."""
        import torch

        want, first, second = self.want(), self.by(shape, 0), self.by(shape, 0)
        torch.cuda.synchronize()
        wrong = ~((first.float() - want).abs() <= 2**-7 * want.abs() + 4e-3)
        if wrong.any():
            place = [int(each) for each in wrong.nonzero()[0]]
            return f"{int(wrong.sum())} of {wrong.numel()} are wrong, the first at {place}"
        return "" if torch.equal(first, second) else "not the same twice"

    def seconds(self, call: Callable[[int], Any]) -> float:
        from quire.bench.gpu.tune import graph_seconds

        return graph_seconds([partial(call, index) for index in range(len(self.weights))], repeats=9)

    def report(self, what: str, seconds: float, now: float, more: str = "") -> None:
        flops = 2 * self.rows * self.features * self.width / seconds / 1e12
        rate = self.features * self.width * 2 / seconds / 1e12
        print(f"{self.rows:5d} {self.name:8s} {what:22s} {1e6 * seconds:8.1f} us {100 * seconds / now:6.1f}% "
              f"{flops:5.0f} TFLOP/s {rate:5.2f} TB/s {more}", flush=True)


def child(counts: list[int], names: list[str], left_out: list[str]) -> None:
    import torch

    from quire.kernels.cuda import wide_gemm
    from quire.ops.triton import TritonOps

    ops = TritonOps("cuda", torch.bfloat16, pdl=True)
    best: dict[tuple[int, str], tuple[float, Shape | None]] = {}
    for rows in counts:
        for name in names:
            gemm = Gemm(ops, rows, name)
            now = gemm.seconds(gemm.now)
            gemm.report("now", now, now)
            for shape in (each for row, other, each in jobs([rows], [name])):
                job = f"{rows}/{name}/{called(shape).replace(' ', '-')}"
                if job in left_out:
                    continue
                print(f"TRY {job}", flush=True)
                fault = gemm.fault(shape)
                if fault:
                    print(f"{rows:5d} {name:8s} {called(shape):22s} {fault}", flush=True)
                    continue
                seconds = gemm.seconds(partial(gemm.by, shape))
                variant = variant_of(rows, name, shape)
                clusters = wide_gemm.clusters_at_once(variant, torch.cuda.current_device())
                gemm.report(called(shape), seconds, now, f"{clusters} clusters at once")
                best[rows, name] = min(best.get((rows, name), (now, None)), (seconds, shape), key=lambda each: each[0])
            del gemm
        if rows <= _MIDDLE_ROWS and len(names) == len(weights_of()):
            print(f"TRY {rows}/layer", flush=True)
            if f"{rows}/layer" not in left_out:
                Layer(ops, rows, {name: best.get((rows, name), (0.0, None))[1] for name in names}).report()
        torch.cuda.empty_cache()


class Layer:
    """The GEMMs of a layer with norms and gate, as a decode step has them but for attention: as it is now, and with the
    fastest candidates, each with its gate."""

    COPIES = 4

    def __init__(self, ops: Any, rows: int, shapes: dict[str, Shape | None]) -> None:
        import torch

        self.ops, self.rows, self.shapes = ops, rows, shapes
        sizes = weights_of()
        self.packed = [
            {name: ops.pack_linear(torch.randn(*size, device="cuda", dtype=torch.bfloat16) / size[1] ** 0.5)
             for name, size in sizes.items()}
            for _ in range(self.COPIES)]  # fmt: skip
        hidden, query = sizes["o"]
        self.residual = torch.zeros(rows, hidden, device="cuda", dtype=torch.bfloat16)
        self.attended = torch.randn(rows, query, device="cuda", dtype=torch.bfloat16)
        self.gain = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    def gemm(self, wide: bool, x: Any, name: str, index: int) -> Any:
        from quire.kernels.cuda.wide_gemm import linear_wide

        packed, shape, gated = self.packed[index][name], self.shapes[name], name == "gate_up"
        if wide and shape is not None:
            variant = variant_of(self.rows, name, shape)
            return linear_wide(x, packed.weight, variant=variant, pdl=True, watched=True)
        found = self.ops.linear(x, packed)
        return self.ops.act_mul(found, "silu") if gated else found

    def run(self, wide: bool, index: int) -> Any:
        x = self.gemm(wide, self.attended, "o", index)
        x = self.ops.add_rms_norm(x, self.residual, self.gain, 1e-6)
        x = self.gemm(wide, self.gemm(wide, x, "gate_up", index), "down", index)
        return self.gemm(wide, self.ops.add_rms_norm(x, self.residual, self.gain, 1e-6), "qkv", index)

    def report(self) -> None:
        from quire.bench.gpu.tune import graphs_seconds

        ways: list[list[Callable[[], Any]]] = [
            [partial(self.run, wide, index) for index in range(self.COPIES)] for wide in (False, True)]
        now, wide = graphs_seconds(ways, rounds=15)
        print(f"{self.rows:5d} layer    now {1e6 * now:.1f} us, with the fastest {1e6 * wide:.1f} us "
              f"({100 * wide / now:.1f}%): {self.shapes}", flush=True)


# ---- the parent: hears the child, gives it up when it is silent


def watch(words: list[str], left_out: list[str], until: float) -> str | None:
    """Run a child; the job that it was at when it failed or fell silent, None if it came to its end."""
    command = module_command("quire.bench.gpu.tune_wide", "--child", *words, "--leave-out", *left_out, "-")
    process = subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()

    def hear() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=hear, daemon=True).start()
    job = "start"
    try:
        while time.monotonic() < until:
            line = lines.get(timeout=min(_SILENCE, max(0.1, until - time.monotonic())))
            if line is None:
                return None if process.wait() == 0 else job
            if line.startswith("TRY "):
                job = line.split()[1]
            else:
                print(line, end="", flush=True)
    except queue.Empty:
        print(f"silent at {job}", flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    return job


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 128, 64, 8192])
    parser.add_argument("--only", nargs="+", default=list(weights_of()), choices=list(weights_of()))
    parser.add_argument("--seconds", type=float, default=120.0, help="give up after so many (default: 120)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--leave-out", nargs="*", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.rows, args.only, args.leave_out)
        return 0
    until, left_out = time.monotonic() + args.seconds, list[str]()
    compile_all(args.rows, args.only)
    words = ["--rows", *map(str, args.rows), "--only", *args.only]
    while time.monotonic() < until:
        failed = watch(words, left_out, until)
        if failed is None:
            return 0
        print(f"failed: {failed}", flush=True)
        if failed == "start":
            return 1
        left_out.append(failed)
    return 1


if __name__ == "__main__":
    sys.exit(main())
