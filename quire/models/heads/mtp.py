"""The layer behind a model's last one that was trained with it to predict one token more (DeepSeek-V3, GLM-4.5).

It is a head whose one layer is the model's own kind (latent attention, experts), stored in the model's checkpoint: two
norms, one projection of token and hidden state, the layer, a norm before the projection to the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quire.errors import ConfigError, ModelLoadError
from quire.models.heads.ends import HeadTarget
from quire.models.heads.head import DraftHead
from quire.models.heads.same import same_rows
from quire.models.heads.spec import FINAL, HeadSpec
from quire.models.registry import family_of
from quire.models.rotary_rows import half_split
from quire.models.shard import shard_of
from quire.models.spec import DecoderSpec, Shape
from quire.models.stored_parts import NOTHING, Ranges, StoredParts
from quire.models.weight_names import WeightNames
from quire.parallel.place import Place

if TYPE_CHECKING:
    from quire.models.loader.source import ModelSource

Moved = Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]
_AROUND = {
    "enorm.weight": "token_norm.weight",
    "hnorm.weight": "state_norm.weight",
    "eh_proj.weight": "fuse.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "head.weight",
    "embed_tokens.weight": "embed.weight",
}
"""What lies around the layer, by its name in the checkpoint."""
_STORED = {ours: stored for stored, ours in _AROUND.items()}


def read_mtp(target: DecoderSpec) -> HeadSpec:
    """The first such layer of a model; refuses one that has none."""
    if not target.extra_layers:
        raise ConfigError(f"speculative_config method 'mtp' needs a layer that was trained with the model to predict "
                          f"one token more (num_nextn_predict_layers), and this {target.architecture} has none: use "
                          "another method", field="speculative_config")
    layer = target.layers[-1]
    if layer.placement != "pre" or layer.attention.rope is None:
        raise ConfigError(f"speculative_config method 'mtp' does not know the layers of {target.architecture}: use "
                          "another method", field="speculative_config")
    return HeadSpec(target.architecture, target.vocab_size, target.hidden_size, target.max_positions, (FINAL,), layer,
                    target.ropes[layer.attention.rope], norm=layer.norm, input_norms=True)


class _Behind(StoredParts):
    """Of a checkpoint the first layer behind the last one."""

    def __init__(self, names: WeightNames, spec: DecoderSpec) -> None:
        super().__init__(names, shard_of(spec, Place()))
        self.prefix = f"{names.layers_prefix}{spec.num_layers}."

    def ranges(self, name: str, shape: Shape) -> Ranges | None:
        return None if name.startswith(self.prefix) else NOTHING

    def wants(self, name: str) -> bool:
        return name.startswith(self.prefix)


def build_mtp(source: ModelSource, target: HeadTarget, max_model_len: int, moved: Moved = iter) -> DraftHead:
    """The layer of a checkpoint as a head, its tensors `moved` to where the target's are. Embeddings and projection
    that are the target's are not kept twice."""
    if source.path.suffix == ".gguf":
        raise ConfigError("speculative_config method 'mtp' reads the layer from a Hugging Face folder, not from GGUF: "
                          "use another method", field="speculative_config")
    spec = read_mtp(target.spec)
    wanted, optional = spec.parameters(), spec.optional()
    found: dict[str, Tensor] = {}
    for name, tensor in moved(_named(source, target.spec)):
        shape = wanted.get(name) or optional.get(name)
        if shape is None:
            raise ModelLoadError(f"{name!r} is not a part of a layer of {spec.architecture} that predicts more tokens")
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(f"{_STORED.get(name, name)!r} of the layer that predicts more tokens has shape "
                                 f"{tuple(tensor.shape)}, but the config asks for {shape}")
        shared = {"embed.weight": target.embed, "head.weight": target.head}.get(name)
        if shared is None or not same_rows(tensor, shared):
            found[name] = tensor
    missing = [_STORED.get(name, name) for name in wanted if name not in found]
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {', '.join(missing[:4])} of the layer that predicts more tokens")
    head = DraftHead(spec, target, max_model_len, [name for name in optional if name in found])
    head.load(found, None)
    return head


def _named(source: ModelSource, spec: DecoderSpec) -> Iterator[tuple[str, Tensor]]:
    """The layer's tensors in our names; inside the layer the family spells them as those of any other."""
    config: Mapping[str, Any] = source.config
    names, shapes = family_of(config).names, spec.parameters()
    behind, last = _Behind(names, spec), spec.num_layers - 1
    for stored, tensor in source.weights(None, behind):
        inner = stored.removeprefix(behind.prefix)
        if inner in _AROUND:
            yield _AROUND[inner], tensor
            continue
        try:
            parts = list(names.split(f"{names.layers_prefix}{last}.{inner}", tensor, shapes))
        except KeyError:
            raise ModelLoadError(f"tensor {stored!r} is not one that {spec.architecture} has") from None
        for name, part in parts:
            turned = half_split(name, part, spec)
            assert isinstance(turned, Tensor)  # `weights` gives floating point
            yield name.removeprefix(f"layers.{last}."), turned
