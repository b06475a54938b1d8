"""What a model takes on a GPU in each format of its weights, and how many tokens fit beside it, for `quire inspect`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.cli.terminal import size_text
from quire.layers.spec import MoeSpec

if TYPE_CHECKING:
    from quire.models.spec import DecoderSpec, Shape

_BITS = {"none": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4 + 32 / 128}
"""Of a weight of a projection, scales of groups included; what is not a projection keeps its 16 bits."""
_SCALED = ("fp8", "int8")
"""With one float32 scale a row."""
_PROJECTION = re.compile(r"layers\.\d+\.(attn\.(?!.*norm).*|mlp\.(shared\.)?(up|down|gate))\.weight")
_GPUS = (24, 80, 141)
"""Gigabytes of GPUs that are answered for."""
_UTILIZATION = 0.9


def gpu_facts(spec: DecoderSpec, sizes: tuple[int, int]) -> dict[str, Any]:
    """By `quantization`: bytes of weights; then the KV of a token, and tokens that fit into GPUs of some sizes beside
    weights, without what a step needs. With several ranks, as many as tensor ranks times stages in `sizes`, each on a
    GPU: of each, and tokens that fit on all of them."""
    from quire.models.shard import shard_of
    from quire.parallel.place import Place

    # Experts are not quantized on a GPU yet: there the other formats are refused.
    bits_of = {"none": _BITS["none"]} if any(isinstance(each.mlp, MoeSpec) for each in spec.layers) else _BITS
    ranks = []
    for place in Place.all(*sizes):
        shard = shard_of(spec, place)
        kv = shard.kv_bytes_per_block(1, element_size=1)
        ranks.append({"rank": place.index, "weight_bytes": _weights(shard.parameters, bits_of),
                      "kv_bytes_per_token": {"auto": 2 * kv, "fp8": kv}})
    tokens = {f"{size} GB": {name: min(_tokens(size, rank, name) for rank in ranks) for name in bits_of}
              for size in _GPUS}
    elements = sum(layer.kv.elements_per_token for layer in spec.layers)
    return {"weight_bytes": _weights(spec.parameters(), bits_of),
            "kv_bytes_per_token": {"auto": 2 * elements, "fp8": elements}, "tokens": tokens,
            "ranks": ranks if len(ranks) > 1 else []}


def _weights(parameters: Mapping[str, Shape], bits_of: Mapping[str, float]) -> dict[str, int]:
    """Bytes of parameters, by `quantization`."""
    rows = columns = others = 0
    for name, shape in parameters.items():
        if len(shape) == 2 and _PROJECTION.fullmatch(name):
            rows, columns = rows + shape[0], columns + math.prod(shape)
        else:
            others += math.prod(shape)
    return {name: int(columns * bits / 8) + 2 * others + (4 * rows if name in _SCALED else 0)
            for name, bits in bits_of.items()}


def _tokens(size: int, rank: dict[str, Any], name: str) -> int:
    left = _UTILIZATION * size * 1e9 - rank["weight_bytes"][name]
    return max(0, int(left // rank["kv_bytes_per_token"]["auto"]))


def gpu_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    ranks = facts["ranks"]
    rows = [("on a GPU", _held(facts))]
    rows += [("" if rank["rank"] else f"on {len(ranks)} GPUs", f"  rank {rank['rank']}: {_held(rank)}")
             for rank in ranks]
    each = " of each" if ranks else ""
    for size, tokens in facts["tokens"].items():
        fit = ", ".join(f"{_shown(name)} {count:,}" if count else f"{_shown(name)} does not fit"
                        for name, count in tokens.items())
        rows.append(("", f"  tokens in 90% of {size}{each}, less what a step needs: {fit}"))
    return rows


def _held(facts: dict[str, Any]) -> str:
    taken = ", ".join(f"{_shown(name)} {size_text(size)}" for name, size in facts["weight_bytes"].items())
    kv = facts["kv_bytes_per_token"]
    return f"weights {taken}; KV per token {kv['auto']:,} bytes, in fp8 {kv['fp8']:,}"


def _shown(name: str) -> str:
    return "bf16" if name == "none" else name
