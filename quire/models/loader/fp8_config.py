"""Reads `quantization_config` of a config.json: whether the checkpoint stores its weights in fp8, and what it asks of
activations; or why it is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quire.models.loader.quantization_fields import (
    FIELD,
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

_FORMATS: Values = ("float-quantized", "naive-quantized")
_PLAIN: dict[str, Values] = {"fmt": ("e4m3", None), "activation_scheme": ("dynamic", "static", None),
                             "scale_fmt": ("float", "ue8m0", None)}  # fmt: skip
_WEIGHTS: dict[str, Values] = {"num_bits": (8,), "strategy": ("tensor", "channel", "block"), "dynamic": (False, None),
                               "symmetric": (True, None)}  # fmt: skip
_INPUTS: dict[str, Values] = {"type": ("float",), "num_bits": (8,), "symmetric": (True, None)}


@dataclass(frozen=True, slots=True)
class ScaleNames:
    """What a weight's scales are called beside it: the last parts of their tensors' names."""

    weight: str = "weight_scale"
    inputs: str = "input_scale"
    """Of activations, where calibration found it."""


_USUAL = ScaleNames()
_TRANSFORMERS = ScaleNames("weight_scale_inv", "activation_scale")
"""Its weights too are code * scale."""


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """How a checkpoint's linear layers are stored in fp8 (e4m3)."""

    names: tuple[ScaleNames, ...] = (_USUAL,)
    """Those that its weights may use."""
    block: int | None = None
    """Rows and columns that share a scale; None: a row, or all, as the scales' shape says."""
    fixed_inputs: bool = False
    """Activations of every weight have a scale, found at calibration."""

    def scales_of(self, members: Collection[str]) -> ScaleNames | None:
        """Of a module with these tensors; None: it has no weight in fp8."""
        return next((names for names in self.names if "weight" in members and names.weight in members), None)


def fp8_scheme(config: Mapping[str, Any]) -> Fp8Scheme | None:
    """Of a model's config; None where weights are not fp8. UnsupportedModelError names the field."""
    stored = config.get(FIELD)
    if not isinstance(stored, Mapping):
        return None
    check_extras(stored)
    if only_keys_and_values(stored):
        return None
    method = stored.get("quant_method")
    if method == "fp8":
        return _plain(stored)
    if method == "modelopt":
        check_values(stored, {"quant_algo": ("FP8",)})
        return Fp8Scheme(fixed_inputs=True)
    if method == "compressed-tensors":
        return _compressed(stored)
    return None


def _plain(stored: Mapping[str, Any]) -> Fp8Scheme:
    """Qwen3-FP8, DeepSeek: blocks; others: a scale for each tensor."""
    check_values(stored, _PLAIN)
    blocks, static = stored.get("weight_block_size"), stored.get("activation_scheme") == "static"
    if blocks is None:
        return Fp8Scheme((_USUAL, _TRANSFORMERS), fixed_inputs=static)
    check_values(stored, {"weight_block_size": ([128, 128],)})
    if static:
        refuse("activation_scheme", "static", f" with weight_block_size={blocks}; known: dynamic")
    return Fp8Scheme((_TRANSFORMERS,), 128)


def _compressed(stored: Mapping[str, Any]) -> Fp8Scheme | None:
    """None where weights are integers."""
    groups = weight_groups(stored)
    integers = [place for place, group in groups.items() if group["weights"].get("type") != "float"]
    if len(integers) == len(groups):
        return None
    if integers:
        refuse(f"{integers[0]}.weights.type", groups[integers[0]]["weights"].get("type"),
               " beside groups of type 'float': layers in fp8 and layers in integers do not mix")  # fmt: skip
    check_status(stored)
    found = {_compressed_group(stored, place, group) for place, group in groups.items()}
    if len(found) != 1:
        refuse("config_groups", stored["config_groups"], "; layers in fp8 must all be of one scheme")
    return found.pop()


def _compressed_group(stored: Mapping[str, Any], place: str, group: Mapping[str, Any]) -> Fp8Scheme:
    check_format(stored, place, group, _FORMATS, " for fp8")
    weights = group["weights"]
    check_values(weights, _WEIGHTS, f"{place}.weights.")
    if group.get("output_activations") is not None:
        refuse(f"{place}.output_activations", group["output_activations"])
    blocks = weights["strategy"] == "block"
    if blocks:
        check_values(weights, {"block_structure": ([128, 128],)}, f"{place}.weights.")
    fixed = _fixed_inputs(f"{place}.input_activations", group.get("input_activations"))
    return Fp8Scheme(block=128 if blocks else None, fixed_inputs=fixed)


def _fixed_inputs(place: str, inputs: Any) -> bool:
    """Whether activations have a scale from calibration. Left in 16 bits (W8A16) they are quantized per row all the
    same by a device that multiplies fp8: refused, since it was not asked for."""
    if not isinstance(inputs, Mapping):
        refuse(place, inputs, "; fp8 weights need activations in fp8")
    check_values(inputs, _INPUTS, f"{place}.")
    if inputs.get("group_size") is not None:
        group_size(inputs, place=f"{place}.")
    strategy, dynamic = inputs.get("strategy"), inputs.get("dynamic")
    if dynamic is True and strategy in ("token", "group"):
        return False
    if dynamic is False and strategy == "tensor":
        return True
    refuse(f"{place}.strategy", strategy, "; known: token or group with dynamic=true, tensor with dynamic=false")
