"""What the kernel tests share: the operations of each variant, and sequences laid out in a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.library import supported_variants
from quire.kernels.types import HeadShape, LayerCache, StepContext
from quire.ops.cpu import CpuOps


@dataclass
class Paged:
    """Sequences whose tokens are computed in the given pieces, over blocks dealt out in a shuffled order."""

    shape: HeadShape
    block_size: int
    lengths: Sequence[int]
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.qkv = [torch.randn(n, self.shape.width, generator=generator) for n in self.lengths]
        needed = [-(-n // self.block_size) for n in self.lengths]
        self.num_blocks = sum(needed) + 3
        order = torch.randperm(self.num_blocks, generator=generator).tolist()
        # Entries past a sequence's blocks must never be followed.
        self.table = torch.full((len(needed), max(needed) + 1), 2**30, dtype=torch.int32)
        for row, count in enumerate(needed):
            for column in range(count):
                self.table[row, column] = order.pop()

    def step(self, pieces: Sequence[tuple[int, int, int]]) -> tuple[Tensor, StepContext]:
        """The projections and the context of a step that computes tokens [start, end) of sequences."""
        positions = torch.cat([torch.arange(start, end) for _, start, end in pieces])
        rows = torch.tensor([row for row, _, _ in pieces])
        starts = [0]
        slots = []
        for row, start, end in pieces:
            starts.append(starts[-1] + end - start)
            index = torch.arange(start, end)
            blocks = self.table[row, index // self.block_size].long()
            slots.append(blocks * self.block_size + index % self.block_size)
        context = StepContext(
            positions=positions,
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_len=torch.tensor([end for _, _, end in pieces], dtype=torch.int32),
            block_tables=(self.table[rows].contiguous(),),
            slots=(torch.cat(slots),),
        )
        return torch.cat([self.qkv[row][start:end] for row, start, end in pieces]), context

    def attend(
        self, ops, steps, *, rope=None, q_norm=None, k_norm=None, window=None, softcap=None, cache=None
    ):
        """Outputs of every token, one [length, heads * dim] tensor per sequence, after running all steps."""
        shape = self.shape
        cache = cache or ops.allocate_cache(shape.kv, self.num_blocks, self.block_size)
        width = shape.num_heads * shape.head_dim
        outputs = [torch.full((n, width), float("nan")) for n in self.lengths]
        for pieces in steps:
            qkv, context = self.step(pieces)
            ops.rope_and_cache(qkv, cache, context, 0, shape, rope, q_norm, k_norm, 1e-6)
            out = ops.attend(qkv, cache, context, 0, shape, shape.head_dim**-0.5, window, softcap)
            at = 0
            for row, start, end in pieces:
                outputs[row][start:end] = out[at : at + end - start]
                at += end - start
        return outputs

    def whole(self) -> list[list[tuple[int, int, int]]]:
        return [[(row, 0, n) for row, n in enumerate(self.lengths)]]

    def poisoned(self, ops: CpuOps) -> LayerCache:
        """A cache whose every slot holds NaN until it is written."""
        cache = ops.allocate_cache(self.shape.kv, self.num_blocks, self.block_size)
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
        return cache


@pytest.fixture
def paged() -> type[Paged]:
    return Paged


@pytest.fixture
def ops() -> CpuOps:
    """The operations with two threads, on the best variant."""
    return CpuOps(num_threads=2)


@pytest.fixture(params=supported_variants())
def variant_ops(request: pytest.FixtureRequest) -> CpuOps:
    """The operations of each variant that this processor runs."""
    return CpuOps(num_threads=2, variant=request.param)


@pytest.fixture
def randn() -> Callable[..., Tensor]:
    """Random tensors from a seed of their own."""

    def make(*shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return make
