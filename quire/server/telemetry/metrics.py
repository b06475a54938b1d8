"""Prometheus metrics under the names that the field uses, with the prefix `quire:`.

Counts of requests and tokens and the latency histograms are the server's own, so they survive an engine that is started
anew; gauges and cache counters are read from the engine at each scrape.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quire.engine.outputs.output import RequestOutput
from quire.server.telemetry.loop_lag import LoopLag

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
         1.0, 2.5, 5.0, 10.0)
_SLOW = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
         320.0, 640.0)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0,
           100000.0)


class Histogram:
    """Buckets and a sum. prometheus_client's own takes a lock per value, which is much for every token."""

    __slots__ = ("_bounds", "_counts", "_sum", "help", "name")

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: Mapping[str, str]) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(self.name, self.help, labels=list(labels))
        running, buckets = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            running += count
            buckets.append((bound, running))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class Stopwatch:
    """Times one request to the engine."""

    __slots__ = ("_arrived", "_finished", "_first", "_generated", "_last", "_metrics", "_prompt_counted")

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._arrived = time.perf_counter()
        self._first = self._last = 0.0
        self._generated: dict[int, int] = {}
        """Tokens of each sequence."""
        self._prompt_counted = self._finished = False

    def note(self, output: RequestOutput) -> None:
        """New output of a stream: count its tokens, time the first of them, and the others from one to the next."""
        now = time.perf_counter()
        self._count_prompt(output)
        fresh = 0
        for completion in output.outputs:
            count = len(completion.token_ids_delta)
            self._generated[completion.index] = self._generated.get(completion.index, 0) + count
            fresh = max(fresh, count)
            self._metrics.generation_tokens += count
            if completion.finish_reason is not None:
                self._metrics.count_finished(completion.finish_reason)
        if fresh and not self._last:
            self._first = self._last = now
            self._metrics.first_token.observe(now - self._arrived)
            fresh -= 1
        if fresh:
            # Sequences of one request go in step; tokens that came together took equal shares of the time.
            self._metrics.inter_token.observe((now - self._last) / fresh, fresh)
            self._last = now
        if output.finished:
            self._finish(output, now - self._arrived, self._last - self._first)

    def note_whole(self, output: RequestOutput) -> None:
        """The output of a request that is not streamed, which carries its times with it."""
        self._count_prompt(output)
        for completion in output.outputs:
            self._generated[completion.index] = len(completion.token_ids)
            self._metrics.generation_tokens += len(completion.token_ids)
            self._metrics.count_finished(completion.finish_reason or "abort")
        times = output.metrics
        first, latency = times.time_to_first_token, times.latency
        decoding = 0.0
        if first is not None:
            self._metrics.first_token.observe(first)
            decoding = max((latency or first) - first, 0.0)
        longest = max(self._generated.values(), default=0)
        if longest > 1:
            self._metrics.inter_token.observe(decoding / (longest - 1), longest - 1)
        self._finish(output, time.perf_counter() - self._arrived, decoding)

    def _count_prompt(self, output: RequestOutput) -> None:
        if not self._prompt_counted:
            self._prompt_counted = True
            metrics, length = self._metrics, len(output.prompt_token_ids)
            metrics.prompt_tokens += length
            metrics.prompt_length.observe(length)
            metrics.cached_tokens += output.num_cached_tokens or 0

    def _finish(self, output: RequestOutput, latency: float, decoding: float) -> None:
        metrics = self._metrics
        metrics.latency.observe(latency)
        metrics.output_length.observe(sum(self._generated.values()))
        longest = max(self._generated.values(), default=0)
        if longest > 1:
            metrics.per_token.observe(decoding / (longest - 1))
        queue = output.metrics.queue_time
        if queue is not None:
            metrics.queue.observe(max(queue, 0.0))
        self._finished = True

    def close(self, reason: str) -> None:
        """The request is over; `reason` is counted if it had not finished."""
        if not self._finished:
            self._finished = True
            self._metrics.count_finished(reason)


