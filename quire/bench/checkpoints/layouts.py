"""The layouts that a model's weights can be written in, and how: matrices of layers quantized, all else in bf16."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.bench.checkpoints.fp8_layouts import BLOCKS, MODELOPT, compressed_fp8, fp8
from quire.bench.checkpoints.gguf_blocks import ENCODERS, NARROW
from quire.bench.checkpoints.gguf_file import StoredTensor, write_gguf
from quire.bench.checkpoints.input_scales import input_scales
from quire.bench.checkpoints.integer_layouts import (
    Packer,
    awq,
    awq_config,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
)
from quire.bench.checkpoints.names import EXPERTS_NAME, GGUF_NAMES
from quire.bench.checkpoints.one_expert import MLP_MATRIX, one_expert
from quire.bench.gpu.accuracy import texts
from quire.errors import QuireError
from quire.models.loader.gguf import GgufFile
from quire.models.loader.gguf_quants import QUANT_FORMATS
from quire.models.loader.source import ModelSource, resolve_model

_PROJECTION = re.compile(r".*layers\.\d+\..*_proj\.weight")
_GGUF_MATRIX = re.compile(r"blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down))\.weight")
_CALIBRATED_ON = 8
"""Docstrings of this package."""


@dataclass(frozen=True, slots=True)
class FolderLayout:
    """Of a Hugging Face folder; both are given the columns that share a scale, where the layout has groups."""

    packer: Callable[[int], Packer]
    config: Callable[[int], dict[str, Any]]
    static: bool = False
    """An `input_scale` beside each weight."""


FOLDERS: dict[str, FolderLayout] = {
    "compressed-fp8": FolderLayout(lambda _: fp8(), lambda _: compressed_fp8()),
    "compressed-fp8-static": FolderLayout(lambda _: fp8("tensor"), lambda _: compressed_fp8("tensor", True), True),
    "fp8-blocks": FolderLayout(lambda _: fp8("block", "weight_scale_inv"), lambda _: BLOCKS),
    "modelopt-fp8": FolderLayout(lambda _: fp8("tensor"), lambda _: MODELOPT, True),
    "compressed-int8": FolderLayout(lambda _: compressed(8, -1, plain=True),
                                    lambda _: compressed_config(8, -1, plain=True)),
    "awq": FolderLayout(awq, awq_config),
    "gptq": FolderLayout(lambda group: gptq(4, group), lambda group: gptq_config(4, group)),
    "gptq-zero-points": FolderLayout(lambda group: gptq(4, group, False), lambda group: gptq_config(4, group, False)),
    "gptq-act-order": FolderLayout(lambda group: gptq(4, group, act_order=True),
                                   lambda group: gptq_config(4, group, act_order=True)),
    "gptq-8-bits": FolderLayout(lambda group: gptq(8, group), lambda group: gptq_config(8, group)),
    "compressed-int4": FolderLayout(lambda group: compressed(4, group), lambda group: compressed_config(4, group)),
}


class Checkpoints:
    """A model's weights, in bf16, to be written in any layout. `device`: where numbers are rounded."""

    def __init__(self, model: str, device: str = "cpu") -> None:
        self._source: ModelSource = resolve_model(model)
        self._device = torch.device(device)

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        return dict(self._source.weights(torch.bfloat16))

    @cached_property
    def _matrices(self) -> dict[str, Tensor]:
        return {name: weight for name, weight in self._weights.items() if _PROJECTION.fullmatch(name)}

    @cached_property
    def _input_scales(self) -> dict[str, float]:
        exact = {name: weight for name, weight in self._source.weights() if name in self._matrices}
        return input_scales(self._source, exact, texts(_CALIBRATED_ON))

    @property
    def group(self) -> int:
        """Columns that share a scale in layouts with groups: 128, or what divides every width."""
        widths = [weight.shape[1] for weight in self._matrices.values()]
        fits = [group for group in (128, 64, 32) if not any(width % group for width in widths)]
        if not fits:
            raise QuireError(f"{self._source.name}: groups of 32 columns do not fill its weights")
        return fits[0]

    def write(self, layout: str, folder: Path) -> str:
        """The path to open the checkpoint by."""
        if layout in GGUF_NAMES or layout == EXPERTS_NAME:
            return self._write_gguf(layout, folder / "model.gguf")
        return self._write_folder(FOLDERS[layout], folder)

    def _write_folder(self, layout: FolderLayout, folder: Path) -> str:
        group = self.group
        pack = layout.packer(group)
        stored = {name: weight for name, weight in self._weights.items() if name not in self._matrices}
        for name, weight in self._matrices.items():
            module = name.removesuffix(".weight")
            members, _ = pack(weight.to(self._device, torch.float32))
            stored |= {f"{module}.{member}": tensor.cpu() for member, tensor in members.items()}
            if layout.static:
                stored[f"{module}.input_scale"] = torch.tensor(self._input_scales[name])
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
        config = {**self._source.config, "quantization_config": layout.config(group)}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return str(folder)

    def _write_gguf(self, layout: str, path: Path) -> str:
        """Names, order of rows and what is said about the model are those of the model's own file."""
        if self._source.path.suffix != ".gguf":
            raise QuireError(f"{layout} is written from the header of a GGUF file: {self._source.name} is none")
        experts = layout == EXPERTS_NAME
        form, quantized = ("MXFP4", MLP_MATRIX) if experts else (layout.upper(), _GGUF_MATRIX)
        with GgufFile(self._source.path) as file:
            tensors = [self._gguf_tensor(file, name, form, quantized) for name in file.tensors]
            write_gguf(path, *one_expert(file.metadata, tensors) if experts else (file.metadata, tensors))
        return str(path)

    def _gguf_tensor(self, file: GgufFile, name: str, form: str, quantized: re.Pattern[str]) -> StoredTensor:
        tensor = file.tensors[name]
        values = torch.empty(tensor.shape)
        file.read(tensor, values.view(-1).numpy())
        if quantized.fullmatch(name):
            elements = {quant.name: quant.block_elements for quant in QUANT_FORMATS.values()}
            form = NARROW[form] if tensor.shape[-1] % elements[form] and form in NARROW else form
            blocks = values.to(self._device, torch.bfloat16).float().view(-1, elements[form])
        else:
            form = "F32" if values.dim() == 1 else "BF16"
            blocks = values.view(1, -1)
        return StoredTensor(name, tensor.shape, form, ENCODERS[form](blocks).cpu().numpy())
