"""The check against guidellm: one trace for both tools, the server as referee, a verdict that can fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quire.bench.serving import guidellm
from quire.bench.serving.guidellm import (
    CASES,
    FIGURES,
    Case,
    Turn,
    as_lines,
    as_table,
    compare,
    referee,
    split_cores,
    verdict,
)
from quire.bench.serving.load_data import trace_requests
from quire.errors import QuireError


def _turn(scale: float = 1.0, server: float = 1.0) -> Turn:
    return Turn({figure.title: 100.0 * scale for figure in FIGURES},
                {figure.title: 90.0 * server for figure in FIGURES if figure.server}, 1.0)


def test_the_trace_is_one_that_our_bench_reads_with_all_prompts_different_and_lengths_spread(tmp_path: Path) -> None:
    for case in CASES.values():
        guidellm.write_trace(tmp_path / "trace.jsonl", case)
        made = trace_requests(tmp_path / "trace.jsonl", None)
        assert len(made) == case.requests == len({one.prompt for one in made})
        lengths = [len(one.prompt.split()) for one in made]
        assert all(case.prompt_tokens * 0.74 <= length <= case.prompt_tokens * 1.26 for length in lengths)
        assert all(case.output_tokens * 0.74 <= one.max_tokens <= case.output_tokens * 1.26 for one in made)
        assert len({one.max_tokens for one in made}) > 5


def test_an_open_case_arrives_at_about_its_rate(tmp_path: Path) -> None:
    guidellm.write_trace(tmp_path / "trace.jsonl", Case({}, 400, 10, 10, rate=5.0))
    last = trace_requests(tmp_path / "trace.jsonl", None)[-1].at
    assert last is not None and 60 < last < 100


def test_figures_within_the_bound_pass_and_others_do_not() -> None:
    assert all(row["within"] for row in compare([_turn(1.09)], [_turn()]))
    assert not any(row["within"] for row in compare([_turn(1.12)], [_turn()]))
    assert not any(row["within"] for row in compare([_turn(0.88)], [_turn()]))


def test_medians_count_and_the_servers_share_is_told_from_the_tools() -> None:
    rows = compare([_turn(1.2, 1.2), _turn(1.2, 1.2), _turn(9.0)], [_turn(), _turn(), _turn(0.1)])
    found = {row["figure"]: row for row in rows}["TTFT mean, ms"]
    assert found["ratio"] == pytest.approx(1.2) and not found["within"]
    assert found["server_ratio"] == pytest.approx(1.2)
    assert found["measured_apart"] == pytest.approx(1.0)


def test_the_verdict_names_what_is_over_and_how_far_the_measuring_is_apart() -> None:
    told, passed = verdict({"a": compare([_turn()], [_turn()]), "b": compare([_turn(1.3, 1.25)], [_turn()])})
    assert not passed and told.startswith(f"FAIL: {len(FIGURES)} of {2 * len(FIGURES)} figures are over 10%")
    assert "b TTFT mean, ms" in told and "a TTFT mean, ms" not in told and "at most 4.0% apart" in told
    told, passed = verdict({"a": compare([_turn(1.05)], [_turn()])})
    assert passed and told.startswith(f"PASS: all {len(FIGURES)} figures within 10%") and "5.0% apart" in told


def test_the_table_marks_what_is_over_and_the_lines_are_json() -> None:
    rows = compare([_turn(1.3)], [_turn()])
    assert as_table("dummy-open", CASES["dummy-open"], rows, 1).count("OVER") == len(FIGURES)
    lines = [json.loads(line) for line in as_lines("dummy-open", rows, {"cores": 2}).splitlines()]
    assert [line["figure"] for line in lines] == [figure.title for figure in FIGURES]
    assert lines[0]["ratio"] == 1.3 and lines[0]["cores"] == 2


def test_the_referee_counts_only_what_came_between() -> None:
    names = [figure.server for figure in FIGURES if figure.server]
    before = {f"{name}_{part}": 2.0 for name in names for part in ("sum", "count")}
    after = {f"{name}_{part}": {"sum": 3.0, "count": 6.0}[part] for name in names for part in ("sum", "count")}
    assert set(referee(before, after).values()) == {250.0}


def test_server_and_tools_share_no_core_where_there_are_two() -> None:
    server, tools = split_cores()
    assert server and tools and (not server & tools or (server == tools and len(server) == 1))


def _command(folder: Path, text: str) -> str:
    path = folder / "guidellm"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


def test_guidellms_report_is_read_in_our_units_and_its_own_environment_is_clean(tmp_path: Path) -> None:
    command = _command(tmp_path, """
import json, os, sys
assert not os.environ["PYTHONPATH"] and os.environ["GUIDELLM__MAX_WORKER_PROCESSES"] == "1"
assert "kind=concurrent,streams=2" in sys.argv
path = next(word for word in sys.argv if word.startswith("kind=json")).partition("path=")[2]
value = {"successful": {"mean": 2.0, "median": 3.0}}
names = ("requests_per_second output_tokens_per_second time_to_first_token_ms inter_token_latency_ms "
         "request_latency").split()
metrics = {name: value for name in names} | {"request_totals": {"successful": 4}}
requests = [{"inter_token_latency_ms": gap} for gap in (1.0, 2.0, 3.0, 10.0)]
json.dump({"benchmarks": [{"metrics": metrics, "requests": {"successful": requests}}]}, open(path, "w"))
""")
    case = Case({}, 4, 8, 8, streams=2)
    found = guidellm._guidellm(command, "http://nowhere", tmp_path / "trace.jsonl", case, tmp_path)
    assert found["TTFT mean, ms"] == 2.0 and found["TTFT median, ms"] == 3.0
    assert found["end to end mean, ms"] == 2000.0
    assert (found["ITL mean, ms"], found["TPOT mean, ms"], found["TPOT median, ms"]) == (2.0, 4.0, 2.5)
    with pytest.raises(QuireError, match="saw 4 of 9"):
        guidellm._guidellm(command, "http://nowhere", tmp_path / "trace.jsonl", Case({}, 9, 8, 8, streams=2), tmp_path)


def test_a_guidellm_that_fails_or_is_not_there_is_told(tmp_path: Path) -> None:
    command = _command(tmp_path, "import sys; sys.exit('no such backend')")
    case = Case({}, 4, 8, 8, streams=2)
    with pytest.raises(QuireError, match="no such backend"):
        guidellm._guidellm(command, "http://nowhere", tmp_path / "t", case, tmp_path)
    with pytest.raises(QuireError, match="--guidellm takes the path"):
        guidellm._guidellm(str(tmp_path / "missing"), "http://nowhere", tmp_path / "t", case, tmp_path)
