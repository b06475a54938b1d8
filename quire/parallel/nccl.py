"""Sums over ranks by NCCL, for ranks that have a GPU each; its identifier goes round through the host's group.

NCCL adds in an order that depends on the number of ranks and on the message: never in deterministic mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.parallel.collectives import TensorGroup


class NcclSum:
    """In place, on the current stream; can be captured. All ranks must make it together."""

    def __init__(self, rank: int, size: int, identifier: bytes) -> None:
        self._communicator = torch.cuda.nccl.init_rank(size, identifier, rank)

    @classmethod
    def of(cls, host: TensorGroup) -> NcclSum:
        return cls(host.rank, host.size, host.broadcast(torch.cuda.nccl.unique_id() if host.rank == 0 else None))

    def __call__(self, part: Tensor) -> Tensor:
        torch.cuda.nccl.all_reduce([part], comms=[self._communicator])
        return part
