"""Watches an engine's steps and blocks and tells what changed, ten times a second at most.

None of this runs while the engine is not watched. While it is, a step costs a few microseconds; frames are made
between steps, and farther apart where making them takes more than `_SHARE` of the engine's time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, islice

from quire.engine.metrics import flat_metrics
from quire.engine.watch import view_frame as f
from quire.engine.watch.expert_view import ExpertView
from quire.engine.watch.pool_view import PoolView, TableBook, label
from quire.executor.base import RankFacts
from quire.kernels.routing import LayerLoad
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.host_tier import HostTier
from quire.scheduler.plan import StepPlan
from quire.scheduler.preemption import PreemptionReason
from quire.scheduler.request import Request, Sequence, Status
from quire.scheduler.scheduler import Scheduler
from quire.worker.memory import PoolSize

FRAME_SECONDS = 0.1
_SHARE = 0.01
"""Of the engine's time: what watching may take."""
_MAX_STEPS = 32
"""In one frame; a GPU makes more than that between two frames."""
_MAX_ENTRIES = 24
"""Of one step that are shown one by one."""
_MAX_SCANNED = 1024
"""Plan entries that one frame looks at, roughly: of large batches fewer steps are shown."""
_MAX_LISTED = 64
"""Requests of each queue that are shown one by one."""
_MAX_COPIES = 32


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    rows: dict[int, Sequence]
    """Who had which row when it was planned."""
    began: float
    preempted: list[f.PreemptionView]
    ended: float = 0.0
    accepted: dict[int, int] = field(default_factory=dict)
    """By row with drafts: how many of them were right."""

    def judge(self) -> None:
        """Its results are known: a sequence has gone on from its last token by those drafts that were right."""
        for entry in self.plan.entries:
            seq = self.rows.get(entry.row)
            if entry.num_drafts and seq is not None:
                self.accepted[entry.row] = max(0, min(entry.num_drafts, seq.num_computed - entry.start - 1))


@dataclass(slots=True)
class _Spent:
    """Seconds of the engine's own thread."""

    total: float = 0.0
    frame: float = 0.0
    """What the last frames took: their average, or the last if that took longer."""

    def add_frame(self, seconds: float) -> None:
        self.total += seconds
        self.frame = max(seconds, 0.7 * self.frame + 0.3 * seconds)


@dataclass(slots=True)
class _Timeline:
    """Steps that no frame has told of yet: the first ones after the last frame, and later those in which more happened
    than tokens. Of the others only the number is kept: a plan that is held is work for the garbage collector."""

    in_flight: deque[_Step | None] = field(default_factory=deque)
    done: list[_Step] = field(default_factory=list)
    num_kept: int = 0
    num_entries: int = 0
    """Of the steps kept."""
    num_done: int = 0
    """All of them, also those that are not kept."""

    def keeps(self, num_entries: int, eventful: bool) -> bool:
        if self.num_kept >= (2 * _MAX_STEPS if eventful else _MAX_STEPS):
            return False
        if self.num_entries + num_entries > _MAX_SCANNED and self.num_kept and not eventful:
            return False
        self.num_kept += 1
        self.num_entries += num_entries
        return True

    def collected(self, now: float) -> None:
        step = self.in_flight.popleft()
        self.num_done += 1
        if step is not None:
            step.ended = now
            step.judge()
            self.done.append(step)

    def take(self) -> tuple[list[_Step], int]:
        """Those to be shown, and how many there were besides."""
        shown, skipped = self.done, self.num_done - len(self.done)
        self.done = []
        self.num_done = 0
        self.num_kept = sum(step is not None for step in self.in_flight)
        self.num_entries = sum(len(step.plan.entries) for step in self.in_flight if step is not None)
        return shown, skipped


