"""Decode attention in clusters (`attention_cluster.cu`) without a GPU: compiled for this machine and run there thread
by thread, compared with attention in float64; and compiled for Hopper, where the compiler must find registers."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels.cuda import nvrtc
from quire.kernels.cuda.attention_cluster import _REGISTERS, OPTIONS, ClusterSizes, Variant, sizes_for, takes
from quire.kernels.decode_lengths import SHORT_SEQUENCES
from quire.kernels.triton.attention_decode import LOG2_E
from quire.kernels.types import HeadShape, HeadTurn, pair_cache
from tests.kernels.cuda.ptxas import expect_no_spills

EPS, SCALE, DIM = 1e-6, 0.088, 128
HARNESS = Path(__file__).with_name("cluster_harness.cpp")
ENGINE = Variant(ClusterSizes(8, 4), 8, 2, 16, norm=True, early=True)


class Step:
    """A decode step of sequences of these lengths (0: padding), whose blocks lie in any order."""

    def __init__(self, variant: Variant, lengths: list[int], named: bool) -> None:
        torch.manual_seed(sum(lengths))
        kv, page, self.variant = variant.kv_heads, variant.page, variant
        self.lengths, count = lengths, len(lengths)
        most = -(-max(lengths) // page) + 1
        table_rows = count + 2 if named else count
        pages = table_rows * most
        self.tables = torch.randperm(pages, dtype=torch.int32).view(table_rows, most)
        self.rows = torch.randperm(table_rows, dtype=torch.int32)[:count] if named else None
        heads = kv * (variant.group + 2)
        self.q_stride = heads * DIM + 16  # rows of a wider tensor
        self.qkv = 2 * torch.randn(count, self.q_stride).bfloat16()
        self.k, self.v = (torch.randn(pages, kv, page, DIM).bfloat16() for _ in range(2))
        self.gains = [torch.rand(DIM) + 0.5 for _ in range(2)] if variant.norm else []
        angles = torch.rand(max(lengths) + 1, DIM // 2) * 6
        self.rope = torch.cat((angles.cos(), angles.sin()), 1)
        # Keys that no sequence has are not to be read.
        for seq, length in enumerate(lengths):
            row = self.tables[seq if self.rows is None else int(self.rows[seq])]
            for part in (self.k, self.v):
                for position in range(max(length - 1, 0), most * page):
                    part[int(row[position // page]), :, position % page] = float("nan")

    def run(self, folder: Path, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Output and both caches, as the kernel leaves them."""
        variant = self.variant
        source = variant.source()
        kernel, program = folder / "kernel.cu", folder / "kernel"
        kernel.write_text(source[source.index("// Decode attention of few sequences") :])
        defined = [f"-D{name}={value}" for name, value in re.findall(r"#define (\w+) (\d+)", source)]
        command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", f'-DKERNEL="{kernel}"', *defined,
                   f"-DSHARED={variant.shared}", "-o", str(program), str(HARNESS)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        tensors = [self.qkv, self.k, self.v, *self.gains, self.tables, *([] if self.rows is None else [self.rows]),
                   lengths, self.rope]  # fmt: skip
        given = [len(self.lengths), len(self.tables), len(self.k), len(self.rope), EPS, SCALE * LOG2_E, window,
                 self.q_stride, self.tables.shape[1], int(self.rows is not None)]  # fmt: skip
        data = b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in tensors)
        ran = subprocess.run([str(program), *map(str, given)], input=data, capture_output=True)
        assert ran.returncode == 0, ran.stderr
        found = torch.frombuffer(bytearray(ran.stdout), dtype=torch.bfloat16)
        out, k, v = found.split([found.numel() - 2 * self.k.numel(), self.k.numel(), self.k.numel()])
        return out.view(len(self.lengths), -1, DIM), k.view_as(self.k), v.view_as(self.v)

    def turned(self, heads: Tensor, gain: int, position: int) -> Tensor:
        heads = heads.double()
        if self.gains:
            heads = heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt() * self.gains[gain].double()
        (low, high), (cos, sin) = heads.chunk(2, -1), self.rope[position].double().chunk(2)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).bfloat16()

    def check(self, found: tuple[Tensor, Tensor, Tensor], window: int) -> None:
        """Against attention over keys one by one; the cache has changed in the steps' own places only."""
        out, k_cache, v_cache = found
        kv, page, group = self.variant.kv_heads, self.variant.page, self.variant.group
        k_want, v_want = self.k.clone(), self.v.clone()
        for seq, length in enumerate(self.lengths):
            if not length:
                assert out[seq].isnan().all()  # nothing is written
                continue
            row = self.tables[seq if self.rows is None else int(self.rows[seq])]
            own = self.qkv[seq, : kv * (group + 2) * DIM].view(-1, DIM)
            q, k, v = own.split([kv * group, kv, kv])
            newest = length - 1
            place = int(row[newest // page]), slice(None), newest % page
            k_want[place], v_want[place] = self.turned(k, 1, newest), v
            k_found = k_cache[place]
            torch.testing.assert_close(k_found.float(), k_want[place].float(), rtol=2**-7, atol=1e-3)
            k_want[place] = k_found
            seen = range(max(0, length - window), length)
            blocks, within = [int(row[each // page]) for each in seen], [each % page for each in seen]
            keys, values = (part[blocks, :, within].double() for part in (k_cache, v_want))
            queries = self.turned(q, 0, newest).double().view(kv, group, DIM)
            weights = torch.softmax(torch.einsum("hgd,khd->hgk", queries, keys) * SCALE, -1)
            want = torch.einsum("hgk,khd->hgd", weights, values).view(-1, DIM)
            torch.testing.assert_close(out[seq].double(), want, rtol=0.01, atol=0.01)
        for part, want in ((k_cache, k_want), (v_cache, v_want)):
            assert torch.equal(part.view(torch.int16), want.view(torch.int16))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("variant", "lengths", "window", "named"),
    [
        (Variant(ClusterSizes(8, 2), 2, 2, 16, True, True), [257, 1, 0, 300], 1 << 30, True),  # one tile each; two
        (Variant(ClusterSizes(8, 1), 1, 7, 32, False, True), [16, 17, 400], 1 << 30, False),
        (Variant(ClusterSizes(4, 2), 2, 4, 64, True, False), [129, 128, 500], 200, False),
        (Variant(ClusterSizes(2, 2), 1, 5, 16, True, True), [33, 210], 1 << 30, False),
        (Variant(ClusterSizes(1, 4), 3, 1, 16, True, True), [80, 65], 48, True),
        (Variant(ClusterSizes(8, 8), 1, 3, 16, True, True), [5, 1100], 1 << 30, False),  # tiles for each warp, and more
    ],
)  # fmt: skip
def test_an_emulated_cluster_attends(
    tmp_path: Path, variant: Variant, lengths: list[int], window: int, named: bool
) -> None:
    step = Step(variant, lengths, named)
    step.check(step.run(tmp_path, window), window)


def engine_variants() -> list[Variant]:
    """Of Qwen3-0.6B and 4B; and with other groups."""
    found = []
    for count in (1, 2):
        sizes = sizes_for(count)
        assert sizes is not None
        found += [replace(ENGINE, sizes=sizes, group=group) for group in (2, 4)]
    return [*found, replace(ENGINE, group=5), replace(ENGINE, kv_heads=4, group=7, norm=False)]


def test_no_kernel_spills_registers(tmp_path: Path) -> None:
    expect_no_spills(engine_variants(), tmp_path)


def test_the_compiler_that_engines_have_takes_every_kind_of_kernel() -> None:
    library = nvrtc._library()
    if library is None:
        pytest.skip("needs NVRTC")
    for variant in engine_variants()[::4]:
        assert nvrtc._compile(library, variant.source(), OPTIONS)


def test_blocks_of_few_sequences_run_at_the_same_time() -> None:
    """On 132 multiprocessors with 65,536 registers, eight KV heads."""
    for count in range(1, SHORT_SEQUENCES + 1):
        sizes = sizes_for(count)
        assert sizes is not None
        together = 65536 // (_REGISTERS * 32 * sizes.warps)
        assert count * 8 * sizes.cluster <= 132 * together
    assert not sizes_for(SHORT_SEQUENCES + 1) and not sizes_for(0)


def test_what_has_no_kernel_is_declined() -> None:
    def known(num_heads: int = 16, dim: int = 128, page: int = 16, dtype: torch.dtype = torch.bfloat16,
              gain: torch.dtype = torch.float32, sinks: bool = False, stored: torch.dtype = torch.bfloat16) -> bool:
        pages = torch.zeros(2, 8, page, dim, dtype=stored)
        turn = HeadTurn(torch.zeros(4, dim), torch.ones(dim, dtype=gain), torch.ones(dim, dtype=gain), EPS,
                        torch.zeros(num_heads) if sinks else None)  # fmt: skip
        return takes(dtype, HeadShape(num_heads, 8, dim), turn, pair_cache(pages, pages, page))

    assert known() and known(num_heads=56, page=64)
    assert not known(num_heads=64) and not known(dim=64) and not known(page=8) and not known(dtype=torch.float16)
    assert not known(gain=torch.bfloat16) and not known(sinks=True) and not known(stored=torch.float8_e4m3fn)
