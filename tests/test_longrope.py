"""Which factors a longrope turns by: the option `max_model_len` decides, for every sequence and every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.models.build import build_decoder
from quire.ops.cpu import CpuOps
from tests.checkpoints import config_of, make_checkpoint, make_model, oracle_greedy, oracle_logits, weights_of
from tests.paged_driver import PagedDriver

TRAINED = 32
SHAPE: dict[str, Any] = {"original_max_position_embeddings": TRAINED, "max_position_embeddings": 96}
TOKENS = [(7 * place * place + 3) % 97 for place in range(60)]


def always_long(model: Any) -> Any:
    """transformers takes the long factors of a forward longer than the trained length: make every one longer."""
    oracle_logits(model, TOKENS[: TRAINED + 1])  # computes them
    model.config.rope_parameters["original_max_position_embeddings"] = 0
    return model


@pytest.mark.parametrize("max_model_len", [None, TRAINED + 1])
def test_past_the_trained_length_every_token_has_the_long_factors(max_model_len: int | None) -> None:
    model = make_model("phi3", **SHAPE)
    decoder = build_decoder(config_of(model), weights_of(model), CpuOps(), max_model_len=max_model_len)
    length = min(decoder.max_model_len, len(TOKENS))
    whole = oracle_logits(model, TOKENS[:length])  # longer than the trained length: transformers does the same
    assert torch.equal(oracle_logits(always_long(model), TOKENS[:length]), whole)
    driver = PagedDriver(decoder, block_size=4)
    for seq, chunks in enumerate(([length], [20, length - 20], [TRAINED] + [1] * (length - TRAINED))):
        assert (driver.run(seq, TOKENS[:length], chunks) - whole).abs().max() < 1e-4
    short = TOKENS[:10]  # here transformers, which looks at one forward, would take the short ones
    assert (driver.run(9, short, [10]) - oracle_logits(model, short)).abs().max() < 1e-4


def test_within_the_trained_length_every_token_has_the_short_factors() -> None:
    model = make_model("phi3", **SHAPE)
    decoder = build_decoder(config_of(model), weights_of(model), CpuOps(), max_model_len=TRAINED)
    got = PagedDriver(decoder, block_size=4).run(0, TOKENS[:TRAINED], [5, 20, 1, TRAINED - 26])
    assert (got - oracle_logits(model, TOKENS[:TRAINED])).abs().max() < 1e-4


def test_factors_depend_on_the_option_and_not_on_the_memory_for_kv(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "phi3", **SHAPE)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def tokens(**options: Any) -> list[int]:
        with LLM(str(tmp_path), skip_tokenizer_init=True, block_size=4, **options) as llm:
            return list(llm.generate([TOKENS[:10]], params)[0].outputs[0].token_ids)

    short = oracle_greedy(model, TOKENS[:10], 8)
    long = oracle_greedy(always_long(model), TOKENS[:10], 8)
    assert short != long
    assert tokens() == long
    assert tokens(num_kv_blocks=6) == long  # room for 24 tokens
    assert tokens(max_model_len=TRAINED) == short
