"""`quire bench accuracy --device cuda` with its kernels interpreted: formats differ from bf16 as their roundings do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.bench.cpu.accuracy import Asked, divergence_of
from quire.bench.gpu import format_accuracy
from quire.errors import QuireError
from tests.integer_checkpoints import AWQ, awq, write_checkpoint


def test_a_cache_in_fp8_is_near_one_in_bf16(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, awq(), AWQ, num_hidden_layers=1)
    with torch.inference_mode():
        plain, narrow = (format_accuracy._decoder(name, str(tmp_path), "cpu") for name in ("bfloat16", "fp8-kv"))
        assert 0 < divergence_of(narrow, plain, [[3, 14, 15]])["kl"] < 0.05


def test_a_format_of_a_cpu_is_refused() -> None:
    with pytest.raises(QuireError, match="int8-kv is of a CPU"):
        next(format_accuracy.measure(Asked("m", (), None, None), ["int8-kv"], 0, "cpu"))
