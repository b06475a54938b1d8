"""What one rank holds of a model: a run of layers, and of each a run of whole heads, MLP slices and vocabulary rows.

Plain data computed from the spec and the rank's place; no torch. Every rank can compute what the others hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from quire.errors import ConfigError
from quire.kernels.kv_spec import KVSpec
from quire.kernels.slices import Slices, rank_run
from quire.layers.share import LayerShare, dense_width, num_experts, num_slices
from quire.layers.spec import MoeSpec
from quire.models.spec import DecoderSpec, Shape
from quire.parallel.place import Place

_VOCABULARY_UNIT = 64
"""Vocabulary rows that stay together where there are enough: whole panels of a packed weight."""
Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a parameter a rank has: [start, stop) along dimension `dim`."""

    dim: int
    start: int
    stop: int

    def shape(self, whole: Shape) -> Shape:
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])


@dataclass(frozen=True)
class Shard:
    """The layers [first_layer, last_layer) of a model, and of these what one tensor rank holds.

    The first stage also has the embedding, the last one the head; each tensor rank has a run of vocabulary rows.
    """

    spec: DecoderSpec
    place: Place
    first_layer: int
    last_layer: int
    stages_help: bool = True
    """Whether the first stage can help the last one with a tied head: on a CPU, not on GPUs."""
    reads_tokens: bool = False
    """Whether the last stage has the embedding too, which a draft head reads there."""

    @property
    def is_whole(self) -> bool:
        return self.place.num_ranks == 1

    def layer(self, index: int) -> LayerShare:
        layer = self.spec.layers[index]
        return LayerShare(layer.attention, layer.mlp, self.place.tensor_rank, self.place.tensor_size)

    @cached_property
    def vocabulary(self) -> tuple[Run, ...]:
        """The vocabulary rows of every tensor rank."""
        return vocabulary_runs(self.spec.vocab_size, self.place.tensor_size)

    def stage_of(self, state: str) -> int:
        """Which stage computes a hidden state: "embed", or "layers.i" for what layer i puts out."""
        if state == "embed":
            return 0
        layer = int(state.removeprefix("layers."))
        return next(stage for stage, (_, last) in enumerate(self._stages) if layer < last)

    @cached_property
    def _stages(self) -> list[Run]:
        """Asked for in every step that keeps hidden states."""
        return stage_layers(self.spec, self.place.num_stages, self.place.tensor_size, self.stages_help)

    # ---- parameters

    def owns(self, name: str) -> bool:
        """Whether a parameter, or a part of it, belongs to this stage (a tied table belongs to both ends)."""
        place = name.split(".")
        if place[0] == "layers":
            if place[3] == "experts" and not self.layer(int(place[1])).has_expert(int(place[4])):
                return False
            return self.first_layer <= int(place[1]) < self.last_layer
        if place[0] in ("head", "final_norm", "embed_out"):
            return self.place.is_last
        at_end = self.place.is_last and (self.spec.tied_head or self.reads_tokens)
        return self.place.is_first or (place[0] == "embed" and at_end)

    def cut(self, name: str) -> Cut | None:
        """The rank's part of a parameter that its stage owns; None: all of it."""
        if self.place.tensor_size == 1:
            return None
        place = name.split(".")
        if place[0] in ("embed", "head"):
            return Cut(0, *self.vocabulary[self.place.tensor_rank])
        if place[0] != "layers" or place[2] not in ("attn", "mlp"):
            return None
        if place[3] in ("router", "choice", "experts", "shared_gate"):
            return None  # an expert is had whole or not at all
        return _cut_in_layer(self.layer(int(place[1])), place[-2], place[-1])

    @cached_property
    def parameters(self) -> Mapping[str, Shape]:
        """Name and shape of everything that this rank loads."""
        return {name: self._shape(name, whole) for name, whole in self.spec.parameters().items() if self.owns(name)}

    def _shape(self, name: str, whole: Shape) -> Shape:
        cut = self.cut(name)
        return whole if cut is None else cut.shape(whole)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.parameters.values())

    # ---- KV

    def kv(self, index: int) -> KVSpec:
        """What a layer keeps of each token on this rank."""
        spec = self.spec.layers[index].kv
        heads = self.layer(index).heads
        count = heads.last_kv - heads.first_kv
        return replace(spec, parts=tuple(replace(part, heads=count) for part in spec.parts))

    def kv_heads(self, layer: int, part: str) -> tuple[int, int]:
        """How many heads a part of a layer's KV has in the whole model, and which of them is this rank's first."""
        whole = next(each for each in self.spec.layers[layer].kv.parts if each.name == part)
        return whole.heads, self.layer(layer).heads.first_kv

    @property
    def kv_bytes_per_token(self) -> int:
        return self.kv_bytes_per_block(1)

    def kv_bytes_per_block(self, block_size: int, element_size: int = 4) -> int:
        return block_size * sum(self.kv(index).bytes_per_token(element_size)
                                for index in range(self.first_layer, self.last_layer))


