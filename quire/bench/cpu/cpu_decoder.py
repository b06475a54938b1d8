"""The decoder that an engine on a CPU would run, without the engine."""

from __future__ import annotations

from typing import Any

from quire.config import EngineConfig
from quire.models.build import build_decoder
from quire.models.decoder import Decoder
from quire.models.loader.source import resolve_model
from quire.models.registry import read_spec
from quire.models.shard import shard_of
from quire.ops.cpu import CpuOps
from quire.parallel.place import Place


def cpu_decoder(model: str, max_model_len: int, threads: int | None, **options: Any) -> Decoder:
    """`options` are the engine's."""
    config = EngineConfig.create(model=model, num_threads=threads, **options)
    rounding, source = config.model.rounding, resolve_model(model)
    spec = read_spec(source.config).with_kv_dtype(config.cache.kv_cache_dtype)
    weights = source.weights(None) if rounding is None else source.stored_weights()
    ops = CpuOps(num_threads=threads, rounding=rounding)
    shard = shard_of(spec, Place())
    return build_decoder(source.config, weights, ops, max_model_len=max_model_len, shard=shard, dtype=None)
