"""Layers that compute something of their own, on the Triton kernels: heads that turn in part or not at all, attention
and MLP beside each other, a norm with a weight for each head. Interpreted, so short; GPU tests run all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.models.build import build_decoder
from tests.checkpoints import config_of, make_model, oracle_logits, weights_of
from tests.paged_driver import PagedDriver

TOKENS = [5, 3, 96, 41]


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("smollm3", {"no_rope_layers": [0]}), ("phi3", {}), ("cohere", {}), ("qwen2_moe", {}),
    ("deepseek_v3", {"first_k_dense_replace": 0}), ("gpt_oss", {"layer_types": ["full_attention"]}),
    ("gpt_oss", {"layer_types": ["sliding_attention"], "sliding_window": 2}),
]


@pytest.mark.parametrize(("family", "change"), CHANGES)
def test_logits_are_those_of_transformers(family: str, change: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    from quire.ops.triton import TritonOps

    model = make_model(family, num_hidden_layers=1, **change)
    decoder = build_decoder(config_of(model), weights_of(model), TritonOps("cpu", torch.float32))
    got = PagedDriver(decoder).run(0, TOKENS, [3, 1])
    assert (got - oracle_logits(model, TOKENS)).abs().max() < 1e-4
