"""What Gluon kernels hold in `gluon_interpreter`: numbers, pointers, and shared memory that knows who still uses it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SWIZZLED = 8
"""Rows after which the pattern repeats by which a place of 128 bytes a row is laid out."""


class ProtocolError(Exception):
    """What a GPU would answer with wrong numbers, a hang or a fault, now and then."""


def demand(holds: bool, complaint: str) -> None:
    if not holds:
        raise ProtocolError(complaint)


def plain(value: Any) -> Any:
    return value.data if isinstance(value, Value) else value


class Value:
    """A block or a scalar (no dimensions); integers are of 32 bits and wrap, division truncates, as on the chip."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @property
    def data(self) -> Tensor:
        return self.held

    @property
    def shape(self) -> list[int]:
        return list(self.held.shape)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return Value(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.data.reshape(shape))

    def permute(self, order: list[int]) -> Value:
        return Value(self.data.permute(order))

    def __getitem__(self, place: Any) -> Value:
        return Value(self.data[place])

    def __bool__(self) -> bool:
        demand(self.held.ndim == 0, "a block decides nothing")
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)


def _operators() -> None:
    def truncated(a: Any, b: Any) -> Tensor:
        return torch.div(a, b, rounding_mode="trunc")

    functions = {name: getattr(operator, name) for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne")}
    functions |= {"and": operator.and_, "or": operator.or_, "floordiv": truncated, "mod": torch.fmod,
                  "rshift": operator.rshift}
    for name, function in functions.items():
        setattr(Value, f"__{name}__", lambda a, b, f=function: Value(f(a.data, plain(b))))
    for name in ("add", "sub", "mul"):
        setattr(Value, f"__r{name}__", lambda a, b, f=functions[name]: Value(f(b, a.data)))


_operators()


def scalar(number: int) -> Value:
    return Value(torch.tensor(number, dtype=torch.int32))


class InFlight(Value):
    """The sums of an MMA that no wait has yet returned as done: good for nothing but the next MMA."""

    def __init__(self, held: Tensor, mma: Mma) -> None:
        super().__init__(held)
        self.mma = mma

    @property
    def data(self) -> Tensor:
        raise ProtocolError("sums are used before their MMA is waited for")


class Pointer:
    """Into a tensor of the caller; `late` if the kernel before this one may still write it."""

    def __init__(self, flat: Tensor, place: Any, late: bool) -> None:
        self.flat, self.place, self.late = flat, place, late
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, self.place + offset, self.late)

    def checked(self, mask: Value | None) -> tuple[Tensor, Tensor]:
        """(places, mask) of the same shape, all that the mask lets through inside the tensor."""
        place = torch.as_tensor(plain(self.place)).long()
        real = torch.ones_like(place, dtype=torch.bool) if mask is None else plain(mask)
        demand(real.shape == place.shape, f"a mask of {tuple(real.shape)} for pointers of {tuple(place.shape)}")
        inside = (place >= 0) & (place < len(self.flat))
        demand(bool((inside | ~real).all()), "a pointer beyond its tensor")
        return torch.where(real, place, 0), real


class Descriptor:
    """A tensor for the copy engine: it copies whole blocks, and reads zeros beyond the tensor."""

    def __init__(self, name: str, described: TensorDescriptor, late: bool) -> None:
        self.name, self.base, self.layout, self.late = name, described.base, described.layout, late
        self.dtype, shape = described.base.dtype, list(described.block_shape)
        demand(all(side <= 256 and side & (side - 1) == 0 for side in shape), f"no block of the copy engine: {shape}")
        self.block_type = SimpleNamespace(shape=shape, nbytes=prod(shape) * self.dtype.itemsize)

    def block(self, corner: Collection[int]) -> Tensor:
        found = torch.zeros(self.block_type.shape, dtype=self.dtype)
        demand(len(corner) == found.ndim and min(corner) >= 0, f"a block at {corner}")
        part = self.base[tuple(slice(at, at + side) for at, side in zip(corner, found.shape))]
        found[tuple(slice(side) for side in part.shape)] = part
        return found


class Knowledge:
    """Up to which of its times everyone's deeds are known: of partitions, and of barriers, whose times are phases."""

    def __init__(self) -> None:
        self.times: dict[Any, int] = {}
        self.now = 0

    def of(self, who: Any) -> int:
        return self.times.get(who, -1)

    def learn(self, who: Any, time: int) -> None:
        self.times[who] = max(self.of(who), time)

    def learn_all(self, other: Knowledge) -> None:
        for who, time in other.times.items():
            self.learn(who, time)

    def told(self, me: Any) -> Knowledge:
        """A copy for others, with all that has been done up to now by whoever this is; what follows is not in it."""
        copy = Knowledge()
        copy.times = dict(self.times) | {me: self.now}
        self.now += 1
        return copy