class EngineView:
    """One per engine at a time; an observer of its core, told of every step (`StepObserver`)."""

    def __init__(self, scheduler: Scheduler, pool: PoolSize, title: str, *, engine: int = 0, simulated: bool = False,
                 clock: Callable[[], float] = time.monotonic,
                 ranks: Callable[[], list[RankFacts]] = list,
                 experts: Callable[[], list[LayerLoad]] = list) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._title, self._engine, self._simulated = title, engine, simulated
        self._clock = clock
        self._started = self._next_at = clock()
        self._spent = _Spent()
        self._ranks, self._experts = ranks, ExpertView(experts)
        self._stages_told: dict[int, float] = {}
        """By stage: the end of the last step that a frame has told of."""
        self._timeline = _Timeline()
        self._preempted: list[f.PreemptionView] = []
        self._rows: dict[int, Sequence] = {}
        self._full = True
        self._see_everything()
        scheduler.on_preempt = self.preempted

    def _see_everything(self) -> None:
        cache = self._scheduler.cache
        self._device = [PoolView(cache.num_blocks) for _ in cache.groups]
        self._host = [PoolView(pool.num_blocks) for pool in self._host_pools()]
        self._tables = TableBook()
        self._experts.start_over()

    def _host_pools(self) -> list[BlockPool]:
        """Other tiers than host memory are not shown block by block."""
        return next((tier.pools for tier in self._scheduler.cache.tiers if isinstance(tier, HostTier)), [])

    # ---- what the engine reports

    def submitted(self, plan: StepPlan) -> None:
        if plan.starts or not self._rows:
            self._rows = {seq.row: seq for request in self._scheduler.running.values()
                          for seq in request.sequences if seq.row >= 0}
        preempted, self._preempted = self._preempted, []
        kept = self._timeline.keeps(len(plan.entries), bool(preempted or plan.copies or plan.transfers))
        self._timeline.in_flight.append(_Step(plan, self._rows, self._clock(), preempted) if kept else None)

    def collected(self) -> None:
        """The oldest step is back (or lost)."""
        if self._timeline.in_flight:  # else it was submitted before the view began
            self._timeline.collected(self._clock())

    def idle(self) -> None:
        """Nothing is left to do; the last frame is made when the loop asks for it."""

    def preempted(self, request: Request, reason: PreemptionReason) -> None:
        self._preempted.append(f.PreemptionView(label(request.live[0] if request.live else request.sequences[0]),
                                                reason.value, request.swapped is not None))

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._scheduler.on_preempt == self.preempted:
            self._scheduler.on_preempt = None

    # ---- frames

    def start_over(self) -> None:
        """A new watcher: the next frame is a full one."""
        self._full = True

    @property
    def due_in(self) -> float:
        """Seconds."""
        return max(0.0, self._next_at - self._clock())

    @property
    def due(self) -> bool:
        return self._clock() >= self._next_at

    @property
    def has_steps(self) -> bool:
        """There are some that no frame has told of."""
        return self._timeline.num_done > 0

    def frame(self) -> tuple[bytes, bool]:
        """What has changed since the last one, as JSON; and whether it is a full one."""
        began = time.perf_counter()
        full = self._full
        if full:
            self._see_everything()
        body = f.encode_frame(self._frame())
        self._full = False
        self._spent.add_frame(time.perf_counter() - began)
        self._next_at = self._clock() + max(FRAME_SECONDS, self._spent.frame / _SHARE)
        return body, full

    def _frame(self) -> f.Frame:
        scheduler, cache, now = self._scheduler, self._scheduler.cache, self._clock()
        shown, skipped = self._timeline.take()
        self._tables.look(scheduler)
        ranks = self._ranks()
        running = [seq for request in scheduler.running.values() for seq in request.sequences if seq.row >= 0]
        waiting = list(islice(chain(scheduler.arriving.values(), scheduler.waiting), _MAX_LISTED))
        return f.Frame(
            at=round(now - self._started, 4), full=self._full, engine=self._engine,
            facts=self._facts() if self._full else None,
            blocks=[view.changes(pool) for view, pool in zip(self._device, cache.pools, strict=True)],
            host=[view.changes(pool) for view, pool in zip(self._host, self._host_pools(), strict=True)],
            tables=self._tables.changed, gone=self._tables.gone,
            running=[_running(seq) for seq in running[:_MAX_LISTED]],
            waiting=[_waiting(request, now) for request in waiting],
            num_running=len(scheduler.running), num_waiting=len(scheduler.waiting),
            num_arriving=len(scheduler.arriving),
            steps=[_step_view(step, self._started) for step in shown], skipped_steps=skipped,
            stages=self._stage_steps(ranks), ranks=[_rank(rank) for rank in ranks],
            first_tokens=[token for step in shown for token in _first_tokens(step, self._started)],
            totals=flat_metrics(scheduler, self._pool), experts=self._experts.changes(),
            cost=round(self._spent.total / max(1e-9, now - self._started), 5),
        )

    def _stage_steps(self, ranks: list[RankFacts]) -> list[f.StageStep]:
        """Of the first tensor rank of every stage: the others compute the same steps at the same time."""
        found = []
        for rank in ranks:
            if rank.tensor_rank == 0 and ranks[-1].stage > 0:
                told = self._stages_told.get(rank.stage, self._started)
                fresh = [time for time in rank.times if time[2] > told]
                if fresh:
                    self._stages_told[rank.stage] = fresh[-1][2]
                found += [f.StageStep(rank.stage, step, round(began - self._started, 5),
                                      round(ended - self._started, 5)) for step, began, ended in fresh]
        return found

    def _facts(self) -> f.EngineFacts:
        cache, limits, ranks = self._scheduler.cache, self._scheduler.limits, self._ranks()
        return f.EngineFacts(
            self._title, cache.block_size, cache.num_blocks, [group.window for group in cache.groups],
            self._host_pools()[0].num_blocks if self._host else 0, limits.max_num_seqs, limits.max_num_batched_tokens,
            self._simulated, 1 + max((rank.stage for rank in ranks), default=0), max(1, len(ranks)),
            self._experts.layers)


