"""Says what a model is and what of it fits in this machine, from its headers: no weight is loaded.

MODEL is a short name, the path of a .gguf file, a Hugging Face folder or a hub id."""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.cli.engine import fetch
from quire.cli.inspect_gpu import gpu_facts, gpu_rows, kept_parameters
from quire.cli.inspect_ranks import draft_text, rank_facts, rank_rows
from quire.cli.options import add_engine_options, engine_options
from quire.cli.terminal import size_text
from quire.config import EngineConfig, option_fields
from quire.errors import ModelLoadError, OutOfMemoryError

if TYPE_CHECKING:
    from quire.models.loader.source import ModelSource
    from quire.models.shard import Shard
    from quire.models.spec import DecoderSpec
    from quire.worker.draft_memory import GpuDraft
    from quire.worker.memory import DraftKV, PoolSize

EXAMPLES = (
    "examples:\n"
    "  quire inspect smollm2-135m\n"
    "  quire inspect ./model.gguf --kv-cache-memory 4GiB\n"
    "  quire inspect ./folder --tensor-parallel-size 8 --pipeline-parallel-size 2\n"
    "  quire inspect smollm2-135m --speculative eagle\n"
    "  quire inspect ./folder --load-format dummy --json"
)
_LENGTHS = (512, 2048, 8192, 32768)
_SETTINGS = ("tokenizer", "load_format", "cache_dir", "max_model_len", "tensor_parallel_size", "pipeline_parallel_size",
             "speculative", "speculative_config")
