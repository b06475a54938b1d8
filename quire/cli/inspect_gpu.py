"""What a model takes on a GPU in each format of its weights, and how many tokens fit beside it, for `quire inspect`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.cli.terminal import size_text

if TYPE_CHECKING:
    from quire.models.spec import DecoderSpec, Shape

_BITS = {"none": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4 + 32 / 128}
"""Of a weight of a projection, scales of groups included; what is not a projection keeps its 16 bits."""
_SCALED = ("fp8", "int8")
"""With one float32 scale a row."""
_PROJECTION = re.compile(r"layers\.\d+\.(attn\.(?!.*norm).*|mlp\.(shared\.)?(up|down|gate))\.weight")
_EXPERT = re.compile(r"layers\.\d+\.mlp\.experts\.\d+\.(up|down|gate)\.weight")
_GPUS = (24, 80, 141)
"""Gigabytes of GPUs that are answered for."""
_UTILIZATION = 0.9


def gpu_facts(spec: DecoderSpec, config: Mapping[str, Any], sizes: tuple[int, int]) -> dict[str, Any]:
    """By `quantization`: bytes of weights; then the KV of a token, and tokens that fit into GPUs of some sizes beside
    weights, without what a step needs. With several ranks, as many as tensor ranks times stages in `sizes`, each on a
    GPU: of each, and tokens that fit on all of them. Experts that the checkpoint has in MXFP4 stay so in any format."""
    from quire.models.shard import shard_of
    from quire.parallel.place import Place

    stored = config.get("quantization_config")
    packed = isinstance(stored, Mapping) and stored.get("quant_method") == "mxfp4"
    ranks = []
    for place in Place.all(*sizes):
        shard = shard_of(spec, place, stages_help=False)
        kv = shard.kv_bytes_per_block(1, element_size=1)
        ranks.append({"rank": place.index, "weight_bytes": _weights(shard.parameters, packed),
                      "kv_bytes_per_token": {"auto": 2 * kv, "fp8": kv}})
    whole = _weights(spec.parameters(), packed)
    tokens = {f"{size} GB": {name: min(_tokens(size, rank, name) for rank in ranks) for name in whole}
              for size in _GPUS}
    elements = sum(layer.kv.elements_per_token for layer in spec.layers)
    return {"weight_bytes": whole, "kv_bytes_per_token": {"auto": 2 * elements, "fp8": elements}, "tokens": tokens,
            "ranks": ranks if len(ranks) > 1 else []}


def _weights(parameters: Mapping[str, Shape], packed: bool) -> dict[str, int]:
    """Bytes of parameters, by `quantization`. `packed`: the checkpoint has its experts in MXFP4."""
    rows = columns = others = 0
    experts = dict.fromkeys((*_BITS, "mxfp4"), 0)
    for name, shape in parameters.items():
        if len(shape) == 2 and _EXPERT.fullmatch(name):
            for form in experts:
                experts[form] += expert_bytes(form, *shape)
        elif len(shape) == 2 and _PROJECTION.fullmatch(name):
            rows, columns = rows + shape[0], columns + math.prod(shape)
        else:
            others += math.prod(shape)
    bits_of = {"none": _BITS["none"], "file": _BITS["none"], **_BITS} if packed else _BITS
    return {name: int(columns * bits / 8) + 2 * others + (4 * rows if name in _SCALED else 0)
            + experts["mxfp4" if packed and name != "none" else name] for name, bits in bits_of.items()}


def expert_bytes(form: str, rows: int, columns: int) -> int:
    """Of an expert's weight as it lies on a GPU: planes of 32 bytes a feature, which columns fill up (see
    `kernels/triton/code_planes.py`), and scales. `form`: what `quantization` makes of floats, or mxfp4."""
    group = math.gcd(128, columns)
    if form == "none" or (form == "int4" and group % 32) or (form == "int8" and columns % 32):
        return 2 * rows * columns
    if form in _SCALED:
        return rows * (-(-columns // 32) * 32 + 4)
    scales = columns // 32 if form == "mxfp4" else 4 * columns // group
    return rows * (-(-columns // 64) * 32 + scales)


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
