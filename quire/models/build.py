"""Puts a decoder together from a config and a stream of weights, or of random ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.quantized import FloatWeight, StoredWeight
from quire.kernels.unread import UnreadRows
from quire.layers.spec import MoeSpec
from quire.models.decoder import Decoder
from quire.models.excluded import ExcludedModules
from quire.models.random_rows import RandomRows
from quire.models.registry import family_of, read_spec
from quire.models.rotary_rows import half_split
from quire.models.shard import Shard
from quire.models.spec import DecoderSpec, Shape
from quire.models.spelling import Spelling
from quire.models.stored_parts import NOTHING, Ranges, StoredParts, take
from quire.models.weight_names import WeightNames
from quire.ops.interface import Ops
from quire.parallel.collectives import TensorGroup

_NARROW_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMED_IN_MESSAGE = 4
_KV_SCALE = re.compile(r"\blayers\.(\d+)\..*\b([kv])_scale$")
"""Of an fp8 cache: self_attn.k_scale (compressed-tensors), self_attn.k_proj.k_scale (ModelOpt)."""
_BIASES_OF_ZEROS = ("awq", "gptq")
"""Methods whose tools gave a bias to every layer that they packed, also in models that have none."""
LARGE_BYTES = 16 << 20
"""Of a random matrix, or a rank's part of it, beyond which it is drawn while it is packed."""


