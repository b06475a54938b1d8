"""What the router counts, under Prometheus' rules: requests, retries, who got what, and what choosing takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.router.fleet import Fleet
from quire.router.replica import State
from quire.server.telemetry.loop_lag import LoopLag
from quire.server.telemetry.metrics import Histogram, exposition

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_LONG = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)


class RouterMetrics:
    def __init__(self) -> None:
        self.retries = self.broken_streams = 0
        self.prompt_tokens = self.held_tokens = 0
        self.first_byte = Histogram("quire:router_time_to_first_byte_seconds",
                                    "From a request's arrival to the first byte of its stream", _LONG)
        self.choosing = Histogram("quire:router_choice_seconds",
                                  "What it takes to read a request and to find who holds its prompt", _SHORT)
        self._lags = Histogram("quire:event_loop_lag_seconds", "How late the event loop was, 100 times a second",
                               _SHORT)
        self.loop_lag = LoopLag(self._lags.observe)
        self._http: dict[tuple[str, str], int] = {}

    def count_http(self, path: str, status: int) -> None:
        key = (path, str(status))
        self._http[key] = self._http.get(key, 0) + 1

    def render(self, fleet: Fleet, num_blocks: int) -> bytes:
        """The text of /metrics."""
        return exposition(self._families(fleet, num_blocks))

    def _families(self, fleet: Fleet, num_blocks: int) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def counter(name: str, help: str, value: float) -> Metric:
            family = CounterMetricFamily(f"quire:router_{name}", help)
            family.add_metric([], value)
            return family

        yield counter("retries", "Times that a request was sent to another server", self.retries)
        yield counter("broken_streams", "Streams that ended with an error because their server went away",
                      self.broken_streams)
        yield counter("prompt_tokens", "Tokens of the prompts that were routed", self.prompt_tokens)
        yield counter("prompt_tokens_held", "Those of them whose KV the chosen server had", self.held_tokens)
        family = CounterMetricFamily("quire:http_requests", "HTTP requests, by route and status",
                                     labels=["path", "status"])
        for (path, status), count in sorted(self._http.items()):
            family.add_metric([path, status], count)
        yield family
        outcomes = CounterMetricFamily("quire:router_server_requests", "Requests sent to a server, by how they ended",
                                       labels=["server", "outcome"])
        up = GaugeMetricFamily("quire:router_server_up", "1 while the server takes requests", labels=["server"])
        waiting = GaugeMetricFamily("quire:router_server_waiting", "Requests there without a first token",
                                    labels=["server"])
        running = GaugeMetricFamily("quire:router_server_running", "Requests there that are being answered",
                                    labels=["server"])
        for replica in fleet:
            for outcome, count in sorted(replica.outcomes.items()):
                outcomes.add_metric([replica.url, outcome], count)
            up.add_metric([replica.url], replica.state is State.UP)
            waiting.add_metric([replica.url], replica.load.waiting)
            running.add_metric([replica.url], replica.load.running)
        yield from (outcomes, up, waiting, running)
        blocks = GaugeMetricFamily("quire:router_index_blocks", "KV blocks that the index knows of")
        blocks.add_metric([], num_blocks)
        yield blocks
        lag = GaugeMetricFamily("quire:event_loop_lag_max_seconds",
                                "The event loop's largest lag in the last 30 to 60 seconds")
        lag.add_metric([], self.loop_lag.largest)
        yield lag
        for histogram in (self.first_byte, self.choosing, self._lags):
            yield histogram.family({})
