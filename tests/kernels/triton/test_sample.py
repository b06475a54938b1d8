"""The kernels of rows that ask for more than a temperature draw what the sampler draws, for every mix of settings."""

from __future__ import annotations

import pytest
import torch

from quire.sampling.params import SamplingParams
from quire.scheduler.plan import RowStart
from tests.kernels.triton.sampled import Case, Drawn, check_sampling, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("seed", "capacity", "banded"), [(0, 512, False), (1, 512, True), (2, 8, True), (3, 8, False)])
def test_tokens_and_reports_are_those_of_the_sampler(seed: int, capacity: int, banded: bool) -> None:
    """With room for all tokens in question, and with too little for most rows."""
    assert check_sampling(DEVICE, torch.float32, 16, 211, seed, block=64, capacity=capacity, few=32, many=128,
                          banded=banded) == 0


def test_a_band_that_misses_the_cut_draws_the_same() -> None:
    assert check_sampling(DEVICE, torch.float32, 12, 1501, 5, block=128, capacity=512, few=32, many=128, banded=True,
                          near=0, far=1) == 0


@pytest.mark.parametrize("banded", [False, True])
def test_the_sizes_of_a_gpu_draw_the_same(banded: bool) -> None:
    assert check_sampling(DEVICE, torch.bfloat16, 12, 5003, 11, banded=banded) == 0


def test_a_flat_row_is_cut_by_a_finer_guess() -> None:
    """Nearly all tokens of a large vocabulary are likely: the first guess alone would leave too many in question."""
    vocab = 151_936
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(2)) * torch.tensor([[0.64], [0.3], [4.0]])
    logits = logits.to(DEVICE, torch.bfloat16)
    params = [SamplingParams(temperature=0.6, top_p=top_p) for top_p in (0.95, 0.8, 0.95)]
    cases = [Case(RowStart(row, [5], 1, each, 7 + row, 0, stop_ids=[], bad_words=[]), [5], b"")
             for row, each in enumerate(params)]
    got = Drawn(logits, cases, padding=0, banded=True)
    assert got.token_ids.tolist() == reference(logits, cases).token_ids.tolist()
    scratch = got.scratch
    assert (scratch.guess < torch.inf).tolist() == [True, True, False]
    weights = torch.softmax(logits.float().cpu() / 0.6, dim=1)
    for row in range(3):
        order = weights[row].double().sort(descending=True)
        cut = logits[row, order.indices[int((order.values.cumsum(0) < params[row].top_p).sum())]].float()
        low, high = scratch.bracket[row].tolist()
        assert low < float(cut) <= high and 0 < int(scratch.cursor[row]) <= scratch.held
