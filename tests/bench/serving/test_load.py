"""`quire bench serve`: data, arrivals, and figures that are right for a server whose times are known."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from quire.bench.serving.load_client import Sent
from quire.bench.serving.load_data import (
    LoadRequest,
    arrival_times,
    random_requests,
    sharegpt_requests,
    trace_requests,
)
from quire.bench.serving.load_report import meets, parse_goodput, peak_concurrency, percentile, report
from quire.cli.main import main
from quire.errors import ConfigError, InvalidRequestError
from tests.cli.conftest import tiny as tiny
from tests.client.stub import Stub, text, usage
from tests.client.stub import serving as serving

# ---- data


def test_random_requests_have_the_lengths_asked_for_and_share_the_prefix() -> None:
    made = random_requests(50, 40, 10, prefix_len=8, range_ratio=0.5, seed=3)
    prefixes = {" ".join(one.prompt.split()[:8]) for one in made}
    lengths = [len(one.prompt.split()) - 8 for one in made]
    assert len(prefixes) == 1
    assert min(lengths) >= 20 and max(lengths) <= 60 and len(set(lengths)) > 5
    assert {one.max_tokens for one in made} <= set(range(5, 16))
    assert made == random_requests(50, 40, 10, prefix_len=8, range_ratio=0.5, seed=3)


def test_sharegpt_takes_first_questions_and_the_lengths_of_their_answers(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    path.write_text(json.dumps([
        {"conversations": [{"from": "human", "value": "a " * 40}, {"from": "gpt", "value": "b" * 80}]},
        {"conversations": [{"from": "human", "value": "alone"}]},
        {"conversations": [{"from": "human", "value": "x" * 9000}, {"from": "gpt", "value": "b" * 80}]},
    ]))
    assert sharegpt_requests(path, 10) == [LoadRequest("a " * 40, 20)]
    assert sharegpt_requests(path, 10, output_len=7)[0].max_tokens == 7


def test_a_trace_keeps_its_times_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in (
        {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 600, "output_length": 500, "hash_ids": [1, 9]})))
    first, second = trace_requests(path, None, speed=2.0, max_output_len=50)
    assert (first.at, second.at) == (0.0, 1.0)
    assert (first.max_tokens, second.max_tokens) == (5, 50)
    one, two = first.prompt.split(), second.prompt.split()
    assert (len(one), len(two)) == (700, 600)
    assert one[:512] == two[:512] and one[512:600] != two[512:600]


def test_azures_trace_keeps_times_and_lengths_and_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,700,44\r\n"
                     b"2023-11-16 18:15:48.6805900,600,9\r\n")
    first, second = trace_requests(path, None, speed=4.0, max_output_len=20)
    assert first.at == 0.0 and second.at == pytest.approx(0.5)
    assert (first.max_tokens, second.max_tokens) == (20, 9)
    one, two = first.prompt.split(), second.prompt.split()
    assert (len(one), len(two)) == (700, 600) and one[:64] != two[:64]
    path.write_text("a,b,c\n1,2\n")
    with pytest.raises(InvalidRequestError, match=r"line 2 .* Azure"):
        trace_requests(path, None)


def test_a_line_that_is_no_trace_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(InvalidRequestError, match="line 1"):
        trace_requests(path, None)


def test_arrivals_keep_their_mean_rate_and_burstiness() -> None:
    def gaps(burstiness: float) -> list[float]:
        times = arrival_times(4000, 5.0, burstiness, seed=1)
        return [b - a for a, b in itertools.pairwise(times)]

    for burstiness in (0.5, 1.0, 4.0):
        found = gaps(burstiness)
        mean = sum(found) / len(found)
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in found) / len(found)) / mean
        assert mean == pytest.approx(0.2, rel=0.1)
        assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


# ---- figures


def sent(start: float, pieces: list[float], tokens: int, end: float | None = None, error: str | None = None) -> Sent:
    return Sent(LoadRequest("x", tokens), start, end or (pieces or [start])[-1], pieces, 10, 4, tokens, error)


def test_figures_of_a_counted_workload() -> None:
    found = report([sent(0.0, [1.0, 1.5, 3.0], 5), sent(1.0, [2.0], 1), sent(2.0, [], 0, 2.5, "500: no")], 4.0,
                   {"ttft": 1000.0, "e2el": 2000.0}, [50, 99])
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, ["500: no"])
    assert (found["total_input_tokens"], found["total_cached_tokens"], found["total_output_tokens"]) == (20, 8, 6)
    assert (found["request_throughput"], found["output_throughput"]) == (0.5, 1.5)
    assert found["mean_ttft_ms"] == 1000.0
    assert found["mean_tpot_ms"] == 500.0  # (3.0 - 1.0) / 4 of the first; the second has no token after the first
    assert found["mean_itl_ms"] == 1000.0  # 0.5 and 1.5
    assert found["mean_e2el_ms"] == 2000.0
    assert (found["good_requests"], found["request_goodput"]) == (1, 0.25)
    assert peak_concurrency([sent(0.0, [2.0], 1), sent(1.0, [3.0], 1), sent(2.5, [4.0], 1)]) == 2


def test_percentiles_are_numpys() -> None:
    import numpy

    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    for share in (0, 1, 25, 50, 90, 99, 100):
        assert percentile(values, share) == pytest.approx(float(numpy.percentile(values, share)))


def test_goodput_bounds_are_checked() -> None:
    assert parse_goodput(["ttft:200", "tpot:5.5"]) == {"ttft": 200.0, "tpot": 5.5}
    for word in ("ttft", "ttft:x", "itl:5", "ttft:-1", "ttft:nan"):
        with pytest.raises(ConfigError, match="goodput"):
            parse_goodput([word])
    assert not meets(sent(0.0, [], 0, 1.0, "gone"), {"ttft": 1.0})


# ---- against a server


async def paced(body: dict[str, Any]) -> AsyncIterator[Any]:
    await asyncio.sleep(0.2)
    for _ in range(4):
        yield text("word ")
        await asyncio.sleep(0.1)
    yield text("", "length")
    yield usage(7, 4, 2)
    yield "[DONE]"


def test_a_server_of_known_times_is_measured_right(
    serving: Callable[..., Stub], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stub = serving(paced)
    code = main(["bench", "serve", "--url", stub.url, "--num-prompts", "6", "--max-concurrency", "3", "--json",
                 "--goodput", "ttft:5000", "--plot", str(tmp_path / "run.svg"),
                 "--save-result", str(tmp_path / "run.json"), "--save-detailed", "--random-input-len", "7"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (found["completed"], found["failed"], found["good_requests"]) == (6, 0, 6)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (42, 24)
    assert found["peak_concurrency"] == 3
    # A busy machine makes them longer, nothing makes them shorter.
    assert 190 < found["median_ttft_ms"] < 2000
    assert 90 < found["median_tpot_ms"] < 1000 and 90 < found["median_itl_ms"] < 1000
    assert stub.bodies[-1]["model"] == "stub-model"
    assert stub.bodies[-1]["ignore_eos"] is True and stub.bodies[-1]["stream_options"] == {"include_usage": True}
    assert len(json.loads((tmp_path / "run.json").read_text())["requests"]) == 6
    drawn = (tmp_path / "run.svg").read_text()
    assert drawn.startswith("<svg") and drawn.count(">milliseconds<") == 4


def test_refused_and_broken_requests_are_counted_not_raised(
    serving: Callable[..., Stub], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = 0

    async def moody(body: dict[str, Any]) -> AsyncIterator[Any]:
        nonlocal asked
        asked += 1
        if asked == 2:
            yield 429, {"error": {"message": "too many"}}
        yield text("word")
        if asked == 3:
            return  # the connection closes without [DONE]
        yield usage(1, 1)
        yield "[DONE]"

    stub = serving(moody)
    words = ("bench", "serve", "--url", stub.url, "--num-prompts", "4", "--max-concurrency", "1")
    assert main(list(words)) == 0
    shown = capsys.readouterr().out
    assert "429: too many" in shown and "middle of the answer" in shown
    assert "Failed requests:" in shown


def test_a_picture_of_no_known_format_is_refused_before_anything_is_sent(
    serving: Callable[..., Stub], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stub = serving(paced)
    assert main(["bench", "serve", "--url", stub.url, "--plot", str(tmp_path / "run.xyz")]) == 1
    assert "name it run.png or run.svg" in capsys.readouterr().err
    assert not stub.bodies and not list(tmp_path.iterdir())


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "serve", "--url", "127.0.0.1:9", "--ready-check-timeout-sec", "0.1"])
    error = capsys.readouterr().err
    assert code != 0 and "cannot be reached" in error and "quire serve" in error and error.count("\n") == 1


def test_a_tokenizer_makes_prompts_of_exactly_the_length(
    serving: Callable[..., Stub], tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.models.loader.source import resolve_model

    stub = serving(paced)
    assert main(["bench", "serve", "--url", stub.url, "--num-prompts", "2", "--tokenizer", str(tiny),
                 "--random-input-len", "30", "--num-warmups", "0"]) == 0
    tokenizer = resolve_model(str(tiny), load_format="dummy").tokenizer()
    assert [len(tokenizer.encode(body["prompt"], add_special_tokens=False)) for body in stub.bodies] == [30, 30]
