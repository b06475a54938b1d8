"""`quire bench accuracy --device cuda` with its kernels interpreted: formats differ from bf16 as their roundings do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.bench.checkpoints import layouts
from quire.bench.cpu.accuracy import Asked, divergence_of
from quire.bench.gpu import format_accuracy
from quire.errors import QuireError
from quire.eval import data
from tests.integer_checkpoints import AWQ, awq, write_checkpoint
from tests.models.loader.tiny_gguf import tiny_model, write_gguf


def test_a_cache_in_fp8_is_near_one_in_bf16(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, awq(), AWQ, num_hidden_layers=1)
    with torch.inference_mode():
        plain, narrow = (format_accuracy._decoder(name, str(tmp_path), "cpu") for name in ("bfloat16", "fp8-kv"))
        assert 0 < divergence_of(narrow, plain, [[3, 14, 15]])["kl"] < 0.05


def test_a_format_of_a_cpu_is_refused() -> None:
    with pytest.raises(QuireError, match="int8-kv is of a CPU"):
        next(format_accuracy.measure(Asked("m", (), None, None), ["int8-kv"], 0, "cpu"))


def test_layouts_of_a_file_are_near_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of 64 and 96: blocks of 128 columns do not fill them, nor do those of K-quants."""
    write_gguf(tmp_path / "model.gguf", "llama", tiny_model("llama", num_hidden_layers=1))
    rows = [{"request": {"context": "\u0103", "continuation": f"\u0104{chr(0x106 + i)}"}} for i in range(2)]
    monkeypatch.setattr(data, "rows", lambda name: iter(rows))
    monkeypatch.setattr(layouts, "texts", lambda count: ["\u0103\u0104\u0105\u0106"])
    files = ("fp8-blocks", "compressed-int8", "q6_k", "gptq", "mxfp4", "mxfp4-experts")
    asked = Asked(str(tmp_path / "model.gguf"), ("lambada",), None, None, files=files)
    kl = {line["format"]: line["kl"] for line in format_accuracy.measure(asked, [], 1, "cpu") if line["task"] == "kl"}
    assert tuple(kl) == files
    assert all(0 < found < 0.3 for found in kl.values()), kl
    assert kl["q6_k"] < kl["gptq"]
    assert kl["mxfp4-experts"] < kl["mxfp4"]  # the MLP's matrices alone
