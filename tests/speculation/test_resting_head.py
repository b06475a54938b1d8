"""A head on a simulated GPU whose target is so fast that drafts are far from paying: then it is not fed either, but
for the tries, and drafts come back when they begin to pay."""

from __future__ import annotations

from collections import deque

import pytest

from quire.sampling.params import SamplingParams
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.preemption import PreemptionReason
from quire.scheduler.request import Request, Sequence
from quire.speculation.device_speculator import DeviceSpeculator
from tests.speculation import test_device_streams as streams
from tests.speculation.test_speculator import free

PROMPT, TOKENS = 45, 160


def head(rests: bool = True) -> DeviceSpeculator:
    speculator = DeviceSpeculator(4, own_kv=True, gpu=True, ahead=True, rests=rests)
    speculator.most_in_step = 256
    speculator.drafting.observe(1, 0.25e-3)
    speculator.seconds_behind = 6e-6
    return speculator


class Answers(streams.Gpu):
    """Answers one after the other, `streams` of them at once; a step takes half a millisecond."""

    fed: int = 0
    """Decode steps that kept hidden states."""
    rested: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._holed: set[int] = set()
        self._number = 0

    def answer(self) -> float:
        """Seconds from the prompts to the last token."""
        began = self.now
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
        for _ in range(self.streams):
            self.texts.append(free(PROMPT + TOKENS, self._number))
            self.scheduler.add(Request(f"a{self._number}", self.texts[-1][:PROMPT], params, seed=len(self.texts) - 1,
                                       arrival_time=self.now))
            self._number += 1
        under_way: deque[StepPlan] = deque()
        while self.scheduler.has_work:
            self.now += 0.0 if under_way else 0.3e-3
            while len(under_way) < 2 and (planned := self.scheduler.schedule()) is not None:
                under_way.append(planned)
            self._carry_out(under_way.popleft())
        return self.now - began

    def _carry_out(self, plan: StepPlan) -> None:
        for start in plan.starts:
            self._rows[start.row] = self.texts[start.seed]
            self._read.pop(start.row, None)
            self._holed.discard(start.row)
        assert not any(entry.device_drafts and entry.row in self._holed for entry in plan.entries)
        decodes = all(entry.decodes for entry in plan.entries)
        assert decodes or not plan.head_rests
        self._holed.update(entry.row for entry in plan.entries if plan.head_rests)
        self.rested += plan.head_rests
        self.fed += decodes and not plan.head_rests
        self.now += streams.cost(plan.num_tokens) + self._head(plan)
        self.steps += 1
        self.drafting.append(sum(entry.device_drafts > 0 for entry in plan.entries))
        self.scheduler.update(StepResult(plan.step, [self._result(plan, i) for i in range(len(plan.entries))]))
        self.scheduler.take_updates()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of about SmolLM2-135M's on an H200."""
    monkeypatch.setattr(streams, "ROWS", (1, 2, 4, 8, 16, 64, 320, 640))
    monkeypatch.setattr(streams, "MILLISECONDS", (0.42, 0.43, 0.5, 0.51, 0.53, 0.65, 1.2, 2.0))


def answers(count: int, speculator: DeviceSpeculator | None, **more: object) -> tuple[Answers, float]:
    gpu = Answers(speculator=speculator, **{"streams": 1, **more})  # type: ignore[arg-type]
    gpu.scheduler.take_updates()
    for request in list(gpu.scheduler.waiting):
        gpu.scheduler.abort(request.request_id)
    return gpu, sum(gpu.answer() for _ in range(count))


def test_nothing_is_kept_for_a_head_that_is_far_from_paying(small: None) -> None:
    plain, (gpu, seconds) = answers(30, None)[1], answers(30, head(), chances=(0.6, 0.6, 0.6, 0.6))
    assert gpu.rested > 0.95 * gpu.steps
    assert plain > 0.985 * seconds
    assert sum(gpu.drafting[200:]) >= 2, "tries go on, with answers that have just begun"


