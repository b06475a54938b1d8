"""The batched pass: equal to the plain reference, and to itself whatever the batch and the threads."""

from __future__ import annotations

import math
import random
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch

from quire.sampling import SamplingParams, sampler
from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.logprobs import token_logprobs
from quire.sampling.reference import (
    ReferenceRow,
    edited_logits,
    logprobs_one,
    noise,
    probabilities,
    sample_one,
)
from quire.sampling.sampler import NOT_FINITE, NOTHING_ALLOWED, argmax_rows, sample
from quire.sampling.token_logprobs import unpack_all
from quire.sampling.weights import integer_weights


@pytest.fixture(autouse=True)
def one_thread():
    """Keeps small tensors off the thread pool, which on a busy machine slows them tenfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch_row(row: ReferenceRow) -> SamplingRow:
    return SamplingRow(
        row.params,
        row.seed,
        row.seq_index,
        row.prompt_ids + row.output_ids,
        len(row.prompt_ids),
        row.stop_ids,
        row.bad_words,
    )


def draw(logits: torch.Tensor, rows: list[ReferenceRow]) -> sampler.SamplerOutput:
    return sample(logits, SamplingBatch.build([batch_row(r) for r in rows], logits.shape[1]))


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    def maybe(value, default, chance=0.5):
        return value if rng.random() < chance else default

    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.5]),
        top_k=maybe(rng.choice([1, 2, 5, 40, 63, 64, 300, vocab, vocab + 5]), 0),
        top_p=maybe(rng.choice([0.05, 0.5, 0.9, 0.99, 0.999999]), 1.0),
        min_p=maybe(rng.choice([0.01, 0.2, 1.0]), 0.0, 0.3),
        repetition_penalty=maybe(rng.choice([0.7, 1.3]), 1.0, 0.3),
        presence_penalty=maybe(rng.choice([-1.0, 0.5]), 0.0, 0.3),
        frequency_penalty=maybe(rng.choice([-0.5, 1.5]), 0.0, 0.3),
        min_tokens=maybe(8, 0, 0.3),
        logit_bias=maybe({rng.randrange(vocab): rng.uniform(-9, 9) for _ in range(5)}, None, 0.2),
        allowed_token_ids=maybe(rng.sample(range(vocab), 30), None, 0.15),
        logprobs=maybe(rng.choice([0, 1, 5, 20]), None, 0.3),
    )


def random_row(rng: random.Random, vocab: int) -> ReferenceRow:
    output = [rng.randrange(vocab) for _ in range(rng.randrange(16))]
    words = (
        [[*output[-2:], rng.randrange(vocab)], [rng.randrange(vocab)], [1, 2, 3]]
        if rng.random() < 0.2
        else []
    )
    return ReferenceRow(
        random_params(rng, vocab),
        rng.getrandbits(64),
        rng.randrange(4),
        [rng.randrange(vocab) for _ in range(rng.randrange(1, 20))],
        output,
        rng.sample(range(vocab), 3),
        words,
    )


def random_case(
    seed: int, rows: int, vocab: int, spread: float = 3.0
) -> tuple[torch.Tensor, list[ReferenceRow]]:
    rng = random.Random(seed)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    if seed % 3 == 0:
        logits = logits.round()  # many ties
    return logits, [random_row(rng, vocab) for _ in range(rows)]


@pytest.mark.parametrize("seed", range(60))
def test_mixed_batches_draw_what_the_plain_reference_draws(seed):
    logits, rows = random_case(
        seed, rows=12, vocab=[97, 512, 1500][seed % 3], spread=[0.5, 3.0, 8.0][seed // 3 % 3]
    )
    before = logits.clone()
    out = draw(logits, rows)
    assert torch.equal(before, logits)
    assert bool(out.ok.all())
    for i, row in enumerate(rows):
        token, values = int(out.token_ids[i]), logits[i].tolist()
        if token == sample_one(values, row):
            continue
        # float32 against float64: only a draw that falls on an edge of the distribution may differ.
        # Under top_p alone the first draw is from the whole row.
        drawn_from = row if row.params.top_k else replace(row, params=replace(row.params, top_p=1.0))
        cumulative = np.cumsum(probabilities(values, drawn_from))
        below = cumulative[token - 1] if token else 0.0
        assert below - 2e-6 <= noise(row) <= cumulative[token] + 2e-6, (seed, i, row)


def test_at_most_a_few_draws_in_ten_thousand_fall_on_an_edge():
    differing = total = 0
    for seed in range(1000, 1040):
        logits, rows = random_case(seed, rows=24, vocab=512)
        tokens = draw(logits, rows).token_ids.tolist()
        differing += sum(t != sample_one(x.tolist(), r) for t, x, r in zip(tokens, logits, rows, strict=True))
        total += len(rows)
    assert differing <= total // 500


@pytest.mark.parametrize("seed", range(6))
def test_a_row_alone_among_others_and_reordered_draws_the_same_token_and_logprobs(seed):
    logits, rows = random_case(seed, rows=32, vocab=4999)
    together = draw(logits, rows)
    listed = (
        {}
        if together.logprobs is None
        else dict(zip(together.logprobs.rows, together.logprobs.records(), strict=True))
    )
    order = random.Random(seed).sample(range(32), 32)
    shuffled = draw(logits[order], [rows[i] for i in order])
    assert shuffled.token_ids.tolist() == together.token_ids[order].tolist()
    for i, row in enumerate(rows):
        alone = draw(logits[i : i + 1], [row])
        assert int(alone.token_ids) == int(together.token_ids[i])
        assert (alone.logprobs.records()[0] if alone.logprobs else None) == listed.get(i)


def test_thread_count_and_a_large_vocabulary_change_no_bit():
    logits, rows = random_case(2, rows=32, vocab=49152)
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        out = draw(logits, rows)
        alone = [int(draw(logits[i : i + 1], [rows[i]]).token_ids) for i in range(12)]
        assert out.token_ids[:12].tolist() == alone
        results.append((alone, out.logprobs.records()))
    assert results[0] == results[1]


@pytest.mark.parametrize("function", [torch.exp, torch.log])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_elementwise_functions_we_rely_on_do_not_depend_on_where_an_element_lies(function, dtype):
    """exp2, for one, does: its vector body and its scalar tail differ. We want to hear of it here."""
    x = torch.rand(70001, generator=torch.Generator().manual_seed(0)).to(dtype) * 30 + 0.01
    x = x if function is torch.log else -x
    whole = function(x)
    for size in (1, 3, 7, 8, 9, 31, 1000, 5001):
        for start in (0, 1, 5, 13, 30011):
            assert torch.equal(function(x[start : start + size].clone()), whole[start : start + size])
    torch.set_num_threads(2)
    assert torch.equal(function(x), whole)


@pytest.mark.parametrize("seed", range(12))
def test_looking_for_the_cut_and_sorting_whole_rows_keep_the_same_tokens(seed):
    logits, rows = random_case(seed, rows=64, vocab=1500, spread=[0.2, 3.0][seed % 2])
    batch = SamplingBatch.build([batch_row(r) for r in rows], 1500)
    batch.edits.apply_(logits)
    peak = logits.amax(-1)
    assert torch.equal(
        sampler.draw_by_cut(logits, peak, batch.filtered), sampler.draw_by_sort(logits, peak, batch.filtered)
    )


def test_weights_of_a_row_have_the_same_bits_alone_and_among_others_and_with_any_threads():
    """Tokens would almost never show a last bit that differs, so look at the bits."""
    logits = torch.randn(9, 4999, generator=torch.Generator().manual_seed(8)) * 3
    peak = logits.amax(-1, keepdim=True)
    together = integer_weights(logits, peak, 0.7)
    for i in range(9):
        assert torch.equal(integer_weights(logits[i], float(peak[i]), 0.7), together[i])
        some = torch.randperm(4999)[:37].sort().values
        assert torch.equal(integer_weights(logits[i, some], float(peak[i]), 0.7), together[i, some])
    torch.set_num_threads(2)
    assert torch.equal(integer_weights(logits, peak, 0.7), together)


def test_a_draw_is_the_first_place_whose_exact_running_total_exceeds_its_share():
    def pick(weights, noise):
        return int(sampler._pick(torch.tensor([weights]), torch.tensor([noise], dtype=torch.float64)))

    assert [pick([1, 2, 1], u) for u in (0.0, 0.24, 0.25, 0.74, 0.75, 0.999)] == [0, 0, 1, 1, 2, 2]
    assert pick([0, 0, 3, 0], 0.0) == 2  # a token without weight is not drawn, not even by zero
    assert pick([5, 0], 1 - 2**-53) == 0
    huge = [1 << 40, 1, 1, 1, 1 << 40]
    assert [pick(huge, ((1 << 40) + k + 0.5) / sum(huge)) for k in range(-1, 4)] == [0, 1, 2, 3, 4]
    rng = random.Random(6)
    for _ in range(200):
        weights = [rng.randrange(1 << rng.randrange(1, 41)) for _ in range(300)]
        noise = rng.random()
        target = min(int(noise * float(sum(weights))), sum(weights) - 1)
        running = np.cumsum(np.array(weights, dtype=object))
        assert pick(weights, noise) == next(i for i, total in enumerate(running) if total > target)


def test_draws_follow_the_distribution():
    n, vocab = 5_000, 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5)) * 1.5
    cases = [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=5),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.4, top_k=9, top_p=0.9, min_p=0.02),
    ]
    for params in cases:
        rows = [SamplingRow(params, 11, 0, [0] * 3, 3) for _ in range(n)]
        for position, row in enumerate(rows):
            row.position = position
        tokens = sample(logits.expand(n, vocab).contiguous(), SamplingBatch.build(rows, vocab)).token_ids
        counts = torch.bincount(tokens, minlength=vocab).numpy()
        expected = probabilities(logits.tolist(), ReferenceRow(params, 11, 0, [0] * 3, [])) * n
        support = expected > 0
        assert counts[~support].sum() == 0
        chi = ((counts[support] - expected[support]) ** 2 / expected[support]).sum()
        freedom = int(support.sum()) - 1
        assert chi < freedom + 4.5 * math.sqrt(2 * freedom), params


def test_an_all_greedy_batch_takes_the_first_maximum_and_draws_nothing(monkeypatch):
    for name in ("_draw_plain", "_draw_filtered", "integer_weights"):
        monkeypatch.setattr(sampler, name, None)
    logits = torch.randn(5, 300).round()
    rows = [SamplingRow(SamplingParams(temperature=0), 0, 0, [1], 1) for _ in range(5)]
    out = sample(logits, SamplingBatch.build(rows, 300))
    assert out.token_ids.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert out.logprobs is None


@pytest.mark.parametrize("width", [1, 63, 64, 65, 128, 1000, 50257])
def test_argmax_by_blocks_is_the_first_maximum(width):
    values = torch.randn(7, width).round()
    assert argmax_rows(values).tolist() == [row.index(max(row)) for row in values.tolist()]
    values[3, width // 2] = math.nan
    assert math.isnan(values[3, argmax_rows(values)[3]])


@pytest.mark.parametrize("rows", [1, 5])
def test_greedy_rows_by_themselves_are_as_among_others(rows):
    """By themselves they take a path of their own; with a log-probability asked for, the one of all."""
    logits = torch.randn(rows, 1000, generator=torch.Generator().manual_seed(rows)).round()
    broken = [float("nan"), float("inf"), -float("inf"), 0.0]
    for row, value in zip(range(1, rows), broken, strict=False):
        logits[row, 3:] = value
    alone, among = (
        draw(logits, [ReferenceRow(SamplingParams(temperature=0, logprobs=asked), 0, 0, [1], [], [], [])
                      for asked in ([None] * rows if path == 0 else [0] * rows)])
        for path in range(2)
    )
    assert alone.token_ids.tolist() == among.token_ids.tolist()
    assert alone.status.tolist() == among.status.tolist()
    assert alone.logprobs is None and among.logprobs is not None


def test_a_row_of_bad_logits_fails_alone():
    logits = torch.randn(6, 500)
    logits[1, 17], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    logits[4, :400] = -math.inf
    for params in [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=9),
        SamplingParams(top_p=0.7),
        SamplingParams(top_p=0.7, min_p=0.1, logprobs=3, repetition_penalty=1.2),
    ]:
        rows = [ReferenceRow(params, 5, 0, [1, 2], [3]) for _ in range(6)]
        out = draw(logits, rows)
        assert out.ok.tolist() == [True, False, False, False, True, True]
        assert set(out.status[1:4].tolist()) == {NOT_FINITE}
        assert int(out.token_ids[4]) >= 400
        for i in (0, 4, 5):
            assert int(draw(logits[i : i + 1], rows[:1]).token_ids) == int(out.token_ids[i])


def test_a_row_left_with_no_token_says_so():
    params = SamplingParams(allowed_token_ids=[4], min_tokens=2)
    out = draw(
        torch.randn(2, 50),
        [ReferenceRow(params, 1, 0, [1], [], stop_ids=[4]), ReferenceRow(SamplingParams(), 1, 0, [1], [])],
    )
    assert out.status.tolist() == [NOTHING_ALLOWED, 0]


def test_top_k_keeps_exactly_k_of_equal_tokens_the_lower_ids_first():
    logits = torch.zeros(200, 3000)
    rows = [ReferenceRow(SamplingParams(top_k=3), s, 0, [1], []) for s in range(200)]
    assert set(draw(logits, rows).token_ids.tolist()) == {0, 1, 2}
    rows = [ReferenceRow(SamplingParams(top_p=0.001), s, 0, [1], []) for s in range(200)]
    assert set(draw(logits, rows).token_ids.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1.1e-5, 1e-3, 1e6, 1e300])
def test_extreme_temperatures_neither_fail_nor_leave_the_filter(temperature):
    logits = torch.randn(8, 1000) * 20
    logits[:, 0] = -math.inf
    rows = [
        ReferenceRow(SamplingParams(temperature=temperature, top_k=4, min_p=0.0), s, 0, [1], [])
        for s in range(8)
    ]
    out = draw(logits, rows)
    assert bool(out.ok.all())
    best = logits.topk(4).indices
    assert all(int(t) in best[i].tolist() for i, t in enumerate(out.token_ids))


def test_edits_are_those_of_the_reference():
    for seed in range(20):
        logits, rows = random_case(seed, rows=16, vocab=200)
        batch = SamplingBatch.build([batch_row(r) for r in rows], 200)
        edited = logits.clone()
        if batch.edits is not None:
            batch.edits.apply_(edited)
        expected = torch.tensor([edited_logits(x.tolist(), r) for x, r in zip(logits, rows, strict=True)])
        torch.testing.assert_close(edited, expected, rtol=1e-5, atol=1e-5)


def test_a_row_that_grew_token_by_token_equals_one_built_from_its_past():
    rng = random.Random(4)
    for _ in range(20):
        reference = random_row(rng, 64)
        grown = SamplingRow(
            reference.params,
            reference.seed,
            0,
            reference.prompt_ids,
            len(reference.prompt_ids),
            reference.stop_ids,
            reference.bad_words,
        )
        start = grown.ahead([])
        for token in reference.output_ids:
            grown.append(token)
        reference.seq_index = 0
        for row in (grown, start.ahead(reference.output_ids)):
            logits = torch.randn(1, 64)
            expected = draw(logits, [reference]).token_ids
            assert torch.equal(sample(logits, SamplingBatch.build([row], 64)).token_ids, expected)
        assert start.num_output == 0 and start.position == len(reference.prompt_ids)


@pytest.mark.parametrize("vocab", [10, 700])
def test_logprobs_are_of_the_raw_logits_with_ranks(vocab):
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(1)) * 3
    logits[4:] = logits[4:].round()
    targets = torch.randint(0, vocab, (9,), generator=torch.Generator().manual_seed(2))
    found = token_logprobs(logits, targets, 20)
    torch.testing.assert_close(
        found.logprob, logits.log_softmax(-1).gather(1, targets[:, None])[:, 0], rtol=0, atol=2e-6
    )
    for i, (token, logprob, rank, ids, tops) in enumerate(map(astuple, unpack_all(found.records()))):
        expected = logprobs_one(logits[i].tolist(), token, 20)
        assert (rank, ids) == expected[1:3]
        assert logprob == pytest.approx(expected[0], abs=2e-6)
        assert tops == pytest.approx(expected[3], abs=2e-6)


def test_logprobs_come_for_those_who_asked_and_as_many_as_they_asked():
    logits = torch.randn(4, 100)
    rows = [
        ReferenceRow(SamplingParams(logprobs=n, temperature=0.9, logit_bias={3: 50.0}), 1, i, [1], [])
        for i, n in enumerate([None, 0, 2, 5])
    ]
    found = draw(logits, rows).logprobs
    assert found.rows == [1, 2, 3]
    listed = unpack_all(found.records())
    assert [len(entry.top_ids) for entry in listed] == [0, 2, 5]
    assert all(entry.token_id == 3 and entry.logprob < -0.5 for entry in listed)  # drawn by bias, told as raw


def test_no_positions_give_no_logprobs():
    found = token_logprobs(torch.zeros(0, 50), torch.zeros(0, dtype=torch.int64), 3)
    assert found.records() == []
