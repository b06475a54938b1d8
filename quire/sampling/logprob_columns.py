"""Log-probabilities of a whole step packed at once; not beside the records, which schedulers read without numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from quire.sampling.token_logprobs import HEAD, TOP, LogprobRecord

_FEW = 4
"""Rows that are packed one by one: an array of records takes as long to set up as this many."""

def pack_columns(tokens: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, top_ids: np.ndarray,
                 top_logprobs: np.ndarray, counts: Sequence[int]) -> list[LogprobRecord]:
    """A record for each row of the columns, with `counts` of the likeliest: without those that a grammar makes
    impossible, which are the last."""
    rows, width = top_ids.shape
    if rows <= _FEW:
        columns = (tokens.tolist(), logprobs.tolist(), ranks.tolist(), top_ids.tolist(), top_logprobs.tolist(), counts)
        return [_pack(*one) for one in zip(*columns, strict=True)]
    table = np.empty(rows, _table_type(width))
    table["logprob"], table["token"], table["rank"] = logprobs, tokens, ranks
    table["top"]["logprob"], table["top"]["token"] = top_logprobs, top_ids
    impossible = np.isneginf(top_logprobs)
    if impossible.any():
        counts = np.minimum(counts, width - impossible.sum(1)).tolist()
    if min(counts) >= width:  # whole records, the usual case: several times as fast as cutting each
        records: list[LogprobRecord] = table.view(f"V{table.itemsize}").tolist()
        return records
    data, size = table.tobytes(), table.itemsize
    head, top = HEAD.size, TOP.size
    return [data[at : at + head + top * min(count, width)]
            for at, count in zip(range(0, rows * size, size), counts, strict=True)]


def _pack(token: int, logprob: float, rank: int, ids: list[int], values: list[float], count: int) -> LogprobRecord:
    tops = [TOP.pack(value, top) for value, top in zip(values[:count], ids, strict=False) if value != -math.inf]
    return HEAD.pack(logprob, token, rank) + b"".join(tops)


@lru_cache(maxsize=64)
def _table_type(width: int) -> np.dtype[np.void]:
    top = np.dtype([("logprob", "<f8"), ("token", "<i4")])
    return np.dtype([("logprob", "<f8"), ("token", "<i4"), ("rank", "<i4"), ("top", top, (width,))])
