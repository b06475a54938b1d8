"""The comparison of policies runs to the end, and its figures follow from the times of the tokens."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.bench.scheduling import policies
from quire.bench.scheduling.arrivals import Story
from quire.config import EngineConfig
from quire.errors import QuireError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    policies.add_arguments(parser)
    return parser.parse_args(words)


def small(model: str, *words: str) -> argparse.Namespace:
    return parsed("--model", model, "--load-format", "dummy", "--requests", "6", "--rate", "50", "--prompt-tokens", "8",
                  "60", "--output-tokens", "4", "12", "--batch", "3", "--chunk", "16", "--num-threads", "1", *words)


def test_every_policy_is_measured_shown_and_drawn(
    dummy_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "timeline.svg"
    assert policies.run(small(dummy_model, "--itl-slo-ms", "500", "--plot", str(plot))) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in printed if line.startswith("{")]
    names = ["static", "prefill-first", "decode-first, whole prompts", "decode-first, chunks of 16",
             "decode-first, bound of 500 ms"]
    assert [line["policy"] for line in lines] == names
    for line in lines:
        assert line["output_tok_s"] > 0 and 0 <= line["gaps_within_slo"] <= 1
        assert line["ttft_ms_p50"] <= line["ttft_ms_p99"] <= line["ttft_ms_max"]
        assert line["itl_ms_p50"] <= line["itl_ms_p99"] <= line["itl_ms_max"]
    assert all(any(row.startswith(name) for row in printed) for name in names)
    drawn = ElementTree.parse(plot).getroot()
    assert [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text") if t.text in names] == names


def test_without_a_bound_one_is_found_by_measuring(dummy_model: str) -> None:
    assert 0 < policies._calibrate(small(dummy_model)) < 60_000


def test_the_contenders_are_engine_options_that_hold_the_workload() -> None:
    for contender in policies.contenders(batch=8, chunk=64, longest=4000, slo_ms=100.0):
        options = EngineConfig.create(**contender.options).scheduler
        if not options.enable_chunked_prefill:
            assert options.max_num_batched_tokens is not None and options.max_num_batched_tokens >= 8 * 4000


def test_the_summary_counts_from_arrival_and_between_tokens() -> None:
    stories = [Story(1.0, 1.5, [2.0, 2.1, 2.4]), Story(0.0, 0.0, [4.0])]
    found = policies.summary(stories, bound=0.2)
    assert found["output_tok_s"] == 1.0 and found["seconds"] == 4.0
    assert (found["ttft_ms_mean"], found["ttft_ms_p50"], found["ttft_ms_max"]) == (2500.0, 1000.0, 4000.0)
    assert (found["itl_ms_mean"], found["itl_ms_max"], found["gaps_within_slo"]) == (200.0, 300.0, 0.5)


def test_one_token_outputs_have_no_gaps_to_report() -> None:
    found = policies.summary([Story(0.0, 0.0, [1.0])], bound=0.2)
    assert found["itl_ms_p99"] is None and found["gaps_within_slo"] is None
    assert "-" in policies.table([{"policy": "x", **found}], 200.0)


@pytest.mark.parametrize("words", [
    ("--rate", "0"), ("--requests", "0"), ("--prompt-tokens", "9", "3"), ("--plot", "no/such/folder/x.png"),
])
def test_a_workload_that_cannot_be_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(QuireError, match=words[-1] if words[0] == "--plot" else words[0]):
        policies.run(parsed(*words))
