"""The bench of single kernels has a line for every product, and for attention over both kinds of cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.bench.cpu import kernels
from quire.machine import Ceilings
from tests.integer_checkpoints import awq, write_checkpoint


def test_every_kernel_has_its_share_of_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SECONDS", 1e-4)
    monkeypatch.setattr(kernels, "CONTEXTS", (40,))
    write_checkpoint(tmp_path, awq(), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm",
                                       "zero_point": True})
    formats = {}
    for quantization in (None, "file", "int8"):
        lines = list(kernels.measure(str(tmp_path), quantization, Ceilings(1e8, 1e9), threads=1))
        formats[quantization] = {line["kernel"]: line["format"] for line in lines}
    assert (formats["file"]["up"], formats["int8"]["up"]) == ("int4", "int4"), "the file's own bits"
    assert (formats["file"]["head"], formats["int8"]["head"]) == (formats[None]["head"], "int8")
    assert "int" not in formats[None]["up"]
    products = [(line["kernel"], line["rows"]) for line in lines if line["kernel"] != "attention"]
    assert products == [(name, rows) for name in ("qkv", "out", "up", "down", "head") for rows in kernels.ROWS]
    floats, codes = [line for line in lines if line["kernel"] == "attention"]
    assert (floats["format"], codes["format"]) == ("float32", "int8") and floats["context"] == codes["context"] == 40
    assert all(line["us"] > 0 and line["share_of_limit"] > 0 for line in lines)
