"""Reads a config's rotary position embedding into a RopeSpec; what cannot be is refused by the field's name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from quire.layers.spec import RopeKind, RopeSpec
from quire.models.config_reader import MAX_POSITIONS, ConfigReader, positive


def rope_of(
    reader: ConfigReader,
    head_dim: int,
    layer_type: str | None = None,
    default_theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
    also: Collection[str] = (),
    unless_said: Mapping[str, Any] | None = None,
) -> RopeSpec:
    """The rotation: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers
    4).

    `layer_type` picks one of a config that has several; without it such a config is refused. `partial` is
    the default of `partial_rotary_factor`; without it heads turn whole and the field is refused. `interleaved`
    is how the family pairs features (see `RopeSpec`). `also` are fields among the rotation's that the family reads.
    `unless_said` are the fields of a config that has none.
    """
    fields = reader.get("rope_parameters")
    fields = reader.get("rope_scaling") if fields is None else fields
    fields = (unless_said or {}) if fields is None else fields
    if not isinstance(fields, Mapping):
        reader.fail("rope_parameters", f"must be an object, not {fields!r}")
    if "full_attention" in fields or "sliding_attention" in fields:
        if layer_type is None:
            reader.refuse("rope_parameters", sorted(fields), "; one rotation for all layers is")
        fields = fields.get(layer_type) or {}
        if not isinstance(fields, Mapping):
            reader.fail("rope_parameters", f"must hold an object for {layer_type}, not {fields!r}")
    theta = fields.get("rope_theta")
    theta = positive(
        reader, "rope_theta", reader.get("rope_theta") if theta is None else theta, default_theta
    )
    return replace(read_rope(reader, fields, theta, head_dim, partial, also), interleaved=interleaved)


def full_and_window_ropes(
    reader: ConfigReader, head_dim: int, full_theta: float, window_theta: float
) -> tuple[RopeSpec, RopeSpec]:
    """The full layers' rotation and the window layers', which a config of transformers 4 never scales.

    The thetas are what a config that does not say means.
    """
    fields = reader.get("rope_parameters")
    if fields is None:
        full = rope_of(reader, head_dim, default_theta=full_theta)
        return full, RopeSpec(window_theta, head_dim)
    if not isinstance(fields, Mapping) or not {"full_attention", "sliding_attention"} & fields.keys():
        reader.fail("rope_parameters", "must hold full_attention and sliding_attention")
    window = fields.get("sliding_attention") or {}
    theta = window.get("rope_theta") if isinstance(window, Mapping) else None
    theta = positive(reader, "rope_theta", theta, window_theta)
    full = rope_of(reader, head_dim, "full_attention", full_theta)
    return full, read_rope(reader, window, theta, head_dim)


def reach(limit: int, rope: RopeSpec) -> int:
    """Positions that a model can be used at.

    Dynamic scaling begins where the trained ones end. Yarn is often switched on by adding its fields to a
    config that still says the trained length.
    """
    if rope.kind not in ("dynamic", "yarn"):
        return limit
    return max(limit, int(min(MAX_POSITIONS, rope.original_max_positions * rope.factor)))


def sharpened(reader: ConfigReader, rope: RopeSpec) -> float:
    """What latent attention multiplies scores by where its rotation is scaled and the config has `mscale_all_dim`."""
    fields = reader.get("rope_parameters")
    fields = reader.get("rope_scaling") if fields is None else fields
    mscale = fields.get("mscale_all_dim") if isinstance(fields, Mapping) else None
    if rope.kind == "default" or not mscale:
        return 1.0
    return _sharpness(rope.factor, positive(reader, "rope_parameters.mscale_all_dim", mscale)) ** 2


def _sharpness(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(
    reader: ConfigReader,
    fields: Mapping[str, Any],
    theta: float,
    head_dim: int,
    partial: float | None = None,
    also: Collection[str] = (),
) -> RopeSpec:
    """One rotation from its own fields; those it does not know are refused."""
    if not isinstance(fields, Mapping):
        reader.fail("rope_parameters", f"must be an object, not {fields!r}")
    kind = fields.get("rope_type", fields.get("type")) or "default"
    kind = "longrope" if kind == "su" else kind  # its name in the first Phi-3 configs
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        reader.refuse("rope_type", kind, f"; known: {', '.join(_ROPE_FIELDS)}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *also, *_ROPE_FIELDS[kind]}
    for field, value in fields.items():
        if field not in known and value is not None:
            reader.refuse(f"rope_parameters.{field}", value, f" with rope_type {kind}")
    rotary_dim = _rotary_dim(reader, fields, head_dim, partial)
    if kind == "default":
        return RopeSpec(theta, rotary_dim)
    if kind == "longrope":
        return _longrope(reader, fields, theta, rotary_dim)
    return _scaled_rope(reader, fields, theta, rotary_dim, kind)


def _rotary_dim(
    reader: ConfigReader, fields: Mapping[str, Any], head_dim: int, partial: float | None
) -> int:
    """How many features of a head turn: all of them, unless the family knows heads that turn in part."""
    share = fields.get("partial_rotary_factor")
    if partial is None:
        if share not in (None, 1, 1.0):
            reader.refuse("partial_rotary_factor", share)
        if head_dim % 2:
            reader.fail("head_dim", f"must be even for a rotation, not {head_dim}")
        return head_dim
    share = reader.get("partial_rotary_factor") if share is None else share
    share = positive(reader, "partial_rotary_factor", share, partial)
    rotary_dim = int(head_dim * share) if share <= 1 else 0
    if rotary_dim == 0 or rotary_dim % 2:
        reader.fail("partial_rotary_factor", f"must turn an even number of {head_dim} features, not {share} of them")
    return rotary_dim


_ROPE_FIELDS: dict[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor", "original_max_position_embeddings"),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    ),
}


def _scaled_rope(
    reader: ConfigReader, fields: Mapping[str, Any], theta: float, head_dim: int, kind: RopeKind
) -> RopeSpec:
    limit = reader.size("max_position_embeddings", most=MAX_POSITIONS)
    # transformers takes the trained length of dynamic scaling from max_position_embeddings in any case
    trained = limit if kind == "dynamic" else trained_length(reader, fields, limit)
    ratio = limit / trained if kind == "yarn" else None
    factor = positive(reader, "rope_parameters.factor", fields.get("factor"), ratio)
    if kind == "yarn" and theta <= 1:
        reader.fail("rope_theta", f"must be above 1 for yarn, not {theta}")
    if kind == "dynamic" and head_dim < 4:
        reader.fail("head_dim", "must be at least 4 for dynamic rope scaling")
    low = positive(
        reader, "low_freq_factor", fields.get("low_freq_factor"), None if kind == "llama3" else 1.0
    )
    high = positive(
        reader, "high_freq_factor", fields.get("high_freq_factor"), None if kind == "llama3" else 4.0
    )
    if high <= low:
        reader.fail(
            "rope_parameters.high_freq_factor", f"must be above low_freq_factor: {high} is not above {low}"
        )
    return RopeSpec(
        theta,
        head_dim,
        kind,
        factor=factor,
        original_max_positions=trained,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=positive(reader, "beta_fast", fields.get("beta_fast") or None, 32.0),
        beta_slow=positive(reader, "beta_slow", fields.get("beta_slow") or None, 1.0),
        truncate=fields.get("truncate") is not False,
        attention_factor=_yarn_attention(reader, fields, factor) if kind == "yarn" else 1.0,
    )


def trained_length(reader: ConfigReader, fields: Mapping[str, Any], default: int | None = None) -> int:
    """The positions a scaled rotation was trained at."""
    field = "original_max_position_embeddings"
    trained = positive(reader, f"rope_parameters.{field}", reader.get(field) or fields.get(field), default)
    if not 1 <= trained <= MAX_POSITIONS:
        reader.fail(f"rope_parameters.{field}", f"must be from 1 to {MAX_POSITIONS}, not {trained}")
    return int(trained)


def _longrope(
    reader: ConfigReader, fields: Mapping[str, Any], theta: float, rotary_dim: int
) -> RopeSpec:
    """Divisors of every pair, one list within the trained length and one past it (Phi-3)."""
    limit = reader.size("max_position_embeddings", most=MAX_POSITIONS)
    trained = trained_length(reader, fields)
    factor = positive(reader, "rope_parameters.factor", fields.get("factor"), limit / trained)
    plain = 1.0 if factor <= 1 or trained < 2 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return RopeSpec(
        theta,
        rotary_dim,
        "longrope",
        factor=factor,
        original_max_positions=trained,
        attention_factor=positive(reader, "attention_factor", fields.get("attention_factor"), plain),
        short_factors=_factors(reader, fields, "short_factor", rotary_dim // 2),
        long_factors=_factors(reader, fields, "long_factor", rotary_dim // 2),
    )


def _factors(reader: ConfigReader, fields: Mapping[str, Any], field: str, count: int) -> tuple[float, ...]:
    values = fields.get(field)
    if not isinstance(values, list) or len(values) != count:
        reader.fail(f"rope_parameters.{field}", f"must list {count} numbers, one for each pair that turns")
    return tuple(positive(reader, f"rope_parameters.{field}", value) for value in values)


def _yarn_attention(reader: ConfigReader, fields: Mapping[str, Any], factor: float) -> float:
    """How much yarn sharpens attention: as stated, else by its paper's rule."""
    if fields.get("attention_factor") is not None:
        return positive(reader, "attention_factor", fields["attention_factor"])

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        above, below = (positive(reader, f, fields[f]) for f in ("mscale", "mscale_all_dim"))
        return _sharpness(factor, above) / _sharpness(factor, below)
    return _sharpness(factor, 1.0)
