"""Engines of several ranks on a pool: what an engine of any size has kept is a hit, to the bit, for every other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kvpool.test_disk_engine import ask, open_engine, said, units


def ranks(tensor: int, stages: int = 1) -> dict[str, Any]:
    return {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "num_threads": 1,
            "distributed_executor_backend": "threads"}


@pytest.mark.parametrize(("family", "writer", "readers"), [
    ("llama", {}, [ranks(2), ranks(3)]),
    ("gemma3", ranks(2, 2), [{"block_size": 4}, ranks(1, 2) | {"block_size": 128}, ranks(2, 2)]),
    ("qwen3_moe", ranks(3), [{}, ranks(2) | {"max_num_batched_tokens": 100}]),
])
def test_a_disk_written_at_one_size_is_read_at_another(family: str, writer: dict[str, Any],
                                                       readers: list[dict[str, Any]], models: Any,
                                                       tmp_path: Path) -> None:
    model = models(family)
    with open_engine(model, None) as llm:
        plain = ask(llm)
    with open_engine(model, tmp_path, **writer) as llm:
        assert said(ask(llm)) == said(plain)
    written = [path.read_bytes() for path in units(tmp_path)]
    assert written
    for reader in readers:
        with open_engine(model, tmp_path, **reader) as llm:
            again = ask(llm)
            assert said(again) == said(plain)
            assert again.num_cached_tokens == 512 and llm.metrics()["tier_hit_tokens"] == 512
            assert llm.metrics()["kv_disk_units_bad"] == 0
    assert [path.read_bytes() for path in units(tmp_path)] == written, "the same units, to the byte"
