"""Connects an engine to others as its options say: who it is, how its KV moves, where it listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.engine.assembly.device import ModelWorker
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.kvcache.secret import derived_secret
from quire.kvtransfer.fingerprint import Fingerprint, fingerprint_of
from quire.peers.bootstrap import split_address
from quire.peers.hub import PeerHub
from quire.peers.mover import KVMover
from quire.peers.sockets import PeerListener, connector
from quire.peers.tensors import TensorMover

if TYPE_CHECKING:
    from quire.models.loader.source import ModelSource


def connect_peers(config: EngineConfig, source: ModelSource, worker: ModelWorker, core: EngineCore) -> PeerHub:
    """For a `kv_role`; the listener is open when this returns."""
    options, secret = config.transfer, config.cache.kv_secret
    if secret is None:
        raise ConfigError("kv_role needs a secret that the engines share", field="kv_role")
    store = worker.kv_memory()
    if store is None:
        raise ConfigError("kv_role needs a model: the dummy executor has no KV", field="kv_role")
    who = _fingerprint(config, source, store.layout.dtype)
    host, port = options.listen
    mover = TensorMover(store, derived_secret(secret, "transfer"), who, options.transports, host,
                        receives=options.asks, convert=options.kv_convert_dtype, timeout=options.kv_lease)
    return open_hub(config, core, mover, worker.spec.vocab_size, len(worker.spec.cache_groups()),
                    derived_secret(secret, "peers"), host, port)


def open_hub(config: EngineConfig, core: EngineCore, mover: KVMover, vocab_size: int, num_groups: int, key: bytes,
             host: str, port: int) -> PeerHub:
    options = config.transfer
    for address in options.peers:
        split_address(address)
    hub = PeerHub(core, mover, vocab_size, num_groups, computes=options.computes, asks=options.asks,
                  lease=options.kv_lease, patience=config.cache.kv_fetch_timeout, least_tokens=options.kv_least_tokens)
    hub.default_peers = options.peers
    hub.connect = connector(hub, key)
    if options.computes:
        hub.listener = PeerListener(hub, key, host, port)
    return hub


def _fingerprint(config: EngineConfig, source: ModelSource, dtype: str) -> Fingerprint:
    return fingerprint_of(source, config.model.max_model_len, dtype, config.model.seed, config.model.rounding)
