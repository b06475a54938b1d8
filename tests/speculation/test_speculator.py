"""How many drafts are worth it: simulated streams, whose clock is what a step would cost."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.kvcache.manager import KVCacheManager
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import EntryResult, StepPlan, StepResult
from quire.scheduler.request import Request, Sequence
from quire.scheduler.scheduler import Limits, Scheduler
from quire.speculation.device_speculator import DeviceSpeculator
from quire.speculation.ngram import NgramProposer, NgramSource
from quire.speculation.speculator import LookupSpeculator, Speculator
from quire.speculation.suffix import RecentOutputs, SuffixSource
from quire.speculation.tree import TreeShape, path_along

Cost = Callable[[int], float]


rests = DeviceSpeculator._rests


def memory_bound(tokens: int) -> float:
    """Seconds of a step in which reading weights costs more than a few tokens."""
    return 0.020 + 0.002 * tokens


def compute_bound(tokens: int) -> float:
    return 0.002 + 0.020 * tokens


class Stream:
    """Runs requests whose true tokens are given, on a clock that a cost function moves."""

    def __init__(self, texts: list[list[int]], cost: Cost, speculator: Speculator | None, draft_cost: float = 0.0,
                 draft_hits: float = 0.0, depth: int = 1, host: float = 0.0, behind_cost: float = 0.0,
                 prompt: int = 8, tree_hits: float = 0.0, sure: float = 1.0, temperature: float = 0.0,
                 sizes: tuple[int, ...] = (1, 2, 3, 5, 9, 16, 32, 64), n: int = 1, budget: int = 4096) -> None:
        """`n`: samples of each prompt, all of the same tokens. `budget`: tokens of a step. `sizes`: those that were
        measured beforehand. `sure`: how often a model that cuts its chains offers a draft that is not right; it offers
        all that are."""
        self._sure, self._samples = sure, n
        self._tree_hits = tree_hits
        self._depth, self._host, self._behind_cost, self._prompt = depth, host, behind_cost, prompt
        self._read: dict[int, int] = {}
        self.now = 0.0
        self.steps = 0
        self._cost, self._draft_cost, self._hits = cost, draft_cost, draft_hits
        self._texts = texts
        self._rng = random.Random(1)
        if speculator is not None:
            speculator._clock = lambda: self.now
            for size in sizes:
                speculator.times.observe(size, cost(size))
        self.scheduler = Scheduler(Limits(64, budget, 4096), KVCacheManager(4096, 16), clock=lambda: self.now,
                                   speculator=speculator)
        for i, text in enumerate(texts):
            params = SamplingParams(max_tokens=len(text) - prompt, ignore_eos=True, temperature=temperature, n=n)
            self.scheduler.add(Request(f"r{i}", text[:prompt], params, seed=i, arrival_time=0.0))

    def run(self) -> float:
        """Seconds until all are done; what came out is checked."""
        rows: dict[int, list[int]] = {}
        produced: dict[Sequence, list[int]] = {}
        under_way: deque[StepPlan] = deque()
        while self.scheduler.has_work:
            # The host's work is hidden where another step runs meanwhile.
            self.now += 0.0 if under_way else self._host
            while len(under_way) < self._depth and (planned := self.scheduler.schedule()) is not None:
                under_way.append(planned)
            plan = under_way.popleft()
            for start in plan.starts:
                rows[start.row] = self._texts[start.seed]
            results = self._results(plan, rows)
            if self._sure < 1.0:
                offered = [(entry, result.num_drafts) for entry, result in zip(plan.entries, results, strict=True)
                           if entry.device_drafts]
                self.now += self._cost(plan.num_tokens - sum(entry.device_drafts - there for entry, there in offered))
                self.now += self._draft_cost * max((1 + min(entry.device_drafts, there + 1)
                                                    for entry, there in offered), default=0)
            else:
                self.now += self._cost(plan.num_tokens)
                self.now += self._draft_cost * max(
                    (entry.draft_depth or entry.device_drafts for entry in plan.entries), default=0)
            for entry in plan.entries:
                if entry.device_drafts:
                    self.now += self._behind_cost * (entry.start - self._read.get(entry.row, 0))
                    self._read[entry.row] = entry.start
            self.steps += 1
            self.scheduler.update(StepResult(plan.step, results))
            for update in self.scheduler.take_updates():
                produced.setdefault(update.sequence, []).extend(update.new_tokens)
        self.scheduler.check()
        found = sorted((seq.request.request_id, tokens) for seq, tokens in produced.items())
        assert found == sorted(
            (f"r{i}", text[self._prompt :]) for i, text in enumerate(self._texts) for _ in range(self._samples))
        return self.now

    def _results(self, plan: StepPlan, rows: dict[int, list[int]]) -> list[EntryResult]:
        results = []
        for entry in plan.entries:
            text, known = rows[entry.row], entry.start + entry.num_tokens - entry.num_drafts
            if not entry.sample:
                results.append(EntryResult())
                continue
            kept, parents = 0, entry.parents
            if entry.drafts:
                kept = len(path_along(entry.drafts, parents, text[known : known + entry.num_drafts + 1]))
            else:
                depth = entry.draft_depth or entry.device_drafts
                while kept < depth and self._rng.random() < (self._tree_hits if entry.draft_depth else self._hits):
                    kept += 1
                if entry.draft_depth:  # one branch, and all others at its first place
                    parents = (*range(-1, depth - 1), *[-1] * (entry.num_drafts - depth))
            offered = entry.num_drafts
            if entry.device_drafts and self._sure < 1.0:
                offered = kept
                while offered < entry.device_drafts and self._rng.random() < self._sure:
                    offered += 1
            results.append(EntryResult(text[known : known + kept + 1], num_drafts=offered, parents=parents))
        return results


def repeating(length: int = 400) -> list[int]:
    rng = random.Random(3)
    paragraph = [rng.randrange(1000) for _ in range(60)]
    return (paragraph * (length // 60 + 1))[:length]


def free(length: int = 400, seed: int = 4) -> list[int]:
    """Words that come back, as in any language, but seldom with what followed them."""
    rng = random.Random(seed)
    return [int(300 * rng.random() ** 3) for _ in range(length)]


def speedup(texts: list[list[int]], cost: Cost, speculator: Speculator, depth: int = 1, host: float = 0.0,
            prompt: int = 8, **more: Any) -> float:
    plain = Stream(texts, cost, None, depth=depth, host=host, prompt=prompt).run()
    return plain / Stream(texts, cost, speculator, depth=depth, host=host, prompt=prompt, **more).run()


def test_a_text_that_repeats_itself_is_much_faster_where_tokens_are_cheap() -> None:
    assert speedup([repeating()], memory_bound, LookupSpeculator(NgramSource(1), 8)) > 3.0


@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
@pytest.mark.parametrize("seed", range(4))
def test_a_text_that_nobody_can_guess_is_hardly_slower(cost: Cost, seed: int) -> None:
    assert speedup([free(seed=seed)], cost, LookupSpeculator(NgramSource(1), 8)) > 0.97


def test_where_a_token_more_costs_its_full_share_there_are_no_drafts() -> None:
    speculator = LookupSpeculator(NgramSource(1), 8)
    assert speedup([repeating()], lambda tokens: 0.02 * tokens, speculator) > 0.999
    assert speculator.stats.verifications == 0


def test_a_large_batch_ends_drafts_by_itself() -> None:
    """What is memory-bound for one stream is not for 32 of them."""
    def cost(tokens: int) -> float:
        return 0.020 * max(1.0, tokens / 24)

    texts = [repeating(200) for _ in range(32)]
    alone, crowded = LookupSpeculator(NgramSource(1), 8), LookupSpeculator(NgramSource(1), 8)
    assert speedup(texts[:1], cost, alone) > 2.0
    assert speedup(texts, cost, crowded) > 0.97
    assert crowded.stats.decode_tokens / crowded.stats.decode_steps < 1.3


def test_drafts_of_a_model_that_hit_pay() -> None:
    speculator = DeviceSpeculator(5)
    speculator.drafting.observe(1, 0.002)
    assert speedup([free()], memory_bound, speculator, draft_cost=0.002, draft_hits=0.9) > 1.8


@pytest.mark.parametrize("first", [1.0, 2.0])
def test_drafts_that_were_measured_for_one_stream_pay_for_eight_too(first: float) -> None:
    """As on a GPU: reading weights is nearly all that a step costs, and the first step of a size may take longer."""
    began = set[int]()

    def cost(tokens: int) -> float:
        seconds = (0.0040 + 0.00002 * tokens) * (1.0 if tokens in began else first)
        began.add(tokens)
        return seconds

    speculator = DeviceSpeculator(4)
    speculator.drafting.observe(1, 0.0003)
    sizes = (1, 2, 3, 5)
    for size in sizes:
        cost(size)
    texts = [free(160, seed) for seed in range(8)]
    assert speedup(texts, cost, speculator, depth=2, draft_cost=0.0003, draft_hits=0.7, sizes=sizes) > 1.4


def test_without_a_speculator_there_are_no_drafts() -> None:
    """As in the bench's control: an engine whose drafts are switched off."""
    speculator = LookupSpeculator(NgramSource(1), 8)
    stream = Stream([repeating()], memory_bound, speculator)
    stream.scheduler.speculator = None
    stream.run()
    assert stream.steps == len(repeating()) - 8 and speculator.stats.decode_steps == 0


