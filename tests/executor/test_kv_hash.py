"""KV that is numbers: the text is that of the plain functions, and whatever is wrong with a plan changes it."""

from __future__ import annotations

import random

import pytest

from quire.executor.faults import AT_COLLECT, AT_LAUNCH, HALFWAY, Faults, FaultyExecutor, TransferFault
from quire.executor.kv_hash import BlockStore, PlainKV, content, drawn_token, ranked_candidates
from quire.executor.kv_hash_worker import KVHashWorker
from quire.executor.lost_rows import REFUSED
from quire.sampling.params import SamplingParams
from quire.sampling.token_logprobs import logprob_of, unpack_all
from quire.scheduler.plan import (
    BlockCopy,
    BlockMove,
    PlanEntry,
    RowStart,
    StepPlan,
    StepResult,
    TableDiff,
    TransferStart,
)

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 9, 2, 7, 1, 8]
VOCAB = 10**6


def plain(tokens: list[int], windows: list[int | None], params: SamplingParams = GREEDY, seed: int = 0,
          index: int = 0) -> int:
    kv = PlainKV(windows)
    for token in tokens:
        kv.append(token)
    return drawn_token(kv.state, params, seed, index, len(tokens), VOCAB)


def start(row: int, tokens: list[int] = PROMPT, params: SamplingParams = GREEDY, seed: int = 0,
          index: int = 0) -> RowStart:
    return RowStart(row, tokens, len(tokens), params, seed, index)


def make(block_size: int = 2, windows: tuple[int | None, ...] = (None,),
         faults: Faults | None = None) -> FaultyExecutor:
    worker = KVHashWorker(12, block_size, windows, VOCAB)
    return FaultyExecutor(worker, {"host": [BlockStore(12, block_size) for _ in windows]}, faults)


def tables(row: int, blocks: list[int], groups: int = 1) -> list[TableDiff]:
    return [TableDiff(row, group, 0, blocks) for group in range(groups)]


def token(result: StepResult, entry: int = 0) -> int:
    assert result.entries[entry].error is None
    return result.entries[entry].tokens[0]


