"""The target's tables of tokens, whole, on the one rank that has a head where ranks share the target.

A head reads embeddings and projects to the vocabulary for every draft: with the tables that ranks share it would have
to talk to all of them each time. So its rank reads both tables once more, all their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire.errors import ModelLoadError
from quire.kernels.quantized import StoredWeight, WeightUse
from quire.layers.linear import Embedding, Linear
from quire.models.decoder import Decoder
from quire.models.registry import family_of
from quire.models.shard import shard_of
from quire.models.spec import DecoderSpec, Shape
from quire.models.stored_parts import NOTHING, Ranges, StoredParts
from quire.models.weight_names import WeightNames
from quire.parallel.place import Place

Weights = Iterable[tuple[str, StoredWeight]]


class WholeEnds:
    """What a head uses of a target that ranks share: its final norm, and tables of its own."""

    def __init__(self, decoder: Decoder) -> None:
        self.ops, self.spec = decoder.ops, decoder.spec
        self.asked_len, self.final_norm = decoder.asked_len, decoder.final_norm
        self.weights_dtype = decoder.weights_dtype
        self.embed = Embedding(self.ops, self.weights_dtype)
        self.head: Linear = self.embed
        if not self.spec.tied_head:
            self.head = Linear(self.ops, ("",), False, self.weights_dtype, use=WeightUse.VOCABULARY)


HeadTarget = Decoder | WholeEnds
"""What a head is for, as far as it needs to know."""


class _Ends(StoredParts):
    """Of a checkpoint both tables."""

    def __init__(self, names: WeightNames, spec: DecoderSpec) -> None:
        super().__init__(names, shard_of(spec, Place()))
        self._tables = end_parameters(spec)

    def ranges(self, name: str, shape: Shape) -> Ranges | None:
        return None if self.wants(name) else NOTHING

    def wants(self, name: str) -> bool:
        try:
            return any(target in self._tables for target in self._names.targets(name))
        except KeyError:
            return False


def end_parameters(spec: DecoderSpec) -> tuple[str, ...]:
    """Names of the tables, in our own spelling."""
    return ("embed.weight",) if spec.tied_head else ("embed.weight", "head.weight")


def whole_ends(config: Mapping[str, Any], decoder: Decoder, weights: Callable[[StoredParts], Weights]) -> WholeEnds:
    """`weights`: of the target's checkpoint, those that parts want."""
    names, ends = family_of(config).names, WholeEnds(decoder)
    tables = set(end_parameters(decoder.spec))
    shapes = decoder.spec.parameters()
    for stored, tensor in weights(_Ends(names, decoder.spec)):
        for name, part in names.split(stored, tensor, shapes):
            if name in tables:
                getattr(ends, name.partition(".")[0]).receive("", "weight", part)
    if not ends.embed.is_loaded or not ends.head.is_loaded:
        raise ModelLoadError(f"the checkpoint lacks {' or '.join(sorted(tables))}, which a draft head reads")
    return ends
