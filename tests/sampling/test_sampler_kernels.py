"""The compiled kernels draw and rank as the plain pass does, for every mix of settings, and as they do alone."""

from __future__ import annotations

import math
import random

import pytest
import torch

from quire.kernels.cpu.sampling import CpuSampling
from quire.sampling import SamplingParams
from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.logprobs import rank_candidates, token_logprobs
from quire.sampling.masks import TokenMasks
from quire.sampling.sampler import sample
from quire.sampling.token_logprobs import unpack_all

KERNELS = CpuSampling()


def random_row(rng: random.Random, vocab: int, index: int) -> SamplingRow:
    options = {
        "temperature": rng.choice([0.0, 1e-9, 0.3, 0.8, 1.0, 1.7, 40.0, 1e30]),
        "top_k": rng.choice([0, 0, 1, 2, 5, 20, vocab - 1, vocab, 2 * vocab]),
        "top_p": rng.choice([1.0, 1.0, 0.01, 0.3, 0.9, 0.95, 0.999999]),
        "min_p": rng.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
        "logprobs": rng.choice([None, 0, 1, 5, 20]),
    }
    row = SamplingRow(SamplingParams(**options), rng.getrandbits(64), index % 3, list(range(9)), 4)
    if rng.random() < 0.3:  # a grammar's: words with all tokens, with none, and with some
        words = [rng.choice([0xFFFFFFFF, 0, rng.getrandbits(32)]) for _ in range(-(-vocab // 32))]
        row.mask = b"".join(word.to_bytes(4, "little") for word in words)
    return row


def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Steep, flat, with many ties, and broken ones."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    logits *= torch.tensor([3.0, 0.05, 30.0, 1.0])[torch.arange(rows) % 4, None]
    logits[1::5] = (logits[1::5] * 2).round() / 2
    logits[3::7] = 0.0
    logits[3::7, ::2] = -0.0
    logits[4::9, vocab // 3 :] = -math.inf
    logits[13, 3], logits[14, 5], logits[15] = math.nan, math.inf, -math.inf
    return logits


@pytest.mark.parametrize("vocab", [9, 37, 1024, 5003])
@pytest.mark.parametrize("seed", range(12))
def test_tokens_statuses_and_reports_are_those_of_the_plain_pass(seed: int, vocab: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng, vocab, index) for index in range(40)]
    logits = random_logits(40, vocab, seed)
    batch = SamplingBatch.build(rows, vocab)
    plain, found = sample(logits, batch), sample(logits, batch, KERNELS)
    assert torch.equal(plain.status, found.status)
    # exp may differ by a unit in the last place: only a draw on an edge may.
    assert torch.equal(plain.token_ids, found.token_ids)
    assert plain.logprobs is not None and found.logprobs is not None
    sound = [bool(plain.ok[row]) for row in plain.logprobs.rows]
    told = (unpack_all(one.logprobs.records()) for one in (plain, found))
    for want, got, ok in zip(*told, sound, strict=True):
        if ok:
            assert (got.token_id, got.rank, got.top_ids) == (want.token_id, want.rank, want.top_ids)
            assert [got.logprob, *got.top_logprobs] == pytest.approx([want.logprob, *want.top_logprobs], abs=1e-6,
                                                                     rel=1e-6)


@pytest.mark.parametrize("vocab", [9, 37, 1024, 5003])
def test_a_mask_tells_the_largest_logit_before_and_after_of_every_row(vocab: int) -> None:
    rng, logits = random.Random(vocab), random_logits(40, vocab, 3)
    logits[20, 7] = math.nan
    words = torch.tensor([[rng.choice([-1, 0, rng.getrandbits(32) - (1 << 31)]) for _ in range(-(-vocab // 32))]
                          for _ in range(30)], dtype=torch.int32)
    words[3] = 0
    rows = torch.tensor(rng.sample(range(40), 30))
    words[rows.tolist().index(14) if 14 in rows else 0] = -1  # the one with +inf keeps it
    expected, masked = logits.clone(), logits.clone()
    TokenMasks(rows, words).apply_(expected)
    before, after = KERNELS.mask_(masked, rows, words)
    assert torch.equal(masked.nan_to_num(5e5), expected.nan_to_num(5e5))
    for found, of in ((before, logits), (after, expected)):
        assert torch.equal(found.nan_to_num(5e5), of.amax(-1).nan_to_num(5e5))


@pytest.mark.parametrize("seed", range(6))
def test_rows_with_nothing_but_masks_draw_as_the_plain_pass_does(seed: int) -> None:
    rng, vocab = random.Random(seed), 700
    rows = [SamplingRow(SamplingParams(temperature=0.8, top_p=rng.choice([1.0, 0.9])), seed, index, [1], 1)
            for index in range(40)]
    for row in rows[:: 1 + seed % 2]:
        row.mask = b"".join(rng.choice([0xFFFFFFFF, 0, rng.getrandbits(32)]).to_bytes(4, "little")
                            for _ in range(-(-vocab // 32)))
    rows[2].mask = bytes(4 * -(-vocab // 32))
    logits, batch = random_logits(40, vocab, seed), SamplingBatch.build(rows, vocab)
    plain, found = sample(logits, batch), sample(logits, batch, KERNELS)
    assert torch.equal(plain.status, found.status) and len(set(found.status.tolist())) == 3
    assert torch.equal(plain.token_ids, found.token_ids)


def test_spent_logits_draw_the_same_and_are_kept_where_log_probabilities_follow() -> None:
    rng, vocab = random.Random(8), 700
    rows = [random_row(rng, vocab, index) for index in range(40)]
    silent = [row for row in rows if row.params.logprobs is None]
    for chosen, kept in ((rows, True), (silent, False)):
        logits = random_logits(40, vocab, 8)[: len(chosen)].clone()
        batch, given = SamplingBatch.build(chosen, vocab), logits.clone()
        want, got = sample(logits, batch, KERNELS), sample(given, batch, KERNELS, spent=True)
        assert torch.equal(want.token_ids, got.token_ids) and torch.equal(want.status, got.status)
        assert torch.equal(given.nan_to_num(7.0), logits.nan_to_num(7.0)) == kept


def test_a_row_draws_the_same_alone_among_others_and_with_any_threads() -> None:
    rng, vocab = random.Random(5), 3001
    rows = [random_row(rng, vocab, index) for index in range(30)]
    logits = random_logits(30, vocab, 5)
    together = sample(logits, SamplingBatch.build(rows, vocab), KERNELS)
    threads = KERNELS._library.quire_get_num_threads()
    try:
        for number in (1, 3):
            KERNELS._library.quire_set_num_threads(number)
            for place in range(30):
                alone = sample(logits[place : place + 1], SamplingBatch.build(rows[place : place + 1], vocab), KERNELS)
                assert int(alone.token_ids) == int(together.token_ids[place])
    finally:
        KERNELS._library.quire_set_num_threads(threads)


def test_candidates_are_the_log_probabilities_bit_by_bit() -> None:
    logits = random_logits(16, 700, 3)[:12]
    found = rank_candidates(logits, [9] * 12, [1.0] * 12, KERNELS)
    scored = token_logprobs(logits, found.ids[:, 2], 9, KERNELS)
    assert torch.equal(scored.top_ids, found.ids) and torch.equal(scored.top_logprobs, found.logprobs)
    assert torch.equal(scored.logprob, found.logprobs[:, 2]) and set(scored.rank.tolist()) == {3}
    assert token_logprobs(logits[:0], found.ids[:0, 0], 3, KERNELS).records() == []