@pytest.mark.parametrize("windows", [(None,), (3,), (None, 3), (None, 4, 1)])
@pytest.mark.parametrize("block_size", [1, 2, 3, 6, 8])
def test_blocks_chunks_and_windows_do_not_show(block_size: int, windows: tuple[int | None, ...]) -> None:
    rng = random.Random(block_size)
    executor = make(block_size, windows)
    blocks = rng.sample(range(12), -(-10 // block_size))
    first = StepPlan(1, starts=[start(3)], diffs=tables(3, blocks, len(windows)), entries=[PlanEntry(3, 0, 4, False)])
    executor.submit(first).result()
    text = list(PROMPT)
    for step in range(4):
        entry = PlanEntry(3, 4, 2, True) if step == 0 else PlanEntry(3, 5 + step, 1, True)
        text.append(token(executor.submit(StepPlan(step + 2, entries=[entry])).result()))
        assert text[-1] == plain(text[:-1], list(windows))


def run_twice(change: str) -> tuple[int, int]:
    """The token of a prompt that was computed in two chunks, and of the same with one thing wrong."""
    found = []
    for wrong in (False, True):
        executor = make()
        executor.submit(StepPlan(1, starts=[start(0)], diffs=tables(0, [4, 5, 6]),
                                 entries=[PlanEntry(0, 0, 4, False)])).result()
        plan = StepPlan(2, entries=[PlanEntry(0, 4, 2, True)])
        if wrong and change == "another block":
            plan.diffs = tables(0, [4, 7, 6])
        elif wrong and change == "order of blocks":
            plan.diffs = tables(0, [5, 4, 6])
        elif wrong and change == "never computed":
            plan.entries = [PlanEntry(0, 5, 1, True)]
        elif wrong and change == "overwritten":
            plan.starts, plan.diffs = [start(1, [3, 3])], tables(1, [5])
            plan.entries.append(PlanEntry(1, 0, 2, False))
        elif wrong and change == "wrong copy":
            plan.copies = [BlockCopy(0, 6, 5)]
        found.append(token(executor.submit(plan).result()))
    return found[0], found[1]


@pytest.mark.parametrize("change", ["another block", "order of blocks", "never computed", "overwritten", "wrong copy"])
def test_whatever_is_wrong_with_the_kv_shows(change: str) -> None:
    right, wrong = run_twice(change)
    assert right == plain(PROMPT, [None]) != wrong


def test_siblings_share_logits_and_draw_for_themselves() -> None:
    params = SamplingParams(temperature=1.0)
    executor = make()
    plan = StepPlan(1, starts=[start(row, params=params, seed=3, index=row) for row in (0, 1)],
                    diffs=tables(0, [4, 5, 6]) + tables(1, [4, 5, 6]),
                    entries=[PlanEntry(0, 0, 6, True), PlanEntry(1, 6, 0, True, shares=0)])
    result = executor.submit(plan).result()
    drawn = [token(result, row) for row in (0, 1)]
    assert drawn == [plain(PROMPT, [None], params, 3, index) for index in (0, 1)] and drawn[0] != drawn[1]


def test_beams_get_their_tokens_given_and_candidates_follow_from_them() -> None:
    executor = make()
    plan = StepPlan(1, starts=[start(0)], diffs=tables(0, [4, 5, 6, 7]),
                    entries=[PlanEntry(0, 0, 7, False, given=(11,), candidates=4)])
    candidates = executor.submit(plan).result().entries[0].candidates
    kv = PlainKV([None])
    for each in [*PROMPT, 11]:
        kv.append(each)
    assert candidates == ranked_candidates(kv.state, 4, VOCAB) and len({t for t, _ in candidates}) == 4


@pytest.mark.parametrize("wrong_at", [0, 1, 2])
def test_drafts_are_kept_up_to_the_first_wrong_one(wrong_at: int) -> None:
    text = list(PROMPT)
    for _ in range(4):
        text.append(plain(text, [None]))
    drafts = text[7:9]
    if wrong_at < 2:
        drafts[wrong_at] += 1
    executor = make()
    executor.submit(StepPlan(1, starts=[start(0)], diffs=tables(0, [4, 5, 6, 7, 8]),
                             entries=[PlanEntry(0, 0, 6, True)])).result()
    judged = executor.submit(StepPlan(2, entries=[PlanEntry(0, 6, 3, True, drafts=tuple(drafts))])).result()
    assert judged.entries[0].tokens == text[7 : 8 + wrong_at] and judged.entries[0].num_drafts == 2
    end = 7 + wrong_at
    assert token(executor.submit(StepPlan(3, entries=[PlanEntry(0, end, 1, True)])).result()) == plain(
        text[: end + 1], [None])


def test_the_worker_proposes_drafts_of_its_own_of_which_every_third_is_wrong() -> None:
    executor = make()
    executor.submit(StepPlan(1, starts=[start(0)], diffs=tables(0, [4, 5, 6, 7, 8, 9]),
                             entries=[PlanEntry(0, 0, 6, True)])).result()
    judged = executor.submit(StepPlan(2, entries=[PlanEntry(0, 6, 5, True, device_drafts=4)])).result()
    text = list(PROMPT)
    while len(text) < 10:
        text.append(plain(text, [None]))
    assert judged.entries[0].tokens == text[7:10]


def test_prompt_log_probabilities_tell_what_was_read() -> None:
    params = SamplingParams(prompt_logprobs=0, logprobs=0)
    found = []
    for blocks in ([4, 5, 6], [1, 2, 3], [4, 4, 6]):
        plan = StepPlan(1, starts=[start(0, params=params)], diffs=tables(0, blocks),
                        entries=[PlanEntry(0, 0, 6, True, prompt_logprobs_from=0)])
        result = make().submit(plan).result().entries[0]
        assert result.prompt_logprobs is not None and result.logprobs is not None
        assert [each.token_id for each in unpack_all(result.prompt_logprobs)] == PROMPT[1:]
        found.append([logprob_of(each) for each in result.prompt_logprobs + result.logprobs])
    assert found[0] == found[1] != found[2]


# ---- transfers


def moved(number: int, out: bool, *pairs: tuple[int, int]) -> TransferStart:
    return TransferStart(number, "host", out, [BlockMove(0, device, tier) for device, tier in pairs])


def go_and_come_back(fault: TransferFault) -> tuple[FaultyExecutor, list[StepResult]]:
    """KV goes out (transfer 1), is overwritten, and comes back (transfer 2, with a fault) to other blocks."""
    executor = make(faults=Faults(transfers={2: fault}))
    done = [executor.submit(StepPlan(1, starts=[start(0)], diffs=tables(0, [4, 5, 6]),
                                     entries=[PlanEntry(0, 0, 5, False)])).result()]
    done.append(executor.submit(StepPlan(2, transfers=[moved(1, True, (4, 0), (5, 1), (6, 2))])).result())
    done.append(executor.submit(StepPlan(3, starts=[start(1, [3] * 6)], diffs=tables(1, [4, 5, 6]),
                                         entries=[PlanEntry(1, 0, 6, False)])).result())
    done.append(executor.submit(StepPlan(4, transfers=[moved(2, False, (7, 0), (8, 1), (9, 2))])).result())
    return executor, done


def resume(executor: FaultyExecutor, step: int = 5) -> int:
    plan = StepPlan(step, freed_rows=[0], starts=[start(2)], diffs=tables(2, [7, 8, 9]),
                    entries=[PlanEntry(2, 5, 1, True)])
    return token(executor.submit(plan).result())


def test_kv_that_went_out_and_came_back_is_the_same() -> None:
    executor, done = go_and_come_back(TransferFault())
    assert [(r.number, r.num_done, r.finished, r.error) for r in done[1].arrivals] == [(1, 3, True, None)]
    assert [(r.number, r.num_done, r.finished, r.error) for r in done[3].arrivals] == [(2, 3, True, None)]
    assert resume(executor) == plain(PROMPT, [None])


def test_kv_that_is_late_is_not_there_before_it_is_reported() -> None:
    executor, done = go_and_come_back(TransferFault(delay=3, moves_a_tick=1))
    assert done[3].arrivals == [] and not executor.quiet
    reports = []
    while not executor.quiet:
        reports += executor.arrivals.take()
    assert [(r.num_done, r.finished) for r in reports] == [(1, False), (2, False), (3, True)]
    assert resume(executor) == plain(PROMPT, [None])
    early, _ = go_and_come_back(TransferFault(delay=9))
    assert resume(early) != plain(PROMPT, [None])


def test_a_transfer_that_fails_says_how_far_it_came() -> None:
    executor, done = go_and_come_back(TransferFault(fails_after=1))
    assert [(r.num_done, r.finished, r.error) for r in done[3].arrivals] == [(1, True, "the transfer failed")]
    assert resume(executor) != plain(PROMPT, [None]) and executor.num_failed_transfers == 1


def test_reports_may_come_twice_and_a_cancelled_transfer_ends_or_goes_on() -> None:
    _, done = go_and_come_back(TransferFault(reports_twice=True))
    assert len(done[3].arrivals) == 2
    for ignores in (False, True):
        executor, _ = go_and_come_back(TransferFault(delay=2, ignores_cancel=ignores))
        cancelled = executor.submit(StepPlan(5, cancels=[2])).result().arrivals
        assert [(r.num_done, r.finished, r.error) for r in cancelled] == ([] if ignores else [(0, True, "cancelled")])
        assert executor.quiet is not ignores


# ---- lost steps


@pytest.mark.parametrize("where", [AT_LAUNCH, HALFWAY, AT_COLLECT])
def test_a_lost_step_refuses_its_rows_from_then_on_and_tells_of_its_transfers(where: str) -> None:
    executor = make(faults=Faults(lost_steps={1: where}))
    plan = StepPlan(1, starts=[start(0, seed=7), start(1, seed=8)], diffs=tables(0, [4, 5, 6]) + tables(1, [1, 2, 3]),
                    entries=[PlanEntry(0, 0, 4, False)], transfers=[moved(1, True, (9, 0))])
    assert executor.submit(plan).exception() is not None and executor.hit == {7}
    later = executor.submit(StepPlan(2, entries=[PlanEntry(0, 4, 2, True), PlanEntry(1, 0, 6, True)])).result()
    if where == AT_COLLECT:  # known only now: the plan had been launched, on rows that are as it assumed
        assert token(later, 0) == token(later, 1) == plain(PROMPT, [None])
        later = executor.submit(StepPlan(3, entries=[PlanEntry(0, 6, 1, True), PlanEntry(1, 6, 1, True)])).result()
    assert [entry.error for entry in later.entries] == [REFUSED, REFUSED]
    again = executor.submit(StepPlan(4, starts=[start(0)], diffs=tables(0, [4, 5, 6]),
                                     entries=[PlanEntry(0, 0, 6, True)])).result()
    assert token(again) == plain(PROMPT, [None])
    reports = later.arrivals + again.arrivals + executor.arrivals.take()
    assert executor.quiet
    if where == AT_LAUNCH:
        assert [(r.number, r.finished, r.error) for r in reports] == [(1, True, "never started")]


def test_contents_tell_tokens_and_positions_apart() -> None:
    assert len({content(token, position) for token in range(100) for position in range(100)}) == 10_000