@dataclass(eq=False)
class Slot:
    """One place of shared memory. A copy fills all of it or some of its rows; MMAs read all."""

    data: Tensor
    layout: Any
    name: str
    landing: list[range] = field(default_factory=list)
    """Rows that are asked for and not waited for."""
    unread: list[range] = field(default_factory=list)
    """Rows that have landed and that no MMA has begun to read."""
    filled: list[tuple[Barrier, int]] = field(default_factory=list)
    """The barriers and their phases that tell of the last copies."""
    readers: set[Mma] = field(default_factory=set)
    read: dict[Any, int] = field(default_factory=dict)
    """When each partition has last waited for an MMA that read it."""
    barrier: Barrier | None = None

    def may_be_filled(self, rows: range, name: str, knows: Knowledge, me: Any) -> None:
        def meets(others: list[range]) -> bool:
            return any(rows.start < other.stop and other.start < rows.stop for other in others)

        demand(not self.readers, f"{name} is copied over what an MMA still reads, in {self.name}")
        demand(not meets(self.landing), f"{name} is copied over a copy that nobody waited for, in {self.name}")
        demand(not meets(self.unread), f"{name} is copied over what no MMA has read, in {self.name}")
        told = all(who is me or knows.of(who) >= time for who, time in self.read.items())
        demand(told, f"{name} is copied over what an MMA still reads for all that is known, in {self.name}")

    def asked_for(self, rows: range, barrier: Barrier) -> None:
        """The first copy after an MMA poisons all: what no copy fills this time is of no use."""
        if not self.landing and not self.unread:
            self.data.fill_(float("nan") if self.data.dtype.is_floating_point else -1)
            self.filled.clear()
        self.landing.append(rows)
        self.filled.append((barrier, barrier.phase))

    def landed(self, rows: range, found: Tensor) -> None:
        self.data[rows.start : rows.stop] = found
        self.landing.remove(rows)
        self.unread.append(rows)

    def may_be_read(self, knows: Knowledge) -> None:
        demand(not self.landing, f"an MMA of what has been asked for but not waited for, in {self.name}")
        demand(bool(self.filled), f"an MMA of what nobody has asked for, in {self.name}")
        known = all(knows.of(barrier) >= phase for barrier, phase in self.filled)
        demand(known, f"an MMA of what others have waited for, in {self.name}")


@dataclass(eq=False)
class Mma:
    """A warpgroup_mma and the places that it reads until it is waited for."""

    reads: list[Slot]


@dataclass(eq=False)
class Barrier:
    """An mbarrier: a phase ends when as many as `count` came and as many bytes landed as they expect.

    Copies land as late as they may: when someone waits for them.
    """

    count: int
    fenced: bool = False
    phase: int = 0
    came: int = 0
    expected: int = 0
    asked: int = 0
    landing: list[tuple[Slot, range, Tensor]] = field(default_factory=list)
    coming: Knowledge = field(default_factory=Knowledge)
    """What those know who came in this phase."""
    told: Knowledge = field(default_factory=Knowledge)
    """What a wait tells of all phases that have ended."""

    def arrive(self, knows: Knowledge, count: int = 1, size: int = 0) -> None:
        demand(self.came + count <= self.count, f"phase {self.phase} is come to again and has not ended")
        self.came += count
        self.expected += size
        self.coming.learn_all(knows)
        if self.came == self.count and not self.expected:
            self.end_phase()

    def copy(self, slot: Slot, rows: range, found: Tensor) -> None:
        self.asked += found.numel() * found.element_size()
        demand(self.asked <= self.expected, f"{self.asked} bytes asked for, {self.expected} expected")
        self.landing.append((slot, rows, found))
        slot.asked_for(rows, self)

    def may_pass(self, parity: int) -> bool:
        """As the hardware sees it, to which all phases of a parity but the present one have ended."""
        return parity != self.phase & 1 or (self.came == self.count and self.asked == self.expected)

    def passed(self, parity: int, knows: Knowledge) -> None:
        if parity == self.phase & 1:
            self.end_phase()
        knows.learn_all(self.told)

    def end_phase(self) -> None:
        for slot, rows, found in self.landing:
            slot.landed(rows, found)
        self.told.learn_all(self.coming)
        self.told.learn(self, self.phase)
        self.phase, self.came, self.expected, self.asked, self.landing = self.phase + 1, 0, 0, 0, []
        self.coming = Knowledge()

    def __str__(self) -> str:
        bytes_of = f", {self.asked} of {self.expected} bytes are asked for" if self.expected else ""
        return f"phase {self.phase}, in which {self.came} of {self.count} came{bytes_of}"


