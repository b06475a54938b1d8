"""Packed weights lie side by side, each at a cache line of its own."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.library import load
from quire.kernels.quantized import Rounding
from quire.ops.cpu import CpuOps
from quire.ops.cpu_panels import PanelMemory

MIB = 1 << 20


def test_small_weights_lie_side_by_side_in_whole_huge_pages() -> None:
    memory = PanelMemory(load())
    places = [memory.keep(memory.room(nbytes)) for nbytes in (1000, 64, MIB + 1, 3 * MIB)]
    starts = [each.data_ptr() for each in places]
    assert [each.nbytes for each in places] == [1000, 64, MIB + 1, 3 * MIB]
    assert starts[0] % (2 * MIB) == 0
    assert [start - starts[0] for start in starts] == [0, 1024, 1088, 1088 + MIB + 64]


def test_room_that_is_not_kept_is_room_for_the_next() -> None:
    memory = PanelMemory(load())
    tried = memory.room(5000)
    assert memory.room(700).data_ptr() == tried.data_ptr()
    assert memory.room(0).nbytes == 0


@pytest.mark.parametrize("nbytes", [5 * MIB, 40 * MIB])
def test_large_weights_have_memory_of_their_own(nbytes: int) -> None:
    memory = PanelMemory(load())
    first = memory.keep(memory.room(100))
    large = memory.keep(memory.room(nbytes))
    after = memory.keep(memory.room(100))
    assert large.nbytes == nbytes and large.data_ptr() % 64 == 0
    assert after.data_ptr() == first.data_ptr() + 128


def test_many_weights_keep_their_numbers() -> None:
    """Over several chunks, in every format that a weight is tried in before the one that holds it."""
    ops = CpuOps(1)
    made = torch.Generator().manual_seed(3)
    weights = [torch.randn(256 + 16 * place, 512, generator=made) for place in range(80)]
    packed = [ops.pack_linear(weight) for weight in weights]
    assert sum(each.nbytes for each in packed) > 70 * MIB
    rows = torch.randn(2, 512, generator=made)
    for weight, each in zip(weights, packed, strict=True):
        torch.testing.assert_close(ops.linear(rows, each), rows @ weight.T, rtol=1e-4, atol=1e-4)


def test_weights_of_different_formats_lie_side_by_side() -> None:
    """Floats that need few bytes and many, and integers, in turns."""
    ops = CpuOps(1, rounding=Rounding(8))
    made = torch.Generator().manual_seed(4)
    wholes = torch.randint(-7, 8, (4, 64, 512), generator=made) * 0.25
    floats = [each for whole in wholes for each in (whole, torch.randn(48, 512, generator=made))]
    weights = [ops.quantized(each) if place % 3 == 2 else each for place, each in enumerate(floats)]
    packed = [ops.pack_linear(each) if isinstance(each, torch.Tensor) else ops.pack_quantized([each])
              for each in weights]
    assert len({each.format for each in packed}) == 3
    rows = torch.randn(2, 512, generator=made)
    for weight, each in zip(floats, packed, strict=True):
        error = (ops.linear(rows, each) - rows @ weight.T).norm() / (rows @ weight.T).norm()
        assert error < (0.03 if each.format.startswith("int") else 1e-5)
