"""Plans and results that cross as bytes are the same on the other side, whatever they hold."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ranks.plan_codec import Learned, PlanDecoder, PlanEncoder
from quire.ranks.result_codec import decode_reports, decode_result, encode_reports, encode_result
from quire.sampling.params import SamplingParams
from quire.sampling.token_logprobs import TokenLogprobs, unpack_all
from quire.scheduler.plan import (
    BlockCopy,
    BlockMove,
    EntryResult,
    PlanEntry,
    RowStart,
    StepPlan,
    StepResult,
    TableDiff,
    TransferReport,
    TransferStart,
)
from quire.structured.spec import StructuredOutputs

small = st.integers(0, (1 << 31) - 1)
tokens = st.lists(small, max_size=6)
text = st.text(max_size=12)
logprob = st.floats(allow_nan=False)
params = st.builds(
    SamplingParams, temperature=st.floats(0, 5), top_p=st.floats(0.01, 1), top_k=st.integers(0, 50),
    seed=st.none() | st.integers(0, (1 << 64) - 1), max_tokens=st.none() | st.integers(1, 9),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=2), logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 999), st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 999), min_size=1, max_size=3))
starts = st.builds(RowStart, small, tokens, small, params, st.integers(0, (1 << 64) - 1), small, tokens,
                   st.lists(tokens, max_size=2))
entries = st.builds(
    PlanEntry, small, small, small, st.booleans(), tokens.map(tuple), st.none() | small, st.none() | small,
    tokens.map(tuple), small, small, st.binary(max_size=9)).map(
        lambda entry: replace(entry, parents=tuple(range(-1, len(entry.drafts) - 1)), draft_depth=entry.device_drafts))
moves = st.lists(st.builds(BlockMove, small, small, small), max_size=4)
number = st.integers(-(1 << 62), 1 << 62)
plans = st.builds(
    StepPlan, number, tokens, st.lists(starts, max_size=2), st.lists(st.builds(TableDiff, small, small, small, tokens)),
    st.lists(st.builds(BlockCopy, small, small, small), max_size=3),
    st.lists(st.builds(TransferStart, number, text, st.booleans(), moves), max_size=2),
    st.lists(number, max_size=3), st.lists(entries, max_size=4), st.none(), st.booleans(), st.booleans())
learned = st.lists(st.builds(Learned, small, small, tokens), max_size=3)
tops = st.lists(st.tuples(small, logprob), max_size=3)
described = st.builds(lambda token, mine, rank, top: TokenLogprobs(
    token, mine, rank, [each for each, _ in top], [each for _, each in top]).pack(), small, logprob, small, tops)


def _with_tree(entry: EntryResult, nodes: int) -> EntryResult:
    return replace(entry, parents=(-1,) * nodes, kept=(nodes - 1,) if nodes > 1 else ())


results = st.builds(
    StepResult, number,
    st.lists(st.builds(EntryResult, tokens, st.none() | st.lists(described, max_size=2),
                       st.none() | st.lists(described, max_size=2),
                       st.none() | st.lists(st.tuples(small, logprob), max_size=3), st.none() | text, small).map(
                           lambda entry: _with_tree(entry, max(0, min(entry.num_drafts, 3)))), max_size=4)
    | st.lists(st.builds(EntryResult, st.lists(small, min_size=1, max_size=1), undraftable=st.booleans()), max_size=4),
    st.lists(st.builds(TransferReport, number, number, st.booleans(), st.none() | text), max_size=3))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(plans, learned), max_size=3))
def test_plans_cross_unchanged(sent: list[tuple[StepPlan, list[Learned]]]) -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    for plan, told in sent:
        found = decoder.decode(bytes(encoder.encode(plan, told)))
        assert found == (plan, told) and _for_heads(found[0]) == _for_heads(plan)


def _for_heads(plan: StepPlan) -> tuple[bool, bool]:
    """What is not among what makes plans equal."""
    return plan.drafts_follow, plan.head_rests


@settings(max_examples=60, deadline=None)
@given(results)
def test_results_cross_unchanged(result: StepResult) -> None:
    assert decode_result(bytes(encode_result(result))) == result
    assert decode_reports(bytes(encode_reports(result.arrivals))) == result.arrivals


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans(), st.booleans()), max_size=30))
def test_decoding_steps_of_groups_in_turn_cross_unchanged(turns: list[tuple[int, int, bool, bool]]) -> None:
    """Groups of sequences decode in any order, lose and gain members and start again: as a pipeline's steps do."""
    encoder, decoder = PlanEncoder(), PlanDecoder()
    groups = [{row: 10 for row in range(10 * g, 10 * g + 3)} for g in range(3)]
    for step, (group, change, sample, prepares) in enumerate(turns):
        rows = groups[group]
        if change == 1 and rows:
            rows.popitem()
        elif change == 2:
            rows[10 * group + 5 + step % 5] = step
        elif change == 3:
            rows.update(dict.fromkeys(rows, 4))
        plan = StepPlan(step, entries=[PlanEntry(row, at, 1, sample) for row, at in rows.items()])
        if sample:
            plan.decoding = list(rows), list(rows.values())
        assert decoder.decode(bytes(encoder.encode(copy.deepcopy(plan)))) == (plan, [])
        if prepares:
            encoder.prepare()
            decoder.prepare()
        for row in rows:
            rows[row] += 1


