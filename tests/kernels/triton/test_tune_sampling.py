"""The steps that `tune_sampling` times are such as the sampling kernels take, for every setting."""

from __future__ import annotations

import pytest
import torch

from quire.bench.gpu.sampling import SETTINGS
from quire.bench.gpu.tune_sampling import _TEXT, MORE, step_of
from quire.kernels.triton.sample import sample_rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="by the interpreter; on a GPU the command itself runs")
@pytest.mark.parametrize("name", [*SETTINGS, *MORE])
@pytest.mark.parametrize("kind", ["flat", "steep"])
def test_every_step_draws(name: str, kind: str) -> None:
    step, wants, scratch = step_of(3, 700, kind, {**SETTINGS, **MORE}[name], "cpu")
    sample_rows(step, 3, wants, scratch)
    tokens, statuses = step.out[0, :, 0].tolist(), step.out[0, :, 1].tolist()
    assert statuses == [0, 0, 0] and tokens == step.tokens[:, _TEXT].tolist()
    assert all(0 <= token < 700 for token in tokens)
    assert kind == "flat" or max(tokens) < 40
