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


def test_projected_states_are_kept_in_one_launch() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, out, page = 72, 50, 4
    table = torch.randperm(60, device=device).view(6, 10).to(torch.int32)
    rows = torch.tensor([3, -1, 0, 5], device=device, dtype=torch.int32)
    positions = torch.tensor([7, 0, 39, 4], device=device, dtype=torch.int32)
    states = [torch.randn(4, width, device=device).half() for _ in range(3)]
    weight = torch.randn(out, 3 * width, device=device).half()
    kept, want = (torch.full((240, out), 9.0, dtype=torch.half, device=device) for _ in range(2))
    assert features.projects(states, weight)
    features.keep_projected(states, weight, kept, table, page, rows, positions)
    projected = (torch.cat(states, 1).float() @ weight.float().t()).half()
    step_reference.keep_features(projected, want, table, page, rows, positions)
    torch.testing.assert_close(kept, want, rtol=2e-3, atol=2e-2)
    assert (kept == 9.0).all(1).sum() == 240 - 3


def test_what_is_not_projected_at_once() -> None:
    states = [torch.zeros(1, 64).half() for _ in range(3)]
    assert features.projects(states, torch.zeros(8, 192).half())
    assert not features.projects(states[:2], torch.zeros(8, 128).half())
    assert not features.projects(states, torch.zeros(8, 192))
    assert not features.projects([torch.zeros(9, 64).half()] * 3, torch.zeros(8, 192).half())
    assert not features.projects(states, torch.empty(1 << 15, 192, dtype=torch.half))


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_sums_of_rows(dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = (torch.randn(3, 700, device=device).to(dtype) for _ in range(2))
    assert torch.equal(features.add_rows(x, y), x + y)