def test_a_model_that_cuts_its_chains_is_asked_for_all_that_it_is_sure_of() -> None:
    """Half of the drafts would be right: where every one is judged that hardly pays, where the head offers mostly those
    it does, though a step of five tokens takes nearly as long as two of one."""
    def cost(tokens: int) -> float:
        return 0.008 + 0.002 * tokens

    every, cut = DeviceSpeculator(4), DeviceSpeculator(4, cuts=True)
    for speculator in (every, cut):
        speculator.drafting.observe(1, 0.0005)
    assert speedup([free(1500)], cost, every, draft_cost=0.0005, draft_hits=0.5) < 1.2
    assert speedup([free(1500)], cost, cut, draft_cost=0.0005, draft_hits=0.5, sure=0.3) > 1.25


@pytest.mark.parametrize("hits", [0.5, 0.6])
def test_chains_of_drawn_tokens_are_as_long_as_it_pays(hits: float) -> None:
    """They are not cut, so a model that cuts others is asked for as many as one that never does."""
    def cost(tokens: int) -> float:
        return 0.008 + 0.002 * tokens

    gains = []
    for speculator in (DeviceSpeculator(4), DeviceSpeculator(4, cuts=True)):
        speculator.drafting.observe(1, 0.0005)
        gains.append(speedup([free(1500)], cost, speculator, draft_cost=0.0005, draft_hits=hits, temperature=1.0))
    assert gains[0] > 1.1 and gains[1] > 0.95 * gains[0]


