"""Same bits, whatever the path: every family in other chunks, batches, block sizes and thread counts."""

from __future__ import annotations

import random

import pytest
import torch

from quire.models.build import build_decoder
from quire.models.decoder import Decoder
from quire.ops.cpu import CpuOps
from tests.checkpoints import FAMILY_NAMES, config_of, make_model, weights_of
from tests.paged_driver import PagedDriver

LENGTH = 80
OVERRIDES: dict[str, dict[str, object]] = {
    "gemma3": {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 40},
    "phi3": {"original_max_position_embeddings": 32},
    "opt": {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
}


def decoder_of(family: str) -> Decoder:
    model = make_model(family, **OVERRIDES.get(family, {}))
    return build_decoder(config_of(model), weights_of(model), CpuOps(num_threads=1), max_model_len=128)


def tokens_of(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(97), k=length)


def random_chunks(draw: random.Random, length: int) -> list[int]:
    sizes: list[int] = []
    while sum(sizes) < length:
        sizes.append(min(draw.choice([1, 1, 2, 5, 16, 33]), length - sum(sizes)))
    return sizes


@pytest.fixture(params=FAMILY_NAMES)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return decoder_of(request.param)


@pytest.fixture
def alone(decoder: Decoder) -> torch.Tensor:
    """What one sequence gives by itself, in one piece, on one thread."""
    return PagedDriver(decoder, num_blocks=8).run(0, tokens_of(0), [LENGTH])


def test_bits_do_not_depend_on_chunks_or_block_size(decoder: Decoder, alone: torch.Tensor) -> None:
    draw = random.Random(1)
    for block_size in (1, 3, 16, 64):
        driver = PagedDriver(decoder, block_size=block_size, num_blocks=2 * LENGTH // block_size + 4)
        for chunks in ([1] * LENGTH, random_chunks(draw, LENGTH)):
            assert torch.equal(driver.run(0, tokens_of(0), chunks), alone)
            driver.release(0)


def test_bits_do_not_depend_on_the_batch(decoder: Decoder, alone: torch.Tensor) -> None:
    draw = random.Random(2)
    driver = PagedDriver(decoder, block_size=16, num_blocks=200)
    others = {seq: tokens_of(seq, draw.randint(1, LENGTH)) for seq in range(1, 32)}
    pending = {0: tokens_of(0), **others}
    rows: list[torch.Tensor] = []
    while pending:
        sizes = {
            seq: min(draw.randint(1, 24), len(pending[seq]))
            for seq in pending
            if seq == 0 or draw.random() < 0.7
        }
        order = sorted(sizes, key=lambda _: draw.random())
        got = driver.step({seq: pending[seq][: sizes[seq]] for seq in order}) if order else {}
        if 0 in got:
            rows.append(got[0])
        pending = {seq: rest for seq, tokens in pending.items() if (rest := tokens[sizes.get(seq, 0) :])}
    assert torch.equal(torch.cat(rows), alone)


def test_bits_do_not_depend_on_the_number_of_threads(decoder: Decoder, alone: torch.Tensor) -> None:
    assert isinstance(decoder.ops, CpuOps)
    decoder.ops.set_num_threads(2)
    torch.set_num_threads(2)
    try:
        for chunks in ([LENGTH], [1] * LENGTH):
            assert torch.equal(PagedDriver(decoder, num_blocks=8).run(0, tokens_of(0), chunks), alone)
    finally:
        decoder.ops.set_num_threads(1)
        torch.set_num_threads(1)
