"""Drafts of a head on a GPU, simulated: steps overlap, a head reads what it has not seen, and the host takes its time
where a step has to wait for the one before it. What the engine spends on finding out whether drafts pay has bounds."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from dataclasses import dataclass, field

import pytest

from quire.kvcache.manager import KVCacheManager
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import EntryResult, StepPlan, StepResult
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Limits, Scheduler
from quire.speculation.device_speculator import DeviceSpeculator
from quire.speculation.speculator import Load
from tests.speculation.test_speculator import free

ROWS = (1, 8, 40, 64, 128, 320, 640)
MILLISECONDS = (3.8, 4.6, 5.2, 5.6, 7.3, 12.5, 22.0)
"""Of decode steps of 8B on an H200, about."""
PROMPT = 256
GOOD, POOR = (0.8, 0.7, 0.6, 0.5), (0.2, 0.2, 0.2, 0.2)
CALIBRATED = (1, 2, 4, 5, 8, 16, 32, 64, 128, 256)


def cost(rows: int) -> float:
    """Seconds of the GPU."""
    if rows > ROWS[-1]:
        return rows * 2.6e-6
    place = min(max(1, bisect(ROWS, rows)), len(ROWS) - 1)
    share = (rows - ROWS[place - 1]) / (ROWS[place] - ROWS[place - 1])
    return 1e-3 * (MILLISECONDS[place - 1] + (MILLISECONDS[place] - MILLISECONDS[place - 1]) * share)


@dataclass
class Gpu:
    """Streams of equal length, two steps under way."""

    streams: int
    speculator: DeviceSpeculator | None
    tokens: int = 160
    chances: tuple[float, ...] = GOOD
    later: tuple[int, tuple[float, ...]] = (1 << 30, GOOD)
    """From this step on drafts have these chances."""
    prompts_in_step: int = 64
    host: float = 0.03e-3
    """Seconds for each stream, beside half a millisecond."""
    now: float = 0.0
    steps: int = 0
    drafting: list[int] = field(default_factory=list)
    """Of each step: sequences that have drafts."""
    waited: int = 0
    """Steps that were begun when no other was under way."""

    def __post_init__(self) -> None:
        if self.speculator is not None:
            self.speculator._clock = lambda: self.now
            for size in CALIBRATED:  # one step at a time, so with what it takes to launch one
                self.speculator.times.observe(size, cost(size) + 0.4e-3)
        limits = Limits(64, self.prompts_in_step * PROMPT, 8192, max_num_partial_prefills=64)
        self.scheduler = Scheduler(limits, KVCacheManager(1 << 15, 16), clock=lambda: self.now,
                                   speculator=self.speculator)
        self.texts = [free(PROMPT + self.tokens, seed) for seed in range(self.streams)]
        params = SamplingParams(max_tokens=self.tokens, ignore_eos=True, temperature=0.0)
        for i, text in enumerate(self.texts):
            self.scheduler.add(Request(f"r{i}", text[:PROMPT], params, seed=i, arrival_time=0.0))
        self._rows: dict[int, list[int]] = {}
        self._read: dict[int, int] = {}
        self._dealt: dict[int, list[bool]] = {}

    def run(self) -> float:
        """Seconds from the first tokens on."""
        under_way: deque[StepPlan] = deque()
        began = None
        while self.scheduler.has_work:
            self.waited += not under_way
            self.now += 0.0 if under_way else 0.5e-3 + self.host * self.streams
            while len(under_way) < 2 and (planned := self.scheduler.schedule()) is not None:
                under_way.append(planned)
            plan = under_way.popleft()
            for start in plan.starts:
                self._rows[start.row] = self.texts[start.seed]
            self.now += cost(plan.num_tokens) + self._head(plan)
            self.steps += 1
            self.drafting.append(sum(entry.device_drafts > 0 for entry in plan.entries))
            self.scheduler.update(StepResult(plan.step, [self._result(plan, i) for i in range(len(plan.entries))]))
            self.scheduler.take_updates()
            began = self.now if began is None else began
        self.scheduler.check()
        return self.now - (began or 0.0)

    def _head(self, plan: StepPlan) -> float:
        entries = [entry for entry in plan.entries if entry.device_drafts]
        unread = 0
        for entry in entries:
            behind = entry.start - self._read.get(entry.row, 0)
            unread += behind if behind > 16 else 0
            self._read[entry.row] = entry.start + 1
        passes = max((entry.device_drafts for entry in entries), default=0)
        return passes * (0.21e-3 + 0.29e-3 * len(entries) / 64) + (0.8e-3 + 1e-6 * unread if unread else 0.0)

    def _result(self, plan: StepPlan, i: int) -> EntryResult:
        entry = plan.entries[i]
        if not entry.sample:
            return EntryResult()
        text, known = self._rows[entry.row], entry.start + entry.num_tokens - entry.num_drafts
        kept = 0
        while kept < entry.device_drafts and self._hits(kept):
            kept += 1
        return EntryResult(text[known : known + kept + 1], num_drafts=entry.num_drafts)

    def _hits(self, place: int) -> bool:
        """Of ten drafts at a place exactly its share is right."""
        if self.steps >= self.later[0] and self.chances != self.later[1]:
            self.chances, self._dealt = self.later[1], {}
        left = self._dealt.setdefault(place, [])
        if not left:
            right = round(10 * self.chances[place])
            left += [(7 * i) % 10 < right for i in range(10)]
        return left.pop()


def head(adaptive: bool = True) -> DeviceSpeculator:
    """As it is calibrated: what it takes to read a text is measured with a short one, most of it to launch."""
    speculator = DeviceSpeculator(4, adaptive, own_kv=True, gpu=True, ahead=True)
    speculator.most_in_step = 512
    speculator.drafting.observe(1, 0.25e-3)
    speculator.seconds_behind = 6e-6
    return speculator


def gains(streams: int, **more: object) -> tuple[float, float]:
    """Times the speed without drafts: with four of them always, and as they pay."""
    plain, always, adaptive = (Gpu(streams, speculator, **more).run()  # type: ignore[arg-type]
                               for speculator in (None, head(False), head()))
    return plain / always, plain / adaptive


@pytest.mark.parametrize(("chances", "tokens", "host", "least"), [
    (GOOD, 160, 0.03e-3, 0.985), (GOOD, 160, 0.05e-3, 0.985), (GOOD, 1000, 0.05e-3, 0.99),
    ((0.5, 0.5, 0.5, 0.5), 160, 0.05e-3, 0.97), (POOR, 160, 0.05e-3, 0.97), (POOR, 1000, 0.05e-3, 0.99),
])
def test_64_streams_where_drafts_do_not_pay_hardly_pay_for_finding_out(
    chances: tuple[float, ...], tokens: int, host: float, least: float
) -> None:
    """The first answers that an engine gives. Who was tried in vain ends two steps after the others: 1% of 160."""
    always, adaptive = gains(64, host=host, chances=chances, tokens=tokens)
    assert always < 0.95 and adaptive > least


def test_a_try_makes_no_other_sequence_wait() -> None:
    speculator = head()
    gpu = Gpu(64, speculator, tokens=1000)
    gpu.run()
    tries = [count for count in gpu.drafting if count]
    assert len(tries) > 2 and sum(count == 1 for count in tries) >= len(tries) - 2
    assert gpu.waited < 6  # the first step, and the last ones of those that were tried


@pytest.mark.parametrize(("streams", "least"), [(1, 0.98), (8, 0.97), (16, 1.0), (32, 1.0)])
def test_where_drafts_pay_they_are_taken(streams: int, least: float) -> None:
    always, adaptive = gains(streams)
    assert always > 1.15 and adaptive > least * always


@pytest.mark.parametrize("streams", [1, 4, 8, 16, 32])
def test_poor_drafts_are_soon_given_up(streams: int) -> None:
    always, adaptive = gains(streams, chances=POOR)
    assert always < 0.9 and adaptive > 0.955


@pytest.mark.parametrize("streams", [8, 32])
def test_streams_whose_prompts_came_one_after_another_have_their_drafts_in_the_same_steps(streams: int) -> None:
    """Else two halves take turns for ever, and each reads all weights."""
    at_once, _ = gains(streams)
    always, adaptive = gains(streams, prompts_in_step=streams // 4)
    assert always > 0.9 * at_once and adaptive > 0.9 * at_once
    gpu = Gpu(streams, head(False), prompts_in_step=streams // 4)
    gpu.run()
    assert sum(count == streams for count in gpu.drafting) > 0.7 * len(gpu.drafting)


@pytest.mark.parametrize("streams", [4, 8])
def test_drafts_that_begin_to_hit_are_found_out(streams: int) -> None:
    gpu = Gpu(streams, head(), tokens=2000, chances=(0.1,) * 4, later=(200, GOOD))
    gpu.run()
    assert gpu.steps < 1500
    assert sum(gpu.drafting[20:200]) < 12  # until then there were tries


def test_many_streams_find_out_that_drafts_always_hit() -> None:
    """Tries of one sequence show it, and more than the first of its drafts."""
    gpu = Gpu(64, head(), tokens=600, chances=(1.0,) * 4)
    gpu.run()
    assert gpu.steps < 400


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_step_that_was_once_slow_does_not_end_drafts_that_pay(step: int) -> None:
    """A kernel that is compiled in the first step with drafts, say."""

    class Slow(Gpu):
        def _head(self, plan: StepPlan) -> float:
            return super()._head(plan) + (0.06 if self.steps == step else 0.0)

    gpu = Slow(1, DeviceSpeculator(4, gpu=True, own_kv=True, ahead=True))
    assert Gpu(1, None).run() > 1.5 * gpu.run()
    assert sum(count > 0 for count in gpu.drafting) > 0.9 * len(gpu.drafting)


def test_steps_without_drafts_are_not_charged_for_the_wait_that_drafts_cause() -> None:
    """The host's time shows only where a step waits for tokens: without drafts none does."""
    speculator = head()
    gpu = Gpu(16, speculator, tokens=600)
    gpu.run()
    without = [i for i, count in enumerate(gpu.drafting) if not count]
    assert len(without) > 2 and sum(count > 8 for count in gpu.drafting) > 100
    assert speculator.times.estimate(16) < 1.06 * (cost(16) + 0.4e-3)
    assert speculator._gap(16) == pytest.approx(0.5e-3 + 16 * 0.03e-3, rel=0.1)


