"""The same pass on a GPU: the same random bits as a CPU, and tokens that do not depend on the batch."""

from __future__ import annotations

import random

import pytest
import torch

from quire.sampling import SamplingParams
from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.philox import signed_seed, uniform, uniforms
from quire.sampling.sampler import sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_random_numbers_have_the_bits_of_the_plain_ones():
    rng = random.Random(1)
    cases = [(rng.getrandbits(64), rng.randrange(64), rng.randrange(1 << 20)) for _ in range(1000)]
    seeds = torch.tensor([signed_seed(seed) for seed, _, _ in cases]).cuda()
    index, position = (torch.tensor([case[i] for case in cases]).cuda() for i in (1, 2))
    assert uniforms(seeds, index, position).tolist() == [uniform(*case) for case in cases]


def mixed_rows(count: int) -> list[SamplingRow]:
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8),
        SamplingParams(top_k=50, logprobs=5),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=200, top_p=0.95, min_p=0.01, repetition_penalty=1.2),
        SamplingParams(min_p=0.05, frequency_penalty=0.5, logit_bias={7: 3.0}, logprobs=0),
    ]
    return [SamplingRow(kinds[i % len(kinds)], 1000 + i, i % 3, list(range(40)), 20) for i in range(count)]


def test_a_row_draws_the_same_token_alone_among_others_and_almost_always_on_a_cpu():
    count, vocab = 96, 49152
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(3)) * 3
    device = logits.cuda()
    rows = mixed_rows(count)
    together = sample(device, SamplingBatch.build(rows, vocab, "cuda"))
    assert bool(together.ok.all())
    listed = dict(zip(together.logprobs.rows, together.logprobs.records(), strict=True))
    for i in range(count):
        alone = sample(device[i : i + 1].clone(), SamplingBatch.build(rows[i : i + 1], vocab, "cuda"))
        assert int(alone.token_ids) == int(together.token_ids[i])
        assert (alone.logprobs.records()[0] if alone.logprobs else None) == listed.get(i)
    host = sample(logits, SamplingBatch.build(rows, vocab))
    # exp differs by a unit in the last place between devices: only a draw on an edge may differ.
    assert (host.token_ids != together.token_ids.cpu()).sum() <= 1
