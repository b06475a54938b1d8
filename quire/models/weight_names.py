"""From a checkpoint's tensor names to the decoder's, and back: the part of a family that is only spelling."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from quire.errors import ModelLoadError
from quire.kernels.quantized import CodedWeight, StoredWeight
from quire.kernels.unread import UnreadRows
from quire.layers.spec import MoeSpec
from quire.models.spec import DecoderSpec, Shape

_NUMBER = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True)
class Merged:
    """One tensor that holds a part of every expert of a layer: [experts, out, in], or [experts, out] for a bias.

    `parts` are the decoder's names, `{}` for the expert's number; several lie one below the other along the output
    dimension, or row by row in turns where `interleaved`.
    """

    parts: tuple[str, ...]
    kind: str = "weight"
    transposed: bool = False
    """Stored as [experts, in, out]."""
    interleaved: bool = False

    def targets(self, layer: str, expert: int) -> tuple[str, ...]:
        return tuple(f"layers.{layer}.{part.format(expert)}.{self.kind}" for part in self.parts)

    def split(self, tensor: StoredWeight, experts: int) -> Iterator[tuple[StoredWeight, ...]]:
        """The parts of one expert after the other. Of codes, and of what is still in its file, the rows of all lie one
        below the other; codes are never turned."""
        count = len(self.parts)
        rows = tensor.shape[0] // experts
        for index in range(experts):
            one = tensor.rows(slice(index * rows, (index + 1) * rows)) if isinstance(tensor, CodedWeight) else (
                tensor[index])
            if self.transposed and not self._is_codes(one) and one.dim() == 2:
                one = (one.dequantized() if isinstance(one, CodedWeight) else one).t()
            elif self.interleaved and isinstance(one, UnreadRows):
                one = one.whole()
            if isinstance(one, CodedWeight):
                yield tuple(one.rows(slice(first, None, count)) for first in range(count)) if self.interleaved else (
                    tuple(one.split([rows // count] * count)))
            else:
                yield tuple(one[first::count] for first in range(count)) if self.interleaved else one.chunk(count)

    def rows_per_expert(self, tensor: StoredWeight, one: Shape) -> int:
        """Rows of an expert in a tensor of all of them, each of whose parts has the shape `one`."""
        if not isinstance(tensor, CodedWeight):
            return 1
        return one[1] if self.transposed and not self._is_codes(tensor) else one[0] * len(self.parts)

    @staticmethod
    def _is_codes(tensor: StoredWeight) -> bool:
        return tensor.coded if isinstance(tensor, UnreadRows) else isinstance(tensor, CodedWeight)


@dataclass(frozen=True, slots=True)
class WeightNames:
    """How one family spells its weights.

    `top` and `layer` map a checkpoint's module name (without `.weight` or `.bias`) to the decoder's; where
    it is a tuple, the checkpoint stores these stacked in one tensor, in that order, along the output
    dimension. `{}` in a name of `layer` stands for an expert's number.
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
    alone: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer whose names end in neither `.weight` nor `.bias`, and the decoder's parameters."""
    merged: Mapping[str, Merged] = field(default_factory=dict)
    """Tensors of a layer, by their whole name in it, that hold a part of all its experts."""

    def targets(self, name: str) -> tuple[str, ...]:
        """The decoder's parameters stored in tensor `name`: none if it is not needed; KeyError if unknown."""
        if name.endswith(self.ignored):
            return ()
        for spelling in (name, self.optional_prefix + name):
            module, _, kind = spelling.rpartition(".")
            if module in self.top:
                return (f"{self.top[module]}.{kind}",)
            if spelling.startswith(self.layers_prefix):
                index, _, whole = spelling.removeprefix(self.layers_prefix).partition(".")
                if not index.isdecimal() or str(int(index)) != index:
                    continue
                if whole in self.alone:
                    return (f"layers.{index}.{self.alone[whole]}",)
                found, number = self._in_layer(whole.rpartition(".")[0])
                if found:
                    return tuple(f"layers.{index}.{part.format(number)}.{kind}" for part in found)
        raise KeyError(name)

    def parameters_in(self, name: str, shapes: Mapping[str, Shape]) -> list[str]:
        """As `targets`, of a model with parameters of these shapes; of a tensor of merged experts, those of all."""
        merged = self.merged_in(name)
        if merged is None:
            return list(self.targets(name))
        layer, whole = merged
        experts = range(_experts_of(layer, whole, shapes))
        return [target for number in experts for target in whole.targets(layer, number)]

    def _in_layer(self, inner: str) -> tuple[tuple[str, ...], str]:
        """The decoder's modules that a module of a layer holds, and the expert's number where it has one."""
        numbered = _NUMBER.search(inner)
        found = self.layer.get(inner) or self.layer.get(_NUMBER.sub(".{}.", inner, count=1), ())
        return (found,) if isinstance(found, str) else found, numbered[0].strip(".") if numbered else ""

    def merged_in(self, name: str) -> tuple[str, Merged] | None:
        """The layer's number and what a tensor holds of all its experts; None where it is no such tensor."""
        if not self.merged or not name.startswith(self.layers_prefix):
            return None
        index, _, inner = name.removeprefix(self.layers_prefix).partition(".")
        found = self.merged.get(inner) or self.merged.get(inner.removesuffix(".weight"))
        return (index, found) if found is not None and index.isdecimal() else None

    def is_extra(self, name: str, spec: DecoderSpec) -> bool:
        """Whether a tensor belongs to a layer behind the last one, which is stored but not read."""
        index = name.removeprefix(self.layers_prefix).partition(".")[0] if name.startswith(self.layers_prefix) else ""
        return index.isdecimal() and spec.num_layers <= int(index) < spec.num_layers + spec.extra_layers

    def split(
        self, name: str, tensor: StoredWeight, spec_shapes: Mapping[str, Shape], held: Container[str] = ()
    ) -> Iterator[tuple[str, StoredWeight]]:
        """The decoder's parameters stored in one tensor, as views of it, or read one after the other as they are asked
        for. `held` are those of a rank's shard: a tensor of merged experts may have these alone. KeyError, at once, if
        the family has no such tensor."""
        merged = self.merged_in(name)
        if merged is not None:
            return self._split_experts(name, tensor, spec_shapes, held, *merged)
        targets = self.targets(name)
        if targets and self.is_transposed(targets[0]) and tensor.dim() == 2:
            tensor = (tensor.dequantized() if isinstance(tensor, CodedWeight) else tensor).t()
        if len(targets) <= 1:
            return ((target, tensor) for target in targets)
        rows = [spec_shapes[target][0] if target in spec_shapes else 0 for target in targets]
        if tensor.dim() == 0 or tensor.shape[0] != sum(rows):
            raise ModelLoadError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, but the config asks for {sum(rows)} rows"
            )
        return zip(targets, tensor.split(rows), strict=True)  # type: ignore[no-untyped-call]

    def _split_experts(
        self, name: str, tensor: StoredWeight, shapes: Mapping[str, Shape], held: Container[str], layer: str,
        merged: Merged,
    ) -> Iterator[tuple[str, StoredWeight]]:  # fmt: skip
        count = _experts_of(layer, merged, shapes)
        experts = list(range(count))
        if not count:
            raise KeyError(name)
        each = merged.rows_per_expert(tensor, shapes[merged.targets(layer, 0)[0]])
        if tensor.dim() and tensor.shape[0] != count * each:
            experts = [number for number in experts if merged.targets(layer, number)[0] in held]
        if tensor.dim() < 2 or tensor.shape[0] != len(experts) * each:
            raise ModelLoadError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, but the config asks for {count} experts"
            )
        return ((target, part) for number, parts in zip(experts, merged.split(tensor, len(experts)), strict=True)
                for target, part in zip(merged.targets(layer, number), parts, strict=True))

    def stored(self, spec: DecoderSpec) -> dict[str, Shape]:
        """Name and shape of every tensor a checkpoint of this model must hold."""
        shapes: dict[str, Shape] = {}
        for target, shape in spec.parameters().items():
            name = self.stored_name(target)
            merged = self.merged_in(name)
            if merged is not None:
                shapes[name] = _merged_shape(merged[1], spec, int(merged[0]), shape)
                continue
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
        for key, value in self.alone.items():
            if value == f"{inner}.{kind}":
                return f"{self.layers_prefix}{index}.{key}"
        numbered = _NUMBER.search(inner)
        pattern = _NUMBER.sub(".{}.", inner, count=1)
        try:
            key = _key_of(self.layer, pattern if numbered else inner)
        except KeyError:
            return f"{self.layers_prefix}{index}.{self._merged_key(pattern, kind)}"
        return f"{self.layers_prefix}{index}.{key.format(numbered[0].strip('.') if numbered else '')}.{kind}"

    def spellings(self, target: str) -> list[str]:
        """Every name that the tensor may have which holds a decoder parameter, the family's usual one first."""
        found = [self.stored_name(target)]
        module, _, kind = target.rpartition(".")
        if ".experts." in module:
            _, index, inner = module.split(".", 2)
            pattern = _NUMBER.sub(".{}.", inner, count=1)
            number = inner.removeprefix("mlp.experts.").partition(".")[0]
            found += [f"{self.layers_prefix}{index}.{key}" for key, merged in self.merged.items()
                      if pattern in merged.parts and merged.kind == kind]
            found += [f"{self.layers_prefix}{index}.{key.format(number)}.{kind}" for key, part in self.layer.items()
                      if part == pattern]
        elif module.startswith("layers."):
            _, index, inner = module.split(".", 2)
            found += [f"{self.layers_prefix}{index}.{key}.{kind}" for key, part in self.layer.items() if part == inner]
        return found

    def _merged_key(self, pattern: str, kind: str) -> str:
        for key, merged in self.merged.items():
            if pattern in merged.parts and merged.kind == kind:
                return key
        raise KeyError(pattern)

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


def _experts_of(layer: str, merged: Merged, shapes: Mapping[str, Shape]) -> int:
    return next(number for number in itertools.count() if merged.targets(layer, number)[0] not in shapes)


def _merged_shape(merged: Merged, spec: DecoderSpec, layer: int, part: Shape) -> Shape:
    mlp = spec.layers[layer].mlp
    experts = mlp.router.num_experts if isinstance(mlp, MoeSpec) else 0
    whole = (part[0] * len(merged.parts), *part[1:])
    return (experts, *(whole[::-1] if merged.transposed else whole))
