"""Reads `quantization_config` of a config.json: how the checkpoint holds integer weights, or why it is refused.

Only what cannot be seen from the tensors is kept. Bits, groups and zero points follow from their shapes and are checked
against the config there (see `integer_weights`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from quire.errors import UnsupportedModelError
from quire.models.loader.fp8_config import check_extras, check_status, fp8_scheme

Layout = Literal["awq", "gptq", "compressed-tensors"]
FIELD = "quantization_config"
METHODS = ("awq", "gptq", "compressed-tensors", "mxfp4", "fp8", "modelopt")
_GPTQ_FORMATS = ("gptq", "gptq_v2")
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
_STRATEGIES = ("group", "channel", "tensor")
_ACT_ORDERS = ("group", "dynamic", True)
"""Values of `actorder` with which groups are no neighbours; other orders leave no trace in the file."""
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


def integer_scheme(config: Mapping[str, Any]) -> IntegerScheme | None:
    """Of a model's config; None where weights are floats (or MXFP4). UnsupportedModelError names the field."""
    stored = config.get(FIELD)
    if stored is None:
        return None
    if not isinstance(stored, Mapping):
        _refuse("", stored)
    check_extras(stored)
    method = stored.get("quant_method")
    if method == "mxfp4" or fp8_scheme(config) is not None:
        return None
    if method == "awq":
        return _awq(stored)
    if method == "gptq":
        return _gptq(stored)
    if method == "compressed-tensors":
        return _compressed(stored)
    _refuse("quant_method", method, f"; known: {', '.join(METHODS)}")


def _awq(stored: Mapping[str, Any]) -> IntegerScheme:
    version = stored.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        _refuse("version", version, "; known: gemm")
    field, form = _file_format(stored, "gemm")
    if form != "gemm":
        _refuse(field, form, "; known: gemm")
    _check_words(stored)
    if stored.get("zero_point", True) is not True:
        _refuse("zero_point", stored["zero_point"], "; AWQ checkpoints store zero points")
    return IntegerScheme("awq", (_width(stored, "bits", (4,)),), (_group(stored, "group_size"),))


def _gptq(stored: Mapping[str, Any]) -> IntegerScheme:
    if stored.get("is_marlin_format"):
        _refuse("is_marlin_format", stored["is_marlin_format"])
    _check_words(stored)
    field, form = _file_format(stored, "gptq")
    if form not in _GPTQ_FORMATS:
        _refuse(field, form, f"; known: {', '.join(_GPTQ_FORMATS)}")
    shift = 1 if form == "gptq" else 0
    order = "desc_act" if stored.get("desc_act") and not stored.get("static_groups") else None
    return IntegerScheme("gptq", (_width(stored, "bits", _WIDTHS),), (_group(stored, "group_size"),), shift,
                         order_field=order)


def _file_format(stored: Mapping[str, Any], default: str) -> tuple[str, str]:
    """Field and name of the layout, which newer tools write into `format`."""
    field = "format" if not stored.get("checkpoint_format") and stored.get("format") else "checkpoint_format"
    return field, stored.get(field) or default


def _check_words(stored: Mapping[str, Any]) -> None:
    if stored.get("pack_dtype", "int32") not in ("int32", None):
        _refuse("pack_dtype", stored["pack_dtype"], "; known: int32")


def _compressed(stored: Mapping[str, Any]) -> IntegerScheme:
    check_status(stored)
    groups = stored.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        _refuse("config_groups", groups)
    bits: dict[int, None] = {}
    sizes: dict[int | None, None] = {}
    for name, group in groups.items():
        width, size = _compressed_group(f"config_groups.{name}", group, stored.get("format"))
        bits[width], sizes[size] = None, None
    dynamic = all(isinstance(group, Mapping) and group.get("input_activations") is not None
                  for group in groups.values())
    ordered = all(group["weights"].get("actorder") in _ACT_ORDERS for group in groups.values())
    return IntegerScheme("compressed-tensors", tuple(bits), tuple(sizes), int8_rows=dynamic,
                         order_field="actorder" if ordered else None)


def _compressed_group(place: str, group: object, whole_format: object) -> tuple[int, int | None]:
    """Bits and group size of one group of layers."""
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        _refuse(place, group)
    form = group.get("format") or whole_format
    if form not in _COMPRESSED_FORMATS:
        _refuse("format", form, f"; known: {', '.join(_COMPRESSED_FORMATS)}")
    weights: Mapping[str, Any] = group["weights"]
    for field, known in (("type", ("int",)), ("strategy", _STRATEGIES), ("dynamic", (False, None))):
        if weights.get(field, known[0]) not in known:
            _refuse(f"{place}.weights.{field}", weights.get(field), f"; known: {', '.join(map(str, known))}")
    for field, value in _activations(place, group):
        _refuse(field, value, "; activations may be left alone or quantized to int8 per token at run time (dynamic)")
    width = _width(weights, "num_bits", _WIDTHS, f"{place}.weights.")
    if weights.get("strategy", "tensor") != "group":
        return width, None
    return width, _group(weights, "group_size", f"{place}.weights.")


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
        _refuse(place + field, value, f"; known: {', '.join(map(str, known))}")
    return value


def _group(stored: Mapping[str, Any], field: str, place: str = "") -> int | None:
    value = stored.get(field, 128)
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or 0 < value < 1 << 24):
        _refuse(place + field, value, "; it is a number of columns, or -1")
    return None if value == -1 else value


def _refuse(field: str, value: object, hint: str = "") -> NoReturn:
    name = f"{FIELD}.{field}" if field else FIELD
    raise UnsupportedModelError(f"config.json: {name}={value!r:.200} is not supported{hint}")
