"""Reads `quantization_config` of a config.json: how the checkpoint holds integer weights, or why it is refused.

Only what cannot be seen from the tensors is kept. Bits, groups and zero points follow from their shapes and are checked
against the config there (see `integer_weights`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.models.loader.fp8_config import fp8_scheme
from quire.models.loader.quantization_fields import (
    FIELD,
    FLAG,
    Values,
    check_extras,
    check_format,
    check_status,
    check_values,
    group_size,
    only_keys_and_values,
    refuse,
    weight_groups,
)

Layout = Literal["awq", "gptq", "compressed-tensors"]
METHODS = ("awq", "gptq", "compressed-tensors", "mxfp4", "fp8", "modelopt")
_GPTQ_FORMATS = ("gptq", "gptq_v2")
_GPTQ_FLAGS: dict[str, Values] = {"desc_act": FLAG, "static_groups": FLAG, "sym": FLAG}
_WORDS: dict[str, Values] = {"pack_dtype": ("int32", None)}
_COMPRESSED_FORMATS: Values = ("pack-quantized", "int-quantized", "naive-quantized")
_ACT_ORDERS: Values = ("group", "dynamic", True)
"""Values of `actorder` with which groups are no neighbours; other orders leave no trace in the file."""
_WEIGHTS: dict[str, Values] = {"type": ("int", None), "strategy": ("group", "channel", "tensor", None),
                               "dynamic": (False, None), "symmetric": FLAG,
                               "actorder": (*_ACT_ORDERS, "weight", "static", False, None)}  # fmt: skip
_WIDTHS = (4, 8)


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """How a checkpoint's linear layers are stored as integers."""

    layout: Layout
    bits: tuple[int, ...]
    """Those that its layers may have: one number, but for compressed-tensors with several groups of layers."""
    groups: tuple[int | None, ...]
    """Columns that may share a scale; None: a whole row."""
    zero_shift: int = 0
    """Added to stored zero points: GPTQ's first format stores them less one."""
    int8_rows: bool = False
    """Activations of 8-bit layers are quantized to int8 at run time, a scale for each token."""
    order_field: str | None = None
    """The field that says act-order: every weight of several groups then says which column is in which. None: a weight
    may say so, or not."""
    zero_points: bool = False
    """Every weight of compressed-tensors must have some. False: it may, or not."""


def integer_scheme(config: Mapping[str, Any]) -> IntegerScheme | None:
    """Of a model's config; None where weights are floats (or fp8, MXFP4). UnsupportedModelError names the field."""
    stored = config.get(FIELD)
    if stored is None:
        return None
    if not isinstance(stored, Mapping):
        refuse("", stored)
    check_extras(stored)
    method = stored.get("quant_method")
    if method == "mxfp4" or only_keys_and_values(stored) or fp8_scheme(config) is not None:
        return None
    if method == "awq":
        return _awq(stored)
    if method == "gptq":
        return _gptq(stored)
    if method == "compressed-tensors":
        return _compressed(stored)
    refuse("quant_method", method, f"; known: {', '.join(METHODS)}")


def _awq(stored: Mapping[str, Any]) -> IntegerScheme:
    version = stored.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        refuse("version", version, "; known: gemm")
    field, form = _file_format(stored, "gemm")
    if form != "gemm":
        refuse(field, form, "; known: gemm")
    check_values(stored, _WORDS)
    if stored.get("zero_point", True) is not True:
        refuse("zero_point", stored["zero_point"], "; AWQ checkpoints store zero points")
    return IntegerScheme("awq", (_width(stored, "bits", (4,)),), (group_size(stored),))


def _gptq(stored: Mapping[str, Any]) -> IntegerScheme:
    if stored.get("is_marlin_format"):
        refuse("is_marlin_format", stored["is_marlin_format"])
    check_values(stored, _WORDS | _GPTQ_FLAGS)
    field, form = _file_format(stored, "gptq")
    if form not in _GPTQ_FORMATS:
        refuse(field, form, f"; known: {', '.join(_GPTQ_FORMATS)}")
    shift = 1 if form == "gptq" else 0
    order = "desc_act" if stored.get("desc_act") and not stored.get("static_groups") else None
    return IntegerScheme("gptq", (_width(stored, "bits", _WIDTHS),), (group_size(stored),), shift,
                         order_field=order)


def _file_format(stored: Mapping[str, Any], default: str) -> tuple[str, str]:
    """Field and name of the layout, which newer tools write into `format`."""
    field = "format" if not stored.get("checkpoint_format") and stored.get("format") else "checkpoint_format"
    return field, stored.get(field) or default


def _compressed(stored: Mapping[str, Any]) -> IntegerScheme:
    check_status(stored)
    groups = weight_groups(stored)
    if not groups:
        refuse("config_groups", stored.get("config_groups"), " without a kv_cache_scheme: no group has weights")
    bits: dict[int, None] = {}
    sizes: dict[int | None, None] = {}
    for place, group in groups.items():
        width, size = _compressed_group(stored, place, group)
        bits[width], sizes[size] = None, None
    weights = [group["weights"] for group in groups.values()]
    dynamic = all(group.get("input_activations") is not None for group in groups.values())
    ordered = all(each.get("actorder") in _ACT_ORDERS for each in weights)
    return IntegerScheme("compressed-tensors", tuple(bits), tuple(sizes), int8_rows=dynamic,
                         order_field="actorder" if ordered else None,
                         zero_points=all(each.get("symmetric") is False for each in weights))


def _compressed_group(stored: Mapping[str, Any], place: str, group: Mapping[str, Any]) -> tuple[int, int | None]:
    """Bits and group size of one group of layers."""
    weights: Mapping[str, Any] = group["weights"]
    check_values(weights, _WEIGHTS, f"{place}.weights.")
    check_format(stored, place, group, _COMPRESSED_FORMATS)
    for field, value in _activations(place, group):
        refuse(field, value, "; activations may be left alone or quantized to int8 per token at run time (dynamic)")
    width = _width(weights, "num_bits", _WIDTHS, f"{place}.weights.")
    if weights.get("strategy") != "group":
        return width, None
    return width, group_size(weights, place=f"{place}.weights.")


def _activations(place: str, group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is asked of activations and is not supported. A scale that was fixed at calibration changes results."""
    if group.get("output_activations") is not None:
        yield f"{place}.output_activations", group["output_activations"]
    inputs = group.get("input_activations")
    if inputs is None:
        return
    where = f"{place}.input_activations"
    if not isinstance(inputs, Mapping):
        yield where, inputs
        return
    for field, wanted in (("type", "int"), ("num_bits", 8), ("dynamic", True), ("symmetric", True),
                          ("strategy", "token")):  # fmt: skip
        if inputs.get(field, None if field in ("num_bits", "dynamic") else wanted) != wanted:
            yield f"{where}.{field}", inputs.get(field)


def _width(stored: Mapping[str, Any], field: str, known: tuple[int, ...], place: str = "") -> int:
    value = stored.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value not in known:
        refuse(place + field, value, f"; known: {', '.join(map(str, known))}")
    return value
