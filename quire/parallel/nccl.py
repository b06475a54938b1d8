"""Large sums over ranks that have a GPU each, by NCCL through torch.distributed (`rank_exchange="nccl"`).

NCCL adds in an order that depends on the number of ranks and on the message: never in deterministic mode. This has
never run on a chip: NCCL refuses two ranks on one GPU. The tests run it with gloo in NCCL's place.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.errors import ConfigError
from quire.parallel.collectives import TensorGroup

MakeGroup = Callable[[Any, int, int], Any]
"""From a store, a rank and the number of ranks: a backend of torch.distributed."""


class LargeSum:
    """In place; on a GPU a launch like all others, in order with the current stream, which a graph may capture."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __call__(self, part: Tensor) -> Tensor:
        self._backend.allreduce([part]).wait()  # on a GPU the stream waits, not this thread
        return part


def connect_sum(host: TensorGroup, device: torch.device, make: MakeGroup) -> LargeSum:
    """All ranks together. They find each other through a file that only this user can read, gone once they have. The
    first sum connects them, so it is made here: no graph can capture that."""
    told = host.broadcast(tempfile.mkdtemp(prefix="quire-ranks-").encode() if host.rank == 0 else None)
    folder = told.decode()
    try:
        found = LargeSum(make(dist.FileStore(os.path.join(folder, "store"), host.size), host.rank, host.size))
        met = int(found(torch.ones(1, device=device)).item())
        host.exchange(torch.ones(1))  # nobody needs the file any more
    finally:
        if host.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if met != host.size:
        raise RuntimeError(f"{met} of {host.size} ranks took part in a sum")
    return found


def nccl_backend(store: Any, rank: int, size: int) -> Any:
    """Its ranks share a machine, so its own sockets listen on the loopback."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())


def check_nccl(ranks_share_gpus: bool) -> None:
    if not (dist.is_available() and dist.is_nccl_available()):
        raise ConfigError("rank_exchange 'nccl': this torch has no NCCL; use 'ipc'", field="rank_exchange")
    if ranks_share_gpus:
        raise ConfigError("rank_exchange 'nccl' needs a GPU for every rank, and there are fewer: NCCL refuses ranks "
                          "that share one. Use 'ipc'", field="rank_exchange")