class ServerMetrics:
    """All that is counted, and how it is shown."""

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model}
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.first_token = Histogram("quire:time_to_first_token_seconds", "From a request's arrival to its first token",
                                     _SLOW)
        self.inter_token = Histogram("quire:inter_token_latency_seconds", "Between two tokens of a stream", _FAST)
        self.per_token = Histogram("quire:time_per_output_token_seconds",
                                   "Mean time between tokens, one value for each request", _FAST)
        self.latency = Histogram("quire:e2e_request_latency_seconds", "From a request's arrival to its last token",
                                 _SLOW)
        self.queue = Histogram("quire:request_queue_time_seconds", "From arrival to the first step with the request",
                               _SLOW)
        self.prompt_length = Histogram("quire:request_prompt_tokens", "Tokens of prompts", _TOKENS)
        self.output_length = Histogram("quire:request_generation_tokens", "Tokens generated for a request", _TOKENS)
        self._lags = Histogram("quire:event_loop_lag_seconds", "How late the event loop was, 100 times a second", _FAST)
        self.loop_lag = LoopLag(self._lags.observe)
        self._steps = {"plan": 0.0, "execute": 0.0, "update": 0.0}
        self._finished: dict[str, int] = {}
        self._http: dict[tuple[str, str], int] = {}

    def count_finished(self, reason: str) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1

    def count_step(self, stats: Any) -> None:
        """Where the time of one step of the engine went."""
        self._steps["plan"] += stats.plan_seconds
        self._steps["execute"] += stats.execute_seconds
        self._steps["update"] += stats.update_seconds

    def count_http(self, path: str, status: int) -> None:
        key = (path, str(status))
        self._http[key] = self._http.get(key, 0) + 1

    def render(self, engine: Mapping[str, Any] | None) -> bytes:
        """The text of /metrics; `engine` is None where it cannot be asked."""
        return exposition(self._families(engine))

    def _families(self, engine: Mapping[str, Any] | None) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        yield self._gauge("engine_up", "1 while the engine answers", 0 if engine is None else 1)
        yield self._counter("prompt_tokens", "Tokens of prompts", self.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Tokens of prompts found in the prefix cache", self.cached_tokens)
        yield self._counter("generation_tokens", "Tokens generated", self.generation_tokens)
        family = CounterMetricFamily("quire:request_success", "Sequences finished, by reason",
                                     labels=[*self._labels, "finished_reason"])
        for reason, count in sorted(self._finished.items()):
            family.add_metric([*self._labels.values(), reason], count)
        yield family
        family = CounterMetricFamily("quire:http_requests", "HTTP requests, by route and status",
                                     labels=["path", "status"])
        for (path, status), count in sorted(self._http.items()):
            family.add_metric([path, status], count)
        yield family
        for histogram in (self.first_token, self.inter_token, self.per_token, self.latency, self.queue,
                          self.prompt_length, self.output_length, self._lags):
            yield histogram.family(self._labels)
        yield self._gauge("event_loop_lag_max_seconds", "The event loop's largest lag in the last 30 to 60 seconds",
                          self.loop_lag.largest)
        yield self._labelled("step_time_seconds", "Time of the engine's steps, by what it was spent on", "phase",
                             self._steps)
        if engine is not None:
            yield from self._of_engine(engine)

    def _of_engine(self, engine: Mapping[str, Any]) -> Iterator[Metric]:
        for name, help, key in _ENGINE_GAUGES:
            if key in engine:
                yield self._gauge(name, help, engine[key])
        total = engine.get("kv_blocks_total") or 0
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use by requests (1: all)",
                          engine.get("kv_blocks_used", 0) / total if total else 0.0)
        for name, help, key in _ENGINE_COUNTERS:
            if key in engine:
                yield self._counter(name, help, engine[key])
        for name, help, label, keys in _ENGINE_LABELLED:
            yield self._labelled(name, help, label, {value: engine.get(key, 0) for value, key in keys.items()})
        for name, help, key in _ENGINE_BY_STORE:
            stores = {store: engine[f"kv_{store}_{key}"] for store in _STORES if f"kv_{store}_{key}" in engine}
            if stores:
                yield self._labelled(name, help, "store", stores)
        for table, gauge in ((_ENGINE_BY_NUMBER, False), (_ENGINE_GAUGES_BY_NUMBER, True)):
            for name, help, label, prefix in table:
                places = {key.removeprefix(prefix): value for key, value in engine.items() if key.startswith(prefix)}
                if places:
                    yield self._labelled(name, help, label, places, gauge)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        return self._labelled(name, help, None, {"": value}, gauge=True)

    def _counter(self, name: str, help: str, value: float) -> Metric:
        return self._labelled(name, help, None, {"": value})

    def _labelled(self, name: str, help: str, label: str | None, values: Mapping[str, float],
                  gauge: bool = False) -> Metric:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names = [*self._labels] if label is None else [*self._labels, label]
        family = (GaugeMetricFamily if gauge else CounterMetricFamily)(f"quire:{name}", help, labels=names)
        for value, count in values.items():
            family.add_metric([*self._labels.values()] if label is None else [*self._labels.values(), value], count)
        return family


