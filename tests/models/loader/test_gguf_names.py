"""A GGUF file gives back the Hugging Face model that it was made from: names, layouts, config."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.build import build_decoder
from quire.models.loader.gguf_names import hf_config
from quire.models.loader.gguf_rope import llama3_scaling
from quire.models.loader.source import GgufSource, resolve_model
from quire.ops.reference import TorchOps
from tests.checkpoints import oracle_logits
from tests.models.loader.tiny_gguf import CONFIGS, converted, tensors_of, tiny_model, write_gguf
from tests.paged_driver import PagedDriver

TOKENS = [5, 3, 90, 0, 41, 7, 8, 9, 10, 11, 12, 13]
QUANTS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def load(path: Path) -> GgufSource:
    source = resolve_model(str(path))
    assert isinstance(source, GgufSource)
    return source


@pytest.mark.parametrize("arch", CONFIGS)
def test_weights_come_back_as_the_model_had_them(arch: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    weights = dict(load(write_gguf(tmp_path / "m.gguf", arch, model)).weights())
    expected = tensors_of(arch, model)
    if model.config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        # Adding 1 to Gemma's norms and taking it off again costs the last bit.
        assert torch.allclose(weights[name], tensor, rtol=0, atol=2e-7), name


@pytest.mark.parametrize("arch", CONFIGS)
def test_the_decoder_gives_the_models_logits(arch: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    source = load(write_gguf(tmp_path / "m.gguf", arch, model))
    # within the trained length of every scaling, where transformers is for so few tokens
    decoder = build_decoder(source.config, source.weights(), TorchOps(), max_model_len=64)
    ours = PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)])
    assert (ours - oracle_logits(model, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize("arch", [arch for arch in CONFIGS if arch != "gpt2"])
def test_another_rotation_would_show(arch: str, tmp_path: Path) -> None:
    """What the comparison above is worth: rows of q and k in another order, or another theta, are far outside of it."""
    model = tiny_model(arch)
    source = load(write_gguf(tmp_path / "m.gguf", arch, model))
    config = {**source.config}
    fields = config.setdefault("rope_parameters", {**(config.pop("rope_scaling", None) or {})})
    config["rope_parameters"] = {**fields, "rope_theta": 3.0 * (fields.get("rope_theta") or config["rope_theta"])}
    if arch == "gemma3":
        rope = config["rope_parameters"]
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}
    decoder = build_decoder(config, source.weights(), TorchOps(), max_model_len=64)
    ours = PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)])
    assert (ours - oracle_logits(model, TOKENS)).abs().max() > 1e-3


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_quantized_weights_are_the_dequantized_ones(arch: str, quant: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    weights = dict(load(write_gguf(tmp_path / "m.gguf", arch, model, quant)).weights())
    kind = gguf.GGMLQuantizationType[quant]
    name = "model.layers.1.mlp.down_proj.weight" if arch == "llama" else "transformer.h.1.mlp.c_fc.weight"
    stored = converted(arch, model, name, model.state_dict()[name]).contiguous().numpy()
    expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind))
    assert torch.equal(weights[name], expected.t() if arch == "gpt2" else expected)


@pytest.mark.parametrize("arch", CONFIGS)
def test_the_config_says_what_transformers_config_says(arch: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    config = dict(load(write_gguf(tmp_path / "m.gguf", arch, model)).config)
    assert config["architectures"] == [type(model).__name__]
    ours = AutoConfig.for_model(config.pop("model_type"), **config).to_dict()
    theirs = model.config.to_dict()
    ignored = {
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "dtype",
        "n_ctx",
        "torch_dtype",
    }
    ignored |= {"sliding_window_pattern", "task_specific_params"}
    different = {key for key in theirs if key not in ignored and ours.get(key) != theirs[key]}
    assert not different, {key: (ours.get(key), theirs[key]) for key in different}


def test_a_file_without_a_head_has_it_tied(tmp_path: Path) -> None:
    tied = tiny_model("llama", tie_word_embeddings=True)
    source = load(write_gguf(tmp_path / "m.gguf", "llama", tied))
    assert source.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in dict(source.weights())


def test_biases_of_a_llama_are_permuted_back(tmp_path: Path) -> None:
    model = tiny_model("llama", attention_bias=True)
    source = load(write_gguf(tmp_path / "m.gguf", "llama", model))
    name = "model.layers.0.self_attn.q_proj.bias"
    assert source.config["attention_bias"] is True
    assert torch.equal(dict(source.weights())[name], model.state_dict()[name])


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", "llama", tiny_model("llama"), extra={"llama.attention.sliding_window": 32}
    )
    config = load(path).config
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 32)


def test_a_mistral3_whose_queries_do_not_grow_is_a_mistral(tmp_path: Path) -> None:
    source = load(write_gguf(tmp_path / "m.gguf", "mistral3", tiny_model("mistral3")))
    del source._file.metadata["mistral3.attention.temperature_scale"]
    config = hf_config(source._file)
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], None)


def test_an_olmo2_with_a_window_is_an_olmo3(tmp_path: Path) -> None:
    extra = {"olmo2.attention.sliding_window": 32, "olmo2.attention.sliding_window_pattern": 2}
    config = load(write_gguf(tmp_path / "m.gguf", "olmo2", tiny_model("olmo2"), extra=extra)).config
    assert (config["architectures"], config["sliding_window"]) == (["Olmo3ForCausalLM"], 32)
    assert config["layer_types"] == ["sliding_attention", "full_attention"]


def test_an_olmo3_scales_the_rotation_of_its_full_layers_only(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    model = tiny_model("olmo2", model_type="olmo3", num_hidden_layers=5, sliding_window=8, rope_scaling=yarn)
    keys = {"attention.sliding_window": 8, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    keys["rope.scaling.original_context_length"] = 32
    extra = {f"olmo2.{key}": value for key, value in keys.items()}
    source = load(write_gguf(tmp_path / "m.gguf", "olmo2", model, extra=extra))
    decoder = build_decoder(source.config, source.weights(), TorchOps())
    assert [layer.attention.rope for layer in decoder.spec.layers] == [1, 1, 1, 0, 1]
    ours = PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)])
    assert (ours - oracle_logits(model, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_is_read(extra: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    keys = {f"llama.rope.scaling.{key}": value for key, value in extra.items()}
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), extra=keys)
    assert load(path).config.get("rope_scaling") == scaling


def llama3_factors(
    theta: float, dim: int, factor: float, low: float, high: float, trained: int
) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    out = []
    for rate in theta ** (-np.arange(0, dim, 2) / dim):
        wavelength = 2 * math.pi / rate
        if wavelength < trained / high:
            out.append(1.0)
        elif wavelength > trained / low:
            out.append(factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize(
    ("theta", "dim", "factor", "low", "high", "trained"),
    [
        (500000.0, 128, 8.0, 1.0, 4.0, 8192),
        (500000.0, 64, 32.0, 1.0, 4.0, 8192),
        (10000.0, 64, 4.0, 1.0, 2.5, 1024),
    ],
)
def test_llama3_scaling_is_recovered_from_its_factors(
    theta: float, dim: int, factor: float, low: float, high: float, trained: int
) -> None:
    factors = llama3_factors(theta, dim, factor, low, high, trained)
    found = llama3_scaling(factors, theta, dim)
    assert found["rope_type"] == "llama3"
    again = llama3_factors(
        theta, dim, found["factor"], found["low_freq_factor"], found["high_freq_factor"],
        found["original_max_position_embeddings"],
    )  # fmt: skip
    assert np.allclose(again, factors, rtol=1e-4)
    assert found["factor"] == factor and found["original_max_position_embeddings"] == trained


def test_rope_factors_become_config_and_no_weight(tmp_path: Path) -> None:
    factors = llama3_factors(500000.0, 16, 8.0, 1.0, 4.0, 8192)
    model = tiny_model("llama", rope_theta=500000.0)
    path = write_gguf(tmp_path / "m.gguf", "llama", model, extra_tensors={"rope_freqs.weight": factors})
    source = load(path)
    assert source.config["rope_scaling"]["rope_type"] == "llama3"
    assert not any("rope" in name for name, _ in source.weights())


def test_longrope_keeps_a_factor_that_does_not_follow_from_the_lengths(tmp_path: Path) -> None:
    model = tiny_model("phi3")
    plain = load(write_gguf(tmp_path / "plain.gguf", "phi3", model)).config["rope_scaling"]
    assert "attention_factor" not in plain and plain["long_factor"] == [1.0, 1.5, 2.0, 4.0, 8.0, 16.0]
    source = load(tmp_path / "plain.gguf")
    source._file.metadata["phi3.rope.scaling.attn_factor"] = 1.25
    assert hf_config(source._file)["rope_scaling"] == {**plain, "attention_factor": 1.25}


@pytest.mark.parametrize(
    ("pattern", "windowed"),
    [(3, [True, True, False]), (np.array([False, True, True]), [False, True, True]), (np.array([True] * 2), None)],
)
def test_windows_are_flags_or_a_period(pattern: Any, windowed: list[bool] | None, tmp_path: Path) -> None:
    source = load(write_gguf(tmp_path / "m.gguf", "gemma2", tiny_model("gemma2")))
    source._file.metadata["gemma2.attention.sliding_window_pattern"] = pattern
    if windowed is None:
        with pytest.raises(ModelLoadError, match="sliding_window_pattern"):
            hf_config(source._file)
    else:
        types = hf_config(source._file)["layer_types"]
        assert [kind == "sliding_attention" for kind in types] == windowed


def test_frequency_factors_of_another_kind_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="llama3"):
        llama3_scaling(np.array([1, 5, 2, 3, 1, 7, 2, 9], np.float32), 10000.0, 16)
    with pytest.raises(ModelLoadError, match="16 rotary"):
        llama3_scaling(np.array([np.nan] * 8, np.float32), 10000.0, 16)


@pytest.mark.parametrize(
    ("arch", "said"),
    [("mpt", r"'mpt'.*llama.*gemma3"), ("mamba", "state"), ("dots1", "experts"), ("glm-dsa", "latent")],
)
def test_another_architecture_is_refused_with_the_known_ones_or_with_the_reason(
    arch: str, said: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=said):
        load(tmp_path / "m.gguf")


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_nothing.weight": np.zeros((4, 64), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), extra_tensors=extra)
    with pytest.raises(UnsupportedModelError, match="ffn_nothing"):
        list(load(path).weights())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 0),
        ("llama.block_count", 10**6),
        ("llama.embedding_length", 65),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.rope.dimension_count", 1000),
        ("llama.rope.freq_base", float("nan")),
        ("llama.attention.head_count", "four"),
    ],
)
def test_impossible_shapes_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    source = load(path)
    source._file.metadata[key] = value
    with pytest.raises(ModelLoadError):
        hf_config(source._file)
