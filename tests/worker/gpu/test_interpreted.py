"""The fused forward pass and both attention kernels inside an engine, run by Triton's interpreter: slow, so
short."""

from __future__ import annotations

import pytest
import torch

from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request
from tests.worker.gpu import engines

pytest.importorskip("triton")
CONFIG = {**engines.QWEN3, "num_hidden_layers": 1, "vocab_size": 61}


def _requests() -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return [
        Request(f"r{i}", [(7 * i + 3 * j) % 61 for j in range(n)], params, seed=i, arrival_time=0.0)
        for i, n in enumerate((9, 2))
    ]


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_on_the_kernels_gives_the_cpu_engines_tokens(deterministic: bool) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.kernels.triton.ops import TritonOps

    plain = engines.run(engines.make_engine(CONFIG, device=False), _requests())
    ops = TritonOps("cpu", torch.float32, deterministic=deterministic)
    assert engines.run(engines.make_engine(CONFIG, device=True, depth=2, ops=ops), _requests()) == plain


def test_fresh_prompts_may_be_attended_to_by_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.attention import triton as backend
    from quire.attention.prompts import Borrowed
    from quire.kernels.triton.ops import TritonOps
    from tests.attention.test_prompts import causal

    monkeypatch.setattr(backend, "_RAGGED_TOKENS", 2)
    taken: list[int] = []

    def counted(q, k, v, run, scale):  # type: ignore[no-untyped-def]
        taken.append(run.tokens)
        return causal(q, k, v, run, scale)

    ops = TritonOps("cpu", torch.float32)
    ops.attention.prompts = Borrowed("mine", counted)
    plain = engines.run(engines.make_engine(CONFIG, device=False), _requests())
    assert engines.run(engines.make_engine(CONFIG, device=True, depth=2, ops=ops), _requests()) == plain
    assert taken == [11]
