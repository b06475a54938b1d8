"""The step loop: plan a step, submit it, collect its result, update the scheduler."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.engine.self_check import SelfCheck
from quire.errors import InvalidRequestError, QuireError
from quire.executor.base import Executor
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.request import FinishReason, Request, Sequence
from quire.scheduler.scheduler import Scheduler, SequenceUpdate
from quire.structured.gate import release_grammar

if TYPE_CHECKING:
    from quire.structured.compiler import GrammarCompiler
    from quire.structured.isolated import IsolatedGrammars


_ARRIVAL_WAIT_S = 0.05
"""Longest that `step` waits for KV when there is nothing else to do; then its caller gets control back."""
_LAST_COPIES_S = 10.0
"""Longest that `close` waits for copies to tiers that are under way."""
_GRAMMAR_WAIT_S = 0.02
"""Longest that `step` waits for a grammar when there is nothing else to do; new requests may arrive meanwhile."""


class Peers(Protocol):
    """Other engines that compute prompts for this one, or for which it computes prompts. Polled between steps."""

    def tick(self) -> bool:
        """Process their messages; true if that may have changed what can be planned."""
        ...

    def claim(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Remove the updates of their requests; return the others."""
        ...

    def close(self) -> None: ...


class StepObserver(Protocol):
    """Called when steps begin and end."""

    def submitted(self, plan: StepPlan) -> None: ...

    def collected(self) -> None: ...

    def idle(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class StepTimes:
    """Where the last call of `step` spent its time, in seconds."""

    plan: float = 0.0
    execute: float = 0.0
    """Submitting plans and waiting for results."""
    update: float = 0.0


class EngineCore:
    """Drives a scheduler and an executor. With a depth of 2, step N+1 is planned while step N runs."""

    def __init__(self, scheduler: Scheduler, executor: Executor, max_steps_in_flight: int = 1,
                 grammars: GrammarCompiler | IsolatedGrammars | None = None) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.grammars = grammars
        self._depth = max_steps_in_flight
        self._futures: deque[Future[StepResult]] = deque()
        self.trace: StepObserver | None = None
        self.peers: Peers | None = None
        self.times = StepTimes()
        self.self_check = SelfCheck(scheduler)
        self.stalled_for: float | None = None
        """If nothing could be planned: seconds to wait at most for KV (`executor.arrivals` signals it) or a grammar."""
        for tier in scheduler.cache.tiers:
            tier.wake = executor.arrivals.ring

    def add(self, request: Request) -> None:
        self.self_check.mend()
        self.self_check.disturb()
        wanted = request.params.structured_outputs
        if wanted is not None:
            if self.grammars is None:
                raise InvalidRequestError("structured_outputs is not supported by this engine, which has no tokenizer",
                                          field="structured_outputs")
            request.grammar = self.grammars.submit(wanted, request.tenant, request.stop_ids)
        try:
            self.scheduler.add(request)
        except QuireError:
            release_grammar(request)
            raise

    def abort(self, request_id: str) -> bool:
        self.self_check.disturb()
        return self.scheduler.abort(request_id)

    def clear_prefix_cache(self) -> int:
        """Evict cached prefixes that no sequence uses; returns how many blocks that freed."""
        self.self_check.disturb()
        return self.scheduler.cache.drop_cached()

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.self_check.disturb()
        self.scheduler.finish(seq, reason, stop_reason)
        if self.trace is not None and not self.scheduler.has_work:
            self.trace.idle()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self, wait_for_kv: bool = True) -> list[SequenceUpdate]:
        """Submit plans until the executor has enough, wait for the oldest step, and return its sequences' updates.

        If every request waits for KV or a grammar, this waits a short while too. With `wait_for_kv=False` it returns
        at once, for callers that also wait for messages; `stalled_for` tells them how long to wait. With no work at
        all it runs a slice of the self-check: only then, so the last tokens of a request never wait for it.
        """
        self.times = times = StepTimes()
        self.stalled_for = None
        self.take_arrivals()
        if not self.scheduler.has_work:
            self.self_check.slice()
            return []
        self.self_check.disturb()
        stirred = False
        while len(self._futures) < self._depth:
            began = time.perf_counter()
            plan = self.scheduler.schedule()
            if self.peers is not None:
                stirred = self.peers.tick()  # asks other engines for prompts now: they compute while this step runs
            planned = time.perf_counter()
            times.plan += planned - began
            if plan is None:
                break
            self._submit(plan)
            times.execute += time.perf_counter() - planned
        if self._futures:
            self._collect()
            self.scheduler.compiling.step_took(times.execute)
        elif not stirred:
            self._rest(wait_for_kv)
        if self.peers is not None:
            self.peers.tick()
        updates = self.take_updates()
        if self.trace is not None and not self.scheduler.has_work:
            self.trace.idle()
        return updates

    @property
    def overlaps(self) -> bool:
        """Whether a step can be planned while another runs."""
        return self._depth > 1

    def launch(self) -> None:
        """Plan and submit one step if one more fits in flight, without waiting: this keeps the executor busy while the
        caller still adds requests."""
        if len(self._futures) >= self._depth or not self.scheduler.has_work:
            return
        self.self_check.disturb()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._submit(plan)

    def take_updates(self) -> list[SequenceUpdate]:
        """Updates of this engine's own requests since the last call, in order."""
        updates = self.scheduler.take_updates()
        if self.peers is None:
            return updates
        return self.peers.claim(updates)

    def take_arrivals(self) -> None:
        """Process transfer reports that came without a step's result, other engines' messages, and expired leases."""
        reports = self.executor.arrivals.take()
        if reports:
            self.self_check.disturb()
            self.scheduler.arrived(reports)
        if self.peers is not None:
            self.peers.tick()
        ends = self.scheduler.cache.leases.next_end
        if ends is not None and self.scheduler.clock() >= ends:
            self.self_check.disturb()
            self.scheduler.look()

    def _rest(self, wait_for_kv: bool) -> None:
        """Nothing is in flight and nothing could be planned: wait a little, or end a request that blocks others."""
        scheduler = self.scheduler
        if scheduler.compiling.owes_masks:
            self._await_grammar(wait_for_kv)
        elif len(scheduler.waiting) or scheduler.running or scheduler.arriving:
            until = scheduler.awaits_until
            if until is None:
                scheduler.fail_stuck()
                return
            self.stalled_for = max(0.0, until - scheduler.clock())
            if wait_for_kv:
                most = _GRAMMAR_WAIT_S if len(scheduler.compiling) else _ARRIVAL_WAIT_S
                self.executor.arrivals.wait(min(self.stalled_for, most))
                self.take_arrivals()
            elif len(scheduler.compiling):
                self.stalled_for = min(self.stalled_for, _GRAMMAR_WAIT_S)
        elif len(scheduler.compiling):
            self._await_grammar(wait_for_kv)

    def _await_grammar(self, here: bool) -> None:
        if here:
            self.scheduler.compiling.wait(_GRAMMAR_WAIT_S)
        else:
            self.stalled_for = _GRAMMAR_WAIT_S

    def warm_grammars(self) -> None:
        """Start the grammar process now, so that the first structured output need not wait for it."""
        if self.scheduler.compiling.isolated is not None:
            self.scheduler.compiling.isolated.warm()

    def hear_grammars(self) -> None:
        """Process messages of the grammar processes while there is no work; steps do so otherwise."""
        if self.scheduler.compiling.isolated is not None:
            self.scheduler.compiling.isolated.pump()

    def _submit(self, plan: StepPlan) -> None:
        """Append a future for every plan, whatever happens: the scheduler keeps plans in flight in that order."""
        future: Future[StepResult] = Future()
        if self.trace is not None:
            self.trace.submitted(plan)
        try:
            future = self.executor.submit(plan)
        except BaseException as error:
            future.set_exception(error)
            self.scheduler.never_started(plan)
            if not isinstance(error, Exception):
                raise
        finally:
            self._futures.append(future)

    def _collect(self) -> None:
        # The future stays in the queue while we wait, so that a Ctrl-C here does not lose it.
        began = time.perf_counter()
        error = self._futures[0].exception()
        done = time.perf_counter()
        self.times.execute += done - began
        if error is None:
            self.scheduler.update(self._futures.popleft().result())
        else:
            self._futures.popleft()
            shown = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
            if not isinstance(error, QuireError):
                logging.getLogger("quire.engine").error("a step failed; its requests end with an error", exc_info=error)
            self.scheduler.fail_step(f"the step that computed this request failed: {shown}")
        self.times.update += time.perf_counter() - done
        if self.trace is not None:
            self.trace.collected()

    def settle(self) -> None:
        """Start copies to tiers that the last step requested: with no request left, no further step starts them."""
        if not self.scheduler.has_requests and self.scheduler.cache.transfers.drafted:
            self.step()

    def _finish_copies(self) -> None:
        """Wait for copies to tiers that are under way, up to `_LAST_COPIES_S`."""
        until = time.perf_counter() + _LAST_COPIES_S
        transfers = self.scheduler.cache.transfers
        while any(transfer.out for transfer in transfers.under_way.values()) and time.perf_counter() < until:
            self.executor.arrivals.wait(_ARRIVAL_WAIT_S)
            self.take_arrivals()

    def close(self) -> None:
        """Abandon steps in flight and close the executor and everything else."""
        if not self.scheduler.has_requests and any(tier.unit_tokens for tier in self.scheduler.cache.tiers):
            self.settle()
            self._finish_copies()
        if self.trace is not None:
            self.trace.close()
        for future in self._futures:
            future.cancel()
        self._futures.clear()
        if self.peers is not None:
            self.peers.close()
        if self.grammars is not None:
            self.grammars.close()
        self.executor.close()
        self.scheduler.cache.close()
