"""Rows that want a token and nothing else get it from one call into C, and it is the sampler's."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from quire.errors import EngineError, OutOfMemoryError
from quire.kernels.cpu import sampling as cpu_sampling
from quire.kernels.cpu.library import load, supported_variants
from quire.kernels.cpu.sampling import CpuSampling
from quire.sampling import SamplingParams
from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.sampler import sample
from quire.worker.draws import draw_rows
from tests.sampling.test_sampler_kernels import random_logits


@pytest.fixture(params=supported_variants())
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuSampling:
    """Of each variant that this processor runs."""
    monkeypatch.setattr(cpu_sampling, "load", lambda: load(request.param))
    return CpuSampling()


def row_of(index: int, **options: object) -> SamplingRow:
    return SamplingRow(SamplingParams(**options), 91 + index, index % 3, list(range(9 + index % 5)), 4)


def plain_row(rng: random.Random, vocab: int, index: int) -> SamplingRow:
    return row_of(index, temperature=rng.choice([0.0, 1e-9, 0.3, 0.8, 1.0, 1.7, 40.0, 1e30]),
                  top_k=rng.choice([0, 0, 1, 2, 5, 20, vocab - 1, vocab, 2 * vocab]),
                  top_p=rng.choice([1.0, 1.0, 0.01, 0.3, 0.9, 0.999999]), min_p=rng.choice([0.0, 0.0, 0.01, 0.3, 1.0]))


@pytest.mark.parametrize("vocab", [16, 37, 255, 256, 5003])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_and_statuses_are_the_samplers(kernels: CpuSampling, seed: int, vocab: int) -> None:
    rng = random.Random(seed)
    rows, logits = [plain_row(rng, vocab, index) for index in range(40)], random_logits(40, vocab, seed)
    before = logits.clone()
    found, wanted = draw_rows(logits, rows, kernels, spent=True), sample(logits, SamplingBatch.build(rows, vocab))
    assert found.batch is None and found.logprobs is None
    assert found.status == wanted.status.tolist() and {1, 0} == set(found.status)
    # exp may differ by a unit in the last place: only a draw on an edge may.
    assert found.tokens == wanted.token_ids.tolist()
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    alone = [draw_rows(logits[i : i + 1], rows[i : i + 1], kernels) for i in range(40)]
    assert [one.tokens[0] for one in alone] == found.tokens and [one.status[0] for one in alone] == found.status


@pytest.mark.parametrize("vocab", [1, 16, 300])
def test_the_likeliest_tokens_without_any_rule(kernels: CpuSampling, vocab: int) -> None:
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[2], logits[3, -1], logits[4] = 0.25, torch.nan, -torch.inf
    found = draw_rows(logits, [row_of(i, temperature=0.0) for i in range(9)], kernels)
    assert found.status == [0, 0, 0, 1, 1, 0, 0, 0, 0] and found.tokens[2] == 0
    assert [token for token, bad in zip(found.tokens, found.status, strict=True) if not bad] == [
        int(row.argmax()) for row, bad in zip(logits, found.status, strict=True) if not bad]


@pytest.mark.parametrize("more", [{"logprobs": 2}, {"repetition_penalty": 1.3}, {"logit_bias": {3: 2.0}},
                                  {"allowed_token_ids": [3, 5]}, {"min_tokens": 12}])
def test_one_row_that_wants_more_takes_all_through_the_sampler(kernels: CpuSampling, more: dict[str, object]) -> None:
    rows = [row_of(0, temperature=0.0), row_of(1, temperature=0.8), row_of(2, temperature=0.8, **more)]
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    found, wanted = draw_rows(logits, rows, kernels), sample(logits, SamplingBatch.build(rows, 50))
    assert found.batch is not None and found.tokens == wanted.token_ids.tolist()
    assert (found.logprobs is not None) is ("logprobs" in more)


def test_no_memory_and_rules_that_do_not_fit_are_errors(kernels: CpuSampling) -> None:
    with pytest.raises(EngineError, match="1 rules for drawing from 2 rows"):
        kernels.choose(torch.zeros(2, 16), (cpu_sampling.DrawRule * 1)())

    def without_memory(logits: int, rules: object, out: list[int], count: int, width: int) -> None:
        out[count - 1] = -2

    kernels._library = SimpleNamespace(quire_choose=without_memory)
    with pytest.raises(OutOfMemoryError, match="max_num_seqs"):
        kernels.choose(torch.zeros(2, 16), None)
