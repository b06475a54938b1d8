"""From a checkpoint's tensor names to the decoder's, and back: the part of a family that is only spelling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.errors import ModelLoadError
from quire.models.spec import DecoderSpec, Shape

if TYPE_CHECKING:  # reading a spec must not cost the import of torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightNames:
    """How one family spells its weights.

    `top` and `layer` map a checkpoint's module name (without `.weight` or `.bias`) to the decoder's; where
    it is a tuple, the checkpoint stores these stacked in one tensor, in that order, along the output
    dimension.
    """

    top: Mapping[str, str]
    layer: Mapping[str, str | tuple[str, ...]]
    layers_prefix: str = "model.layers."
    optional_prefix: str = ""
    """A prefix that some checkpoints of the family leave out (GPT-2's `transformer.`)."""
    transposed: frozenset[str] = frozenset()
    """Decoder modules of a layer whose weights the checkpoint stores as [in, out]."""
    ignored: tuple[str, ...] = ()
    """Endings of tensors that are stored but not needed: constants that are recomputed."""

    def targets(self, name: str) -> tuple[str, ...]:
        """The decoder's parameters stored in tensor `name`: none if it is not needed; KeyError if unknown."""
        if name.endswith(self.ignored):
            return ()
        for spelling in (name, self.optional_prefix + name):
            module, _, kind = spelling.rpartition(".")
            if module in self.top:
                return (f"{self.top[module]}.{kind}",)
            if spelling.startswith(self.layers_prefix):
                index, _, inner = module.removeprefix(self.layers_prefix).partition(".")
                if index.isdecimal() and str(int(index)) == index and inner in self.layer:
                    found = self.layer[inner]
                    parts = (found,) if isinstance(found, str) else found
                    return tuple(f"layers.{index}.{part}.{kind}" for part in parts)
        raise KeyError(name)

    def split(
        self, name: str, tensor: Tensor, spec_shapes: Mapping[str, Shape]
    ) -> Iterator[tuple[str, Tensor]]:
        """The decoder's parameters stored in one tensor, as views of it."""
        targets = self.targets(name)
        if targets and self.is_transposed(targets[0]) and tensor.dim() == 2:
            tensor = tensor.t()
        if len(targets) <= 1:
            yield from ((target, tensor) for target in targets)
            return
        rows = [spec_shapes[target][0] if target in spec_shapes else 0 for target in targets]
        if tensor.dim() == 0 or tensor.shape[0] != sum(rows):
            raise ModelLoadError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, but the config asks for {sum(rows)} rows"
            )
        yield from zip(targets, tensor.split(rows), strict=True)  # type: ignore[no-untyped-call]

    def stored(self, spec: DecoderSpec) -> dict[str, Shape]:
        """Name and shape of every tensor a checkpoint of this model must hold."""
        shapes: dict[str, Shape] = {}
        for target, shape in spec.parameters().items():
            name = self.stored_name(target)
            rows = shape[0] + (
                shapes[name][-1 if self.is_transposed(target) else 0] if name in shapes else 0
            )
            whole = (rows, *shape[1:])
            shapes[name] = whole[::-1] if self.is_transposed(target) else whole
        return shapes

    def stored_name(self, target: str) -> str:
        """The checkpoint's name of the tensor that holds a decoder parameter."""
        module, _, kind = target.rpartition(".")
        if not module.startswith("layers."):
            return f"{_key_of(self.top, module)}.{kind}"
        _, index, inner = module.split(".", 2)
        return f"{self.layers_prefix}{index}.{_key_of(self.layer, inner)}.{kind}"

    def is_transposed(self, target: str) -> bool:
        """Whether a parameter (a weight, not a bias) is stored as [in, out]."""
        module, _, kind = target.rpartition(".")
        return (
            kind == "weight" and module.startswith("layers.") and module.split(".", 2)[2] in self.transposed
        )


def _key_of(names: Mapping[str, str] | Mapping[str, str | tuple[str, ...]], wanted: str) -> str:
    for key, value in names.items():
        if value == wanted or (isinstance(value, tuple) and wanted in value):
            return key
    raise KeyError(wanted)
