"""What fetching a prefix from a pool saves against computing it: bytes, a network, and the cost of prefill."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kvpool.keys import UNIT_TOKENS

LATENCIES = {"rdma": 5e-6, "tcp": 100e-6}
"""Seconds from asking to the first byte inside one data centre, by kind of network."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model keeps of each token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_size: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_size


@dataclass(frozen=True, slots=True)
class Network:
    """Of so many Gbit/s, of which a share is reached."""

    gigabits: float
    kind: str = "rdma"
    efficiency: float = 1.0

    @property
    def bytes_per_second(self) -> float:
        return self.gigabits * 1e9 / 8 * self.efficiency

    def seconds(self, num_bytes: int) -> float:
        return LATENCIES[self.kind] + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Benefit:
    """One cell of the table, in seconds."""

    tokens: int
    num_bytes: int
    prefill: float
    fetch: float

    @property
    def saved(self) -> float:
        """Negative: the pool loses."""
        return self.prefill - self.fetch


def benefit(tokens: int, bytes_per_token: int, tokens_per_second: float, network: Network,
            whole_units: bool = True) -> Benefit:
    """Of a prompt's prefix. A pool holds whole units only: what is over is computed either way."""
    fetched = tokens // UNIT_TOKENS * UNIT_TOKENS if whole_units else tokens
    num_bytes = fetched * bytes_per_token
    rest = (tokens - fetched) / tokens_per_second
    fetch = network.seconds(num_bytes) + rest if fetched else rest
    return Benefit(tokens, num_bytes, tokens / tokens_per_second, fetch)


def break_even(bytes_per_token: int, tokens_per_second: float) -> float:
    """Gbit/s below which computing a token is faster than fetching its KV."""
    return bytes_per_token * tokens_per_second * 8 / 1e9
