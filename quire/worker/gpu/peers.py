"""Connects ranks on GPUs of one machine: each makes memory for what it says, and opens the others' (CUDA IPC)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from quire.parallel.collectives import Collectives, Link, TensorGroup
from quire.parallel.cuda_memory import HANDLE_BYTES, SharedDeviceMemory
from quire.parallel.device_waits import DeviceWaits, KernelWaits, StreamWaits
from quire.parallel.nccl import LargeSum, connect_sum, nccl_backend
from quire.parallel.peers import HEAD_BYTES, LINK_SLOT_BYTES, PeerGroup, PeerLink, group_bytes
from quire.parallel.place import Place
from quire.worker.gpu.passes import DeviceRanks


@dataclass(slots=True)
class PeerRanks(DeviceRanks):
    waits: DeviceWaits | None = None
    memory: list[SharedDeviceMemory] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        if self.waits is None:
            yield
        else:
            with self.waits.watched():
                yield

    @property
    def waited_ns(self) -> int:
        return 0 if self.waits is None else self.waits.waited_ns

    def close(self) -> None:
        if self.waits is not None:
            self.waits.close()
        self.group = self.before = self.after = self.waits = None
        while self.memory:
            self.memory.pop().close()


def connect_peers(host: Collectives, place: Place, device: torch.device, dtype: torch.dtype, *, shared: bool,
                  nccl: bool = False) -> PeerRanks:
    """Handles go round through the memory that ranks share on the host. `shared`: some ranks are on one GPU. `nccl`:
    large sums are its."""
    waits = StreamWaits(device) if shared else KernelWaits(device)
    found = PeerRanks(waits=waits)
    if host.group is not None:
        large_sum = connect_sum(host.group, device, nccl_backend) if nccl else None
        found.group = _group(host.group, waits, found, large_sum)
    if host.after is not None and host.before is not None:
        _connect_stages(host.before, host.after, place, dtype, waits, found)
    return found


def _group(host: TensorGroup, waits: DeviceWaits, ranks: PeerRanks, large_sum: LargeSum | None) -> PeerGroup:
    mine = SharedDeviceMemory.create(group_bytes(), waits.device)
    ranks.memory.append(mine)
    handles = host.exchange(torch.frombuffer(bytearray(mine.handle), dtype=torch.uint8))
    memories = []
    for rank, handle in enumerate(handles):
        theirs = mine
        if rank != host.rank:
            theirs = SharedDeviceMemory.open(handle.numpy().tobytes(), group_bytes(), waits.device)
            ranks.memory.append(theirs)
        memories.append(theirs)
    return PeerGroup(host.rank, [each.bytes for each in memories], waits.meeting(host.rank, memories), large_sum)


def _connect_stages(before: Link, after: Link, place: Place, dtype: torch.dtype, waits: DeviceWaits,
                    ranks: PeerRanks) -> None:
    """Memory of the sender; both sides say in it what they have done. It is ready before the other side hears of it."""
    size = HEAD_BYTES + LINK_SLOT_BYTES
    mine = SharedDeviceMemory.create(size, waits.device)
    ranks.memory.append(mine)
    if not place.is_last:
        ranks.after = PeerLink(mine.bytes, dtype, *waits.sending(mine))
    after.send(memoryview(mine.handle))
    handle = bytearray(HANDLE_BYTES)
    before.receive(memoryview(handle))
    if not place.is_first:
        theirs = SharedDeviceMemory.open(bytes(handle), size, waits.device)
        ranks.memory.append(theirs)
        ranks.before = PeerLink(theirs.bytes, dtype, *waits.receiving(theirs))
