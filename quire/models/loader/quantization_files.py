"""Finds what a folder says of its quantization where config.json has no `quantization_config` at its top.

| place | written by | what becomes of it |
|---|---|---|
| config.json: text_config.quantization_config | tools, of models with several parts | as it is |
| config.json: compression_config | older compressed-tensors | `quant_method` is compressed-tensors |
| hf_quant_config.json | ModelOpt | its `quantization`; `quant_method` is modelopt |
| quantize_config.json | AutoGPTQ, GPTQModel | `quant_method` is gptq, unless the file says another |
| quant_config.json | AutoAWQ | `w_bit`, `q_group_size` are named as in config.json; `quant_method` is awq |
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError
from quire.models.loader.json_file import read_json_object
from quire.models.loader.quantization_fields import FIELD

MODELOPT_FILE = "hf_quant_config.json"
GPTQ_FILE = "quantize_config.json"
AWQ_FILE = "quant_config.json"
_OLD_FIELD = "compression_config"
_AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}


def with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config of a folder, with a `quantization_config` at its top if the folder says one anywhere."""
    if config.get(FIELD) is not None:
        return config
    inner = config.get("text_config")
    stored = inner.get(FIELD) if isinstance(inner, Mapping) else None
    if stored is None and isinstance(config.get(_OLD_FIELD), Mapping):
        stored = {"quant_method": "compressed-tensors", **config[_OLD_FIELD]}
    stored = _beside(folder) if stored is None else stored
    return config if stored is None else {**config, FIELD: stored}


def _beside(folder: Path) -> dict[str, Any] | None:
    """Of the files beside a config.json."""
    if (folder / MODELOPT_FILE).is_file():
        stored = read_json_object(folder / MODELOPT_FILE).get("quantization")
        if not isinstance(stored, Mapping):
            raise ModelLoadError(f"{folder / MODELOPT_FILE} does not say its 'quantization'")
        return {"quant_method": "modelopt", **stored}
    for file, method, bits in ((GPTQ_FILE, "gptq", "bits"), (AWQ_FILE, "awq", "w_bit")):
        said = read_json_object(folder / file) if (folder / file).is_file() else {}
        if bits in said:  # another tool's file of that name has none
            return {"quant_method": method, **{_AWQ_NAMES.get(name, name): value for name, value in said.items()}}
    return None