def build_decoder(
    config: Mapping[str, Any],
    weights: Iterable[tuple[str, StoredWeight]],
    ops: Ops,
    *,
    max_model_len: int | None = None,
    asked_len: int | None = None,
    shard: Shard | None = None,
    ranks: TensorGroup | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> Decoder:
    """A ready decoder; `weights` yields (name as Hugging Face spells it, tensor), of a shard its `stored_parts`. They
    are packed as `dtype`, or (None) as they are stored.

    Each tensor is let go of as soon as its layer has packed it.
    """
    names = family_of(config).names
    spec = read_spec(config)
    lengths = {"max_model_len": max_model_len, "asked_len": asked_len}
    decoder = Decoder(spec, ops, **lengths, shard=shard, ranks=ranks, dtype=dtype)
    shapes = {**spec.parameters(), **decoder.shard.parameters}
    spelling, extra, excluded = Spelling(config, names), [], ExcludedModules(config)
    for source, tensor in weights:
        spelling.saw(source)
        if _adds_nothing(config, names, source, tensor, shapes):
            continue
        try:
            if not _load_stored(decoder, names, source, tensor, shapes, excluded):
                extra.append(spelling.of(source))
        except ModelLoadError as error:
            raise spelling.explained(error, source) from None
        del tensor  # before the next one is made, not after
    _check_complete(decoder, spelling.of_missing(decoder.missing()), extra)
    return decoder


def _load_stored(
    decoder: Decoder, names: WeightNames, source: str, tensor: StoredWeight, shapes: Mapping[str, Shape],
    excluded: ExcludedModules,
) -> bool:
    """Hand one stored tensor to the decoder; False if the family has no such tensor."""
    scale = _KV_SCALE.search(source)
    if scale is not None and isinstance(tensor, Tensor):
        decoder.kv_scales.receive(int(scale[1]), scale[2], tensor, source)
        return True
    if names.is_extra(source, decoder.spec):
        return True
    try:
        parts = names.split(source, tensor, shapes, decoder.shard.parameters)
    except KeyError:
        return False
    for name, part in parts:
        if name == "head.weight" and decoder.spec.tied_head:
            continue  # stored by some checkpoints beside the table it is tied to
        if name not in shapes:
            return False
        if _is_matrix(part, name) and excluded.holds(source):
            part = replace(part, kept=True) if isinstance(part, UnreadRows) else FloatWeight(part)
        decoder.load(name, half_split(name, part, decoder.spec), source)
    return True


def _adds_nothing(
    config: Mapping[str, Any], names: WeightNames, source: str, tensor: StoredWeight, shapes: Mapping[str, Shape]
) -> bool:
    """Whether it is a bias of zeros that a tool put beside the codes of a matrix without one. Any other is refused: the
    model would not compute what its checkpoint says."""
    stored = config.get("quantization_config")
    if not isinstance(stored, Mapping) or stored.get("quant_method") not in _BIASES_OF_ZEROS:
        return False
    if not source.endswith(".bias") or not isinstance(tensor, Tensor):
        return False
    try:
        targets = names.targets(source)
    except KeyError:
        return False
    beside = [target.removesuffix("bias") + "weight" for target in targets]
    without = bool(targets) and not any(target in shapes for target in targets)
    return without and all(len(shapes.get(name, ())) == 2 for name in beside) and not bool(tensor.any())


def _is_matrix(part: StoredWeight, name: str) -> TypeGuard[Tensor | UnreadRows]:
    """Whether a device might round it: norms of each head by itself (Cohere) have two dimensions too."""
    floats = part.dim() == 2 and part.is_floating_point() if isinstance(part, Tensor) else (
        isinstance(part, UnreadRows) and not part.coded)
    return floats and not name.removesuffix(".weight").endswith("norm")


def stored_parts(config: Mapping[str, Any], shard: Shard) -> StoredParts:
    """What the loaders have to read for a shard of this model."""
    return StoredParts(family_of(config).names, shard)


def dummy_weights(
    config: Mapping[str, Any], seed: int = 0, parts: StoredParts | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Random weights for a config, under checkpoint names: cheap, the same for a seed, of a scale that keeps
    activations near one (so that logits are neither flat nor infinite), and of the type that the config gives its
    checkpoint, since kernels keep weights as narrow as they come. With `parts`: of the same weights those."""
    return ((name, found) for name, found in _random_weights(config, seed, parts, None) if isinstance(found, Tensor))


def undrawn_weights(
    config: Mapping[str, Any], seed: int = 0, parts: StoredParts | None = None
) -> Iterator[tuple[str, StoredWeight]]:
    """The same weights. Large ones are drawn while they are packed, before the next one is asked for."""
    return _random_weights(config, seed, parts, LARGE_BYTES)


def _random_weights(
    config: Mapping[str, Any], seed: int, parts: StoredParts | None, large: int | None
) -> Iterator[tuple[str, StoredWeight]]:
    """`large`: bytes beyond which a matrix is left to be drawn; None: none is."""
    spec, names = read_spec(config), family_of(config).names
    kept = _NARROW_TYPES.get(str(config.get("torch_dtype") or config.get("dtype")), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    offset = -spec.layers[0].norm.weight_offset
    for name, shape in names.stored(spec).items():
        wanted = None if parts is None else parts.ranges(name, shape)
        if len(shape) == 3 or (len(shape) == 2 and not name.endswith(("norm.weight", "bias"))):
            bound = math.sqrt(3.0 / shape[-1]) if len(shape) == 3 else random_bound(name, shape, spec, names)
            rows = RandomRows(*_as_matrix(shape, wanted), generator, bound, kept)
            if wanted != NOTHING:
                whole = large is None or rows.nbytes <= large
                yield name, rows.whole().view(-1, *shape[1:]) if len(shape) == 3 and whole else (
                    rows.whole() if whole else rows.unread())
            rows.settle()
        elif wanted != NOTHING:
            found = torch.zeros(shape) if name.endswith(("bias", "sinks")) else torch.ones(shape) + offset
            yield name, (found if wanted is None else take(found, wanted)).to(kept)


def _as_matrix(shape: Shape, wanted: Ranges | None) -> tuple[tuple[int, int], Ranges | None]:
    """The rows of merged experts, of which a rank wants whole ones, lie one below the other."""
    if len(shape) == 2:
        return (shape[0], shape[1]), wanted
    experts, rows, columns = shape
    if wanted is not None:
        wanted = (0, tuple((start * rows, stop * rows) for start, stop in wanted[1]))
    return (experts * rows, columns), wanted


def random_bound(name: str, shape: Shape, spec: DecoderSpec, names: WeightNames) -> float:
    """Of the numbers in a random matrix. Rows keep their length, except that the token embeddings of a model with
    experts outweigh what its layers add to them: else attention makes the tokens of a prompt alike, and routers send
    all of them to the same few experts."""
    if not spec.tied_head and any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers) and (
            names.targets(name) == ("embed.weight",)):
        return math.sqrt(6.0 * spec.num_layers)
    return math.sqrt(3.0 / shape[-1])


def _check_complete(decoder: Decoder, missing: list[str], extra: list[str]) -> None:
    shapes = decoder.spec.parameters()
    if missing:
        where = f"{len(missing)} of {len(shapes)} tensors of {decoder.spec.architecture} are missing"
        raise ModelLoadError(f"{where}: {_some(missing)}; is a file of the checkpoint absent?")
    if extra:
        raise ModelLoadError(
            f"{len(extra)} tensors are not ones that {decoder.spec.architecture} has: {_some(extra)}; "
            "the checkpoint is of another architecture, or its config.json hides a feature"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_IN_MESSAGE} more" if len(names) > _NAMED_IN_MESSAGE else ""
    return ", ".join(names[:_NAMED_IN_MESSAGE]) + more
