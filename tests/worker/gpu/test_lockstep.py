"""Rows in lockstep on a GPU's kernels, run by Triton's interpreter: the tokens of a CPU's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.models.build import build_decoder, dummy_weights
from quire.ops.cpu import CpuOps
from quire.training import lockstep, rows
from tests.training.test_lockstep import spoken
from tests.worker.gpu import engines

pytest.importorskip("triton")
CONFIG = {**engines.QWEN3, "num_hidden_layers": 1, "vocab_size": 61}
JOBS = [(i, [(7 * i + 3 * j) % 61 for j in range(n)], 0.0, 4 - i) for i, n in enumerate((9, 2, 12))]


def _answers(ops: Any) -> list[list[int]]:
    decoder = build_decoder(CONFIG, dummy_weights(CONFIG), ops, max_model_len=64)
    target = SimpleNamespace(decoder=decoder, device=torch.device("cpu"))
    found = spoken(lockstep.Lockstep(rows.Rows(target, 2, 64, 0), ()), JOBS)  # type: ignore[arg-type]
    return [found[i].tokens for i in range(len(JOBS))]


def test_rows_on_the_kernels_say_what_they_say_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    for module in (rows, lockstep):  # the interpreter is slow
        monkeypatch.setattr(module, "CHUNK", 2)
    from quire.ops.triton import TritonOps

    assert _answers(TritonOps("cpu", torch.float32)) == _answers(CpuOps(num_threads=1))
