"""Random cases on ranks give the tokens of one: real tiny models, cut into tensor ranks and stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.fuzz.case import model_on_ranks, random_case
from quire.fuzz.run import find_difference


@pytest.mark.parametrize(("tensor_size", "num_stages", "seeds"),
                         [(2, 1, (13,)), (3, 1, (10, 14)), (1, 2, (25,)), (2, 2, (13, 21))],
                         ids=["2x1", "3x1", "1x2", "2x2"])
def test_random_cases_on_ranks(tensor_size: int, num_stages: int, seeds: tuple[int, ...], tmp_path: Path) -> None:
    """In 21 and 25 a head drafts."""
    for seed in seeds:
        case = model_on_ranks(random_case(seed), tensor_size, num_stages)
        assert find_difference(case, tmp_path) is None, case.to_json()
