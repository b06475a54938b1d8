"""Results on their way to the host: copied on a side stream, waited for only by whoever asks for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from quire.sampling.sampler import FAILURES, NOT_FINITE, OK, SampledLogprobs
from quire.scheduler.plan import EntryResult, StepResult, TokenLogprobs
from quire.worker.gpu.drafted import Drafted
from quire.worker.gpu.sampling import RankedCandidates


@dataclass(slots=True)
class PendingStep:
    """What the device will have for a step: tokens with statuses, log-probabilities, and whose they are."""

    step: int
    num_entries: int
    drawing: Sequence[int]
    """Entry of the plan that each row of `tokens` belongs to."""
    tokens: Tensor
    """int32 [rows, 2]: token and status."""
    logprobs: list[tuple[list[int], SampledLogprobs]] = field(default_factory=list)
    """(entries, what was found for them)."""
    prompt_logprobs: list[tuple[int, SampledLogprobs]] = field(default_factory=list)
    """(entry, a run of its positions), in order."""
    candidates: RankedCandidates | None = None
    errors: dict[int, str] = field(default_factory=dict)
    """What became of entries that failed alone."""
    drafts: Drafted | None = None
    """The plan's drafts, where a draft is an entry of its own: entry i of the plan is 1 + counts[i] here."""


class ResultCopier:
    """Copies results off the device while the next step runs on it. One thread waits for the copies, in
    order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[_Sent | None] = SimpleQueue()
        self._thread = Thread(target=_deliver, args=(self._queue,), name="quire-results", daemon=True)
        self._thread.start()

    def send(self, pending: PendingStep) -> Future[StepResult]:
        """Start the copies, after all that has been launched so far; the device's tensors live until they
        are done."""
        future: Future[StepResult] = Future()
        if self._stream is None:
            self._queue.put(_Sent(future, _host_copy(pending), pending, None))
            return future
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copied = _host_copy(pending)
            done = torch.cuda.Event()
            done.record(self._stream)
        self._queue.put(_Sent(future, copied, pending, done))
        return future

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=10)


@dataclass(slots=True)
class _Sent:
    future: Future[StepResult]
    copied: PendingStep
    device: PendingStep
    """Holds the source of the copies until they are done."""
    done: Any


def _deliver(queue: SimpleQueue[_Sent | None]) -> None:
    """Wait for each step's copies and hand its result over; the wait is in the driver, without Python's
    lock."""
    while (sent := queue.get()) is not None:
        try:
            if sent.done is not None:
                sent.done.synchronize()
            result = _assemble(sent.copied)
        except Exception as error:
            _settle(sent.future, error=error)
        else:
            _settle(sent.future, result)


def _settle(future: Future[StepResult], result: StepResult | None = None, error: Exception | None = None) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if result is not None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _host_copy(pending: PendingStep) -> PendingStep:
    ranked = pending.candidates
    return PendingStep(
        pending.step,
        pending.num_entries,
        pending.drawing,
        _to_host(pending.tokens),
        [(entries, _logprobs_to_host(found)) for entries, found in pending.logprobs],
        [(entry, _logprobs_to_host(found)) for entry, found in pending.prompt_logprobs],
        None if ranked is None else RankedCandidates(
            ranked.entries, ranked.counts, _logprobs_to_host(ranked.found), _to_host(ranked.peak)
        ),
        pending.errors,
        None if pending.drafts is None else replace(pending.drafts, tokens=_to_host(pending.drafts.tokens)),
    )


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in fresh pinned memory (a reused buffer would be overwritten before it is read)."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _logprobs_to_host(found: SampledLogprobs) -> SampledLogprobs:
    tensors = (found.token_ids, found.logprob, found.rank, found.top_ids, found.top_logprobs)
    return SampledLogprobs(found.rows, found.counts, *(_to_host(tensor) for tensor in tensors))


def _assemble(pending: PendingStep) -> StepResult:
    results = [EntryResult() for _ in range(pending.num_entries)]
    for entry, (token, status) in zip(pending.drawing, pending.tokens.tolist(), strict=True):
        if status == OK:
            results[entry].tokens.append(token)
        else:
            results[entry].error = FAILURES[status]
    for entries, found in pending.logprobs:
        for entry, row in zip(entries, found.to_list(), strict=True):
            results[entry].logprobs = [TokenLogprobs(*row)]
    for entry, found in pending.prompt_logprobs:
        known = results[entry].prompt_logprobs
        rows = [TokenLogprobs(*row) for row in found.to_list()]
        results[entry].prompt_logprobs = rows if known is None else known + rows
    if pending.candidates is not None:
        _take_candidates(pending.candidates, results)
    for entry, message in pending.errors.items():
        results[entry] = EntryResult(error=message)
    if pending.drafts is not None:
        results = _judged(pending.drafts.by_entry(), results)
    return StepResult(pending.step, results)


def _judged(drafts: list[tuple[int, ...]], places: list[EntryResult]) -> list[EntryResult]:
    """Drafts are kept as long as they are what was drawn at their places; then comes what was drawn there."""
    results, first = [], 0
    for mine in drafts:
        result, *others = places[first : first + 1 + len(mine)]
        first += 1 + len(mine)
        result.num_drafts = len(mine)
        for draft, place in zip(mine, others, strict=True):
            if result.error is not None or result.tokens[-1:] != [draft] or place.error is not None:
                break
            result.tokens += place.tokens
            if result.logprobs is not None and place.logprobs is not None:
                result.logprobs += place.logprobs
        results.append(result)
    return results


def _take_candidates(ranked: RankedCandidates, results: list[EntryResult]) -> None:
    rows = zip(ranked.entries, ranked.counts, ranked.peak.tolist(), ranked.found.to_list(), strict=True)
    for entry, count, peak, (_, _, _, ids, logprobs) in rows:
        if math.isfinite(peak):
            results[entry].candidates = list(zip(ids, logprobs, strict=True))[:count]
        else:
            results[entry].error = FAILURES[NOT_FINITE]


def failed(error: Exception) -> Future[StepResult]:
    """A step that was lost before it reached the device."""
    future: Future[StepResult] = Future()
    future.set_exception(error)
    return future
