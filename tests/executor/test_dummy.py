"""The executor without a model says which token comes, and notices a plan that contradicts its rows."""

from __future__ import annotations

import math

import pytest

from quire.errors import InvariantError
from quire.executor.dummy import DummyExecutor, dummy_token
from quire.sampling.params import SamplingParams
from quire.sampling.token_logprobs import logprob_of, unpack_all
from quire.scheduler.plan import PlanEntry, RowStart, StepPlan


def start(row: int, seed: int = 7) -> RowStart:
    return RowStart(row, [1, 2, 3], 3, SamplingParams(), seed, 0)


def test_a_token_is_a_function_of_seed_index_and_position() -> None:
    drawn = {dummy_token(seed, index, position, 10**9) for seed in range(5) for index in range(3)
             for position in range(20)}
    assert len(drawn) == 300
    assert dummy_token(1, 2, 3, 100) == dummy_token(1, 2, 3, 100) < 100


def test_only_an_entry_that_samples_gives_a_token() -> None:
    executor = DummyExecutor(50)
    first = executor.submit(StepPlan(1, starts=[start(4)], entries=[PlanEntry(4, 0, 2, False)])).result()
    second = executor.submit(StepPlan(2, entries=[PlanEntry(4, 2, 1, True)])).result()
    assert first.entries[0].tokens == [] and second.entries[0].tokens == [dummy_token(7, 0, 3, 50)]


def test_a_gap_or_an_unknown_row_in_a_plan_is_noticed() -> None:
    executor = DummyExecutor()
    executor.submit(StepPlan(1, starts=[start(0)], entries=[PlanEntry(0, 0, 2, False)]))
    with pytest.raises(InvariantError, match="computed 2 tokens, not 3"):
        executor.submit(StepPlan(2, entries=[PlanEntry(0, 3, 1, True)]))
    with pytest.raises(InvariantError, match="never started"):
        executor.submit(StepPlan(3, entries=[PlanEntry(1, 0, 1, True)]))


@pytest.mark.parametrize("entry, said", [
    (PlanEntry(0, 3, 1, True), ([0], [2])), (PlanEntry(0, 3, 1, True), ([1], [3])),
    (PlanEntry(0, 3, 1, True), ([], [])),
    (PlanEntry(0, 3, 1, False), ([0], [3])), (PlanEntry(0, 3, 2, True), ([0], [3])),
    (PlanEntry(0, 3, 1, True, masks=b"1111"), ([0], [3])),
])
def test_a_plan_that_says_wrongly_that_it_only_decodes_is_noticed(
        entry: PlanEntry, said: tuple[list[int], list[int]]) -> None:
    executor = DummyExecutor()
    executor.submit(StepPlan(1, starts=[start(0)], entries=[PlanEntry(0, 0, 3, True)]))
    with pytest.raises(InvariantError, match="does not only decode"):
        executor.submit(StepPlan(2, entries=[entry], decoding=said))


def test_a_freed_row_can_be_started_again() -> None:
    executor = DummyExecutor()
    executor.submit(StepPlan(1, starts=[start(0)], entries=[PlanEntry(0, 0, 3, True)]))
    again = StepPlan(2, freed_rows=[0], starts=[start(0, seed=8)], entries=[PlanEntry(0, 0, 3, True)])
    assert executor.submit(again).result().entries[0].tokens == [dummy_token(8, 0, 3, 1000)]


def test_log_probabilities_are_those_of_a_model_that_knows_nothing() -> None:
    executor = DummyExecutor(50)
    params = SamplingParams(logprobs=2, prompt_logprobs=0)
    row = RowStart(1, [4, 5, 6], 3, params, 7, 0)
    entry = PlanEntry(1, 0, 3, True, prompt_logprobs_from=0)
    (result,) = executor.execute(StepPlan(1, starts=[row], entries=[entry])).entries
    assert result.logprobs is not None and result.prompt_logprobs is not None
    assert [each.token_id for each in unpack_all(result.prompt_logprobs)] == [5, 6]
    (drawn,) = unpack_all(result.logprobs)
    assert drawn.token_id == result.tokens[0] and len(drawn.top_ids) == 2
    assert {logprob_of(each) for each in result.logprobs + result.prompt_logprobs} == {-math.log(50)}
