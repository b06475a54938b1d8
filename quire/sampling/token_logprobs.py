"""The log-probabilities of one token as one run of bytes: how they travel from the sampler to a request's output.

Few of them are ever read, and a step of 256 rows that builds objects for all of them takes the host longer than the
GPU takes to compute it. So a whole step is packed at once, and objects are built when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct

import numpy as np

LogprobRecord = bytes
"""Little-endian: the token's log-probability (float64), its id and its rank (int32); then of each of the likeliest,
best first, its log-probability (float64) and id (int32). Without the last of them it is cut there."""

_HEAD = Struct("<dii")
_TOP = Struct("<di")


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probability and rank of one token, and the most likely ids at its position with theirs."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]

    def pack(self) -> LogprobRecord:
        tops = zip(self.top_logprobs, self.top_ids, strict=True)
        return _HEAD.pack(self.logprob, self.token_id, self.rank) + b"".join([_TOP.pack(*top) for top in tops])

    @classmethod
    def unpack(cls, record: LogprobRecord) -> TokenLogprobs:
        logprob, token, rank = _HEAD.unpack_from(record)
        tops = list(_TOP.iter_unpack(memoryview(record)[_HEAD.size :]))
        return cls(token, logprob, rank, [top for _, top in tops], [value for value, _ in tops])


def is_record(data: bytes) -> bool:
    """Whether bytes from outside can be read as a record."""
    return len(data) >= _HEAD.size and (len(data) - _HEAD.size) % _TOP.size == 0


def logprob_of(record: LogprobRecord) -> float:
    """Of the token itself."""
    value: float = _HEAD.unpack_from(record)[0]
    return value


def unpack_all(records: Iterable[LogprobRecord]) -> list[TokenLogprobs]:
    return [TokenLogprobs.unpack(record) for record in records]


def pack_columns(tokens: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, top_ids: np.ndarray,
                 top_logprobs: np.ndarray, counts: Sequence[int]) -> list[LogprobRecord]:
    """A record for each row of the columns, with `counts` of the likeliest: without those that a grammar makes
    impossible, which are the last."""
    rows, width = top_ids.shape
    table = np.empty(rows, _table_type(width))
    table["logprob"], table["token"], table["rank"] = logprobs, tokens, ranks
    table["top"]["logprob"], table["top"]["token"] = top_logprobs, top_ids
    impossible = np.isneginf(top_logprobs)
    if impossible.any():
        counts = np.minimum(counts, width - impossible.sum(1)).tolist()
    data, size = table.tobytes(), table.itemsize
    head, top = _HEAD.size, _TOP.size
    return [data[at : at + head + top * min(count, width)]
            for at, count in zip(range(0, rows * size, size), counts, strict=True)]


@lru_cache(maxsize=64)
def _table_type(width: int) -> np.dtype[np.void]:
    top = np.dtype([("logprob", "<f8"), ("token", "<i4")])
    return np.dtype([("logprob", "<f8"), ("token", "<i4"), ("rank", "<i4"), ("top", top, (width,))])