def test_trees_of_a_model_are_as_deep_as_it_pays() -> None:
    """A whole tree of twelve nodes costs more here than it is thought to bring, until a smaller one has shown more."""
    def cost(tokens: int) -> float:
        return 0.010 + 0.0012 * tokens

    offered, gains = [], []
    for hits in (0.3, 0.9):
        speculator = DeviceSpeculator(4, tree=TreeShape(4, 4, 12))
        speculator.drafting.observe(1, 0.0005)
        speed = speedup([free(1500)], cost, speculator, draft_cost=0.0005, draft_hits=0.25, tree_hits=hits)
        stats = speculator.stats
        offered.append(sum(stats.offered) / max(1, stats.verifications))
        gains.append(speed)
    assert offered[0] < 2 and 4 < offered[1] < 12
    assert gains[0] > 0.97 and gains[1] > 1.4


def test_a_slow_moment_is_no_verdict_on_trees() -> None:
    """What they cost beside chains is learned from steps with trees alone: it is forgotten where there are none."""
    seconds = []
    for slow in (range(0), range(50, 62)):
        speculator = DeviceSpeculator(4, tree=TreeShape(4, 4, 12))
        speculator.drafting.observe(1, 0.0005)
        stream = Stream([free(3000)], lambda n: 0.010 + 0.0012 * n, speculator, draft_cost=0.0005, draft_hits=0.25,
                        tree_hits=0.9)
        stream._cost = lambda n, s=stream, slow=slow: (3.0 if s.steps in slow else 1.0) * (0.010 + 0.0012 * n)
        seconds.append(stream.run())
    assert seconds[1] < 1.3 * seconds[0]


