"""Which weights of a model's files are quantized, and how, from headers alone: no weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.errors import ModelLoadError
from quire.kernels.quantized import in_groups
from quire.models.loader import mxfp4, safetensors
from quire.models.loader.fp8_config import fp8_scheme
from quire.models.loader.gguf_quants import MXFP4, QuantFormat
from quire.models.loader.quantization_config import IntegerScheme, integer_scheme
from quire.models.spec import Shape


@dataclass(frozen=True, slots=True)
class StoredForm:
    """Of one weight."""

    kind: Literal["integers", "fp8", "mxfp4"]
    bits: int
    group: int | None
    """Columns that share a scale; None: a whole row."""
    offsets: bool = False
    """Groups have minima or zero points of their own."""
    int8_rows: bool = False
    """The file asks for activations in int8."""
    ordered: bool = False
    """Columns of a group lie anywhere (act-order)."""

    def is_read_as_codes(self, width: int) -> bool:
        """Of a matrix with so many columns; of others the readers make floats, which are like those of a file."""
        return self.kind != "integers" or in_groups(width, width if self.group is None else self.group)


_MXFP4 = StoredForm("mxfp4", 4, 32)


def gguf_form(quant: QuantFormat, dimensions: int) -> StoredForm | None:
    """Of a tensor in a format of a GGUF file; None: it is of floats, or read as floats."""
    if quant.name == MXFP4:
        return _MXFP4 if dimensions == 3 else None
    coding = quant.coding
    return None if coding is None else StoredForm("integers", coding.bits, coding.group, coding.offsets)


def folder_forms(folder: Path, config: Mapping[str, Any]) -> dict[str, StoredForm]:
    """By the names of quantized weights, without `.weight` at their ends."""
    integers, fp8 = integer_scheme(config), fp8_scheme(config)
    if fp8 is not None:
        form = StoredForm("fp8", 8, fp8.block)
        return {module: form for module, held in _modules(folder) if fp8.scales_of(held) is not None}
    if integers is not None:
        return dict(_integer_forms(folder, config, integers))
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4":
        names = safetensors.tensor_names(folder)
        return {mxfp4.stem(name): _MXFP4 for name in names if name.endswith(mxfp4.BLOCKS)}
    return {}


def _integer_forms(
    folder: Path, config: Mapping[str, Any], scheme: IntegerScheme
) -> Iterator[tuple[str, StoredForm]]:
    stored = config["quantization_config"]
    for module, held in _modules(folder):
        if scheme.layout == "compressed-tensors" and "weight_scale" in held:
            bits, group = _compressed_form(module, held, scheme)
            rows, ordered = scheme.int8_rows and bits == 8, _ordered(scheme, group)
            yield module, StoredForm("integers", bits, group, "weight_zero_point" in held, rows, ordered)
        elif scheme.layout != "compressed-tensors" and "qweight" in held:
            zero_points = scheme.layout == "awq" or not stored.get("sym", True)
            group = scheme.groups[0]
            yield module, StoredForm("integers", scheme.bits[0], group, zero_points, ordered=_ordered(scheme, group))


def _ordered(scheme: IntegerScheme, group: int | None) -> bool:
    return scheme.order_field is not None and group is not None


def _compressed_form(module: str, held: Mapping[str, Shape], scheme: IntegerScheme) -> tuple[int, int | None]:
    """Bits and group, of those that the config allows the ones that the tensors' shapes have."""
    scales = held["weight_scale"][1] if len(held["weight_scale"]) > 1 else 1
    for bits in (8,) if "weight" in held else scheme.bits:
        codes = held.get("weight") or held.get("weight_packed")
        width = 0 if not codes else codes[1] if "weight" in held else codes[1] * 32 // bits
        for group in scheme.groups:
            if scales == (1 if group is None else -(-width // group)):
                return bits, group
    raise ModelLoadError(f"tensor '{module}.weight_scale' has {scales} columns, unlike quantization_config")


def _modules(folder: Path) -> Iterator[tuple[str, dict[str, Shape]]]:
    """Every module of the files with the shapes of its tensors, by the last part of their names."""
    found: dict[str, dict[str, Shape]] = {}
    for name, shape in safetensors.tensor_shapes(folder):
        module, _, member = name.rpartition(".")
        found.setdefault(module, {})[member] = shape
    yield from found.items()
