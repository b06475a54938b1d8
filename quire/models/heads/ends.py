"""The target's tables of tokens, whole, on the one rank that has a head where ranks on a CPU share the target.

A head reads embeddings and projects to the vocabulary for every draft: with tables that ranks share it would have to
talk to all of them each time. So its rank reads once more, all their rows, those tables that it has not whole. On GPUs
every tensor rank has the head, and its target is the decoder itself, whose tables they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.errors import ModelLoadError
from quire.kernels.quantized import StoredWeight
from quire.layers.linear import Embedding
from quire.models.decoder import Decoder
from quire.models.registry import family_of
from quire.models.shard import Shard, shard_of
from quire.models.spec import DecoderSpec, Shape
from quire.models.stored_parts import NOTHING, Ranges, StoredParts
from quire.models.weight_names import WeightNames
from quire.parallel.place import Place

Weights = Iterable[tuple[str, StoredWeight]]


class WholeEnds:
    """What a head uses of a target that ranks share: its final norm, and tables that are whole."""

    def __init__(self, decoder: Decoder) -> None:
        self.ops, self.spec = decoder.ops, decoder.spec
        self.asked_len, self.final_norm = decoder.asked_len, decoder.final_norm
        self.weights_dtype = decoder.weights_dtype
        self.ranks = None
        self.embed = Embedding(self.ops, self.weights_dtype)
        self.head = self.embed
        if decoder.shard.place.tensor_size == 1:
            self.head = decoder.head
        elif not self.spec.tied_head:
            self.head = Embedding(self.ops, self.weights_dtype)


HeadTarget = Decoder | WholeEnds
"""What a head is for, as far as it needs to know. `ranks`: those that share the tables, on GPUs."""


class _Ends(StoredParts):
    """Of a checkpoint these tables."""

    def __init__(self, names: WeightNames, spec: DecoderSpec, tables: Sequence[str]) -> None:
        super().__init__(names, shard_of(spec, Place()))
        self._tables = tables

    def ranges(self, name: str, shape: Shape) -> Ranges | None:
        return None if self.wants(name) else NOTHING

    def wants(self, name: str) -> bool:
        try:
            return any(target in self._tables for target in self._names.targets(name))
        except KeyError:
            return False


def tables_to_read(shard: Shard) -> tuple[str, ...]:
    """Names, in our own spelling, of the tables that a rank of the last stage has not whole."""
    tables = ("embed.weight",) if shard.spec.tied_head else ("embed.weight", "head.weight")
    return tuple(name for name in tables if not shard.owns(name) or shard.cut(name) is not None)


def whole_ends(config: Mapping[str, Any], decoder: Decoder, weights: Callable[[StoredParts], Weights]) -> HeadTarget:
    """The decoder itself, if its share has the tables whole. `weights`: of the target's checkpoint, those that parts
    want."""
    tables = tables_to_read(decoder.shard)
    if not tables:
        return decoder
    names, ends = family_of(config).names, WholeEnds(decoder)
    shapes = decoder.spec.parameters()
    for stored, tensor in weights(_Ends(names, decoder.spec, tables)):
        for name, part in names.split(stored, tensor, shapes):
            if name in tables:
                getattr(ends, name.partition(".")[0]).receive("", "weight", part)
    if not ends.embed.is_loaded or not ends.head.is_loaded:
        raise ModelLoadError(f"the checkpoint lacks {' or '.join(tables)}, which a draft head reads")
    return ends
