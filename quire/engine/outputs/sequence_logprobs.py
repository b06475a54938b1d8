"""Log-probabilities of one sequence: kept as the records that results carry, described when somebody reads them."""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.outputs.detokenizer import TextDecoder
from quire.engine.outputs.output import Logprob, PositionLogprobs
from quire.sampling.token_logprobs import LogprobRecord, TokenLogprobs


class SequenceLogprobs:
    """One position for each token, in order. A position that was read once is not described again."""

    __slots__ = ("_count", "_positions", "_tokenizer", "add")

    def __init__(self, count: int, tokenizer: TextDecoder | None) -> None:
        """`count`: of the likeliest tokens that each position shows. Without a tokenizer they have no words."""
        self._count = count
        self._tokenizer = tokenizer
        self._positions: list[LogprobRecord | PositionLogprobs] = []
        self.add = self._positions.append

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def num_values(self) -> int:
        """About how many log-probabilities a reader will get."""
        return len(self._positions) * max(1, self._count)

    def extend(self, records: Iterable[LogprobRecord]) -> None:
        self._positions.extend(records)

    def part(self, start: int, end: int) -> list[PositionLogprobs]:
        """Positions from `start` to `end`. Two threads may read at once: both find equal positions."""
        found = []
        for place, position in enumerate(self._positions[start:end], start=start):
            if isinstance(position, bytes):
                position = self._positions[place] = describe(position, self._count, self._tokenizer)
            found.append(position)
        return found

    def first(self, end: int) -> list[PositionLogprobs]:
        return self.part(0, end)


def describe(record: LogprobRecord, count: int, tokenizer: TextDecoder | None) -> PositionLogprobs:
    """The log-probabilities of one position, with the words of their tokens."""

    def word(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)

    entry = TokenLogprobs.unpack(record)
    position = {entry.token_id: Logprob(entry.logprob, entry.rank, word(entry.token_id))}
    best = zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True)
    for rank, (token, logprob) in enumerate(best, start=1):
        if token not in position:
            position[token] = Logprob(logprob, rank, word(token))
    return position
