"""What a model takes on a GPU in each format of its weights, and how many tokens fit beside it, for `quire inspect`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quire.cli.gpu_bytes import MADE, made_bytes, made_expert_bytes, part_form, stored_bytes, stored_expert_bytes
from quire.cli.inspect_ranks import draft_text
from quire.cli.terminal import size_text

if TYPE_CHECKING:
    from quire.models.loader.source import ModelSource
    from quire.models.loader.stored_forms import StoredForm
    from quire.models.shard import Shard
    from quire.models.spec import DecoderSpec, Shape
    from quire.models.weight_names import WeightNames
    from quire.worker.draft_memory import GpuDraft

_PROJECTION = re.compile(r"layers\.\d+\.(attn\.(?!.*norm).*|mlp\.(shared\.)?(up|down|gate))\.weight")
_EXPERT = re.compile(r"(layers\.\d+\.mlp\.experts)\.\d+\.(up|down|gate)\.weight")
_GPUS = (24, 80, 141)
"""Gigabytes of GPUs that are answered for."""
_UTILIZATION = 0.9


Kept = Mapping[str, "StoredForm | None"]
"""How parameters of a decoder are held that `quantization` does not round; None: as floats."""


def gpu_facts(spec: DecoderSpec, kept: Kept, sizes: tuple[int, int],
              draft_of: Callable[[Shard], GpuDraft] | None = None, reads_tokens: bool = False,
              kv_cache_dtype: str = "auto") -> dict[str, Any]:
    """By `quantization`: bytes of weights; then the KV of a token, and tokens that fit into GPUs of some sizes beside
    weights, without what a step needs. With several ranks, as many as tensor ranks times stages in `sizes`, each on a
    GPU: of each, and tokens that fit on all of them. Where the file stores quantized weights, what rounds nothing more
    than `file` is left out. `draft_of`: what a rank has for drafts, in 16 bits; it is counted in the tokens that fit,
    and not among weights and KV. `reads_tokens`: see `Shard`."""
    from quire.models.shard import shard_of
    from quire.parallel.place import Place

    file = any(form is not None for form in kept.values())
    whole = _weights(spec.parameters(), kept, file)
    shown = [name for name in whole if name in ("none", "file") or not file or whole[name] != whole["file"]]
    whole = {name: whole[name] for name in shown}
    ranks = []
    for place in Place.all(*sizes):
        shard = shard_of(spec, place, stages_help=False, reads_tokens=reads_tokens)
        kv = shard.kv_bytes_per_block(1, element_size=1)
        taken = _weights(shard.parameters, _kept_of(shard, kept), file)
        ranks.append({"rank": place.index, "weight_bytes": {name: taken[name] for name in shown},
                      "kv_bytes_per_token": _kv(spec, kv), **_draft(draft_of, shard)})
    kv_dtype = "fp8" if kv_cache_dtype == "fp8" else "auto"  # others are a CPU's
    tokens = {f"{size} GB": {name: min(_tokens(size, rank, name, kv_dtype) for rank in ranks) for name in whole}
              for size in _GPUS}
    elements = sum(layer.kv.elements_per_token for layer in spec.layers)
    return {"weight_bytes": whole, "kv_bytes_per_token": _kv(spec, elements), "tokens": tokens,
            "tokens_kv_dtype": kv_dtype, **_draft(draft_of, shard_of(spec, Place())),
            "ranks": ranks if len(ranks) > 1 else []}


def _kv(spec: DecoderSpec, elements: int) -> dict[str, int]:
    """Bytes by `kv_cache_dtype`: latents are never in fp8."""
    return {"auto": 2 * elements} if spec.has_latents else {"auto": 2 * elements, "fp8": elements}


def _draft(draft_of: Callable[[Shard], GpuDraft] | None, shard: Shard) -> dict[str, int]:
    if draft_of is None:
        return {"draft_parameters": 0, "draft_kv_bytes_per_token": 0}
    found = draft_of(shard)
    return {"draft_parameters": found.parameters, "draft_kv_bytes_per_token": 2 * found.kv_elements}


def kept_parameters(spec: DecoderSpec, source: ModelSource, forms: Mapping[str, StoredForm]) -> Kept:
    """What the file stores quantized, in `forms`, and floats that its config excludes. What a GPU turns or looks up,
    and what readers make floats of, is as if the file had floats."""
    from quire.models.excluded import ExcludedModules
    from quire.models.registry import family_of

    names, shapes = family_of(source.config).names, spec.parameters()
    tensors = names.stored(spec) if source.is_dummy else source.tensor_names()
    read = (*tensors, *(f"{module}.weight" for module in forms))
    found: dict[str, StoredForm | None] = dict.fromkeys(
        ExcludedModules(source.config).parameters(read, names, shapes))
    for target, shape in shapes.items():
        form = _form(target, names, forms) if _is_rounded(target, shape) else None
        if form is not None and form.is_read_as_codes(shape[1]):
            found[target] = form
    return found


def _is_rounded(target: str, shape: Shape) -> bool:
    return len(shape) == 2 and bool(_PROJECTION.fullmatch(target) or _EXPERT.fullmatch(target))


def _form(target: str, names: WeightNames, forms: Mapping[str, StoredForm]) -> StoredForm | None:
    if names.is_transposed(target):
        return None
    spelled = (name.removesuffix(".weight") for name in names.spellings(target))
    return next((forms[name] for name in spelled if name in forms), None)


def _kept_of(shard: Shard, kept: Kept) -> Kept:
    """The same of a rank's parts; of one that codes cannot be cut for floats are made."""
    whole = shard.spec.parameters()
    return {name: None if form is None else part_form(form, shard.cut(name), whole[name][1])
            for name, form in kept.items() if name in shard.parameters}


