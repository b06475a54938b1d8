"""The bench of single kernels has a line for every product, and for attention over both kinds of cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import machine
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
        lines = [each.against(Ceilings(1e12, 1e9)) for each in kernels.measure(str(tmp_path), quantization, threads=1)]
        formats[quantization] = {line["kernel"]: line["format"] for line in lines}
    assert (formats["file"]["up"], formats["int8"]["up"]) == ("int4", "int4"), "the file's own bits"
    assert (formats["file"]["head"], formats["int8"]["head"]) == (formats[None]["head"], "int8")
    assert "int" not in formats[None]["up"]
    products = [(line["kernel"], line["rows"]) for line in lines if line["kernel"] != "attention"]
    assert products == [(name, rows) for name in ("qkv", "out", "up", "down", "head") for rows in kernels.ROWS]
    floats, codes = [line for line in lines if line["kernel"] == "attention"]
    assert (floats["format"], codes["format"]) == ("float32", "int8") and floats["context"] == codes["context"] == 40
    assert all(line["us"] > 0 and line["share_of_limit"] > 0 for line in lines)


def test_what_is_read_faster_than_memory_gives_it_is_limited_by_its_operations() -> None:
    """A weight in a cache would have a share of the limit far above 1, which says nothing."""
    ceilings = Ceilings(read_bytes_per_s=1e9, flops_per_s=1e9)
    timed = kernels.Timed({"kernel": "up"}, seconds=1.0, nbytes=800_000_000, macs=100_000_000, rate=4)
    assert timed.against(ceilings) == {"kernel": "up", "us": 1e6, "GMAC_s": 0.1, "GB_s": 0.8, "share_of_limit": 0.8,
                                       "limit": "bandwidth"}
    cached = kernels.Timed({}, seconds=0.5, nbytes=800_000_000, macs=100_000_000, rate=4).against(ceilings)
    assert (cached["share_of_limit"], cached["limit"]) == (0.1, "operations (in a cache)")
    many = kernels.Timed({}, seconds=1.0, nbytes=1000, macs=1_000_000_000, rate=4).against(ceilings)
    assert (many["share_of_limit"], many["limit"]) == (0.5, "operations")


def test_the_rate_is_at_least_that_of_one_thread_times_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that get in each other's way, as on two hardware threads of one core, set no ceiling."""
    used = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: used.append(count))
    monkeypatch.setattr(machine, "_best", lambda action, seconds: 1.0 if used[-1] == 4 else 0.8)
    found = machine.measure_ceilings()
    assert found.flops_per_s == pytest.approx(2 * 256 * 1024 * 1024 * 4 / 0.8)
    assert found.read_bytes_per_s == pytest.approx(4 * (1 << 24) / 0.8), "one thread may read faster than four"
    assert used[-1] == 4, "as it was"
    assert found.or_higher(Ceilings(1.0, 1e15)) == Ceilings(found.read_bytes_per_s, 1e15)
