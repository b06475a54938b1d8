"""`quire bench gpu --row-sizes 16,8,1,3,3,0 32,4,1,2,5,0,4`: given sizes of the kernel of one row of int4, on a model's
down projection: alone, and behind its gate and up as the table has them, where a kernel begins as the one before ends.

Sizes are as in the GEMM table (`quire.kernels.triton.codes_row.CodesRowShape`). Each is compiled by a process of its
own and compared with the weight in floats before it is timed; all are timed in turns.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from quire.bench.gpu.cases import READ_BANDWIDTH
from quire.bench.gpu.tune import graphs_seconds, weights_of
from quire.child import child_environment, module_command
from quire.errors import QuireError

_LAYERS = 6
"""Whose weights are too large for the cache."""
_GROUP = 128
_MOST_ERROR = 0.01


def measure(models: list[str], sizes: list[str], note: Callable[[dict[str, Any]], None]) -> None:
    for model in models:
        if [form for form, *_ in weights_of(model)] != ["norm", "plain", "gated", "plain", "norm"]:
            raise QuireError(f"--row-sizes times dense models only, and {model} has experts: name others with --models")
    here = module_command("quire.bench.gpu.row_sizes")
    compiling = [subprocess.Popen([*here, model, each], env=child_environment()) for model in models for each in sizes]
    for process in compiling:
        process.wait()
    for model in models:
        layers = _Layers(model, _LAYERS)
        right = [each for each in sizes if layers.is_right(each)]
        alone = graphs_seconds([layers.calls(each, False) for each in right])
        behind = graphs_seconds([layers.calls(each, True) for each in right])
        limit = round(1e6 * layers.down[0].nbytes / READ_BANDWIDTH, 2)
        for each, first, both in zip(right, alone, behind, strict=True):
            note({"bench": "gpu", "case": "row sizes", "model": model, "sizes": each, "limit_us": limit,
                  "alone_us": round(1e6 * first, 2), "with_gate_us": round(2e6 * both, 2)})


def text(line: dict[str, Any]) -> str:
    return (f"{line['model']:>4} {line['sizes']:<22} alone {line['alone_us']} us (limit {line['limit_us']}), "
            f"with gate and up {line['with_gate_us']} us")


class _Layers:
    """Gate and up, and down, of some layers, of random codes."""

    def __init__(self, model: str, count: int) -> None:
        import torch

        from quire.kernels.triton.codes_row import CodesRowShape, fits
        from quire.kernels.triton.gemm_table import GATED, INT4, lookup
        from quire.kernels.triton.linear_prefetch import PrefetchScratch

        _, _, (_, halves, hidden), (_, _, inner), _ = weights_of(model)
        self.scratch = PrefetchScratch.allocate("cuda")
        self.down = [_random_codes(hidden, inner) for _ in range(count)]
        self.gate = [_random_codes(halves, hidden) for _ in range(count)]
        choice = lookup(1, halves, hidden, torch.bfloat16, INT4 + GATED)
        self.gate_sizes = CodesRowShape(*choice.sizes)
        if choice.kernel != "codes_row" or not fits(self.gate[0], self.gate_sizes, True, True):
            raise QuireError(f"gate and up of {model} do not run this kernel")
        self.x, self.inner = (torch.randn(1, size, device="cuda").bfloat16() for size in (hidden, inner))
        self.gain = torch.ones(hidden, device="cuda").bfloat16()

    def run_down(self, sizes: str, layer: int) -> Any:
        from quire.kernels.triton.codes_row import CodesRowShape, fits, linear_codes_row

        shape = CodesRowShape(*map(int, sizes.split(",")))
        if not fits(self.down[layer], shape, scratch=self.scratch):
            raise ValueError(f"the kernel does not take these sizes: {sizes}")
        return linear_codes_row(self.inner, self.down[layer], None, self.x, sizes=shape, scratch=self.scratch, pdl=True)

    def run_gate(self, layer: int) -> Any:
        from quire.kernels.triton.codes_row import linear_codes_row

        return linear_codes_row(self.x, self.gate[layer], norm=self.gain, eps=1e-6, gated="silu",
                                sizes=self.gate_sizes, scratch=self.scratch, pdl=True)

    def calls(self, sizes: str, gated: bool) -> list[Callable[[], Any]]:
        found: list[Callable[[], Any]] = []
        for layer in range(len(self.down)):
            found += [partial(self.run_gate, layer)] * gated + [partial(self.run_down, sizes, layer)]
        return found

    def is_right(self, sizes: str) -> bool:
        from quire.kernels.triton.linear_codes import unpacked

        want = self.inner.float() @ unpacked(self.down[0]).float().t() + self.x.float()
        try:
            error = float((self.run_down(sizes, 0).float() - want).norm() / want.norm())
        except Exception as problem:
            print(f"{sizes}: {problem!r}"[:400], file=sys.stderr)
            return False
        if error > _MOST_ERROR:
            print(f"{sizes}: the result is wrong by {error:.3f}", file=sys.stderr)
        return error <= _MOST_ERROR


def _random_codes(features: int, width: int) -> Any:
    import torch

    from quire.kernels.triton.linear_codes import PackedCodes

    words = torch.randint(-(1 << 31), 1 << 31, (features // 4, width // 2), dtype=torch.int32, device="cuda")
    scales = torch.rand(width // _GROUP, features, device="cuda") / 64 + 0.01
    pairs = torch.stack([scales.bfloat16(), torch.zeros_like(scales).bfloat16()], -1).view(torch.int32).squeeze(-1)
    return PackedCodes(words, pairs, features, width, _GROUP, torch.bfloat16, offsets=False)


if __name__ == "__main__":
    _Layers(sys.argv[1], 1).is_right(sys.argv[2])