_ENGINE_GAUGES = (
    ("num_requests_running", "Requests in the running batch", "requests_running"),
    ("num_requests_waiting", "Requests that wait for their turn", "requests_waiting"),
    ("num_requests_arriving", "Requests whose KV is on its way from another tier", "requests_arriving"),
    ("num_requests_swapped", "Requests whose KV waits in host memory", "requests_swapped"),
    ("kv_blocks_total", "KV blocks", "kv_blocks_total"),
    ("kv_blocks_used", "KV blocks in use by requests", "kv_blocks_used"),
    ("kv_blocks_cached", "KV blocks that cache a prefix and are idle", "kv_blocks_cached"),
    ("kv_blocks_free", "KV blocks that hold nothing", "kv_blocks_free"),
    ("spec_tokens_per_step", "Tokens from one computation of a decoding sequence, on average since the start",
     "spec_tokens_per_step"),
    ("spec_acceptance_rate", "Share of the judged drafts that was accepted since the start", "spec_acceptance_rate"),
    ("expert_imbalance", "Rows of a layer's busiest expert over those of the average one, mean of all layers",
     "expert_imbalance"),
    ("kv_leases", "Leases on KV blocks of finished prompts that others take", "kv_leases"),
    ("kv_reservations", "Reservations of KV blocks for prompts that others compute", "kv_reservations"),
    ("kv_links", "Other engines that this one is connected to", "kv_links"),
    ("kv_prefills_open", "Prompts being computed for other engines", "kv_prefills_open"),
    ("kv_prompts_open", "Prompts that other engines are computing", "kv_prompts_open"),
)
_ENGINE_COUNTERS = (
    ("engine_steps", "Steps of the engine", "steps"),
    ("engine_restarts", "Times the engine was started anew", "engine_restarts"),
    ("engine_requests_aborted", "Requests ended before their time", "requests_aborted"),
    ("requests_refused_queue_full", "Requests refused because too many wait (429)", "requests_refused_queue_full"),
    ("requests_timed_out", "Requests given up because they took too long", "requests_timed_out"),
    ("requests_lost", "Requests in flight when the engine died", "requests_lost"),
    ("engine_requests_failed", "Requests that the engine gave up", "requests_failed"),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache", "prefix_query_tokens"),
    ("kv_fetches", "Times that a request waited for KV from another tier", "fetches"),
    ("kv_fetches_failed", "Those of which not all came", "fetches_failed"),
    ("recomputed_tokens", "Tokens computed again after a preemption", "recomputed_tokens"),
    ("spec_decode_steps", "Times that a decoding sequence was computed, with drafts or without", "spec_decode_steps"),
    ("spec_decode_tokens", "Tokens that came of those", "spec_decode_tokens"),
    ("spec_verifications", "Times that a sequence was computed with drafts", "spec_verifications"),
    ("spec_draft_tokens", "Drafts judged", "spec_draft_tokens"),
    ("spec_accepted_tokens", "Drafts accepted", "spec_accepted_tokens"),
    ("kv_prefills", "Prompts computed for other engines", "kv_prefills_done"),
    ("kv_prefills_failed", "Prompts for other engines that failed here", "kv_prefills_failed"),
    ("kv_prefills_cancelled", "Prompts for other engines that were called off", "kv_prefills_cancelled"),
    ("kv_tokens_sent", "Tokens whose KV was sent to other engines", "kv_tokens_sent"),
    ("kv_bytes_sent", "Bytes of KV sent to other engines", "kv_bytes_sent"),
    ("kv_prompts_arrived", "Prompts that other engines computed", "kv_prompts_arrived"),
    ("kv_prompts_failed", "Times that another engine was asked for a prompt in vain", "kv_prompts_failed"),
    ("kv_prompts_computed_here", "Prompts computed here for want of a prefill engine", "kv_prompts_computed_here"),
    ("kv_tokens_received", "Tokens whose KV came from other engines", "kv_tokens_received"),
    ("kv_leases_expired", "Leases that expired without being released", "kv_leases_expired"),
)
_ENGINE_BY_NUMBER = (
    ("spec_draft_tokens_by_position", "Drafts judged, by place in the draft", "position", "spec_draft_tokens_at_"),
    ("spec_accepted_tokens_by_position", "Drafts accepted, by place in the draft", "position",
     "spec_accepted_tokens_at_"),
    ("expert_tokens", "Tokens that went through each expert, all layers together", "expert", "expert_rows_"),
    ("rank_steps", "Steps of each rank that shares the model", "rank", "rank_steps_"),
    ("rank_busy_seconds", "Time of each rank in steps", "rank", "rank_busy_seconds_"),
    ("rank_waiting_seconds", "Of that: waiting for other ranks", "rank", "rank_waited_seconds_"),
)
_ENGINE_GAUGES_BY_NUMBER = (
    ("rank_memory_bytes", "Memory of each rank: resident in its process, or of its GPU", "rank", "rank_memory_bytes_"),
)
_STORES = ("disk", "pool")
_ENGINE_BY_STORE = (
    ("kv_units_written", "Units of 256 tokens of KV that were kept, by store", "units_written"),
    ("kv_units_read", "Those that came back, by store", "units_read"),
    ("kv_units_bad", "Those that came back torn, changed or foreign and were computed instead, by store", "units_bad"),
    ("kv_store_lookups_failed", "Times that a store was not asked or did not answer in time, by store",
     "lookups_failed"),
)
_ENGINE_LABELLED = (
    ("prefix_cache_hits", "Tokens found in the prefix cache, by tier", "tier",
     {"device": "prefix_hit_tokens", "host": "tier_hit_tokens"}),
    ("num_preemptions", "Preemptions, by reason", "reason",
     {"memory": "preemptions_for_memory", "priority": "preemptions_for_priority", "loss": "preemptions_for_loss"}),
)


def exposition(families: Iterable[Metric]) -> bytes:
    """Metrics as Prometheus reads them."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(list(families)))
    return generate_latest(registry)


class _Once:
    """A collector of families that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
