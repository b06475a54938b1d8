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
"""How long a step waits for KV when there is nothing else to do, before its caller may look around."""
_LAST_COPIES_S = 10.0
"""That the end of an engine waits for copies to tiers which are under way."""
_GRAMMAR_WAIT_S = 0.02
"""How long a step waits for a grammar when there is nothing else to do: others may come meanwhile."""


class Peers(Protocol):
    """Other engines that this one works for, or that work for it; their news is looked at between steps."""

    def tick(self) -> bool:
        """Look at their news; true if that may have changed what can be planned."""
        ...

    def claim(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Take out what concerns requests of theirs."""
        ...

    def close(self) -> None: ...


class StepObserver(Protocol):
    """A listener that is called when steps begin and end."""

    def submitted(self, plan: StepPlan) -> None: ...

    def collected(self) -> None: ...

    def idle(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class StepTimes:
    """Where the last call of `step` spent its time, in seconds."""

    plan: float = 0.0
    execute: float = 0.0
    """Handing plans over and waiting for results."""
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
        """Seconds without anything to plan, until KV arrives (`executor.arrivals` tells) or a grammar is there."""
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
        """Keep the executor supplied, wait for the oldest step, and return what became of its sequences.

        When all that is left waits for KV or for a grammar, it waits too, a little while; or not (`wait_for_kv`), for
        callers who wait themselves, for messages too: `stalled_for` tells them how long. Without anything to do it
        examines itself a little, so whoever has just got the last tokens does not wait.
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
                stirred = self.peers.tick()  # who is to compute a prompt for this engine begins while the step runs
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
        """A step can be planned while another runs."""
        return self._depth > 1

    def launch(self) -> None:
        """Plan and submit one step if one more fits in flight, and wait for nothing: whoever still adds requests keeps
        the executor busy meanwhile."""
        if len(self._futures) >= self._depth or not self.scheduler.has_work:
            return
        self.self_check.disturb()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._submit(plan)

    def take_updates(self) -> list[SequenceUpdate]:
        """News of this engine's own requests since the last call, in order."""
        updates = self.scheduler.take_updates()
        if self.peers is None:
            return updates
        return self.peers.claim(updates)

    def take_arrivals(self) -> None:
        """What transfers have reported besides the results of steps, other engines' news, leases that have ended."""
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
        """Nothing is in flight, and nothing could be planned."""
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
        """Have the first structured output not wait for libraries and the vocabulary."""
        if self.scheduler.compiling.isolated is not None:
            self.scheduler.compiling.isolated.warm()

    def hear_grammars(self) -> None:
        """Take in what their processes say while there is no work, in which steps would."""
        if self.scheduler.compiling.isolated is not None:
            self.scheduler.compiling.isolated.pump()

    def _submit(self, plan: StepPlan) -> None:
        """Every plan that the scheduler made gets its future, whatever happens, so the two stay in step."""
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
        # It stays in the queue while we wait, so that a Ctrl-C here loses nothing.
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
        """Start copies to tiers that were asked for by the last step of the last request: no other will start them."""
        if not self.scheduler.has_requests and self.scheduler.cache.transfers.drafted:
            self.step()

    def _finish_copies(self) -> None:
        """Let copies to tiers that are under way come to their end, for a while."""
        until = time.perf_counter() + _LAST_COPIES_S
        transfers = self.scheduler.cache.transfers
        while any(transfer.out for transfer in transfers.under_way.values()) and time.perf_counter() < until:
            self.executor.arrivals.wait(_ARRIVAL_WAIT_S)
            self.take_arrivals()

    def close(self) -> None:
        """Abandon what is in flight and let go of the executor."""
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