def test_a_step_that_goes_on_decoding_takes_no_room_for_its_sequences() -> None:
    encoder, rows = PlanEncoder(), list(range(256))
    plans = [StepPlan(n, entries=[PlanEntry(row, 100 + row + n, 1, True) for row in rows],
                      decoding=(rows, [100 + row + n for row in rows])) for n in range(3)]
    first, *later = (len(encoder.encode(plan)) for plan in plans)
    assert first > 256 * 8 and max(later) < 64


def _steady(step: int, blocks: list[list[int]]) -> StepPlan:
    """Two rows decode; tables change by these blocks."""
    return StepPlan(step, diffs=[TableDiff(row, row, step, each) for row, each in enumerate(blocks)],
                    entries=[PlanEntry(row, step, 1, True) for row in range(2)], decoding=([0, 1], [step, step]))


@pytest.mark.parametrize("prepares", [False, True])
def test_blocks_of_a_step_that_goes_on_decoding_cross_whatever_their_number(prepares: bool) -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    tables = [[], [[7], [8]], [[9]], [[1, 2], []], [[1], [2, 3]], [], [[4], [5]]]
    for step, blocks in enumerate(tables):
        plan = replace(_steady(step, blocks), drafts_follow=step == 3, head_rests=step % 2 == 1)
        read, told = decoder.decode(encoder.encode(plan))
        assert _for_heads(read) == _for_heads(plan)
        assert (read, told) == (plan, []) and list(read.diffs) == plan.diffs and len(read.diffs) == len(blocks)
        if prepares:
            encoder.prepare()
            decoder.prepare()


def test_a_step_that_goes_on_decoding_and_says_more_crosses_whole() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    said = [{}, {"freed_rows": [5]}, {}, {"copies": [BlockCopy(0, 1, 2)]}, {"cancels": [3]},
            {"transfers": [TransferStart(1, "host", True, [BlockMove(0, 1, 2)])]},
            {"starts": [RowStart(5, [1], 1, SamplingParams(), 0, 0)]}, {}]
    for step, more in enumerate(said):
        plan, told = replace(_steady(step, [[step]]), **more), [Learned(0, step, [1])] if step == 2 else []
        assert decoder.decode(encoder.encode(plan, told)) == (plan, told)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x"])
def test_a_short_message_of_another_length_is_refused(change: Callable[[bytes], bytes]) -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    decoder.decode(encoder.encode(_steady(0, [])))
    with pytest.raises(ValueError, match="bytes"):
        decoder.decode(change(encoder.encode(_steady(1, [[1], [2]]))))


def test_samples_of_one_prompt_send_it_once() -> None:
    prompt = list(range(1000))
    one, four = (StepPlan(1, starts=[RowStart(row, prompt, 1000, SamplingParams(), row, row) for row in range(count)])
                 for count in (1, 4))
    sizes = [len(PlanEncoder().encode(plan, [])) for plan in (one, four)]
    assert sizes[1] - sizes[0] < 400
    crossed, _ = PlanDecoder().decode(bytes(PlanEncoder().encode(four, [])))
    assert crossed == four


def test_a_shape_of_structured_outputs_stays_behind_as_ranks_get_masks() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a+b*"), top_k=3)
    plan = StepPlan(1, starts=[RowStart(0, [1], 1, params, 0, 0)])
    read, _ = PlanDecoder().decode(bytes(PlanEncoder().encode(plan)))
    assert read.starts[0].params == SamplingParams(structured_outputs=StructuredOutputs(json_object=True), top_k=3)


def test_infinite_and_negative_zero_log_probabilities_keep_their_bits() -> None:
    found = TokenLogprobs(1, -math.inf, 1, [2], [-0.0]).pack()
    back = decode_result(bytes(encode_result(StepResult(1, [EntryResult([1], [found])])))).entries[0].logprobs
    (read,) = unpack_all(back or [])
    assert read.logprob == -math.inf and math.copysign(1, read.top_logprobs[0]) == -1


def test_log_probabilities_that_are_no_record_are_refused() -> None:
    with pytest.raises(ValueError, match="no log-probabilities"):
        decode_result(bytes(encode_result(StepResult(1, [EntryResult([1], [b"short"])]))))


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_message_that_was_cut_short_is_refused(cut: int) -> None:
    plan = StepPlan(1, freed_rows=[1, 2, 3], entries=[PlanEntry(0, 0, 3, True)])
    with pytest.raises(ValueError):
        PlanDecoder().decode(bytes(PlanEncoder().encode(plan))[:-cut])
    with pytest.raises(ValueError):
        decode_result(bytes(encode_result(StepResult(1, [EntryResult([4, 5, 6, 7, 8])])))[:-cut])