def vocabulary_runs(vocab_size: int, tensor_size: int) -> tuple[Run, ...]:
    """The rows of a table of tokens that each tensor rank has."""
    unit = _VOCABULARY_UNIT
    while unit > 1 and -(-vocab_size // unit) < tensor_size:
        unit //= 2
    runs = [rank_run(-(-vocab_size // unit), rank, tensor_size) for rank in range(tensor_size)]
    return tuple((first * unit, min(last * unit, vocab_size)) for first, last in runs)


def _cut_in_layer(share: LayerShare, part: str, kind: str) -> Cut | None:
    heads, spec = share.heads, share.attention
    dim, latent = spec.head_dim, spec.latent
    if part in ("q_a", "q_a_norm", "kv_a", "kv_a_norm"):
        return None  # every rank makes the latents
    if part == "sinks":
        return Cut(0, heads.first, heads.last)
    widths = {"q": dim, "q_b": dim, "out": spec.value_width}
    if latent is not None:
        widths["kv_b"] = latent.nope_dim + latent.value_dim
    if part in widths:
        run = (heads.first * widths[part], heads.last * widths[part])
    elif part in ("k", "v"):
        run = (heads.first_kv * dim, heads.last_kv * dim)
    elif part in ("q_norm", "k_norm"):
        unit = {"head": 0, "each": 1, "all": dim}[spec.qk_norm_over]
        first, last = (heads.first, heads.last) if part == "q_norm" else (heads.first_kv, heads.last_kv)
        return Cut(0, first * unit, last * unit) if unit else None
    else:
        run = share.mlp_columns
    if part not in ("out", "down"):
        return Cut(0, *run)
    # Of these every rank adds the bias, once the sum of all ranks is there.
    return Cut(1, *run) if kind == "weight" else None


def shard_of(spec: DecoderSpec, place: Place, stages_help: bool = True, reads_tokens: bool = False) -> Shard:
    """What the rank at `place` holds; refuses sizes that cannot work, with those that would. `stages_help` and
    `reads_tokens`: as in a shard; all ranks of an engine must say the same."""
    most = most_tensor_ranks(spec)
    if place.tensor_size > most:
        raise ConfigError(
            f"tensor_parallel_size {place.tensor_size} is more than this model can be cut into: it has "
            f"{', '.join(_shared_things(spec))}, and a rank has at least one of each; use 1 to {most}",
            field="tensor_parallel_size")
    if place.num_stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size {place.num_stages} is more than the model's {spec.num_layers} layers: "
            f"use 1 to {spec.num_layers}", field="pipeline_parallel_size")
    first, last = stage_layers(spec, place.num_stages, place.tensor_size, stages_help)[place.stage]
    return Shard(spec, place, first, last, stages_help, reads_tokens)


def _shared_things(spec: DecoderSpec) -> list[str]:
    """What ranks share, the fewest of each in any layer: one of them is why there cannot be more ranks."""
    mlps = [layer.mlp for layer in spec.layers]
    widths = [width for mlp in mlps if (width := dense_width(mlp))]
    experts = [count for mlp in mlps if (count := num_experts(mlp))]
    counts = {
        "query heads": min(layer.attention.num_heads for layer in spec.layers),
        "slices of the MLP": min((Slices.of_width(width).total for width in widths), default=None),
        "ranges of experts": min((Slices.of_experts(count).total for count in experts), default=None),
        "tokens of the vocabulary": spec.vocab_size,
    }
    return [f"{count} {what}" for what, count in counts.items() if count is not None]


def most_tensor_ranks(spec: DecoderSpec) -> int:
    """Every size from 1 to this works."""
    return min(spec.vocab_size, *(min(layer.attention.num_heads, num_slices(layer.mlp)) for layer in spec.layers))


_HEAD_SHARE = 0.5
"""How much of the head's cost counts when layers are dealt to stages: a prompt goes through it with its last token
alone, so stages that are even in decoding leave the first one with two thirds of SmolLM2's prompts."""
_HELPED_HEAD_SHARE = 0.1
"""Of a tied head over two stages, which the first one helps with (`parallel/shared_head.py`), mostly when it is done
with its layers before the last one is: so even layers are even in decoding too."""


def layer_costs(spec: DecoderSpec) -> tuple[list[float], float]:
    """What a token costs in each layer and in the head: the weights it is multiplied with.

    Decoding reads every weight once and computing a prompt multiplies with every weight once, so both take time in
    proportion to them (`quire bench parallel --layer-times` measures it). The embedding is a lookup.
    """
    costs = [0.0] * spec.num_layers
    for name, shape in spec.parameters().items():
        place = name.split(".")
        if place[0] == "layers":
            costs[int(place[1])] += math.prod(shape) * (_chosen_share(spec, place) if place[3] == "experts" else 1.0)
    return costs, float(spec.vocab_size * spec.embed_dim)


def _chosen_share(spec: DecoderSpec, place: list[str]) -> float:
    """How much of its experts a token goes through."""
    mlp = spec.layers[int(place[1])].mlp
    return mlp.router.top_k / mlp.router.num_experts if isinstance(mlp, MoeSpec) else 1.0


def stage_layers(spec: DecoderSpec, num_stages: int, tensor_size: int = 1, stages_help: bool = True) -> list[Run]:
    """The layers of each stage: whole layers, dealt so that the dearest stage is as cheap as possible."""
    costs, head = layer_costs(spec)
    helped = stages_help and spec.tied_head and num_stages == 2 and tensor_size == 1
    costs[-1] += (_HELPED_HEAD_SHARE if helped else _HEAD_SHARE) * head
    return even_runs(costs, num_stages)


def even_runs(costs: Sequence[float], count: int) -> list[Run]:
    """`costs` cut into `count` runs, none empty, whose dearest is as cheap as possible."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    total = len(costs)
    # least[c][end]: the dearest run of the best way to cut the first `end` into c runs, and where its last run begins.
    least: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for runs in range(1, count + 1):
        found = {}
        for end in range(runs, total - (count - runs) + 1):
            options = [(max(dearest, sums[end] - sums[start]), start)
                       for start, (dearest, _) in least[-1].items() if start < end]
            found[end] = min(options, key=lambda option: (option[0], -option[1]))
        least.append(found)
    borders = [total]
    for runs in range(count, 0, -1):
        borders.append(least[runs][borders[-1]][1])
    borders.reverse()
    return list(pairwise(borders))
