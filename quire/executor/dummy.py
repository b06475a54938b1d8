"""An executor without a model: tokens are a function of the sequence and the position, and arrive at once.

The scheduler's tests, its benchmark and the simulator run on it, and an engine with executor="dummy"; it also
checks that each plan is carried out against rows in the state that the plan assumes. Log-probabilities, where they
are asked for, are those of a model that knows nothing: all tokens are equally likely.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future

from quire.errors import InvariantError
from quire.executor.base import Executor
from quire.sampling.params import NOTHING_TO_DRAW
from quire.sampling.token_logprobs import LogprobRecord, TokenLogprobs
from quire.scheduler.plan import (
    EntryResult,
    PlanEntry,
    RowStart,
    StepPlan,
    StepResult,
    TransferReport,
)
from quire.speculation.tree import path_along

_MASK = (1 << 64) - 1


def dummy_token(seed: int, index: int, position: int, vocab_size: int) -> int:
    """The token that stands at `position` of a dummy sequence: a cheap mix of its arguments."""
    x = seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9 + position * 0x94D049BB133111EB & _MASK
    x ^= x >> 31
    return (x * 0xD6E8FEB86659FD93 & _MASK) % vocab_size


def dummy_candidates(seed: int, entry: PlanEntry, vocab_size: int) -> list[tuple[int, float]]:
    """What may follow a beam: likelihoods fall with the rank, the more the less likely the beam's last token."""
    last = entry.given[-1] if entry.given else 0
    end = entry.start + entry.num_tokens
    tokens: dict[int, None] = {}
    rank = 0
    while len(tokens) < min(entry.candidates, vocab_size):
        tokens[dummy_token(seed + last, rank, end, vocab_size)] = None
        rank += 1
    return [(token, -0.1 - (0.5 + (last % 7) / 9) * place) for place, token in enumerate(tokens)]


def allowed_token(masks: bytes, wanted: int) -> EntryResult:
    """The first token from `wanted` on that a grammar's mask has, around the end of the vocabulary."""
    bits = int.from_bytes(masks, "little")
    after = bits >> wanted
    rest = after or bits
    if not rest:
        return EntryResult(error=NOTHING_TO_DRAW)
    return EntryResult([(rest & -rest).bit_length() - 1 + (wanted if after else 0)])


def _check_decoding(plan: StepPlan, rows: list[int], starts: list[int]) -> None:
    """Ranks are told of such a plan without a look at its entries: what it says of them must be so."""
    entries = plan.entries
    if ([entry.row for entry in entries] != rows or [entry.start for entry in entries] != starts
            or not all(entry.decodes and not entry.masks for entry in entries)):
        raise InvariantError(f"step {plan.step} does not only decode, or not what it says")


class DummyExecutor(Executor):
    """Keeps rows as the worker would and draws `dummy_token`s."""

    def __init__(self, vocab_size: int = 1000, step_seconds: float = 0.0) -> None:
        self.vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._rows: dict[int, tuple[int, int]] = {}
        """Seed and sequence index of every row in use."""
        self._computed: dict[int, int] = {}
        self._described: dict[int, RowStart] = {}
        """Rows whose log-probabilities are asked for."""

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        future.set_result(self.execute(plan))
        return future

    def execute(self, plan: StepPlan) -> StepResult:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        for row in plan.freed_rows:
            self._rows.pop(row, None)
            self._computed.pop(row, None)
            self._described.pop(row, None)
        for start in plan.starts:
            self._rows[start.row] = (start.seed, start.sequence_index)
            self._computed.pop(start.row, None)
            self._described.pop(start.row, None)
            if start.params.logprobs is not None or start.params.prompt_logprobs is not None:
                self._described[start.row] = start
        if plan.decoding is not None:
            _check_decoding(plan, *plan.decoding)
        moved = [TransferReport(start.number, len(start.moves), finished=True) for start in plan.transfers]
        return StepResult(plan.step, [self._run(entry) for entry in plan.entries], moved)

    def _run(self, entry: PlanEntry) -> EntryResult:
        if entry.row not in self._rows:
            raise InvariantError(f"row {entry.row} was never started")
        if entry.decodes and not entry.masks and entry.says_more:
            raise InvariantError(f"row {entry.row} decodes one token and is told more: {entry}")
        computed = self._computed.setdefault(entry.row, entry.start)
        if computed != entry.start:
            raise InvariantError(f"row {entry.row} computed {computed} tokens, not {entry.start}")
        self._computed[entry.row] = end = entry.start + entry.num_tokens
        seed, index = self._rows[entry.row]
        if entry.num_drafts:
            return self._judge(entry, seed, index)
        if entry.candidates:
            return EntryResult(candidates=dummy_candidates(seed, entry, self.vocab_size))
        token = dummy_token(seed, index, end, self.vocab_size)
        result = EntryResult([token] if entry.sample else []) if not entry.masks else allowed_token(entry.masks, token)
        if entry.row in self._described:
            self._describe(self._described[entry.row], entry, result)
        return result

    def _describe(self, start: RowStart, entry: PlanEntry, result: EntryResult) -> None:
        if start.params.logprobs is not None and result.tokens:
            result.logprobs = [self._uniform(token, start.params.logprobs) for token in result.tokens]
        first = entry.prompt_logprobs_from
        if first is not None and start.params.prompt_logprobs is not None:
            end = min(entry.start + entry.num_tokens, start.num_prompt_tokens - 1)
            result.prompt_logprobs = [self._uniform(token, start.params.prompt_logprobs)
                                      for token in start.token_ids[first + 1 : end + 1]]

    def _uniform(self, token: int, count: int) -> LogprobRecord:
        likely, count = -math.log(self.vocab_size), min(count, self.vocab_size)
        return TokenLogprobs(token, likely, 1, list(range(count)), [likely] * count).pack()

    def _judge(self, entry: PlanEntry, seed: int, index: int) -> EntryResult:
        """Accept drafts that are the tokens to come; of its own it proposes every third one wrongly."""
        known = entry.start + entry.num_tokens - entry.num_drafts
        true = [dummy_token(seed, index, known + i, self.vocab_size) for i in range(entry.num_drafts + 1)]
        drafts = entry.drafts or [token + (i % 3 == 2) for i, token in enumerate(true[:-1])]
        path = path_along(drafts, entry.parents, true)
        self._computed[entry.row] = known + len(path)
        return EntryResult(true[: len(path) + 1], num_drafts=entry.num_drafts, parents=entry.parents,
                           kept=tuple(path) if entry.parents else ())
