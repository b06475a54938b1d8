"""Reads `quantization_config` of a config.json: whether the checkpoint stores its weights in fp8, and what it asks of
activations; or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from quire.errors import UnsupportedModelError

FIELD = "quantization_config"
_STRATEGIES = ("tensor", "channel", "block")
_STATES = ("compressed", "frozen")
_UNSUPPORTED = ("dynamic", "rotation", "adapter", "transform_config")
"""`dynamic`: layers or modules with settings of their own."""


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """How a checkpoint's linear layers are stored in fp8 (e4m3)."""

    scale: str
    """The last part of the name of a weight's scales."""
    block: int | None = None
    """Rows and columns that share a scale; None: a row, or all, as the scales' shape says."""
    fixed_inputs: bool = False
    """Every weight has an `input_scale`, found at calibration."""


def fp8_scheme(config: Mapping[str, Any]) -> Fp8Scheme | None:
    """Of a model's config; None where weights are not fp8. UnsupportedModelError names the field."""
    stored = config.get(FIELD)
    if not isinstance(stored, Mapping):
        return None
    check_extras(stored)
    method = stored.get("quant_method")
    if method == "fp8":
        return _plain(stored)
    if method == "modelopt":
        return _modelopt(stored)
    if method == "compressed-tensors" and _is_float(stored):
        return _compressed(stored)
    return None


def _plain(stored: Mapping[str, Any]) -> Fp8Scheme:
    """Qwen3-FP8, DeepSeek: blocks; others: a scale for each tensor."""
    form = stored.get("fmt", "e4m3")
    if form != "e4m3":
        _refuse("fmt", form, "; known: e4m3")
    activations = stored.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        _refuse("activation_scheme", activations, "; known: dynamic, static")
    blocks = stored.get("weight_block_size")
    if blocks is None:
        return Fp8Scheme("weight_scale", None, activations == "static")
    if blocks != [128, 128] or activations != "dynamic":
        _refuse("weight_block_size", blocks, "; known: [128, 128], with activation_scheme='dynamic'")
    return Fp8Scheme("weight_scale_inv", 128)


def _modelopt(stored: Mapping[str, Any]) -> Fp8Scheme:
    algorithm = stored.get("quant_algo")
    if algorithm != "FP8":
        _refuse("quant_algo", algorithm, "; known: FP8")
    kv = stored.get("kv_cache_quant_algo")
    if kv not in (None, "FP8"):
        _refuse("kv_cache_quant_algo", kv, "; known: FP8")
    return Fp8Scheme("weight_scale", None, True)


def _is_float(stored: Mapping[str, Any]) -> bool:
    """Whether any group of layers is of floats: then all must be."""
    groups = stored.get("config_groups")
    if not isinstance(groups, Mapping):
        return False
    weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    return any(isinstance(each, Mapping) and each.get("type") == "float" for each in weights)


def _compressed(stored: Mapping[str, Any]) -> Fp8Scheme:
    check_status(stored)
    found = {_compressed_group(f"config_groups.{name}", group, stored.get("format"))
             for name, group in stored["config_groups"].items()}
    if len(found) != 1:
        _refuse("config_groups", stored["config_groups"], "; layers in fp8 must all be of one scheme")
    return found.pop()


def check_status(stored: Mapping[str, Any]) -> None:
    """Of compressed-tensors. Its older versions wrote `frozen` into files that they had compressed; where one was not,
    its weights are floats and are refused by their tensors' type."""
    status = stored.get("quantization_status", "compressed")
    if status not in _STATES:
        _refuse("quantization_status", status, f"; known: {', '.join(_STATES)}")


def check_extras(stored: Mapping[str, Any]) -> None:
    """Refuses what would change results whatever the method is, and is not supported."""
    for field in _UNSUPPORTED:
        if stored.get(field):
            _refuse(field, stored[field])
    sparsity = stored.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") in (None, "dense")):
        _refuse("sparsity_config", sparsity)
    _check_kv_scheme(stored)


def _check_kv_scheme(stored: Mapping[str, Any]) -> None:
    """Refuses a `kv_cache_scheme` other than fp8 with scales that the checkpoint brings. A cache in 16 bits needs none
    of them: they count with kv_cache_dtype='fp8'."""
    scheme = stored.get("kv_cache_scheme")
    if scheme is None:
        return
    if not isinstance(scheme, Mapping):
        _refuse("kv_cache_scheme", scheme)
    for field, known in (("type", ("float",)), ("num_bits", (8,)), ("dynamic", (False, None)),
                         ("symmetric", (True, None)), ("strategy", ("tensor", "attn_head", None))):
        if scheme.get(field) not in known:
            _refuse(f"kv_cache_scheme.{field}", scheme.get(field), f"; known: {', '.join(map(str, known))}")


def _compressed_group(place: str, group: Mapping[str, Any], whole_format: object) -> Fp8Scheme:
    form = group.get("format") or whole_format
    if form not in ("float-quantized", "naive-quantized"):
        _refuse("format", form, "; known for fp8: float-quantized")
    weights = group["weights"]
    for field, known in (("type", ("float",)), ("num_bits", (8,)), ("strategy", _STRATEGIES),
                         ("dynamic", (False, None)), ("symmetric", (True, None))):
        if weights.get(field) not in known:
            _refuse(f"{place}.weights.{field}", weights.get(field), f"; known: {', '.join(map(str, known))}")
    if group.get("output_activations") is not None:
        _refuse(f"{place}.output_activations", group["output_activations"])
    blocks = weights["strategy"] == "block"
    if blocks and weights.get("block_structure") != [128, 128]:
        _refuse(f"{place}.weights.block_structure", weights.get("block_structure"), "; known: [128, 128]")
    fixed = _fixed_inputs(f"{place}.input_activations", group.get("input_activations"))
    return Fp8Scheme("weight_scale", 128 if blocks else None, fixed)


def _fixed_inputs(place: str, inputs: Any) -> bool:
    """Whether activations have a scale from calibration. Left in 16 bits (W8A16) they are quantized per row all the
    same by a device that multiplies fp8: refused, since it was not asked for."""
    if not isinstance(inputs, Mapping):
        _refuse(place, inputs, "; fp8 weights need activations in fp8")
    for field, known in (("type", ("float",)), ("num_bits", (8,)), ("symmetric", (True, None))):
        if inputs.get(field) not in known:
            _refuse(f"{place}.{field}", inputs.get(field), f"; known: {', '.join(map(str, known))}")
    strategy, dynamic = inputs.get("strategy"), inputs.get("dynamic")
    if dynamic is True and strategy in ("token", "group"):
        return False
    if dynamic is False and strategy == "tensor":
        return True
    _refuse(f"{place}.strategy", strategy, "; known: token or group with dynamic=true, tensor with dynamic=false")


def _refuse(field: str, value: object, hint: str = "") -> NoReturn:
    raise UnsupportedModelError(f"config.json: {FIELD}.{field}={value!r:.200} is not supported{hint}")
