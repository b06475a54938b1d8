"""What each expert did reaches Prometheus and `LLM.metrics`, as many rows as there were."""

from __future__ import annotations

from pathlib import Path

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
