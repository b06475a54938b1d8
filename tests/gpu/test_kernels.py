"""Every kernel at sizes of real models, in all three types: the checks of `smoke.py`, each failure named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


SHARES = {"rowwise": 3, "decode": 4, "mixed": 4, "linear": 3}
"""Tests that the checks of a part are dealt to: most of their time is compilation, which processes share."""


@pytest.mark.parametrize(("part", "share"), [(part, share) for part, count in SHARES.items() for share in range(count)])
@torch.inference_mode()
def test_kernels_agree_with_their_references(monkeypatch: pytest.MonkeyPatch, part: str, share: int) -> None:
    from tests.gpu import smoke

    failures: list[str] = []
    seen = itertools.count()
    done: list[str] = []

    def attempt(name: str, check: Callable[[], Any]) -> None:
        if next(seen) % SHARES[part] != share:
            return
        done.append(name)
        try:
            check()
            torch.cuda.synchronize()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")

    monkeypatch.setattr(smoke, "attempt", attempt)
    torch.manual_seed(3)
    smoke.CHECKS[part]()
    assert failures == [] and len(done) > 5