def test_a_model_that_may_draft_trees_cuts_its_chains_too_and_has_them_where_they_are_better() -> None:
    def cost(tokens: int) -> float:
        return 0.008 + 0.002 * tokens

    gains = []
    for tree in (None, TreeShape(4, 4, 12)):
        speculator = DeviceSpeculator(4, cuts=True, tree=tree)
        speculator.drafting.observe(1, 0.0005)
        text = [free(1500)]
        gains.append(speedup(text, cost, speculator, draft_cost=0.0005, draft_hits=0.5, sure=0.3, tree_hits=0.1))
    assert gains[0] > 1.25 and gains[1] > 0.95 * gains[0]


@pytest.mark.parametrize("hits", [0.0, 0.1])
@pytest.mark.parametrize("count", [1, 8])
def test_a_model_that_cuts_its_chains_and_misses_is_given_up(hits: float, count: int) -> None:
    speculator = DeviceSpeculator(4, cuts=True)
    speculator.drafting.observe(1, 0.002)
    texts = [free(2000, seed) for seed in range(count)]
    assert speedup(texts, memory_bound, speculator, draft_cost=0.002, draft_hits=hits, sure=0.6) > 0.97


@pytest.mark.parametrize("hits", [0.0, 0.2])
def test_drafts_of_a_model_that_miss_end_soon(hits: float) -> None:
    speculator = DeviceSpeculator(5)
    speculator.drafting.observe(1, 0.010)
    assert speedup([free(2000)], memory_bound, speculator, draft_cost=0.010, draft_hits=hits) > 0.97


def test_after_a_text_that_was_missed_short_answers_are_tried_again() -> None:
    """Each failed try doubles the wait for the next, but another request is another text."""
    speculator = DeviceSpeculator(4, cuts=True)
    speculator.drafting.observe(1, 0.001)
    Stream([free(3000)], memory_bound, speculator, draft_cost=0.001, draft_hits=0.0, sure=0.6).run()
    assert speculator._patience == 2.0
    steps = 0
    for seed in range(12):
        hitting = Stream([free(48, seed)], memory_bound, speculator, draft_cost=0.001, draft_hits=0.95, sure=0.6)
        hitting.run()
        steps += hitting.steps
    assert steps < 0.8 * 12 * 40


def test_a_text_without_luck_is_no_verdict_on_the_next_one() -> None:
    speculator = DeviceSpeculator(4, cuts=True)
    speculator.drafting.observe(1, 0.001)
    Stream([free(400)], memory_bound, speculator, draft_cost=0.001, draft_hits=0.8, sure=0.6).run()
    unlucky = Stream([free(40)], memory_bound, speculator, draft_cost=0.001, draft_hits=0.0, sure=0.6)
    unlucky.run()
    assert not speculator._chosen and unlucky.steps == 32
    lucky = Stream([free(40)], memory_bound, speculator, draft_cost=0.001, draft_hits=0.8, sure=0.6)
    lucky.run()
    assert lucky.steps < 18