def test_a_gap_that_was_measured_with_few_streams_is_no_reason_against_drafts_of_many() -> None:
    """Nor one of many against those of few."""
    speculator = head()
    Gpu(1, speculator, tokens=100).run()
    assert speculator._gap(1) == pytest.approx(0.53e-3, rel=0.1) == speculator._gap(8)
    assert Gpu(8, None).run() / Gpu(8, speculator).run() > 1.6
    assert speculator._gap(8) == pytest.approx(0.74e-3, rel=0.1)
    other = head()
    other._observe(Load(tokens=64, drafts=32, drafting=32), 0.006, gap=0.0016)
    assert other._gap(64) == other._gap(32) == 0.0016 and other._gap(2) == pytest.approx(0.0004)


@pytest.mark.parametrize(("streams", "seconds_behind"), [(1, 1e-6), (16, 1e-6), (1, 1e-3), (16, 1e-3)])
def test_while_drafts_do_not_pay_hardly_anything_is_asked(streams: int, seconds_behind: float,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether tries are tried now and then, or no text is worth its reading."""
    speculator, looked = head(), []
    speculator.seconds_behind = seconds_behind
    waiting = speculator._waiting
    monkeypatch.setattr(speculator, "_waiting", lambda *given: looked.append(given) or waiting(*given))
    gpu = Gpu(streams, speculator, tokens=1000, chances=(0.0,) * 4)
    gpu.run()
    assert len(looked) < 0.1 * gpu.steps
    assert bool(sum(gpu.drafting)) == (seconds_behind < 1e-4)
