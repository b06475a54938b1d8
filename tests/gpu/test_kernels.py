"""Every kernel at sizes of real models, in all three types: the checks of `smoke.py`, each failure named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("part", ["rowwise", "decode", "mixed", "linear"])
@torch.inference_mode()
def test_kernels_agree_with_their_references(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    from tests.gpu import smoke

    failures: list[str] = []
    done: list[str] = []

    def attempt(name: str, check: Callable[[], Any]) -> None:
        done.append(name)
        try:
            check()
            torch.cuda.synchronize()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")

    monkeypatch.setattr(smoke, "attempt", attempt)
    torch.manual_seed(3)
    smoke.CHECKS[part]()
    assert failures == [] and len(done) > 10
