"""Connects ranks on GPUs of one machine: each makes memory for what it says, and opens the others' (CUDA IPC)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.kernels.triton import meeting
from quire.parallel.collectives import Collectives, TensorGroup
from quire.parallel.cuda_memory import HANDLE_BYTES, SharedDeviceMemory
from quire.parallel.peers import HEAD_BYTES, LINK_SLOT_BYTES, PeerGroup, PeerLink, check_state, group_bytes
from quire.parallel.place import Place
from quire.worker.gpu.passes import DeviceRanks

PATIENCE = 120.0
"""Seconds that the device waits for another rank, which may be compiling kernels."""
_TAKEN = 64
"""Bytes from the beginning of a link's memory where the receiver says what it has taken; the sender says at 0."""


@dataclass(slots=True)
class PeerRanks(DeviceRanks):
    place: Place = field(default_factory=Place)
    state: Tensor = field(default_factory=lambda: torch.zeros(meeting.STATE_WORDS, dtype=torch.int64))
    memory: list[SharedDeviceMemory] = field(default_factory=list)

    def check(self) -> None:
        check_state(self.state, self.place.tensor_rank, self.place.tensor_size)

    @property
    def waited_ns(self) -> int:
        return int(self.state[1])

    def close(self) -> None:
        self.state[0] = meeting.STOPPED
        self.group = self.before = self.after = None
        if self.memory:
            torch.cuda.synchronize()
        while self.memory:
            self.memory.pop().close()


def connect_peers(host: Collectives, place: Place, device: torch.device, dtype: torch.dtype) -> PeerRanks:
    """Handles go round through the memory that ranks share on the host."""
    state = torch.zeros(meeting.STATE_WORDS, dtype=torch.int64, pin_memory=True)
    found = PeerRanks(place=place, state=state)
    if host.group is not None:
        found.group = _group(host.group, device, found)
    if host.after is not None and host.before is not None:
        _connect_stages(host, place, device, dtype, found)
    return found


def _group(host: TensorGroup, device: torch.device, ranks: PeerRanks) -> PeerGroup:
    mine = SharedDeviceMemory.create(group_bytes(), device)
    ranks.memory.append(mine)
    handles = host.exchange(torch.frombuffer(bytearray(mine.handle), dtype=torch.uint8))
    memories = []
    for rank, handle in enumerate(handles):
        theirs = mine
        if rank != host.rank:
            theirs = SharedDeviceMemory.open(handle.numpy().tobytes(), group_bytes(), device)
            ranks.memory.append(theirs)
        memories.append(theirs)
    flags = mine.bytes[:HEAD_BYTES].view(torch.int32)
    peers = torch.tensor([each.address for each in memories], dtype=torch.int64, device=device)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    meet = _launch(meeting.meet, peers, flags, counter, ranks.state, host.rank, PATIENCE)
    return PeerGroup(host.rank, [each.bytes for each in memories], meet)


def _connect_stages(host: Collectives, place: Place, device: torch.device, dtype: torch.dtype,
                    ranks: PeerRanks) -> None:
    """Memory of the sender; both sides count in it."""
    if host.after is None or host.before is None:
        return
    size = HEAD_BYTES + LINK_SLOT_BYTES
    mine = SharedDeviceMemory.create(size, device)
    ranks.memory.append(mine)
    host.after.send(memoryview(mine.handle))
    handle = bytearray(HANDLE_BYTES)
    host.before.receive(memoryview(handle))
    sent, taken, counter = _flag(mine, 0), _flag(mine, _TAKEN), torch.zeros(1, dtype=torch.int32, device=device)
    if not place.is_last:
        ranks.after = PeerLink(mine.bytes, dtype, _launch(meeting.wait_for, taken, counter, 0, ranks.state, PATIENCE),
                               _launch(meeting.post, sent, counter))
    if not place.is_first:
        theirs = SharedDeviceMemory.open(bytes(handle), size, device)
        ranks.memory.append(theirs)
        sent, taken, counter = (_flag(theirs, 0), _flag(theirs, _TAKEN),
                                torch.zeros(1, dtype=torch.int32, device=device))
        ranks.before = PeerLink(theirs.bytes, dtype, _launch(meeting.wait_for, sent, counter, 1, ranks.state, PATIENCE),
                                _launch(meeting.post, taken, counter))


def _flag(memory: SharedDeviceMemory, place: int) -> Tensor:
    return memory.bytes[place : place + 4].view(torch.int32)


def _launch(kernel: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: kernel(*arguments)
