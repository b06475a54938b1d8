"""What a load test found: throughput, latencies at mean, median and percentiles, goodput; as table, JSON, picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from quire.bench.figures.drawing import Drawing
from quire.bench.serving.load_client import Sent
from quire.errors import ConfigError

METRICS = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st)", "itl": "Inter-token Latency",
           "e2el": "End-to-end Latency"}
_COLORS = {"ttft": "#4f81bd", "tpot": "#e0923d", "itl": "#5fa55a", "e2el": "#8064a2"}


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Bounds in milliseconds from words such as ttft:200."""
    bounds = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            bounds[name] = float(value)
        except ValueError:
            bounds[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not bounds[name] > 0:
            raise ConfigError(f"--goodput takes bounds in milliseconds for ttft, tpot and e2el, as in ttft:200, "
                              f"not {word!r}", field="goodput")
    return bounds


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours, as numpy's default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latencies(sent: Sequence[Sent]) -> dict[str, list[float]]:
    """Every measured value in milliseconds, by metric."""
    done = [one for one in sent if one.error is None]
    return {"ttft": [one.ttft * 1e3 for one in done],
            "tpot": [one.tpot * 1e3 for one in done if one.tpot is not None],
            "itl": [gap * 1e3 for one in done for gap in one.gaps],
            "e2el": [one.latency * 1e3 for one in done]}


def meets(one: Sent, bounds: Mapping[str, float]) -> bool:
    """Did a request keep every bound? One that failed did not."""
    if one.error is not None:
        return False
    found = {"ttft": one.ttft, "tpot": one.tpot or 0.0, "e2el": one.latency}
    return all(found[name] * 1e3 <= bound for name, bound in bounds.items())


def report(sent: Sequence[Sent], seconds: float, bounds: Mapping[str, float],
           percentiles: Sequence[float]) -> dict[str, Any]:
    """Flat figures under the names that the field's benchmarks use."""
    done = [one for one in sent if one.error is None]
    prompt, output = sum(one.prompt_tokens for one in done), sum(one.output_tokens for one in done)
    found: dict[str, Any] = {
        "duration": seconds, "completed": len(done), "failed": len(sent) - len(done),
        "total_input_tokens": prompt, "total_output_tokens": output,
        "total_cached_tokens": sum(one.cached_tokens for one in done),
        "request_throughput": len(done) / seconds, "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds, "peak_concurrency": peak_concurrency(sent),
    }
    if bounds:
        good = sum(meets(one, bounds) for one in sent)
        found |= {"goodput_bounds_ms": dict(bounds), "good_requests": good, "request_goodput": good / seconds}
    for name, values in latencies(sent).items():
        if values:
            found |= {f"mean_{name}_ms": statistics.fmean(values), f"median_{name}_ms": statistics.median(values),
                      f"std_{name}_ms": statistics.pstdev(values)}
            found |= {f"p{share:g}_{name}_ms": percentile(values, share) for share in percentiles}
    found["errors"] = sorted({one.error for one in sent if one.error is not None})[:10]
    return found


def peak_concurrency(sent: Sequence[Sent]) -> int:
    """Most requests under way at one moment."""
    steps = sorted([(one.start, 1) for one in sent] + [(one.end, -1) for one in sent])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


def table(found: Mapping[str, Any]) -> str:
    lines = [f"{' Serving Benchmark Result ':=^56}"]

    def line(words: str, value: float | int) -> None:
        lines.append(f"{words:<42}{value:>14,}" if isinstance(value, int) else f"{words:<42}{value:>14,.2f}")

    line("Successful requests:", found["completed"])
    line("Failed requests:", found["failed"])
    line("Peak concurrent requests:", found["peak_concurrency"])
    line("Benchmark duration (s):", found["duration"])
    line("Total input tokens:", found["total_input_tokens"])
    line("  of them served from cache:", found["total_cached_tokens"])
    line("Total generated tokens:", found["total_output_tokens"])
    line("Request throughput (req/s):", found["request_throughput"])
    if "request_goodput" in found:
        line("Request goodput (req/s):", found["request_goodput"])
    line("Output token throughput (tok/s):", found["output_throughput"])
    line("Total token throughput (tok/s):", found["total_token_throughput"])
    for name, title in METRICS.items():
        if f"mean_{name}_ms" in found:
            lines.append(f"{' ' + title + ' ':-^56}")
            for key, value in found.items():
                kind, _, rest = key.partition("_")
                if rest == f"{name}_ms" and kind != "std":
                    line(f"{kind.capitalize()} {name.upper()} (ms):", float(value))
    lines.append("=" * 56)
    return "\n".join([*lines, *(f"error: {error}" for error in found["errors"])])


def picture(sent: Sequence[Sent], title: str) -> Drawing:
    """How each latency is spread: the share of values (upwards) below a time (to the right)."""
    drawing = Drawing(860, 560)
    drawing.text(24, 28, title, 15, bold=True)
    for place, (name, values) in enumerate(latencies(sent).items()):
        _spread(drawing, 60 + place % 2 * 420, 70 + place // 2 * 250, METRICS[name], sorted(values), _COLORS[name])
    return drawing


def _spread(drawing: Drawing, left: float, top: float, title: str, values: list[float], color: str) -> None:
    width, height = 340.0, 170.0
    drawing.text(left, top - 10, f"{title} (ms), share of values below", 12, bold=True)
    drawing.line(left, top + height, left + width, top + height, "#888888")
    drawing.line(left, top, left, top + height, "#888888")
    for share in (0, 50, 100):
        drawing.text(left - 6, top + height * (1 - share / 100) + 4, f"{share}%", 10, "#666666", "end")
    if not values:
        drawing.text(left + width / 2, top + height / 2, "none", 11, "#666666", "middle")
        return
    step = _round_above((values[-1] or 1.0) / 4)
    most = 4 * step
    for tick in range(5):
        drawing.text(left + width * tick / 4, top + height + 16, f"{step * tick:.4g}", 10, "#666666", "middle")
    drawing.text(left + width / 2, top + height + 32, "milliseconds", 10, "#666666", "middle")
    points = [(left + width * percentile(values, share) / most, top + height * (1 - share / 100))
              for share in range(101)]
    for (x1, y1), (x2, y2) in pairwise(points):
        drawing.line(x1, y1, x2, y2, color, 2)


def _round_above(value: float) -> float:
    """The next larger number that reads well on an axis."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if factor * power >= value * 0.999999)
