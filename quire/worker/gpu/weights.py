"""Weights on their way to the device: checkpoints copied there, or random ones made there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.kernels.quantized import StoredWeight
from quire.models.build import build_decoder, random_bound
from quire.models.decoder import Decoder
from quire.models.registry import family_of, read_spec
from quire.models.shard import Shard
from quire.models.stored_parts import NOTHING, StoredParts, take
from quire.ops.interface import Ops
from quire.parallel.collectives import TensorGroup


def random_weights(
    config: Mapping[str, Any], device: torch.device, dtype: torch.dtype, seed: int = 0,
    parts: StoredParts | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """As `models.build.dummy_weights`, made on the device: 16 GB take a second instead of minutes. `parts`: only these
    parts of the same weights."""
    for name, tensor in _all_random(config, device, dtype, seed):
        wanted = None if parts is None else parts.ranges(name, tuple(tensor.shape))
        if wanted != NOTHING:
            yield name, tensor if wanted is None else take(tensor, wanted)


def _all_random(
    config: Mapping[str, Any], device: torch.device, dtype: torch.dtype, seed: int
) -> Iterator[tuple[str, Tensor]]:
    spec, names = read_spec(config), family_of(config).names
    generator = torch.Generator(device).manual_seed(seed)
    offset = -spec.layers[0].norm.weight_offset
    for name, shape in names.stored(spec).items():
        if len(shape) in (2, 3) and not name.endswith("bias"):
            bound = random_bound(name, shape, spec, names)
            yield (
                name,
                torch.empty(shape, dtype=dtype, device=device).uniform_(-bound, bound, generator=generator),
            )
        elif name.endswith(("bias", "sinks")):
            yield name, torch.zeros(shape, dtype=dtype, device=device)
        else:
            yield name, torch.ones(shape, dtype=torch.float32, device=device) + offset


Weight = TypeVar("Weight", Tensor, StoredWeight)


def moved(weights: Iterable[tuple[str, Weight]], device: torch.device) -> Iterator[tuple[str, Weight]]:
    """Each tensor on the device. Its source makes what it makes where it always does, whatever the default
    here."""
    source = iter(weights)
    while True:
        with torch.device("cpu"):
            item = next(source, None)
        if item is None:
            return
        yield item[0], item[1].to(device)


def build_on_device(
    config: Mapping[str, Any],
    weights: Iterable[tuple[str, StoredWeight]],
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    shard: Shard | None = None,
    ranks: TensorGroup | None = None,
) -> Decoder:
    """A decoder, or a rank's share of one, whose weights, norm vectors and rope tables all lie on the device."""
    if device.type == "cpu":
        return build_decoder(config, weights, ops, max_model_len=max_model_len, shard=shard, ranks=ranks)
    with torch.device(device):
        return build_decoder(config, moved(weights, device), ops, max_model_len=max_model_len, shard=shard, ranks=ranks,
                             dtype=dtype)