def _weights(parameters: Mapping[str, Shape], kept: Kept, file: bool) -> dict[str, int]:
    """Bytes of parameters, by `quantization`; `file`: of a model that stores quantized weights."""
    found = dict.fromkeys(("none", "file", *MADE[1:]) if file else MADE, 0)
    in_floats = {_weight_of(name) for name in parameters if name in kept and kept[name] is None}
    for name, shape in parameters.items():
        expert = _EXPERT.fullmatch(name) is not None
        for made in found:
            if not _is_rounded(name, shape) or made == "none" or _weight_of(name) in in_floats:
                found[made] += 2 * math.prod(shape)
            elif (form := kept.get(name)) is not None:
                found[made] += (stored_expert_bytes if expert else stored_bytes)(form, *shape)
            else:
                found[made] += (made_expert_bytes if expert else made_bytes)(made, *shape)
    return found


def _weight_of(name: str) -> str:
    """What is packed in one format: a parameter, or those of a layer's experts that are multiplied together."""
    expert = _EXPERT.fullmatch(name)
    return name if expert is None else f"{expert[1]}.{'down' if expert[2] == 'down' else 'up'}"


def _tokens(size: int, rank: dict[str, Any], name: str, kv_dtype: str) -> int:
    left = _UTILIZATION * size * 1e9 - rank["weight_bytes"][name] - 2 * rank["draft_parameters"]
    return max(0, int(left // (rank["kv_bytes_per_token"][kv_dtype] + rank["draft_kv_bytes_per_token"])))


def gpu_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    ranks = facts["ranks"]
    rows = [("on a GPU", _held(facts))]
    rows += [("" if rank["rank"] else f"on {len(ranks)} GPUs", f"  rank {rank['rank']}: {_held(rank)}")
             for rank in ranks]
    each = " of each" if ranks else ""
    beside = ", KV in fp8" if facts["tokens_kv_dtype"] == "fp8" else ""
    for size, tokens in facts["tokens"].items():
        fit = ", ".join(f"{_shown(name)} {count:,}" if count else f"{_shown(name)} does not fit"
                        for name, count in tokens.items())
        rows.append(("", f"  tokens in 90% of {size}{each}, less what a step needs{beside}: {fit}"))
    return rows


def _held(facts: dict[str, Any]) -> str:
    taken = ", ".join(f"{_shown(name)} {size_text(size)}" for name, size in facts["weight_bytes"].items())
    kv = facts["kv_bytes_per_token"]
    drafts = f"; for drafts {draft_text(facts)}" if facts["draft_parameters"] else ""
    narrow = f", in fp8 {kv['fp8']:,}" if "fp8" in kv else ""
    return f"weights {taken}; KV per token {kv['auto']:,} bytes{narrow}{drafts}"


def _shown(name: str) -> str:
    return "bf16" if name == "none" else name