class View:
    """Shared memory as kernels hold it: of all slots, or of one, of some of its rows or transposed."""

    def __init__(
        self, slots: list[Slot], data: Tensor | None = None, rows: range | None = None,
        reader: Callable[[View], Value] | None = None,
    ) -> None:
        self.slots, self.data, self.rows, self.reader = slots, data, rows, reader
        """`rows`: which of the slot's, where they may be filled; None if transposed, or of all slots."""

    def load(self, layout: Any) -> Value:
        assert self.reader is not None
        return self.reader(self)

    @property
    def dtype(self) -> torch.dtype:
        return self.slots[0].data.dtype

    def index(self, place: Any) -> View:
        demand(self.data is None and 0 <= int(place) < len(self.slots), f"place {int(place)} of {len(self.slots)}")
        slot = self.slots[int(place)]
        return View([slot], slot.data, range(len(slot.data)), self.reader)

    def slice(self, start: int, length: int, dim: int = 0) -> View:
        demand(isinstance(start, int) and isinstance(length, int), "a slice of what is known at run time only")
        assert self.rows is not None and self.data is not None
        if dim == 1:  # which only products read
            return View(self.slots, self.data[:, start : start + length], None)
        demand(dim == 0, "a slice of other than the rows of a place")
        demand(start >= 0 and start + length <= len(self.rows), f"rows {start} + {length} of {len(self.rows)}")
        demand(start % SWIZZLED == length % SWIZZLED == 0, f"a slice of rows {start} + {length} cuts the pattern")
        return View(self.slots, self.data[start : start + length], self.rows[start : start + length], self.reader)

    @property
    def shape(self) -> list[int]:
        return [len(self.slots), *self.slots[0].data.shape]

    def named(self, name: str) -> None:
        for place, slot in enumerate(self.slots):
            slot.name = f"{name}[{place}]"

    def permute(self, order: tuple[int, ...]) -> View:
        assert self.one is not None and self.data is not None
        return View(self.slots, self.data.permute(order))

    @property
    def one(self) -> Slot:
        demand(self.data is not None, "a whole ring where one of its places is meant")
        return self.slots[0]

    @property
    def barrier(self) -> Barrier:
        found = self.one.barrier
        demand(found is not None, "a barrier is used before it is made")
        assert found is not None
        return found


class Races:
    """Who last wrote and read each number of a launch, and what each program knows of the others by its atomics.

    Programs run one after another here, at once on a GPU: an access must follow another program's write (a write also
    its read) by way of atomics, not just by luck of the order. Of several readers only the last is remembered.
    """

    def __init__(self, programs: int) -> None:
        self.knows = torch.eye(programs, dtype=torch.int32)
        """[program, other]: up to which of its atomics the other's deeds are known to have come before."""
        self.published: dict[tuple[int, int], Tensor] = {}
        self.last: dict[int, dict[str, Tensor]] = {}

    def touch(self, program: int, flat: Tensor, places: Tensor, writes: bool) -> None:
        last = self.last.setdefault(
            flat.data_ptr(), {name: torch.full((2, len(flat)), -1, dtype=torch.int32) for name in ("write", "read")}
        )
        for kind in ("write", "read") if writes else ("write",):
            who, when = last[kind][:, places].long().unbind()
            other = (who >= 0) & (who != program)
            unknown = other & (when > self.knows[program, who.clamp(min=0)])
            demand(not bool(unknown.any()), f"a race with the last {kind} of another program")
        mine = torch.tensor([program, int(self.knows[program, program])], dtype=torch.int32)
        last["write" if writes else "read"][:, places] = mine.reshape(2, *(1 for _ in places.shape))

    def meet(self, program: int, flat: Tensor, place: Tensor) -> None:
        """An atomic: the program learns what those know who were here before, and they who come later what it knows."""
        here = (flat.data_ptr(), int(place))
        known = torch.maximum(self.knows[program], self.published.get(here, torch.zeros_like(self.knows[program])))
        self.knows[program] = known
        self.published[here] = known.clone()
        self.touch(program, flat, place, writes=False)
        self.knows[program, program] += 1
