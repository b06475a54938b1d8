"""The kernels of rows that ask for more than a temperature draw what the sampler draws, for every mix of settings."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.sampled import check_sampling

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
