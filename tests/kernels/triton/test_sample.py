"""The kernels of rows that ask for more than a temperature draw what the sampler draws, for every mix of settings."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import sampled_row as at
from quire.kernels.triton.nucleus_rows import draw_nucleus
from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.params import SamplingParams
from quire.sampling.sampler import sample
from quire.scheduler.plan import RowStart
from tests.kernels.triton.sampled import Case, Drawn, check_sampling, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("seed", "capacity"), [(0, 512), (1, 512), (2, 8), (3, 8)])
def test_tokens_and_reports_are_those_of_the_sampler(seed: int, capacity: int) -> None:
    """With room for all tokens in question, and with too little for most rows."""
    assert check_sampling(DEVICE, torch.float32, 16, 211, seed, block=64, capacity=capacity, few=32, many=128) == 0


def test_a_sampled_bound_that_misses_draws_the_same() -> None:
    assert check_sampling(DEVICE, torch.float32, 12, 1501, 5, block=128, capacity=512, few=32, many=128,
                          spare=-10_000) == 0


def test_the_sizes_of_a_gpu_draw_the_same() -> None:
    assert check_sampling(DEVICE, torch.bfloat16, 12, 5003, 11) == 0


def drawn_and_expected(logits: torch.Tensor, params: list[SamplingParams]) -> tuple[list[int], list[int]]:
    cases = [Case(RowStart(row, [5], 1, each, 7 + row, 0, stop_ids=[], bad_words=[]), [5], b"")
             for row, each in enumerate(params)]
    return Drawn(logits, cases, padding=0).token_ids.tolist(), reference(logits, cases).token_ids.tolist()


@pytest.mark.parametrize("count", [1, 5, 300])
def test_a_draw_leaves_its_rows_as_their_next_draw_needs_them(count: int) -> None:
    kinds = [{"top_p": 0.9}, {"presence_penalty": 0.5, "logprobs": 2}, {"logit_bias": {3: 1.0}}]
    cases = [Case(RowStart(row, [5] * (1 + row % 7), 1, SamplingParams(**kinds[row % 3]), row, 0, stop_ids=[],
                           bad_words=[]), [5] * (1 + row % 7), b"") for row in range(count)]  # fmt: skip
    drawn = Drawn(torch.randn(count, 70, generator=torch.Generator().manual_seed(1)).to(DEVICE), cases, padding=0)
    before, after = drawn.staged, drawn.advanced
    rows, changed = slice(at.HEAD, at.HEAD + count * at.WORDS), before.clone()
    mine = changed[rows].view(count, at.WORDS)
    mine[:, at.COUNTED] = mine[:, at.POSITION]
    mine[:, at.POSITION] += 1
    changed[at.RING] = 0  # of two slots, after the second
    assert int(before[at.RING]) == 1 and after.tolist() == changed.tolist()


@pytest.mark.parametrize("top_p", [0.5, 1e-3])
def test_tokens_that_top_p_does_not_keep_are_drawn_again(top_p: float) -> None:
    """A small share refuses nearly every first token, and most of the second ones."""
    logits = torch.randn(16, 3000, generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.bfloat16)
    found, expected = drawn_and_expected(logits, [SamplingParams(temperature=0.6, top_p=top_p)] * 16)
    assert found == expected
    first, _ = drawn_and_expected(logits, [SamplingParams(temperature=0.6)] * 16)
    assert sum(one != other for one, other in zip(found, first, strict=True)) > 4


def test_a_large_vocabulary_and_all_kinds_of_cuts_beside_each_other() -> None:
    logits = torch.randn(6, 32_000, generator=torch.Generator().manual_seed(2))
    logits = (logits * torch.tensor([[0.64], [0.3], [4.0], [1.0], [1.0], [1.0]])).to(DEVICE, torch.bfloat16)
    params = [*(SamplingParams(temperature=0.6, top_p=top_p) for top_p in (0.95, 0.8, 0.95)),
              SamplingParams(top_k=20, top_p=0.95), SamplingParams(top_k=5000), SamplingParams()]
    found, expected = drawn_and_expected(logits, params)
    assert found == expected


@pytest.mark.parametrize(("top_p", "min_p"), [(0.95, 0.0), (0.3, 0.01), (1e-3, 0.0)])
def test_rows_at_hand_are_drawn_from_as_the_sampler_does(top_p: float, min_p: float) -> None:
    logits = torch.randn(9, 2500, generator=torch.Generator().manual_seed(4)) * 2
    logits[3] = logits[3].round()
    logits[5, 7], logits[6] = torch.nan, -torch.inf
    rows = [SamplingRow(SamplingParams(temperature=0.7, top_p=top_p, min_p=min_p), 2**63 + row, row, [1, 2, 3], 2)
            for row in range(9)]
    batch = SamplingBatch.build(rows, 2500)
    draws, peak = batch.nucleus, logits.amax(-1)
    assert draws is not None
    expected = sample(logits, batch)
    given = (logits, draws.rows, peak, draws.temperature, peak + draws.temperature * draws.log_min_p, draws.top_p,
             torch.tensor(draws.keys))
    found = draw_nucleus(*(each.to(DEVICE) for each in given)).cpu()
    assert torch.equal(torch.where(expected.ok, found, 0), expected.token_ids)