def test_steps_of_a_pause_count_as_all_others(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends or is aborted in the middle of one, too."""
    paused: list[int] = []
    begin = DeviceSpeculator._begin_pause

    def watched(self: DeviceSpeculator, rests: bool) -> None:
        begin(self, rests)
        paused.append(0 if self._pause is None else self._pause.left)

    monkeypatch.setattr(DeviceSpeculator, "_begin_pause", watched)
    speculator = head()
    gpu, _ = answers(10, speculator, chances=(0.6,) * 4, streams=3)
    assert sum(paused) > 0.9 * gpu.steps
    assert speculator._pause is None and speculator.stats.decode_tokens == 10 * 3 * (TOKENS - 1)


def made(seq: Sequence) -> int:
    """Tokens by decode steps."""
    return seq.request.counts.decode_steps + seq.request.counts.accepted_tokens


def test_an_abort_ends_a_pause_whose_steps_were_counted(small: None) -> None:
    speculator = head()
    gpu = Answers(speculator=speculator, streams=2, tokens=TOKENS, chances=(0.1,) * 4)
    one, other = [request.sequences[0] for request in gpu.scheduler.waiting]
    under_way: deque[StepPlan] = deque()
    for _ in range(60):
        while len(under_way) < 2 and (planned := gpu.scheduler.schedule()) is not None:
            under_way.append(planned)
        gpu._carry_out(under_way.popleft())
    assert speculator._pause is not None
    gpu.scheduler.abort(one.request.request_id)
    assert speculator._pause is None
    assert made(one) == one.num_output_tokens - 1 > 40
    while gpu.scheduler.has_work:
        while len(under_way) < 2 and (planned := gpu.scheduler.schedule()) is not None:
            under_way.append(planned)
        gpu._carry_out(under_way.popleft())
    assert made(other) == TOKENS - 1


def paused(number: int) -> tuple[Answers, deque[StepPlan]]:
    """So many streams in the middle of a pause, two of its steps under way."""
    gpu = Answers(speculator=head(), streams=number, tokens=TOKENS, chances=(0.1,) * 4)
    under_way: deque[StepPlan] = deque()
    for _ in range(60):
        while len(under_way) < 2 and (planned := gpu.scheduler.schedule()) is not None:
            under_way.append(planned)
        gpu._carry_out(under_way.popleft())
    while len(under_way) < 2 and (planned := gpu.scheduler.schedule()) is not None:
        under_way.append(planned)
    assert gpu.speculator is not None and gpu.speculator._pause is not None
    return gpu, under_way


def test_a_preempted_sequence_is_not_credited_with_steps_in_flight(small: None) -> None:
    """Their results are dropped."""
    gpu, under_way = paused(1)
    request = next(iter(gpu.scheduler.running.values()))
    one, known = request.sequences[0], made(request.sequences[0])
    gpu.scheduler._giving_way.requeue(request, PreemptionReason.MEMORY, may_move=False)
    assert gpu.speculator is not None and gpu.speculator._pause is None
    assert made(one) == one.num_output_tokens - 1 > known
    while under_way:
        gpu._carry_out(under_way.popleft())
    assert made(one) == one.num_output_tokens - 1 == gpu.speculator.stats.decode_tokens


def test_time_in_which_no_step_is_under_way_is_not_that_of_a_pause(small: None) -> None:
    gpu, under_way = paused(1)
    assert gpu.speculator is not None
    while under_way:
        gpu._carry_out(under_way.popleft())
    before = gpu.speculator.times.estimate(1)
    gpu.now += 30.0
    for _ in range(4):
        while len(under_way) < 2 and (planned := gpu.scheduler.schedule()) is not None:
            under_way.append(planned)
        gpu._carry_out(under_way.popleft())
    gpu.speculator.preempted()
    assert gpu.speculator.times.estimate(1) < 1.05 * before and gpu.speculator._plain_seconds < 5.0


@pytest.mark.parametrize("rests", [True, False])
def test_first_tokens_of_forks_are_not_decode_steps(rests: bool) -> None:
    speculator = head(rests)
    gpu = Answers(speculator=speculator, streams=0)
    gpu.texts.append(free(PROMPT + TOKENS, 0))
    params = SamplingParams(max_tokens=8, ignore_eos=True, n=3)
    request = Request("forks", gpu.texts[0][:PROMPT], params, seed=0, arrival_time=0.0)
    gpu.scheduler.add(request)
    while (plan := gpu.scheduler.schedule()) is not None:
        for start in plan.starts:
            gpu._rows[start.row] = gpu.texts[0]
        gpu.scheduler.update(StepResult(plan.step, [gpu._result(plan, i) for i in range(len(plan.entries))]))
    assert request.counts.decode_steps + request.counts.accepted_tokens == 3 * 7 == speculator.stats.decode_tokens


def test_without_the_option_it_is_always_fed(small: None) -> None:
    gpu, _ = answers(10, head(rests=False), chances=(0.6, 0.6, 0.6, 0.6))
    assert not gpu.rested and gpu.fed > 1400


def test_drafts_that_begin_to_pay_come_back_with_later_answers(small: None) -> None:
    gpu, _ = answers(150, head(), chances=(0.3,) * 4, later=(2000, (1.0,) * 4))
    before, after = gpu.drafting[200:2000], gpu.drafting[-300:]
    assert sum(before) < 0.01 * len(before) and sum(after) > 0.8 * len(after)


@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize("chances", [streams.GOOD, streams.POOR])
def test_a_large_target_feeds_its_head_even_while_drafts_do_not_pay(number: int, chances: tuple[float, ...]) -> None:
    gpu, _ = answers(6, head(), streams=number, chances=chances)
    assert not gpu.rested
