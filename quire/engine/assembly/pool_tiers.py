"""Connects the stores that outlive an engine: a tier of units for each, and who moves blocks to and from it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kvpool.directory_lock import secret_in
from quire.kvpool.disk import DiskStore
from quire.kvpool.keys import UnitKeys
from quire.kvpool.publishing import BenefitPublisher
from quire.kvpool.staging import Staging
from quire.kvpool.store import UnitStore
from quire.kvpool.tier import UnitTier

if TYPE_CHECKING:
    from quire.models.loader.source import ModelSource
    from quire.models.spec import DecoderSpec
    from quire.worker.memory import PoolSize
    from quire.worker.unit_transfer import UnitTransfer

_STAGING_BYTES = 256 << 20
_LEAST_UNITS = 4
_MOST_REMEMBERED = 1 << 16
_LEAST_REMEMBERED = 256


class PoolWorker(Protocol):
    """A worker whose caches can be moved to and from further tiers."""

    spec: DecoderSpec
    pool: PoolSize

    def connect(self, transfer: UnitTransfer) -> None: ...


def has_pool(config: EngineConfig) -> bool:
    return config.cache.kv_disk is not None or config.cache.kv_pool is not None


def build_pool_tiers(config: EngineConfig, source: ModelSource, worker: PoolWorker, num_groups: int,
                     prefill_seconds: Callable[[int], float] | None) -> list[UnitTier]:
    """The nearest first."""
    if config.cache.kv_pool_policy == "all":
        prefill_seconds = None
    fingerprint = _fingerprint(config, source, worker)
    tiers: list[UnitTier] = []
    stores: list[UnitStore] = []
    try:
        for name, store, secret in _stores(config):
            stores.append(store)
            keys = UnitKeys(secret, fingerprint)
            tiers.append(_connect(name, store, keys, config, worker, num_groups, prefill_seconds))
    except BaseException:
        for store in stores:
            store.close()
        raise
    return tiers


def _stores(config: EngineConfig) -> Iterator[tuple[str, UnitStore, bytes]]:
    """(name of the tier, store, secret)"""
    cache = config.cache
    secret, disk = cache.kv_secret, cache.disk
    if disk is not None:
        store = DiskStore(*disk)
        try:
            its_secret = secret_in(store.path) if secret is None else secret
        except BaseException:
            store.close()
            raise
        yield "disk", store, its_secret
    if cache.kv_pool is not None and secret is not None:
        yield "pool", _pool_store(cache.kv_pool, secret), secret


def _pool_store(url: str, secret: bytes) -> UnitStore:
    if url.startswith("mooncake://"):
        from quire.kvpool.mooncake import MooncakeAddress, MooncakeStore

        return MooncakeStore(MooncakeAddress.parse(url))
    from quire.kvpool.peers import PeerOptions, PeerStore

    options = PeerOptions.parse(url)
    return PeerStore(options.open_index(secret), secret, options.share, options.listen, options.lease)


def _connect(name: str, store: UnitStore, keys: UnitKeys, config: EngineConfig,
             worker: PoolWorker, num_groups: int,
             prefill_seconds: Callable[[int], float] | None) -> UnitTier:
    staging = Staging(_STAGING_BYTES)
    publisher = BenefitPublisher(_MOST_REMEMBERED, prefill_seconds)
    # The dummy executor moves nothing: its units are names without content.
    tier = UnitTier(name, store, keys, config.cache.block_size, [0] * num_groups, staging, publisher,
                    config.cache.kv_lookup_timeout / 1e3, always=config.cache.kv_pool_policy == "all")
    if config.model.executor != "dummy":
        from quire.worker.unit_transfer import UnitTransfer

        transfer = UnitTransfer(name, store, tier.numbers, staging, tier.rate, tier.breaker, keys.check_seed)
        worker.connect(transfer)
        tier.unit_bytes = transfer.unit_bytes()
    size = max(1, sum(tier.unit_bytes))
    if 0 < store.capacity < max(tier.unit_bytes):
        store.close()
        raise ConfigError(f"{store.capacity:,} bytes of KV in the tier {name!r} hold nothing: of this model 256 tokens "
                          f"take {max(tier.unit_bytes):,}; give it more", field=f"kv_{name}")
    staging.capacity = max(_STAGING_BYTES, _LEAST_UNITS * size)
    if store.capacity:
        publisher.reuse.remember(min(_MOST_REMEMBERED, max(_LEAST_REMEMBERED, 2 * store.capacity // size)))
    return tier


def _fingerprint(config: EngineConfig, source: ModelSource, worker: PoolWorker) -> bytes:
    """All that KV depends on besides the tokens. Kernels of another processor may round otherwise."""
    from quire.kvtransfer.fingerprint import fingerprint, weights_used

    model = config.model
    device = "cuda" if model.device == "cuda" else f"cpu {platform.machine()}"
    dtype = f"{model.dtype} {config.cache.kv_cache_dtype} {device} {model.executor}"
    weights = weights_used(source, model.seed, model.rounding)
    # Units are named by token ids, so it does not matter where those come from.
    return fingerprint(worker.spec, model.max_model_len, weights, "", dtype).digest