def _rank(rank: RankFacts) -> f.RankView:
    last = rank.times[-1][2] - rank.times[-1][1] if rank.times else 0.0
    return f.RankView(rank.index, rank.stage, rank.tensor_rank, rank.memory,
                      round(rank.waited_seconds / max(1e-9, rank.busy_seconds), 3), rank.steps, round(last, 5))


def _running(seq: Sequence) -> f.RunningView:
    request = seq.request
    return f.RunningView(label(seq), seq.num_prompt_tokens, seq.num_tokens, seq.num_computed,
                         request.num_cached_tokens or 0, request.num_preemptions)


def _waiting(request: Request, now: float) -> f.WaitingView:
    why = "swapped" if request.swapped is not None else "preempted" if request.num_preemptions else "new"
    if request.status is Status.ARRIVING:
        why = "arriving"
    seq = request.live[0] if request.live else request.sequences[0]
    return f.WaitingView(label(seq), seq.num_prompt_tokens, len(seq.tokens), why,
                         round(max(0.0, now - request.arrival_time), 3))


def _step_view(step: _Step, zero: float) -> f.StepView:
    plan, rows = step.plan, step.rows
    entries: list[f.EntryView] = []
    prompt = decode = 0
    for entry in plan.entries:
        seq = rows.get(entry.row)
        kind = "d"
        drafts, *shape = entry.judged or (entry.num_drafts,)
        tokens = entry.num_tokens - entry.num_drafts + drafts
        if entry.shares is not None:
            kind = "f"
        elif entry.num_tokens > 1 + entry.num_drafts or (seq is not None and entry.start < seq.num_prompt_tokens):
            kind = "p"
            prompt += tokens
        else:
            decode += tokens
        if len(entries) < _MAX_ENTRIES:
            entries.append(f.EntryView("?" if seq is None else label(seq), entry.start, tokens, kind, drafts,
                                       step.accepted.get(entry.row, 0), *shape))
    return f.StepView(
        plan.step, round(step.began - zero, 5), round(step.ended - zero, 5), prompt, decode, entries,
        others=len(plan.entries) - len(entries), preempted=step.preempted,
        copied=[(copy.group, copy.source, copy.target) for copy in plan.copies[:_MAX_COPIES]],
        moved_out=sum(len(start.moves) for start in plan.transfers if start.out),
        moved_in=sum(len(start.moves) for start in plan.transfers if not start.out))


def _first_tokens(step: _Step, zero: float) -> list[f.FirstToken]:
    found = []
    for entry in step.plan.entries:
        if entry.sample and entry.num_tokens:
            seq = step.rows.get(entry.row)
            if seq is not None and seq.index == 0 and entry.start + entry.num_tokens == seq.num_prompt_tokens:
                waited = step.ended - seq.request.arrival_time
                found.append(f.FirstToken(label(seq), round(step.ended - zero, 4), round(waited, 4)))
    return found
