"""Which part of each stored tensor a rank reads: its shard's cuts, in the names and layout of the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.errors import ModelLoadError
from quire.layers.spec import MoeSpec
from quire.models.shard import Run, Shard
from quire.models.spec import Shape
from quire.models.weight_names import Merged, WeightNames

if TYPE_CHECKING:  # saying what a rank holds must not cost the import of torch
    from torch import Tensor

Ranges = tuple[int, tuple[Run, ...]]
"""A dimension, and the ranges along it that are read and joined; no range: the tensor is not read at all."""
NOTHING: Ranges = (0, ())


class StoredParts:
    """For one rank. A tensor that holds several parameters gives the rank's part of each, joined in their order: what
    the same tensor would be in a checkpoint of the shard alone."""

    def __init__(self, names: WeightNames, shard: Shard) -> None:
        self._names = names
        self._shard = shard
        self._shapes = shard.spec.parameters()

    def ranges(self, name: str, shape: Shape) -> Ranges | None:
        """Of a tensor stored under this name, with this shape; None: all of it.

        A tensor that the family does not have is left whole, so that whoever loads it says so.
        """
        if self._names.is_extra(name, self._shard.spec):
            return NOTHING
        merged = self._names.merged_in(name)
        if merged is not None:
            return self._experts(shape, *merged)
        try:
            targets = self._names.targets(name)
        except KeyError:
            return None
        if not targets or (targets == ("head.weight",) and self._shard.spec.tied_head):
            return NOTHING
        if any(target not in self._shapes for target in targets):
            return None
        if not self._shard.owns(targets[0]):
            return NOTHING
        cuts = [self._shard.cut(target) for target in targets]
        if all(cut is None for cut in cuts):
            return None
        self._check_shape(name, shape, targets)
        start, runs, dim = 0, [], 0
        for target, cut in zip(targets, cuts, strict=True):
            rows = self._shapes[target][0]
            if cut is None:
                runs.append((start, start + rows))
            else:
                dim = cut.dim
                runs.append((start + cut.start, start + cut.stop))
            start += rows
        return 1 - dim if self._names.is_transposed(targets[0]) else dim, tuple(runs)

    def shape_of(self, name: str) -> Shape | None:
        """That a tensor stored under this name must have, whole; None where the family has no such tensor."""
        try:
            targets = self._names.targets(name)
        except KeyError:
            return None
        if not targets or any(target not in self._shapes for target in targets):
            return None
        return self._stored_shape(targets)

    def wants(self, name: str) -> bool:
        """Whether a tensor stored under this name is the rank's, all of it or a part."""
        try:
            targets = self._names.targets(name)
        except KeyError:
            return True
        return bool(targets) and all(target not in self._shapes or self._shard.owns(target) for target in targets)

    def _experts(self, shape: Shape, layer: str, merged: Merged) -> Ranges | None:
        """Of a tensor of all experts of a layer: a rank has a run of whole ones."""
        mlp = self._shard.spec.layers[int(layer)].mlp if int(layer) < self._shard.spec.num_layers else None
        if not isinstance(mlp, MoeSpec) or not shape or shape[0] != mlp.router.num_experts:
            return None
        mine = [number for number in range(shape[0]) if self._shard.owns(merged.targets(layer, number)[0])]
        if len(mine) == shape[0]:
            return None
        return (0, ((mine[0], mine[-1] + 1),)) if mine else NOTHING

    def _stored_shape(self, targets: tuple[str, ...]) -> Shape:
        rows = sum(self._shapes[target][0] for target in targets)
        shape = (rows, *self._shapes[targets[0]][1:])
        return shape[::-1] if self._names.is_transposed(targets[0]) else shape

    def _check_shape(self, name: str, shape: Shape, targets: tuple[str, ...]) -> None:
        wanted = self._stored_shape(targets)
        if shape != wanted:
            raise ModelLoadError(f"tensor {name!r} has shape {shape}, but the config asks for {wanted}: config.json "
                                 "and the weights are not of the same model")


def take(tensor: Tensor, ranges: Ranges) -> Tensor:
    """The ranges of a tensor that is there whole, joined, in memory of their own."""
    import torch

    dim, runs = ranges
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in runs], dim)
