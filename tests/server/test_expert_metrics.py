"""What each expert did reaches Prometheus and `LLM.metrics`, as many rows as there were."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.layers.spec import MoeSpec
from quire.server.telemetry.metrics import ServerMetrics
from tests.checkpoints import make_checkpoint


def test_rows_of_every_expert_are_counted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=64)
    llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    figures = llm.metrics()
    spec = llm._running_engine.spec
    experts = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    rows = {name: value for name, value in figures.items() if name.startswith("expert_rows_")}
    # The last token of each is drawn and never computed.
    assert sum(rows.values()) == (3 + 2 + 2 * 3) * sum(mlp.router.top_k for mlp in experts)
    assert len(rows) == experts[0].router.num_experts and figures["expert_imbalance"] >= 1.0
    text = ServerMetrics("m").render(figures).decode()
    assert f'quire:expert_tokens_total{{expert="2",model_name="m"}} {float(rows["expert_rows_2"])}' in text.replace(
        'model_name="m",expert="2"', 'expert="2",model_name="m"')
    assert 'quire:expert_imbalance{model_name="m"}' in text


def _rows(folder: Path, **options: Any) -> tuple[list[tuple[int, ...]], dict[str, int | float]]:
    """Tokens, and what the experts did once all ranks have told it."""
    with LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, device="cpu", num_threads=1, **options) as llm:
        found = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        rows: dict[str, int | float] = {}
        for _ in range(100):
            before, rows = rows, {name: n for name, n in llm.metrics().items() if name.startswith("expert_")}
            if rows and rows == before:
                break
            time.sleep(0.6)  # ranks tell it every quarter of a second
        return [tuple(output.outputs[0].token_ids) for output in found], rows


@pytest.mark.parametrize(("tensor_size", "num_stages"), [(3, 1), (2, 2)])
def test_ranks_that_share_the_experts_count_the_same_rows(tmp_path: Path, tensor_size: int, num_stages: int) -> None:
    """Seven experts are no whole number for a rank."""
    make_checkpoint(tmp_path, "mixtral", num_local_experts=7, num_experts_per_tok=2)
    alone = _rows(tmp_path)
    assert sum(count for name, count in alone[1].items() if name.startswith("expert_rows_")) == (3 + 2 + 2 * 5) * 2 * 3
    assert _rows(tmp_path, tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages,
                 distributed_executor_backend="threads") == alone


def test_a_ready_engine_knows_the_experts_of_all_its_ranks(tmp_path: Path) -> None:
    """Else the page, which asks once which layers have experts, would show none, or those of some stages."""
    make_checkpoint(tmp_path, "mixtral", num_local_experts=7)
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=64, device="cpu", num_threads=1,
             pipeline_parallel_size=3, distributed_executor_backend="threads") as llm:
        assert [load.layer for load in llm._core.executor.expert_load()] == [0, 1, 2]
        assert [llm.metrics()[f"expert_rows_{expert}"] for expert in range(7)] == [0] * 7
