"""The rotary settings of a GGUF file, as the fields of a Hugging Face config."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.loader.gguf import GgufFile, float_value, positive_value, str_value, tensor_named

Config = dict[str, Any]

# Tensors that go into the config, not into the weights. The first holds llama3 scaling as one divisor per frequency.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
CONFIG_TENSORS = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})


def rope_config(file: GgufFile, arch: str, config: Config) -> None:
    """Rotary settings, and the dimensions of a head."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if hidden % heads and f"{arch}.attention.key_length" not in file.metadata:
        raise ModelLoadError(f"{file.path}: {heads} heads cannot share {hidden} values")
    head_dim = positive_value(file, f"{arch}.attention.key_length", hidden // heads)
    if positive_value(file, f"{arch}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: keys and values of different sizes are not supported")
    rotary = positive_value(file, f"{arch}.rope.dimension_count", head_dim)
    if rotary > head_dim or rotary % 2:
        raise ModelLoadError(f"{file.path}: {rotary} rotary dimensions in heads of {head_dim}")
    config["head_dim"] = head_dim
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    config["rope_theta"] = float_value(file.metadata, f"{arch}.rope.freq_base", 10_000.0)
    scaling = rope_scaling(file, arch, config["rope_theta"], rotary)
    if scaling is not None:
        config["rope_scaling"] = scaling


def rope_scaling(file: GgufFile, arch: str, theta: float, rotary: int) -> Config | None:
    """How rotations are stretched; None: not at all."""
    if ROPE_FACTORS in file.tensors:
        return llama3_scaling(_values(file, ROPE_FACTORS), theta, rotary)
    if LONG_FACTORS in file.tensors:
        return _longrope(file, arch)
    key = f"{arch}.rope.scaling"
    kind = str_value(file.metadata, f"{key}.type", "none")
    factor = float_value(
        file.metadata, f"{key}.factor", float_value(file.metadata, f"{arch}.rope.scale_linear", 1.0)
    )
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else None
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{file.path}: rope scaling of type {kind!r}; Quire knows linear, llama3, yarn and longrope"
        )
    scaling: Config = {"rope_type": "yarn", "factor": factor}
    if f"{key}.original_context_length" in file.metadata:
        scaling["original_max_position_embeddings"] = positive_value(file, f"{key}.original_context_length")
    for name in ("beta_fast", "beta_slow"):
        if f"{key}.yarn_{name}" in file.metadata:
            scaling[name] = float_value(file.metadata, f"{key}.yarn_{name}", 0.0)
    return scaling


def _values(file: GgufFile, name: str) -> np.ndarray:
    tensor = tensor_named(file, name)
    values = np.empty(math.prod(tensor.shape), np.float32)
    file.read(tensor, values)
    return values


def _longrope(file: GgufFile, arch: str) -> Config:
    """Two lists of divisors; the factor on cosines and sines only where it is not the one that follows from the
    lengths."""
    key = f"{arch}.rope.scaling"
    limit = positive_value(file, f"{arch}.context_length")
    trained = positive_value(file, f"{key}.original_context_length", limit)
    usual = math.sqrt(1 + math.log(limit / trained) / math.log(trained)) if limit > trained > 1 else 1.0
    stored = float_value(file.metadata, f"{key}.attn_factor", usual)
    scaling: Config = {
        "rope_type": "longrope",
        "original_max_position_embeddings": trained,
        "short_factor": [float(str(value)) for value in _values(file, SHORT_FACTORS)],
        "long_factor": [float(str(value)) for value in _values(file, LONG_FACTORS)],
    }
    return scaling if abs(stored - usual) < 1e-6 else {**scaling, "attention_factor": stored}


def llama3_scaling(factors: np.ndarray, theta: float, rotary: int) -> Config:
    """The llama3 settings that give these per-frequency divisors.

    Fast frequencies keep divisor 1, slow ones have `factor`; between, 1/divisor is linear in 1/wavelength.
    Only the ratios of the three other settings matter, so `low_freq_factor` is taken as 1.
    """
    rates = theta ** (-2.0 * np.arange(rotary // 2) / rotary) / (2 * math.pi)  # 1 / wavelength
    if factors.shape != rates.shape or not np.isfinite(factors).all() or (factors <= 0).any():
        raise ModelLoadError(f"{ROPE_FACTORS} does not fit heads with {rotary} rotary dimensions")
    factor = float(factors.max())
    if factor <= 1.0 + 1e-6:
        return {"rope_type": "default"}
    share = (1.0 / factors.astype(np.float64) - 1.0 / factor) / (1.0 - 1.0 / factor)
    between = np.flatnonzero((share > 1e-4) & (share < 1 - 1e-4))
    if len(between) >= 2:
        slope, offset = np.polyfit(rates[between], share[between], 1)
        high = round(1.0 - 1.0 / offset, 2) if offset else 0.0
        scaling = _llama3(round(factor, 4), high, round(slope * (high - 1.0)))
        if np.allclose(_llama3_divisors(scaling, rates), factors, rtol=1e-4):
            return scaling
    standard = _llama3(round(factor, 4), 4.0, 8192)
    if np.allclose(_llama3_divisors(standard, rates), factors, rtol=1e-4):
        return standard
    raise UnsupportedModelError(
        f"{ROPE_FACTORS} holds frequency factors that are not those of llama3 rope scaling"
    )


def _llama3(factor: float, high: float, original: int) -> Config:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama3_divisors(scaling: Config, rates: np.ndarray) -> np.ndarray:
    high, factor = scaling["high_freq_factor"], scaling["factor"]
    if high <= 1.0 or scaling["original_max_position_embeddings"] <= 0:
        return np.zeros_like(rates)
    share = np.clip((scaling["original_max_position_embeddings"] * rates - 1.0) / (high - 1.0), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - share) / factor + share))
