"""The decoder itself: stages, named hidden states, limits."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.slices import Slices
from quire.models.build import build_decoder, dummy_weights
from quire.models.decoder import Decoder
from quire.models.shard import Shard, shard_of
from quire.ops.reference import TorchOps
from quire.parallel.place import Place
from tests.checkpoints import config_of, make_model
from tests.paged_driver import PagedDriver

TOKENS = [5, 3, 96, 0, 41, 7]


def whole(family: str, **overrides: object) -> tuple[dict[str, object], Decoder]:
    config = config_of(make_model(family, **overrides))
    return config, build_decoder(config, dummy_weights(config), TorchOps())


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_two_stages_compute_what_one_decoder_does(family: str, tied: bool) -> None:
    config, decoder = whole(family, tie_word_embeddings=tied)
    driver = PagedDriver(decoder)
    ctx = driver._context({0: TOKENS})
    expected = decoder.logits(decoder.forward(torch.tensor(TOKENS), ctx, driver.caches))
    stages = [
        build_decoder(config, dummy_weights(config), TorchOps(), shard=Shard(decoder.spec, Place(0, 1, stage, 2), *run))
        for stage, run in enumerate(((0, 1), (1, 3)))
    ]
    hidden = torch.tensor(TOKENS)
    for stage in stages:
        blocks = [64] * len(decoder.spec.cache_groups())
        stream = stage.forward(hidden, ctx, stage.allocate_caches(blocks, 16))
        hidden = stream.settled()
    assert torch.equal(stages[1].logits(stream), expected)


def test_named_hidden_states_come_back_beside_the_last() -> None:
    _, decoder = whole("llama")
    driver = PagedDriver(decoder)
    ctx = driver._context({0: TOKENS})
    ids = torch.tensor(TOKENS)
    names = ("embed", "layers.0", "layers.2")
    hidden, captured = decoder.forward_capturing(ids, ctx, driver.caches, names)
    assert tuple(captured) == names
    assert torch.equal(captured["embed"], decoder.embed.rows(ids))
    assert torch.equal(captured["layers.2"], hidden.settled())
    assert not torch.equal(captured["layers.0"], hidden.settled())
    with pytest.raises(ConfigError, match=r"layers\.3"):
        decoder.forward_capturing(ids, ctx, driver.caches, ("layers.3",))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "opt", "gpt2"])
def test_products_that_ranks_may_share_are_summed_in_slices(family: str) -> None:
    _, decoder = whole(family)
    for layer, spec in zip(decoder.layers, decoder.spec.layers, strict=True):
        heads = Slices.of_heads(spec.attention.num_heads, spec.attention.head_dim)
        assert layer.attn.out.packed.slices == heads
        assert layer.mlp.down.packed.slices == Slices.of_width(spec.mlp.intermediate)
        assert layer.attn.qkv.packed.slices is None and layer.mlp.up.packed.slices is None
    assert decoder.head.packed.slices is None


def test_a_share_needs_the_others_who_have_the_rest() -> None:
    config, decoder = whole("llama")
    with pytest.raises(ConfigError, match="tensor ranks"):
        build_decoder(config, dummy_weights(config), TorchOps(), shard=shard_of(decoder.spec, Place(1, 2, 0, 1)))


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_learned_positions_bound_the_length(family: str) -> None:
    config = config_of(make_model(family))
    with pytest.raises(ConfigError, match="256") as caught:
        build_decoder(config, dummy_weights(config), TorchOps(), max_model_len=257)
    assert caught.value.field == "max_model_len"
    build_decoder(config, dummy_weights(config), TorchOps(), max_model_len=256)


def test_rotations_go_on_past_the_configured_length() -> None:
    config = config_of(make_model("llama", max_position_embeddings=4))
    decoder = build_decoder(config, dummy_weights(config), TorchOps(), max_model_len=6)
    assert PagedDriver(decoder).run(0, TOKENS, [6]).isfinite().all()
