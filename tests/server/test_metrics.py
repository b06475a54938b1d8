"""The metrics are right against a workload whose tokens, hits and requests are counted by hand."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import httpx

from quire import AsyncLLM
from quire.server.telemetry.loop_lag import LoopLag
from quire.server.telemetry.metrics import Histogram
from tests.server.scripted import running


def read(text: str) -> dict[str, float]:
    """Every sample, by name and labels without the model's."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[re.sub(r'model_name="[^"]*",?', "", name).replace("{}", "").replace(",}", "}")] = float(value)
    return found


def test_metrics_are_right_against_a_counted_workload(tiny: Path) -> None:
    async def start() -> AsyncLLM:
        return await AsyncLLM.start(str(tiny), load_format="dummy", num_threads=1, device="cpu", block_size=16)

    with running(start) as (address, _), httpx.Client(base_url=address, timeout=60.0) as client:

        def ask(length: int, tokens: int, status: int = 200, **fields: object) -> None:
            body = {"prompt": "p" * length, "max_tokens": tokens, "ignore_eos": True, "seed": 1, **fields}
            assert client.post("/v1/completions", json=body).status_code == status

        ask(40, 10)
        ask(40, 10, stream=True)  # two full blocks of its prompt are in the cache
        ask(8, 5, n=3, stream=True)
        ask(8, 5, n=2)
        ask(9, 1, stream=True)
        ask(8, 5, status=400, n=0)
        client.get("/v1/models")
        found = read(client.get("/metrics").text)

    requests, prompt, output = 5, 40 + 40 + 8 + 8 + 9, 10 + 10 + 15 + 10 + 1
    assert found["quire:prompt_tokens_total"] == prompt
    assert found["quire:generation_tokens_total"] == output
    assert found["quire:prompt_tokens_cached_total"] == 32
    assert found['quire:prefix_cache_hits_total{tier="device"}'] == 32
    assert found['quire:prefix_cache_hits_total{tier="host"}'] == 0
    assert found["quire:prefix_cache_queries_total"] == prompt
    assert found['quire:request_success_total{finished_reason="length"}'] == 1 + 1 + 3 + 2 + 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_prompt_tokens", "request_generation_tokens"):
        assert found[f"quire:{name}_count"] == requests, name
        assert found[f'quire:{name}_bucket{{le="+Inf"}}'] == requests
    assert found["quire:request_prompt_tokens_sum"] == prompt
    assert found["quire:request_generation_tokens_sum"] == output
    assert found["quire:time_per_output_token_seconds_count"] == 4
    # One value between each token and the next; sequences of a request go in step.
    assert found["quire:inter_token_latency_seconds_count"] == 9 + 9 + 4 + 4
    assert found['quire:http_requests_total{path="/v1/completions",status="200"}'] == 5
    assert found['quire:http_requests_total{path="/v1/completions",status="400"}'] == 1
    assert found["quire:engine_up"] == 1 and found["quire:engine_restarts_total"] == 0
    for name in ("num_requests_running", "num_requests_waiting", "num_requests_arriving", "num_requests_swapped",
                 "kv_cache_usage_perc",
                 "kv_blocks_used", 'num_preemptions_total{reason="memory"}'):
        assert found[f"quire:{name}"] == 0, name
    assert found["quire:kv_blocks_free"] + found["quire:kv_blocks_cached"] == found["quire:kv_blocks_total"] > 0
    assert found["quire:engine_steps_total"] >= 10 + 10 + 5 + 5 + 1
    spent = [found[f'quire:step_time_seconds_total{{phase="{phase}"}}'] for phase in ("plan", "execute", "update")]
    assert all(seconds > 0 for seconds in spent)
    assert sum(spent) <= found["quire:e2e_request_latency_seconds_sum"] * 1.5
    assert found["quire:event_loop_lag_seconds_count"] > 0 and found["quire:event_loop_lag_max_seconds"] >= 0.0


def test_who_holds_the_event_loop_shows_in_its_lag_for_a_while() -> None:
    ahead, lags = 0.0, []

    async def job() -> None:
        nonlocal ahead
        lag = LoopLag(lags.append, lambda: time.monotonic() + ahead)
        lag.start()
        await asyncio.sleep(0.03)
        time.sleep(0.2)
        while not lags or max(lags) < 0.15:
            await asyncio.sleep(0.01)
        assert lag.largest == max(lags) >= 0.15
        lag.close()
        count = len(lags)
        await asyncio.sleep(0.03)
        assert len(lags) == count
        for ahead in (31.0, 62.0):
            assert (lag.largest > 0.0) == (ahead == 31.0), "one window later it is known, two later it is not"

    asyncio.run(job())


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    histogram = Histogram("h", "", (1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 3)):
        histogram.observe(value, times)
    samples = {s.labels.get("le", s.name): s.value for s in histogram.family({}).samples}
    assert samples == {"1.0": 3, "2.0": 4, "+Inf": 7, "h_count": 7, "h_sum": 0.5 + 2 + 1.5 + 27}
