"""Ranks that each hold a part of every slot of KV give the texts of plain functions, whatever the requests do."""

from __future__ import annotations

import pytest

from quire.fuzz.fault_case import FaultCase, on_ranks, random_fault_case
from quire.fuzz.fault_run import find_fault


def cases(first: int, count: int) -> list[FaultCase]:
    return [random_fault_case(seed) for seed in range(first, first + count)]


@pytest.mark.parametrize(("tensor_size", "num_stages"), [(2, 1), (3, 1), (1, 2), (2, 2), (1, 3)])
def test_random_cases_on_ranks(tensor_size: int, num_stages: int) -> None:
    for seed, case in enumerate(cases(100 * tensor_size + 10 * num_stages, 8)):
        found = find_fault(on_ranks(case, tensor_size, num_stages))
        assert found is None, f"{seed}: {found}\n{on_ranks(case, tensor_size, num_stages).to_json()}"
