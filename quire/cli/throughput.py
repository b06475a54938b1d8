"""Tokens per second of finished requests, split into prefill and decode, as a closing line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.outputs.output import RequestOutput


@dataclass(frozen=True, slots=True)
class Throughput:
    """Over some requests that ran together or one after the other, by the wall clock."""

    requests: int
    prompt_tokens: int
    """Those that were computed: what the prefix cache gave is not counted."""
    output_tokens: int
    prefill_seconds: float
    decode_seconds: float
    first_token_seconds: float
    """Of the request that got its first token soonest after arriving."""

    def line(self) -> str:
        parts = [f"{self.output_tokens} tokens in {self.prefill_seconds + self.decode_seconds:.1f} s"]
        if self.prefill_seconds > 0:
            parts.append(f"prefill {self.prompt_tokens / self.prefill_seconds:.0f} tok/s")
        if self.decode_seconds > 0:
            parts.append(f"decode {(self.output_tokens - self.requests) / self.decode_seconds:.1f} tok/s")
        parts.append(f"first token after {self.first_token_seconds * 1000:.0f} ms")
        return " · ".join(parts)


def measure(outputs: Sequence[RequestOutput]) -> Throughput | None:
    """None when no request got as far as a token.

    Prefill is the time in which some request was still without a first token, decode the rest of the time in
    which any was running, so that requests that overlap are not counted twice.
    """
    done = [
        o for o in outputs if o.metrics.first_token_time is not None and o.metrics.finished_time is not None
    ]
    if not done:
        return None
    waits = [(o.metrics.arrival_time, o.metrics.first_token_time or 0.0) for o in done]
    prefill = _covered(waits)
    busy = _covered([(o.metrics.arrival_time, o.metrics.finished_time or 0.0) for o in done])
    return Throughput(
        requests=len(done),
        prompt_tokens=sum(len(o.prompt_token_ids) - (o.num_cached_tokens or 0) for o in done),
        output_tokens=sum(len(c.token_ids) for o in done for c in o.outputs),
        prefill_seconds=prefill,
        decode_seconds=busy - prefill,
        first_token_seconds=min(end - start for start, end in waits),
    )


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of time spans."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total
