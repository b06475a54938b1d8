"""A worker that is one of several ranks on GPUs: which GPU it has, how it reaches the others, what it loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.quantized import StoredWeight
from quire.models.build import stored_parts
from quire.models.loader.source import resolve_model
from quire.models.registry import read_spec
from quire.models.shard import shard_of
from quire.parallel.collectives import Collectives
from quire.parallel.nccl import check_nccl
from quire.parallel.place import Place
from quire.worker.gpu.options import DTYPES, device_options
from quire.worker.gpu.passes import DeviceRanks
from quire.worker.gpu.peers import connect_peers
from quire.worker.gpu.speculation import speculation_of
from quire.worker.gpu.told import LinkTalk
from quire.worker.gpu.worker import GpuWorker, RankShare
from quire.worker.memory import PoolSize

Agree = Callable[[dict[str, Any]], dict[str, Any]]


def device_of(place: Place, num_devices: int) -> int:
    """Ranks are dealt to the GPUs in order; where there are fewer, some share one."""
    return place.index % num_devices


def sharing(place: Place, num_devices: int) -> int:
    """Ranks on the same GPU as this one, itself included."""
    mine = device_of(place, num_devices)
    return sum(device_of(each, num_devices) == mine for each in Place.all(place.tensor_size, place.num_stages))


def build_gpu_rank(config: EngineConfig, place: Place, collectives: Collectives | None, agree: Agree,
                   gpu: int | None = None) -> GpuWorker:
    """`gpu`: the one that this rank has to itself; None: ranks are dealt to those that there are."""
    if not torch.cuda.is_available():
        raise ConfigError("device 'cuda' cannot be used: torch finds no CUDA GPU in a rank's process", field="device")
    count = torch.cuda.device_count()
    device = torch.device("cuda", device_of(place, count) if gpu is None else gpu)
    torch.cuda.set_device(device)
    model = config.model
    source = resolve_model(model.model, tokenizer=model.tokenizer, load_format=model.load_format,
                           cache_dir=model.cache_dir, progress=False)
    spec = read_spec(source.config)
    speculation = config.speculation.options
    reads_tokens = speculation is not None and speculation.reads_states
    shard = shard_of(spec, place, stages_help=False, reads_tokens=reads_tokens)
    ranks: DeviceRanks = DeviceRanks()
    if collectives is not None:
        shared = gpu is None and count < place.num_ranks
        nccl = config.parallel.rank_exchange == "nccl"
        if nccl:
            check_nccl(shared)
        ranks = connect_peers(collectives, place, device, DTYPES[model.dtype], shared=shared, nccl=nccl)
        collectives.device_waited_ns = lambda: ranks.waited_ns
    share = RankShare(shard, ranks, lambda pool: PoolSize(**agree(dataclasses.asdict(pool))),
                      sharing(place, count) if gpu is None else 1, LinkTalk.of(place, collectives))
    parts = None if shard.is_whole else stored_parts(source.config, shard)
    weights: Iterable[tuple[str, StoredWeight]] | None = None
    if model.load_format != "dummy":
        weights = source.weights(None, parts) if model.asks_for_floats else source.stored_weights(parts)
    options = device_options(config, spec.max_positions, str(device))
    return GpuWorker(source.config, weights, config.cache, options, speculation=speculation_of(config, source),
                     share=share)
