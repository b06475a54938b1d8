"""The log-probabilities of one token as one run of bytes: how they travel from the sampler to a request's output.

Few of them are ever read, and a step of 256 rows that builds objects for all of them takes the host longer than the
GPU takes to compute it. So a whole step is packed at once, and objects are built when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

LogprobRecord = bytes
"""Little-endian: the token's log-probability (float64), its id and its rank (int32); then of each of the likeliest,
best first, its log-probability (float64) and id (int32). Without the last of them it is cut there."""

HEAD = Struct("<dii")
TOP = Struct("<di")


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
        return HEAD.pack(self.logprob, self.token_id, self.rank) + b"".join([TOP.pack(*top) for top in tops])

    @classmethod
    def unpack(cls, record: LogprobRecord) -> TokenLogprobs:
        logprob, token, rank = HEAD.unpack_from(record)
        tops = list(TOP.iter_unpack(memoryview(record)[HEAD.size :]))
        return cls(token, logprob, rank, [top for _, top in tops], [value for value, _ in tops])


def is_record(data: bytes) -> bool:
    """Whether bytes from outside can be read as a record."""
    return len(data) >= HEAD.size and (len(data) - HEAD.size) % TOP.size == 0


def logprob_of(record: LogprobRecord) -> float:
    """Of the token itself."""
    value: float = HEAD.unpack_from(record)[0]
    return value


def unpack_all(records: Iterable[LogprobRecord]) -> list[TokenLogprobs]:
    return [TokenLogprobs.unpack(record) for record in records]
