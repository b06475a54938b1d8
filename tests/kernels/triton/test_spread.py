"""Logits of a draft vocabulary among those of all tokens, as torch puts them there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from quire.kernels.triton import spread
from quire.ops.interface import Ops


def check_spread(device: str, dtype: torch.dtype, vocabulary: int) -> None:
    guessed = torch.randperm(vocabulary, device=device)[: vocabulary // 3]
    places = torch.full((vocabulary,), -1, dtype=torch.int32, device=device)
    places[guessed] = torch.arange(len(guessed), dtype=torch.int32, device=device)
    found = torch.randn(3, len(guessed), device=device).to(dtype)
    least = max(-1.0e9, torch.finfo(dtype).min)
    outs = [torch.full((4, vocabulary), 7.0, dtype=dtype, device=device) for _ in range(2)]
    ops: Any = None
    Ops.spread(ops, found, guessed, places, outs[0][:3], least)
    spread.spread(found, places, outs[1][:3], least)
    assert torch.equal(*outs) and (outs[1][3] == 7.0).all() and (outs[1][:3] == least).sum() > vocabulary


@pytest.mark.parametrize("vocabulary", [100, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_go_to_the_places_of_their_tokens(dtype: torch.dtype, vocabulary: int) -> None:
    check_spread("cuda" if torch.cuda.is_available() else "cpu", dtype, vocabulary)