"""Options beside those of the cache that change what this command says."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="alias, path or hub id")
    parser.add_argument("--json", action="store_true", help="print JSON")
    unused = [f.name for section, f in option_fields() if section != "cache" and f.name not in _SETTINGS]
    add_engine_options(parser, leave_out=unused)


def run(args: argparse.Namespace) -> int:
    config = EngineConfig.create(model=args.model, **engine_options(args))
    fetch(config.model.model, config.model.cache_dir)
    from quire.engine.assembly.source import open_source, with_shipped_head
    from quire.models.registry import read_spec

    source = open_source(config)
    config = with_shipped_head(config, source)
    _check_head(config)
    plain = read_spec(source.config)
    spec = plain.with_kv_dtype(config.cache.kv_cache_dtype)
    facts = {**_identity(source), **_shape(spec)}
    forms = source.stored_forms()
    in_floats = any(form.ordered for form in forms.values())  # a CPU has no kernel for act-order
    facts["file_bytes"] = facts["stored_bytes"] if source.stores_integers and not in_floats else None
    facts |= _memory(spec, config, facts["file_bytes"])
    reads_states = config.speculation.options is not None and config.speculation.options.reads_states
    facts["on_gpu"] = gpu_facts(plain, kept_parameters(plain, source, forms), _sizes(config), _gpu_drafts(config),
                                reads_states, config.cache.kv_cache_dtype)
    facts["longrope"] = _longrope(spec, config.model.max_model_len)
    print(json.dumps(facts) if args.json else _page(facts))
    return 0


def _check_head(config: EngineConfig) -> None:
    """An engine on a GPU refuses this; what is said of int8 comes with the memory of a CPU."""
    from quire.speculation.options import refuse_with_heads

    options = config.speculation.options
    if options is not None and options.reads_states:
        refuse_with_heads(options.method, {"kv_cache_dtype": config.cache.kv_cache_dtype == "fp8"})


def _sizes(config: EngineConfig) -> tuple[int, int]:
    """Tensor ranks and stages."""
    return config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size


def _identity(source: ModelSource) -> dict[str, Any]:
    formats = {} if source.is_dummy else _stored_formats(source)
    tokenizer, template = None, False
    try:
        found = source.tokenizer()
        tokenizer, template = found.vocab_size, found.chat_template is not None
    except ModelLoadError:
        pass
    return {
        "name": source.name,
        "path": str(source.path),
        "stored_as": formats,
        "stored_bytes": sum(entry["bytes"] for entry in formats.values()),
        "tokenizer_tokens": tokenizer,
        "chat_template": template,
        "eos_token_ids": list(source.eos_token_ids),
    }


def _stored_formats(source: ModelSource) -> dict[str, dict[str, int]]:
    """Number of tensors and bytes by the type they are stored in, largest first."""
    found: dict[str, dict[str, int]] = {}
    for kind, size in _tensors(source):
        entry = found.setdefault(kind, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += size
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


def _tensors(source: ModelSource) -> list[tuple[str, int]]:
    """(type, bytes) of every stored tensor, from the headers of the files."""
    if source.path.is_file():
        from quire.models.loader.gguf import GgufFile

        with GgufFile(source.path) as file:
            return [(tensor.format.name, tensor.nbytes) for tensor in file.tensors.values()]
    from safetensors import SafetensorError, safe_open

    from quire.models.loader.safetensors import weight_files

    found = []
    for path in weight_files(source.path):
        try:
            with safe_open(path, framework="np") as shard:
                slices = [shard.get_slice(name) for name in list(shard.keys())]
                found += [
                    (s.get_dtype(), math.prod(s.get_shape()) * _bytes_of(s.get_dtype())) for s in slices
                ]
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelLoadError(f"{path} is truncated or corrupted ({error}); download it again") from error
    return found


def _bytes_of(kind: str) -> int:
    """Size of a safetensors type: its name ends with its bits (BF16, F8_E4M3 apart)."""
    digits = "".join(c for c in kind.split("_")[0] if c.isdigit())
    return int(digits) // 8 if digits else 1


def _shape(spec: DecoderSpec) -> dict[str, Any]:
    attention = spec.layers[0].attention
    return {
        "architecture": spec.architecture,
        "parameters": spec.num_parameters,
        "weight_bytes": 4 * spec.num_parameters,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "heads": attention.num_heads,
        "kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "latent": None if attention.latent is None else {
            "width": attention.latent.rank,
            "rotated": attention.latent.rope_dim,
            "bytes_per_token": spec.layers[0].kv.bytes_per_token(),
        },
        "vocab_size": spec.vocab_size,
        "context": spec.max_positions,
        "tied_head": spec.tied_head,
        "kv_bytes_per_token": spec.kv_bytes_per_token,
        "kv_groups": [
            {
                "kind": group.kind,
                "window": group.window,
                "layers": len(group.layers),
                "bytes_per_token": group.bytes_per_token,
            }
            for group in spec.cache_groups()
        ],
    }


def _memory(spec: DecoderSpec, config: EngineConfig, file_bytes: int | None) -> dict[str, Any]:
    """What an engine started now with these options would have on a CPU. Ranks share `file_bytes`, of weights that stay
    as the file has them, as they share parameters; None: weights are float32."""
    from quire.models.shard import shard_of
    from quire.parallel.place import Place
    from quire.worker.memory import available_memory, size_pool, smallest_pool, step_tokens_of

    shards = [shard_of(spec, place) for place in Place.all(*_sizes(config))]
    free = available_memory()
    facts: dict[str, Any] = {"available_memory": free, "fits": False, "pool": None, "sequences": {}, "ranks": []}
    draft, beside = _drafts(spec, config, shards)
    block = config.cache.block_size
    bytes_each = 4.0 if file_bytes is None else file_bytes / spec.num_parameters

    def ranks_with(num_blocks: int) -> list[dict[str, Any]]:
        return [rank_facts(shard, block, num_blocks, draft, more, bytes_each)
                for shard, more in zip(shards, beside, strict=True)]

    facts["ranks"] = ranks_with(0)
    try:
        pool = smallest_pool([
            size_pool(spec, config.cache, config.model.max_model_len, config.scheduler.num_seqs(gpu=False),
                      free // len(shards), draft=draft, shard=shard, step_tokens=step_tokens_of(config))
            for shard in shards
        ])
    except OutOfMemoryError as error:
        return {**facts, "reason": str(error)}
    facts["ranks"] = ranks = ranks_with(pool.num_blocks)
    if pool.window_blocks is not None:  # there is one rank
        ranks[0]["kv_bytes"] = pool.num_bytes
    facts["fits"] = sum(rank["weight_bytes"] + rank["kv_bytes"] for rank in ranks) <= free
    facts["pool"] = {
        "blocks": pool.num_blocks,
        "window_blocks": pool.window_blocks,
        "block_size": block,
        "bytes": pool.num_bytes,
        "tokens": pool.num_blocks * block,
        "tokens_with_equal_groups": pool.num_bytes // pool.bytes_per_block * block,
        "longest_sequence": pool.max_model_len,
    }
    lengths = sorted({length for length in _LENGTHS if length < pool.max_model_len} | {pool.max_model_len})
    facts["sequences"] = {str(length): _sequences(spec, pool, block, length) for length in lengths}
    return facts


def _drafts(spec: DecoderSpec, config: EngineConfig, shards: list[Shard]) -> tuple[DraftKV, list[int]]:
    """What a draft model or a head keeps of each token, and the parameters that each rank has for it."""
    from quire.worker.memory import NO_DRAFT

    options = config.speculation.options
    if options is None or not options.own_kv:
        return NO_DRAFT, [0] * len(shards)
    from quire.worker.draft_memory import draft_kv, draft_parameters

    return draft_kv(config, spec), [draft_parameters(config, shard) for shard in shards]


def _gpu_drafts(config: EngineConfig) -> Callable[[Shard], GpuDraft] | None:
    if config.speculation.options is None:
        return None
    from quire.worker.draft_memory import gpu_draft

    return functools.partial(gpu_draft, config)


def _sequences(spec: DecoderSpec, pool: PoolSize, block: int, length: int) -> int:
    """How many sequences of a length the pool holds at once; a window layer keeps no more than its window."""

    def blocks(window: int | None) -> int:
        whole = -(-length // block)
        return whole if window is None else min(whole, -(-window // block) + 1)

    return min(pool.blocks_of(group.window) // blocks(group.window) for group in spec.cache_groups())


def _page(facts: dict[str, Any]) -> str:
    stored = ", ".join(
        f"{kind} ({entry['tensors']} tensors, {size_text(entry['bytes'])})"
        for kind, entry in facts["stored_as"].items()
    )
    heads = f"{facts['heads']} heads, {facts['kv_heads']} of keys and values, of {facts['head_dim']}"
    if facts["latent"] is not None:
        heads = _latent(facts)
    template = "yes" if facts["chat_template"] else "no: complete texts with it, do not chat"
    tokenizer = "none" if facts["tokenizer_tokens"] is None else f"{facts['tokenizer_tokens']:,} tokens"
    tied = ", head tied to the embedding" if facts["tied_head"] else ""
    rows = [
        ("model", f"{facts['name']} ({facts['path']})"),
        (
            "architecture",
            f"{facts['architecture']}, {facts['layers']} layers, width {facts['hidden_size']:,}",
        ),
        ("attention", heads),
        ("vocabulary", f"{facts['vocab_size']:,}{tied}; tokenizer: {tokenizer}"),
        ("context", _context(facts)),
        ("chat template", template),
        ("parameters", f"{facts['parameters']:,}"),
        ("stored as", stored or "nothing (random weights)"),
        ("weights in float32", size_text(facts["weight_bytes"])),
        *([] if facts["file_bytes"] is None else [
            ("in the file's bits", f"about {size_text(facts['file_bytes'])}, which is the default; counted below")]),
        ("KV per token", f"{facts['kv_bytes_per_token']:,} bytes"),
        *[
            ("", _group(group))
            for group in facts["kv_groups"]
            if len(facts["kv_groups"]) > 1 or group["window"]
        ],
        *_fit_rows(facts),
        *gpu_rows(facts["on_gpu"]),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _longrope(spec: DecoderSpec, max_model_len: int | None) -> dict[str, Any] | None:
    """The length that a longrope was trained at, and whether these options ask for more."""
    trained = [rope.original_max_positions for rope in spec.ropes if rope.kind == "longrope"]
    return {"trained": trained[0], "long": spec.asked_len(max_model_len) > trained[0]} if trained else None


def _context(facts: dict[str, Any]) -> str:
    shown, longrope = f"{facts['context']:,} tokens", facts["longrope"]
    if longrope is None:
        return shown
    trained = f"{longrope['trained']:,}"
    if longrope["long"]:
        return f"{shown}, with longrope's long factors; max_model_len={longrope['trained']} takes the short ones"
    return f"{shown}, with longrope's short factors, for no more than the {trained} it was trained at"


def _latent(facts: dict[str, Any]) -> str:
    latent = facts["latent"]
    return (
        f"{facts['heads']} heads of {facts['head_dim']}, over one latent of {latent['width']} + {latent['rotated']} "
        f"numbers for all of them: {latent['bytes_per_token']:,} bytes per token and layer"
    )


def _group(group: dict[str, Any]) -> str:
    reach = "every token" if group["window"] is None else f"the last {group['window']:,} tokens"
    return f"  {group['layers']} layers keep {reach}: {group['bytes_per_token']:,} bytes of each"


def _fit_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    free = f"{size_text(facts['available_memory'])} of memory available"
    pool = facts["pool"]
    ranks = rank_rows(facts["ranks"]) if len(facts["ranks"]) > 1 else []
    if pool is None:
        return [*ranks, ("this machine", f"{free}: does not fit, {facts['reason']}")]
    total = sum(rank["weight_bytes"] + rank["kv_bytes"] for rank in facts["ranks"])
    alone = facts["ranks"][0]
    drafts = [("for drafts", draft_text(alone))] if not ranks and alone["draft_parameters"] else []
    verdict = "fits" if facts["fits"] else "does NOT fit: take a smaller model or lower --kv-cache-memory"
    return [
        *ranks,
        *drafts,
        ("this machine", f"{free}; weights and KV pool take {size_text(total)}: {verdict}"),
        (
            "KV pool",
            f"{size_text(pool['bytes'])}: {pool['blocks']:,} blocks of {pool['block_size']}, "
            f"{pool['tokens']:,} tokens, the longest sequence {pool['longest_sequence']:,}"
            + ("" if pool["window_blocks"] is None else
               f"; {pool['window_blocks']:,} blocks for sliding windows (with as many for them as for the others "
               f"{pool['tokens_with_equal_groups']:,} tokens would fit)"),
        ),
        (
            "at once",
            ", ".join(f"{count:,} × {int(length):,}" for length, count in facts["sequences"].items())
            + " (sequences × tokens)",
        ),
    ]
