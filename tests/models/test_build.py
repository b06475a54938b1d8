"""Loading: what is missing, too much, of another shape or twice; dummy weights; memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.errors import ModelLoadError
from quire.kernels.slices import Slices
from quire.models.build import build_decoder, dummy_weights
from quire.ops.cpu import CpuOps
from quire.ops.reference import TorchOps
from tests.checkpoints import FAMILY_NAMES, config_of, make_model, oracle_logits, weights_of
from tests.paged_driver import PagedDriver

TOKENS = [5, 3, 96, 0, 41, 7]


def build(model: Any, weights: Any) -> torch.Tensor:
    decoder = build_decoder(config_of(model), weights, TorchOps())
    return PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)])


def matches(model: Any, weights: Any) -> bool:
    return bool((build(model, weights) - oracle_logits(model, TOKENS)).abs().max() < 1e-4)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_missing_tensor_is_named_as_the_checkpoint_spells_it(family: str) -> None:
    model = make_model(family)
    weights = weights_of(model)
    for dropped in (0, len(weights) // 2, len(weights) - 1):
        name = weights[dropped][0]
        with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
            build(model, weights[:dropped] + weights[dropped + 1 :])


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rope.weight", "model.layers.3.mlp.up_proj.weight"]
)
def test_a_tensor_the_model_has_no_place_for_is_named(name: str) -> None:
    model = make_model("llama")
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        build(model, [*weights_of(model), (name, torch.zeros(80, 48))])


def test_a_bias_the_config_does_not_announce_is_refused() -> None:
    model = make_model("llama")
    with pytest.raises(ModelLoadError, match=r"q_proj\.bias"):
        build(model, [*weights_of(model), ("model.layers.0.self_attn.q_proj.bias", torch.zeros(48))])


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(family: str) -> None:
    model = make_model(family)
    weights = weights_of(model)
    index = next(i for i, (name, _) in enumerate(weights) if "1" in name and name.endswith("weight"))
    name, tensor = weights[index]
    wrong = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1)
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        build(model, [*weights[:index], (name, wrong), *weights[index + 1 :]])


def test_a_tensor_that_comes_twice_is_refused() -> None:
    model = make_model("llama")
    weights = weights_of(model)
    with pytest.raises(ModelLoadError, match="twice"):
        build(model, [*weights, weights[3]])


def test_integers_are_not_weights() -> None:
    model = make_model("llama")
    weights = [(name, t.to(torch.int32) if "norm" in name else t) for name, t in weights_of(model)]
    with pytest.raises(ModelLoadError, match="int32"):
        build(model, weights)


def test_weights_come_in_any_order() -> None:
    model = make_model("gpt2")
    assert matches(model, reversed(weights_of(model)))


def test_a_stored_copy_of_a_tied_head_is_not_needed() -> None:
    model = make_model("llama", tie_word_embeddings=True)
    assert matches(model, [*weights_of(model), ("lm_head.weight", model.lm_head.weight.detach())])


def test_constants_of_old_checkpoints_are_not_needed() -> None:
    llama = make_model("llama")
    assert matches(
        llama, [*weights_of(llama), ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))]
    )
    gpt2 = make_model("gpt2")
    constants = [("h.0.attn.bias", torch.ones(1, 1, 8, 8)), ("h.0.attn.masked_bias", torch.tensor(-1e4))]
    assert matches(gpt2, [*weights_of(gpt2), *constants])


def test_layers_that_guess_further_tokens_are_not_needed() -> None:
    """They lie behind the last one, as many as the config says."""
    model = make_model("deepseek_v3", num_mtp_layers=1)
    kept = [item for item in weights_of(model) if not item[0].startswith(("mtp.", "model.mtp"))]
    further = [("model.layers.3.eh_proj.weight", torch.ones(48, 96)), ("model.layers.3.embed.weight", torch.ones(2))]
    assert matches(model, [*kept, *further])
    with pytest.raises(ModelLoadError, match=r"model\.layers\.4\.eh_proj"):
        build(model, [*kept, ("model.layers.4.eh_proj.weight", torch.ones(48, 96))])


def test_checkpoints_without_the_outer_prefix_are_read() -> None:
    gpt2 = make_model("gpt2")
    assert matches(gpt2, [(name.removeprefix("transformer."), t) for name, t in weights_of(gpt2)])
    opt = make_model("opt")
    assert matches(opt, [(name.removeprefix("model."), t) for name, t in weights_of(opt)])


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_dummy_weights_fit_and_repeat(family: str) -> None:
    model = make_model(family)
    config = config_of(model)
    assert {name: tuple(t.shape) for name, t in dummy_weights(config)} == {
        name: tuple(t.shape) for name, t in weights_of(model)
    }
    first, again, other = (build(model, dummy_weights(config, seed)) for seed in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.2 < first.std() < 5.0


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_dummy_weights_are_of_the_type_that_the_config_gives_its_checkpoint(field: str) -> None:
    config = {**config_of(make_model("llama")), "torch_dtype": None, "dtype": None}
    wide, narrow = dict(dummy_weights(config)), dict(dummy_weights({**config, field: "bfloat16"}))
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    assert all(torch.equal(narrow[name], tensor.bfloat16()) for name, tensor in wide.items())
    assert {tensor.dtype for tensor in narrow.values()} == {torch.bfloat16}


class _CopyingOps(TorchOps):
    """Packs as kernels do: into memory of its own."""

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, slices: Slices | None = None
    ) -> Any:
        return super().pack_linear(weight.clone(), None if bias is None else bias.clone(), slices)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sources_are_released_while_loading(family: str) -> None:
    config = config_of(
        make_model(family, num_hidden_layers=6) if family == "llama" else make_model(family, n_layer=6)
    )
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in dummy_weights(config):
            most = max(most, sum(ref() is not None for ref in alive))
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    build_decoder(config, watched(), _CopyingOps())
    assert len(alive) > 30
    assert most <= 4


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_packed_from_the_type_they_are_stored_in_are_the_same(stored: torch.dtype) -> None:
    """A vocabulary of several pieces, a layer of mixed types."""
    model = make_model("llama", vocab_size=5000)
    weights = [(name, tensor.to(torch.float32 if "k_proj" in name else stored)) for name, tensor in weights_of(model)]
    wide = [(name, tensor.float()) for name, tensor in weights]
    one, other = (build_decoder(config_of(model), given, CpuOps(num_threads=1), max_model_len=64, dtype=dtype)
                  for given, dtype in ((wide, torch.float32), (weights, None)))
    tokens = [1, 4999, 2048, 2047, 3]
    assert torch.equal(PagedDriver(one).run(0, tokens, [5]), PagedDriver(other).run(0, tokens, [5]))
    assert one.weight_bytes == other.weight_bytes
