"""Hidden states in slots of the cache: kept by row and position, and the one before each token fetched."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from quire.kernels import step_reference
from quire.kernels.triton import features


def check_features(device: str, dtype: torch.dtype) -> None:
    width, page = 1100, 4
    table = torch.randperm(60, device=device).view(6, 10).to(torch.int32)
    rows = torch.tensor([3, -1, 0, 5, 5, 2], device=device, dtype=torch.int32)
    positions = torch.tensor([7, 0, 39, 4, 5, 0], device=device, dtype=torch.int32)
    states = torch.randn(6, width, device=device).to(dtype)
    results = []
    for module in (features, step_reference):
        kept = torch.full((240, width), 9.0, dtype=dtype, device=device)
        module.keep_features(states, kept, table, page, rows, positions)
        out = torch.full((6, width), 7.0, dtype=dtype, device=device)
        module.fetch_features(kept, table, page, rows, positions, out)
        results.append((kept, out))
    (kept, out), (want, fetched) = results
    assert torch.equal(kept, want) and torch.equal(out, fetched)
    # What was kept of position 4 comes before position 5; nothing before a row's first token, nothing for padding.
    assert torch.equal(out[4], states[3]) and not out[1].any() and not out[5].any()
    assert (kept == 9.0).all(1).sum() == 240 - 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_kept_and_fetched(dtype: torch.dtype) -> None:
    check_features("cuda" if torch.cuda.is_available() else "cpu", dtype)
