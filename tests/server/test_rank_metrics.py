"""What each rank holds and waits for reaches Prometheus and `LLM.metrics`."""

from __future__ import annotations

import time
from pathlib import Path

from quire import LLM, SamplingParams
from quire.server.telemetry.metrics import ServerMetrics
from tests.checkpoints import make_checkpoint

KINDS = ("memory_bytes", "steps", "busy_seconds", "waited_seconds")


def test_every_rank_is_counted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=64, device="cpu", num_threads=1,
             tensor_parallel_size=2, pipeline_parallel_size=2, distributed_executor_backend="threads") as llm:
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        until = time.monotonic() + 60
        while time.monotonic() < until:  # ranks tell it every quarter of a second
            figures = llm.metrics()
            if all(figures[f"rank_steps_{rank}"] == figures["steps"] for rank in range(4)):
                break
            time.sleep(0.1)
    assert {name for name in figures if name.startswith("rank_")} == {
        f"rank_{kind}_{rank}" for kind in KINDS for rank in range(4)}
    assert all(figures[f"rank_steps_{rank}"] == figures["steps"] > 0 for rank in range(4))
    assert all(0 < figures[f"rank_waited_seconds_{rank}"] < figures[f"rank_busy_seconds_{rank}"] for rank in range(4))
    lines = ServerMetrics("m").render(figures).decode().splitlines()
    assert f'quire:rank_steps_total{{model_name="m",rank="2"}} {float(figures["steps"])}' in lines
    assert sum(line.startswith("quire:rank_waiting_seconds_total{") for line in lines) == 4
    assert "# TYPE quire:rank_memory_bytes gauge" in lines
    (memory,) = [line for line in lines if line.startswith('quire:rank_memory_bytes{model_name="m",rank="0"} ')]
    assert float(memory.split()[-1]) == figures["rank_memory_bytes_0"] > 0


def test_one_process_has_no_ranks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=64, device="cpu", num_threads=1) as llm:
        figures = llm.metrics()
    assert not [name for name in figures if name.startswith("rank_")]
    assert b"quire:rank_" not in ServerMetrics("m").render(figures)
