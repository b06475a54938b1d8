"""The contract of ranks: the bits of a token's logits do not depend on how many ranks share the model."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.models.build import build_decoder
from quire.ops.cpu import CpuOps
from tests.checkpoints import FAMILY_NAMES, config_of, make_model, weights_of
from tests.paged_driver import PagedDriver
from tests.parallel_ranks.rank_threads import rank_decoders, side_by_side

TOKENS = random.Random(0).choices(range(97), k=44)
CHUNKS = [17, 22, 1, 1, 1, 2]
WIDE: dict[str, dict[str, Any]] = {"gpt2": {"n_inner": 272}, "opt": {"ffn_dim": 272}}
"""Eight slices of the MLP, the last of them shorter: so that all sizes up to eight can be."""
OVERRIDES: dict[str, dict[str, Any]] = {
    "opt": {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
    "gemma3": {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0},
}
SIZES = [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2)]


@cache
def one_rank(family: str, **more: Any) -> tuple[dict[str, Any], list[tuple[str, Tensor]], Tensor]:
    overrides = {**WIDE.get(family, {"intermediate_size": 272}), **OVERRIDES.get(family, {}), **more}
    model = make_model(family, **overrides)
    config, weights = config_of(model), weights_of(model)
    decoder = build_decoder(config, [(name, tensor.clone()) for name, tensor in weights], CpuOps(num_threads=1),
                            max_model_len=128)
    return config, weights, PagedDriver(decoder, num_blocks=16).run(0, TOKENS, CHUNKS)


def of_ranks(config: dict[str, Any], weights: list[tuple[str, Tensor]], tensor_size: int, num_stages: int) -> Tensor:
    """Logits of the same sequence, from the rank that draws."""
    drivers = [PagedDriver(decoder, num_blocks=16)  # type: ignore[arg-type]
               for decoder in rank_decoders(config, weights, tensor_size, num_stages)]
    found = side_by_side([lambda driver=driver: driver.run(0, TOKENS, CHUNKS) for driver in drivers])
    return found[(num_stages - 1) * tensor_size]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_any_number_of_ranks_gives_the_same_bits(family: str) -> None:
    config, weights, expected = one_rank(family)
    assert expected.abs().max() > 0
    for tensor_size, num_stages in SIZES:
        assert torch.equal(of_ranks(config, weights, tensor_size, num_stages), expected), (tensor_size, num_stages)


@pytest.mark.parametrize("size", [4, 5, 7, 8])
def test_more_ranks_than_kv_heads_and_uneven_runs(size: int) -> None:
    """Nine query heads to three kv heads, as SmolLM2 has: a kv head is held by up to four ranks."""
    config, weights, expected = one_rank("llama", hidden_size=144, num_attention_heads=9,
                                         num_key_value_heads=3)
    assert torch.equal(of_ranks(config, weights, size, 1), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_or_not_the_vocabulary_is_shared(family: str, tied: bool) -> None:
    config, weights, expected = one_rank(family, tie_word_embeddings=tied)
    for tensor_size, num_stages in ((3, 1), (2, 3)):
        assert torch.equal(of_ranks(config, weights, tensor_size, num_stages), expected)
