"""What each rank would hold of a model that is shared, and how `quire inspect` shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.cli.terminal import size_text

if TYPE_CHECKING:
    from quire.models.shard import Shard
    from quire.worker.memory import DraftKV


def rank_facts(shard: Shard, block_size: int, num_blocks: int, draft: DraftKV, draft_parameters: int,
               bytes_each: float = 4.0) -> dict[str, Any]:
    """One rank: its runs of everything, and the bytes that they take, those of whoever makes drafts included. MLP and
    experts are those of the first of its layers that has such. A parameter takes `bytes_each`, a draft's four."""
    from quire.layers.share import dense_width, num_experts

    shares = [shard.layer(index) for index in range(shard.first_layer, shard.last_layer)]
    heads = shares[0].heads
    dense = next((list(share.mlp_columns) for share in shares if dense_width(share.mlp)), None)
    runs = [share.expert_run for share in shares if num_experts(share.mlp)]
    return {
        "rank": shard.place.index,
        "tensor_rank": shard.place.tensor_rank,
        "stage": shard.place.stage,
        "layers": [shard.first_layer, shard.last_layer],
        "heads": [heads.first, heads.last],
        "kv_heads": [heads.first_kv, heads.last_kv],
        "latent": shares[0].attention.latent is not None,
        "mlp_columns": dense,
        "experts": [runs[0].border(runs[0].first), runs[0].border(runs[0].last)] if runs else None,
        "vocabulary": list(shard.vocabulary[shard.place.tensor_rank]),
        "embedding": shard.place.is_first,
        "head": shard.place.is_last,
        "parameters": shard.num_parameters,
        "draft_parameters": draft_parameters,
        "weight_bytes": int(bytes_each * shard.num_parameters) + 4 * draft_parameters,
        "kv_bytes_per_token": shard.kv_bytes_per_token + draft.on(shard.place),
        "draft_kv_bytes_per_token": draft.on(shard.place),
        "kv_bytes": num_blocks * (shard.kv_bytes_per_block(block_size) + block_size * draft.on(shard.place)),
    }


def rank_rows(ranks: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """A line for each rank; ends of the pipeline also say which vocabulary rows they have."""
    return [(f"rank {rank['rank']}", _line(rank)) for rank in ranks]


def _line(rank: dict[str, Any]) -> str:
    ends = [name for name in ("embedding", "head") if rank[name]]
    vocabulary = f", {' and '.join(ends)} of tokens {_run(rank['vocabulary'])}" if ends else ""
    inner = [f"{name} {_run(rank[key])}" for name, key in (("MLP columns", "mlp_columns"), ("experts", "experts"))
             if rank[key] is not None]
    kept = "the latents of all" if rank["latent"] else f"kv heads {_run(rank['kv_heads'])}"
    drafts = f", for drafts {draft_text(rank)}" if rank["draft_parameters"] else ""
    return (f"layers {_run(rank['layers'])}, heads {_run(rank['heads'])} with {kept}, "
            f"{', '.join(inner)}{vocabulary}{drafts}: weights {size_text(rank['weight_bytes'])}, "
            f"KV {size_text(rank['kv_bytes'])} ({rank['kv_bytes_per_token']:,} bytes per token)")


def draft_text(rank: dict[str, Any]) -> str:
    """What a rank holds for drafts."""
    return f"{rank['draft_parameters']:,} parameters and {rank['draft_kv_bytes_per_token']:,} bytes of KV per token"


def _run(run: list[int]) -> str:
    first, last = run
    return f"{first:,}" if last == first + 1 else f"{first:,}-{last - 1:,}"
