"""What it costs to move KV between tiers, and what to compute it again: two measured rates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Seconds, from rates that the engine measures at start (tests bring their own)."""

    tokens_per_second: float
    """Prompt tokens that the model computes."""
    bytes_per_second: float
    """KV copied between device and host, one way."""

    def recompute(self, num_tokens: int) -> float:
        return num_tokens / self.tokens_per_second

    def move(self, num_bytes: int) -> float:
        return num_bytes / self.bytes_per_second
