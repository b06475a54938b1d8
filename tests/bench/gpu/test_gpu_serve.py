"""The bench over HTTP, with a tiny model of random weights on this CPU; and what it says where a server cannot run."""

from __future__ import annotations

import importlib.util

import pytest

from quire.bench.gpu import serve as gpu_serve
from quire.bench.gpu.cases import qwen3
from quire.errors import QuireError


def test_what_is_missing_for_a_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("zmq", "aiohttp") else found(name))
    with pytest.raises(QuireError, match="lacks zmq, aiohttp"):
        gpu_serve.measure({}, "tiny", {})


def test_the_same_work_is_done_over_http_and_through_generate() -> None:
    config = {**qwen3(32, 1, 4, 48, True), "vocab_size": 12000, "num_key_value_heads": 2, "head_dim": 8}
    line = gpu_serve.measure(config, "tiny", {"device": "cpu", "dtype": "float32"}, streams=3, tokens=8)
    assert line["streams"] == 3 and line["http"] > 0 and line["generate"] > 0
    assert "3 streams of 8 in and out" in gpu_serve.text(line)