def test_steps_are_not_looked_at_one_by_one_while_a_model_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what somebody else does between two of them is not taken for their time."""
    looked_at = []
    monkeypatch.setattr(DeviceSpeculator, "_rests", lambda *given: looked_at.append(1) or rests(*given))
    for host in (0.0, 1.0):
        speculator, looked_at[:] = DeviceSpeculator(4, cuts=True), []
        speculator.drafting.observe(1, 0.001)
        stream = Stream([free(1000)], memory_bound, speculator, draft_cost=0.001, sure=0.6, host=host)
        stream.run()
        assert len(looked_at) < 0.1 * stream.steps and speculator.stats.decode_tokens == 991
        assert memory_bound(1) <= 1.001 * speculator.times.estimate(1) <= 1.52 * memory_bound(1)


def test_a_model_whose_drafts_begin_to_hit_is_found_out() -> None:
    """While drafts do not pay, one is tried now and then, for a hundredth of the time."""
    speculator = DeviceSpeculator(5)
    speculator.drafting.observe(1, 0.002)
    missing = Stream([free(1500)], memory_bound, speculator, draft_cost=0.002, draft_hits=0.0)
    missing.run()
    assert missing.steps > 1450
    hitting = Stream([free(1500)], memory_bound, speculator, draft_cost=0.002, draft_hits=0.95)
    hitting.run()
    assert hitting.steps < 700


def test_tries_in_vain_become_rarer() -> None:
    """A model that never pays costs less than half a percent in the long run."""
    speculator = DeviceSpeculator(5)
    speculator.drafting.observe(1, 0.010)
    Stream([free(2000)], memory_bound, speculator, draft_cost=0.010, draft_hits=0.2).run()
    assert speedup([free(4000)], memory_bound, speculator, draft_cost=0.010, draft_hits=0.2) > 0.995


def test_a_model_is_tried_again_where_steps_overlap_too() -> None:
    """Every sequence has a token under way then: somebody has to wait for his, or none could ever have a draft."""
    speculator = DeviceSpeculator(5)
    speculator.drafting.observe(1, 0.002)
    Stream([free(600)], memory_bound, speculator, draft_cost=0.002, draft_hits=0.0, depth=2).run()
    assert speculator.stats.verifications < 20
    hitting = Stream([free(3000)], memory_bound, speculator, draft_cost=0.002, draft_hits=0.95, depth=2)
    hitting.run()
    assert hitting.steps < 2000


@pytest.mark.parametrize("count", [1, 6])
def test_a_model_that_would_have_to_read_the_whole_text_first_is_tried_seldom(count: int) -> None:
    """A try costs what the model takes to catch up: 0.3 s for these prompts, where a step takes 0.02."""
    speculator = DeviceSpeculator(5, own_kv=True)
    speculator.drafting.observe(1, 0.020)
    speculator.seconds_behind = 0.001
    texts = [free(600, seed=seed) for seed in range(count)]
    assert speedup(texts, memory_bound, speculator, draft_cost=0.020, draft_hits=0.1, behind_cost=0.001) > 0.98


@pytest.mark.parametrize(("depth", "host"), [(1, 0.0), (2, 0.004)])
@pytest.mark.parametrize("behind", [0.0001, 0.001])
def test_no_single_text_pays_for_finding_out_that_a_model_misses(behind: float, depth: int, host: float) -> None:
    """Prompts of 300 tokens, answers of 100, one after another: a try reads a whole prompt. Where steps overlap, nobody
    waits for what will not be tried."""
    speculator = DeviceSpeculator(5, own_kv=True)
    speculator.drafting.observe(1, 0.010)
    speculator.seconds_behind = behind
    ratios = [speedup([free(400, seed=seed)], memory_bound, speculator, draft_cost=0.010, draft_hits=0.1,
                      behind_cost=behind, prompt=300, depth=depth, host=host) for seed in range(30)]
    assert min(ratios) > 0.97


@pytest.mark.parametrize("own_kv", [False, True])
def test_a_machine_that_becomes_busy_makes_drafts_of_a_model_no_cheaper(own_kv: bool) -> None:
    """Measured on an idle machine, run on one that takes three times as long for everything."""
    speculator = DeviceSpeculator(5, own_kv=own_kv)
    for size in (1, 2, 3, 5, 9, 16, 32, 64):
        speculator.times.observe(size, memory_bound(size))
    speculator.drafting.observe(1, 0.015)
    speculator.seconds_behind = 0.0003
    ratios = [speedup([free(400, seed=seed)], lambda tokens: 3 * memory_bound(tokens), speculator, draft_cost=0.045,
                      draft_hits=0.1, behind_cost=0.0009 * own_kv, prompt=300) for seed in range(12)]
    assert min(ratios) > 0.985


@pytest.mark.parametrize(("behind", "answer"), [(0.00013, 100), (0.0004, 300), (0.001, 1000)])
def test_a_model_whose_drafts_hit_is_found_out_where_texts_are_long_beside_their_reading(
    behind: float, answer: int
) -> None:
    speculator = DeviceSpeculator(5, own_kv=True)
    speculator.drafting.observe(1, 0.002)
    speculator.seconds_behind = behind
    ratios = [speedup([free(300 + answer, seed=seed)], memory_bound, speculator, draft_cost=0.002, draft_hits=0.9,
                      behind_cost=behind, prompt=300) for seed in range(12)]
    assert min(ratios) > 0.97 and ratios[-1] > 1.4


def test_a_model_that_takes_long_to_read_a_short_text_is_not_tried_on_it() -> None:
    """However well it may guess: nobody has found out, and a twentieth of a text is too much to find out for."""
    speculator = DeviceSpeculator(5, own_kv=True)
    speculator.drafting.observe(1, 0.002)
    speculator.seconds_behind = 0.0004
    assert speedup([free()], memory_bound, speculator, draft_cost=0.002, draft_hits=0.9, behind_cost=0.0004,
                   prompt=300) == 1.0
    assert speculator.stats.verifications == 0


def test_catching_up_pays_where_many_drafts_follow() -> None:
    speculator = DeviceSpeculator(5, own_kv=True)
    speculator.drafting.observe(1, 0.002)
    speculator.seconds_behind = 0.0001
    assert speedup([free(600)], memory_bound, speculator, draft_cost=0.002, draft_hits=0.9, behind_cost=0.0001) > 1.8


def test_what_the_host_does_between_steps_with_drafts_counts() -> None:
    """Steps without drafts hide it; so drafts must make up for that too."""
    speculator = DeviceSpeculator(5)
    speculator.drafting.observe(1, 0.002)
    assert speedup([free(3000)], memory_bound, speculator, depth=2, host=0.010, draft_cost=0.002, draft_hits=0.3) > 0.97


def test_a_wrong_belief_about_costs_is_mended_by_steps() -> None:
    """Calibrated on an idle machine, run on one where a draft costs its full share."""
    speculator = LookupSpeculator(NgramSource(1), 8)
    stream = Stream([repeating(1500)], compute_bound, speculator)
    for size in (1, 2, 3, 5, 9):
        for _ in range(100):
            speculator.times.observe(size, 0.02)
    plain = Stream([repeating(1500)], compute_bound, None).run()
    assert plain / stream.run() > 0.8


def test_where_drafts_of_a_model_pay_clearly_few_steps_go_without() -> None:
    speculator = DeviceSpeculator(4)
    speculator.drafting.observe(1, 0.0005)
    stream = Stream([free(4000)], memory_bound, speculator, draft_cost=0.0005, draft_hits=0.9)
    stream.run()
    assert stream.steps > 600 and 2 <= speculator.stats.decode_steps - speculator.stats.verifications < 9


@pytest.mark.parametrize("adaptive", [False, True])
def test_whoever_may_draft_ahead_is_told_whether_drafts_will_follow(adaptive: bool) -> None:
    """Of a step before one without drafts: no."""
    speculator = DeviceSpeculator(4, adaptive, ahead=True)
    speculator.drafting.observe(1, 0.0005)
    stream = Stream([free(2000)], memory_bound, speculator, draft_cost=0.0005, draft_hits=0.9, depth=2)
    schedule, plans = stream.scheduler.schedule, []

    def watched() -> StepPlan | None:
        plan = schedule()
        if plan is not None:
            plans.append((any(entry.device_drafts for entry in plan.entries), plan.drafts_follow))
        return plan

    stream.scheduler.schedule = watched  # type: ignore[method-assign]
    stream.run()
    drafted = [i for i, (some, _) in enumerate(plans) if some]
    assert len(drafted) > 300
    right = [plans[i][1] == plans[i + 1][0] for i in drafted if i + 1 < len(plans)]
    assert right.count(False) <= 2  # where the text ends there is nothing left to draft
    assert any(not plans[i][1] for i in drafted) is adaptive


@pytest.mark.parametrize(("dearer", "drafts"), [(1.03, 4), (1.07, 4), (1.1, 3)])
def test_of_drafts_that_are_worth_about_the_same_more_are_taken(dearer: float, drafts: int) -> None:
    """So that their odds are learned. By what is believed at first, four give 1.06 times the tokens of three."""
    speculator = DeviceSpeculator(4)
    speculator.drafting.observe(1, 1e-9)
    costs = {1: 0.020, 2: 0.0201, 3: 0.0202, 4: 0.0203, 5: 0.0203 * dearer}
    stream = Stream([free(600)], lambda tokens: costs.get(tokens, 0.1), speculator, sizes=(1, 2, 3, 4, 5))
    prompt = stream.scheduler.schedule()
    assert prompt is not None
    stream.scheduler.update(StepResult(prompt.step, [EntryResult([1])]))
    plan = stream.scheduler.schedule()
    assert plan is not None and [entry.device_drafts for entry in plan.entries] == [drafts]


@pytest.mark.parametrize("tree", [None, TreeShape(2, 4, 6)])
def test_lookups_cost_nothing_where_no_draft_could_pay_and_miss_no_token_after_it(
    monkeypatch: pytest.MonkeyPatch, tree: TreeShape | None
) -> None:
    """A step of up to eight tokens takes as long as one of a single token; beyond, each costs more than its share."""
    shown: list[int] = []
    real = NgramProposer.extend
    monkeypatch.setattr(NgramProposer, "extend", lambda self, tokens: shown.append(len(tokens)) or real(self, tokens))
    speculator = LookupSpeculator(NgramSource(1), 4, tree=tree)
    stream = Stream([repeating(400)] + [repeating(100)] * 39, lambda tokens: 0.02 * max(1.0, tokens / 8) ** 1.1,
                    speculator)
    stream.run()
    # The prompts, a few tokens until hopelessness is known, and what the last one missed in one go.
    assert shown[:40] == [8] * 40 and len(shown) < 40 + 40 * 3 + 320 and max(shown) > 60
    figures = speculator.stats.flat()
    assert figures["spec_acceptance_rate"] > 0.9
    assert figures["spec_draft_tokens"] > 150


def test_the_next_request_does_not_find_lookups_at_rest_since_a_large_batch_has_ended() -> None:
    speculator = LookupSpeculator(NgramSource(1), 4)
    Stream([repeating(100)] * 40, lambda tokens: 0.02 * max(1.0, tokens / 8) ** 1.1, speculator).run()
    assert not speculator._hopeless and not speculator._followed


@pytest.mark.parametrize(("count", "share"), [(4, 1.0), (32, 0.125)])
def test_a_large_batch_without_drafts_learns_from_some_of_its_sequences(
    monkeypatch: pytest.MonkeyPatch, count: int, share: float
) -> None:
    compared: list[int] = []
    real = LookupSpeculator._guesses
    monkeypatch.setattr(LookupSpeculator, "_guesses", lambda self, proposer: compared.append(1) or real(self, proposer))
    speculator = LookupSpeculator(NgramSource(1), 4)
    Stream([free(108, seed) for seed in range(count)], lambda tokens: 0.02 + 0.001 * tokens, speculator).run()
    tokens = speculator.stats.decode_tokens
    assert len(compared) == pytest.approx(share * tokens, rel=0.15)


def test_an_output_is_kept_whole_where_lookups_had_no_use() -> None:
    source = SuffixSource(1, 1000)
    proposer = source.open([1, 2, 3], 2, "a")
    proposer.finish([4, 5])
    again = source.open([9, 1, 2], 3, "a")
    assert again.propose(3).tokens == (3, 4, 5)


def test_outputs_of_siblings_are_kept_whole_where_lookups_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which read no prompt of their own."""
    kept: list[int] = []
    real = RecentOutputs.add
    monkeypatch.setattr(RecentOutputs, "add", lambda self, tokens: kept.append(len(tokens)) or real(self, tokens))
    speculator = LookupSpeculator(SuffixSource(1, 1000), 4)
    Stream([free(48)], compute_bound, speculator, n=4, temperature=1.0).run()
    assert kept == [48] * 4 and not speculator.stats.verifications


def test_nobody_waits_for_drafts_that_a_step_has_no_room_for() -> None:
    texts = [repeating(300)] * 4
    plain = Stream(texts, memory_bound, None, depth=2, host=0.001, budget=4)
    drafting = Stream(texts, memory_bound, LookupSpeculator(NgramSource(1), 4), depth=2, host=0.001, budget=4)
    assert drafting.run() < 1.01 * plain.run()


def test_a_full_step_with_a_grammar_row_has_no_lookups_while_a_head_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator = DeviceSpeculator(4, own_kv=False)
    for size in (1, 2, 4, 8):
        speculator.times.observe(size, memory_bound(size))
    request = SimpleNamespace(beams=None, start_grammar=object())
    seq: Any = SimpleNamespace(num_pending=0, held_at=None, num_computed=8, num_prompt_tokens=8, request=request)
    monkeypatch.setattr(speculator, "_rests", lambda decoding: True)
    assert speculator.choose([seq], 0).drafts == speculator.choose([seq], -1).drafts == {}
