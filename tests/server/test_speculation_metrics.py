"""Speculation's counters reach Prometheus, by place in the draft too."""

from __future__ import annotations

from quire.server.telemetry.metrics import ServerMetrics
from quire.speculation.stats import SpeculationStats


def test_drafts_and_what_was_accepted_are_counted_by_position() -> None:
    stats = SpeculationStats()
    for tokens in (2, 3, 1):
        stats.computed(tokens)
    stats.judged([1, 1, 1], num_accepted=1)
    stats.judged([1, 1], num_accepted=2)
    figures = stats.flat()
    assert figures["spec_tokens_per_step"] == 2.0
    assert [figures[f"spec_acceptance_rate_at_{place}"] for place in (1, 2, 3)] == [1.0, 0.5, 0.0]
    text = ServerMetrics("m").render(figures).decode()
    assert 'quire:spec_accepted_tokens_by_position_total{model_name="m",position="2"} 1.0' in text
    assert 'quire:spec_draft_tokens_total{model_name="m"} 5.0' in text
    assert 'quire:spec_tokens_per_step{model_name="m"} 2.0' in text
    assert 'quire:spec_acceptance_rate{model_name="m"} 0.6' in text
