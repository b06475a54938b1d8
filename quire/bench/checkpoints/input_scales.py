"""Scales of activations that a checkpoint with static fp8 stores: the largest number that each projection reads, over
texts that no accuracy is measured on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.bench.checkpoints.fp8_layouts import LARGEST
from quire.bench.whole_pass import logits_of
from quire.kernels.slices import Slices
from quire.models.build import build_decoder
from quire.ops.reference import PlainLinear, TorchOps

if TYPE_CHECKING:
    from quire.models.loader.source import ModelSource


class _WatchedInputs(TorchOps):
    """Remembers the largest magnitude of what each weight is multiplied by. Weights that are multiplied as one are
    known by their rows."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._named = {_keys(weight[:1])[0]: name for name, weight in weights.items()}
        self._held: dict[int, list[str]] = {}
        self.largest: dict[str, float] = {}

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, slices: Slices | None = None) -> PlainLinear:
        found = super().pack_linear(weight, bias, slices)
        self._held[id(found)] = [self._named[key] for key in _keys(found.weight) if key in self._named]
        return found

    def linear(
        self, x: Tensor, w: PlainLinear, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        most = float(x.abs().max())
        for name in self._held[id(w)]:
            self.largest[name] = max(most, self.largest.get(name, 0.0))
        return super().linear(x, w, residual, out)


def _keys(weight: Tensor) -> list[bytes]:
    return [row.tobytes() for row in weight.float().numpy()]


@torch.inference_mode()
def input_scales(source: ModelSource, weights: Mapping[str, Tensor], texts: list[str]) -> dict[str, float]:
    """By the name of each weight that gets one: the scale by which its largest input is e4m3's largest number."""
    ops, tokenizer = _WatchedInputs(weights), source.tokenizer()
    tokens = [tokenizer.encode(text) for text in texts]
    with torch.device("cpu"):
        decoder = build_decoder(source.config, source.weights(), ops, max_model_len=max(map(len, tokens)))
        for each in tokens:
            logits_of(decoder, each)
    return {name: ops.largest[name] / LARGEST for name in weights}
