"""The clock around the kernels counts their calls and time, and changes nothing they return."""

from __future__ import annotations

import pytest
import torch

from quire.bench.cpu.python import ClockedLibrary
from quire.kernels.cpu import library
from quire.ops.cpu import CpuOps


def test_calls_are_counted_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 32)
    expected = CpuOps(num_threads=1).act(x, "silu")
    monkeypatch.setattr(library, "opener", ClockedLibrary)
    ops = CpuOps(num_threads=1)
    calls, seconds = ClockedLibrary.calls, ClockedLibrary.seconds
    assert torch.equal(ops.act(x, "silu"), expected)
    assert ClockedLibrary.calls == calls + 1 and ClockedLibrary.seconds >= seconds
