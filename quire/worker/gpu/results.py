"""Results on their way to the host: copied on a side stream, waited for only by whoever asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from quire.sampling.logprobs import Candidates, PackedLogprobs, SampledLogprobs
from quire.sampling.sampler import OK
from quire.scheduler.plan import EntryResult, StepResult
from quire.worker.gpu.drafted import Drafted
from quire.worker.outcomes import along_drafts, drawn_result, take_candidates

Watched = Callable[[], AbstractContextManager[None]]


@dataclass(slots=True)
class PendingStep:
    """What the device will have for a step: tokens with statuses, log-probabilities, and whose they are."""

    step: int
    num_entries: int
    drawing: Sequence[int]
    """Entry of the plan that each row of `tokens` belongs to."""
    tokens: Tensor
    """int32 [rows, 2]: token and status."""
    logprobs: list[tuple[list[int], SampledLogprobs | PackedLogprobs]] = field(default_factory=list)
    """(entries, what was found for them)."""
    prompt_logprobs: list[tuple[int, SampledLogprobs]] = field(default_factory=list)
    """(entry, a run of its positions), in order."""
    candidates: tuple[list[int], Candidates] | None = None
    """(entries, what was found for them)."""
    errors: dict[int, str] = field(default_factory=dict)
    """What became of entries that failed alone."""
    drafts: Drafted | None = None
    """The plan's drafts, where a draft is an entry of its own: entry i of the plan is 1 + counts[i] here."""


class ResultCopier:
    """Copies results off the device while the next step runs on it. One thread waits for the copies, in order."""

    def __init__(self, device: torch.device, watched: Watched = nullcontext) -> None:
        """`watched`: a context around every wait for the device; raises if the results are invalid."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[_Sent | None] = SimpleQueue()
        self._thread = Thread(target=_deliver, args=(self._queue, watched), name="quire-results", daemon=True)
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


def _deliver(queue: SimpleQueue[_Sent | None], watched: Watched) -> None:
    """Wait for each step's copies and hand its result over; the wait is in the driver, without Python's lock."""
    while (sent := queue.get()) is not None:
        try:
            with watched():
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
    return PendingStep(
        pending.step,
        pending.num_entries,
        pending.drawing,
        _to_host(pending.tokens),
        [(entries, found.moved(_to_host)) for entries, found in pending.logprobs],
        [(entry, found.moved(_to_host)) for entry, found in pending.prompt_logprobs],
        None if pending.candidates is None else _candidates_to_host(*pending.candidates),
        pending.errors,
        None if pending.drafts is None else _drafts_to_host(pending.drafts),
    )


def _drafts_to_host(drafted: Drafted) -> Drafted:
    parents = drafted.grown_parents
    return replace(drafted, tokens=_to_host(drafted.tokens),
                   grown_parents=None if parents is None else _to_host(parents))


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in fresh pinned memory (a reused buffer would be overwritten before it is read)."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _candidates_to_host(entries: list[int], found: Candidates) -> tuple[list[int], Candidates]:
    copied = (_to_host(tensor) for tensor in (found.ids, found.logprobs, found.peak))
    return entries, Candidates(found.counts, *copied)


def _assemble(pending: PendingStep) -> StepResult:
    results = _drawn(pending)
    for entries, found in pending.logprobs:
        for entry, one in zip(entries, found.records(), strict=True):
            results[entry].logprobs = [one]
    for entry, found in pending.prompt_logprobs:
        results[entry].prompt_logprobs = [*(results[entry].prompt_logprobs or []), *found.records()]
    if pending.candidates is not None:
        take_candidates(*pending.candidates, results)
    for entry, message in pending.errors.items():
        results[entry] = EntryResult(error=message)
    if pending.drafts is not None:
        results = _judged(pending.drafts, results)
    return StepResult(pending.step, results)


def _drawn(pending: PendingStep) -> list[EntryResult]:
    draws = pending.tokens.tolist()
    if isinstance(pending.drawing, range):  # every entry, in order
        return [EntryResult([token]) if status == OK else drawn_result(token, status) for token, status in draws]
    results = [EntryResult() for _ in range(pending.num_entries)]
    for entry, (token, status) in zip(pending.drawing, draws, strict=True):
        results[entry] = drawn_result(token, status)
    return results


def _judged(drafted: Drafted, places: list[EntryResult]) -> list[EntryResult]:
    """The plan's entries, of which each is as many places here as it has drafts, and one more."""
    results, first = [], 0
    for (mine, parents), count in zip(drafted.trees_by_entry(), drafted.counts, strict=True):
        results.append(along_drafts(mine, places[first : first + 1 + len(mine)], parents))
        first += 1 + count
    for i in drafted.refused:
        results[i].undraftable = True
    return results


def failed(error: Exception) -> Future[StepResult]:
    """A step that was lost before it reached the device."""
    future: Future[StepResult] = Future()
    future.set_exception(error)
    return future
