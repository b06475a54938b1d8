"""What a rank says to the others inside a step: to the tensor ranks of its own stage, and to the neighbouring stages.

Every rank of a group makes the same calls in the same order. Nothing here is summed in an order that depends on timing:
ranks exchange values, and each makes the same additions as one rank alone would (`quire.kernels.slices`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.slices import Node, RankTree, finish_tree
from quire.parallel.shared_head import HeadMemory

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """A group for kernels of the CPU's library that exchange by themselves: the ranks share memory."""

    address: int
    steps: Callable[[RankTree], tuple[int, int]]
    """What finishes a tree, as kernels read it: address and number of the steps."""
    check: Callable[[int], None]
    """Raises unless what the kernel returned is 0."""
    other_calls: Callable[[], int]
    """Exchanges so far that no kernel made by itself."""


class TensorGroup(ABC):
    """The tensor ranks of one stage, seen from one of them.

    `exchange` is all that an implementation must have; the rest is made of it, and overridden where it can be faster.
    Tensors are contiguous.
    """

    on_device: bool = False
    """Calls are launches on a GPU: the host must not look at values, and every rank has the logits and draws. Else
    tensors are on the CPU, and the first rank draws."""

    in_kernels: KernelGroup | None = None
    """None: no kernel exchanges anything by itself."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.waited_ns = 0
        """Nanoseconds spent waiting for other ranks so far."""

    @abstractmethod
    def exchange(self, mine: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        """What every rank gave, flat, in the order of the ranks. The type is the same. Where lengths differ, `counts`
        are those of all ranks."""

    def settle(self) -> None:  # noqa: B027 (most have nothing to do)
        """A step ends here: whoever replays steps begins each in the same state."""

    def room(self, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """[rows, columns] memory from which `sum_nodes` and `gather` pass values on without a copy, or None.

        Valid for the next of these calls only.
        """
        return None

    def rows_at_once(self, row_bytes: int) -> int:
        """Most rows of so many bytes (on the rank that has most) that one `sum_nodes` or `gather` takes."""
        return UNLIMITED

    def sum_nodes(self, nodes: Tensor, tree: RankTree, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """[rows, columns]: the sum over the tree, of which each rank brings nodes [its nodes, rows, columns]; then the
        bias, then the residual. Every rank has it."""
        _, rows, columns = nodes.shape
        values: dict[Node, Tensor] = {}
        for rank, theirs in enumerate(self.exchange(nodes)):
            own = tree.nodes(rank)
            values.update(zip(own, theirs.view(len(own), rows, columns), strict=True))
        found: Tensor = finish_tree(tree.total, values)
        found = found if bias is None else found + bias
        return found if residual is None else found + residual

    def sum_parts(self, part: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """The sum of what the ranks bring, then bias and residual: in float32, in the order of the ranks, rounded
        once. For sums whose bits may depend on the number of ranks."""
        first, *others = self.exchange(part)
        total = first.float()
        for other in others:
            total = total + other
        total = total.view(part.shape)
        total = total if bias is None else total + bias
        return (total if residual is None else total + residual).to(part.dtype)

    def gather(self, mine: Tensor, widths: Sequence[int], out: Tensor | None) -> None:
        """Into `out` [rows, sum of widths] of whoever has one: each rank's columns [rows, widths[rank]] side by
        side."""
        parts = self.exchange(mine)
        if out is not None:
            start = 0
            for part, width in zip(parts, widths, strict=True):
                out[:, start : start + width] = part.view(-1, width)
                start += width

    def pick(self, mine: Tensor, owners: Tensor) -> Tensor:
        """[rows, columns] whose row i is that of rank owners[i] (int64); every rank gives as many rows."""
        everybody = torch.stack([part.view(mine.shape) for part in self.exchange(mine)])
        return everybody[owners, torch.arange(mine.shape[0], device=owners.device)]


    def maximum(self, mine: Tensor) -> Tensor:
        """The largest of the ranks' values, element by element: an activation scale that all must agree on."""
        return torch.stack(self.exchange(mine)).amax(0).view(mine.shape)

    def broadcast(self, message: bytes | None) -> bytes:
        """What rank 0 says, to everybody; the others pass None."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
        return self.exchange(mine)[0].numpy().tobytes()

    def close(self) -> None:  # noqa: B027 (most have nothing to let go of)
        """Let go of memory and connections. Idempotent."""


class Link(ABC):
    """One direction between two ranks of neighbouring stages: bytes arrive in the order in which they were sent."""

    def __init__(self) -> None:
        self.waited_ns = 0
        """Nanoseconds spent waiting for the other side so far."""

    @abstractmethod
    def send(self, data: memoryview) -> None:
        """Blocks until all of it is on its way. RankLostError where the other side is gone."""

    @abstractmethod
    def receive(self, into: memoryview) -> None:
        """Blocks until `into` is full."""

    def close(self) -> None:  # noqa: B027 (most have nothing to let go of)
        """Let go of memory and connections. Idempotent."""


@dataclass(slots=True)
class Collectives:
    """Everybody whom a rank talks to. Stages form a ring for each tensor rank: the last one sends to the first."""

    group: TensorGroup | None
    """The tensor ranks of this stage; None where there is one."""
    before: Link | None = None
    """From the stage before; on the first stage from the last. None where there is one stage."""
    after: Link | None = None
    """To the stage after; on the last stage to the first."""
    device_waited_ns: Callable[[], int] | None = None
    """What ranks on GPUs have waited, which talk to each other on the device."""
    head: HeadMemory | None = None
    """Of the first and the last stage, where they share a machine."""

    @property
    def waited_ns(self) -> int:
        """Nanoseconds spent waiting for other ranks so far."""
        return self.stages_waited_ns + (0 if self.group is None else self.group.waited_ns)

    @property
    def stages_waited_ns(self) -> int:
        """Those spent waiting for other stages; a GPU counts no others apart from them."""
        on_device = 0 if self.device_waited_ns is None else self.device_waited_ns()
        return on_device + sum(link.waited_ns for link in (self.before, self.after) if link is not None)

    def close(self) -> None:
        for each in (self.group, self.before, self.after):
            if each is not None:
                each.close()


def send_tensor(link: Link, tensor: Tensor) -> None:
    """The bytes of a contiguous tensor; the other side knows its shape and type."""
    if tensor.numel():
        link.send(tensor.contiguous().view(-1).numpy().data.cast("B"))


def receive_tensor(link: Link, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = torch.empty(*shape, dtype=dtype)
    if tensor.numel():
        link.receive(tensor.view(-1).numpy().data.cast("B"))
    return tensor
