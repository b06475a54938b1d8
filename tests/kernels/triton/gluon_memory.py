"""What Gluon kernels hold in `gluon_interpreter`: numbers, pointers, and shared memory that knows who still uses it."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SWIZZLED = 8
"""Rows after which the pattern repeats by which a place of 128 bytes a row is laid out."""
WIDTH = 128
"""Bytes after which it repeats along a longer row."""


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

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __bool__(self) -> bool:
        demand(self.held.ndim == 0, "a block decides nothing")
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)


def _operators() -> None:
    def truncated(a: Any, b: Any) -> Tensor:
        return torch.div(a, b, rounding_mode="trunc")

    functions = {name: getattr(operator, name) for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne")}
    functions["truediv"] = operator.truediv
    functions |= {"and": operator.and_, "or": operator.or_, "floordiv": truncated, "mod": torch.fmod,
                  "rshift": operator.rshift}
    for name, function in functions.items():
        setattr(Value, f"__{name}__", lambda a, b, f=function: Value(f(a.data, plain(b))))
    for name in ("add", "sub", "mul", "truediv"):
        setattr(Value, f"__r{name}__", lambda a, b, f=functions[name]: Value(f(b, a.data)))


_operators()


def scalar(number: float) -> Value:
    return Value(torch.tensor(number, dtype=torch.float32 if isinstance(number, float) else torch.int32))


Part = tuple[range, ...]
"""Of a place: a range of each of its dimensions."""


def overlap(one: Part, other: Part) -> bool:
    return all(a.start < b.stop and b.start < a.stop for a, b in zip(one, other))


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
        fits = real.ndim == place.ndim and all(a in (1, b) for a, b in zip(real.shape, place.shape))
        demand(fits, f"a mask of {tuple(real.shape)} for pointers of {tuple(place.shape)}")
        real = real.expand(place.shape)
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
    """One place of shared memory. Copies or stores fill it, all or a part of it; MMAs read all."""

    data: Tensor
    layout: Any
    name: str
    program: Any
    landing: list[Part] = field(default_factory=list)
    """Parts that are asked for and not waited for."""
    unread: list[Part] = field(default_factory=list)
    """Parts that have landed and that no MMA has begun to read."""
    filled: list[tuple[Barrier, int]] = field(default_factory=list)
    """The barriers and their phases that tell of the last copies."""
    readers: set[Mma] = field(default_factory=set)
    read: dict[Any, int] = field(default_factory=dict)
    """When each partition has last waited for an MMA that read it."""
    stored_by: Any = None
    """The partition that has stored here, if no copy has."""
    fenced: bool = True
    """Whether a fence has followed the last store: without one, MMAs and copies may come before it."""
    barrier: Barrier | None = None

    def may_be_filled(self, part: Part, name: str, knows: Knowledge, me: Any) -> None:
        def meets(others: list[Part]) -> bool:
            return any(overlap(part, other) for other in others)

        demand(self.fenced, f"{name} is copied over what is stored without a fence, in {self.name}")

        demand(not self.readers, f"{name} is copied over what an MMA still reads, in {self.name}")
        demand(not meets(self.landing), f"{name} is copied over a copy that nobody waited for, in {self.name}")
        demand(not meets(self.unread), f"{name} is copied over what no MMA has read, in {self.name}")
        told = all(who is me or knows.of(who) >= time for who, time in self.read.items())
        demand(told, f"{name} is copied over what an MMA still reads for all that is known, in {self.name}")

    def store(self, part: Tensor, values: Tensor, me: Any) -> None:
        demand(not self.readers, f"a store over what an MMA still reads, in {self.name}")
        demand(not self.landing, f"a store over a copy that nobody waited for, in {self.name}")
        demand(self.stored_by in (None, me), f"two partitions store in {self.name}")
        demand(part.shape == values.shape, f"{tuple(values.shape)} stored in {tuple(part.shape)} of {self.name}")
        part.copy_(values)
        self.fenced = False
        if not self.filled:
            self.stored_by = me

    def asked_for(self, part: Part, barrier: Barrier) -> None:
        """The first copy after an MMA poisons all: what no copy fills this time is of no use."""
        if not self.landing and not self.unread:
            self.data.fill_(float("nan") if self.data.dtype.is_floating_point else -1)
            self.filled.clear()
        self.landing.append(part)
        self.filled.append((barrier, barrier.phase))

    def landed(self, part: Part, found: Tensor) -> None:
        self.data[tuple(slice(each.start, each.stop) for each in part)] = found
        self.landing.remove(part)
        self.unread.append(part)

    def may_be_read(self, knows: Knowledge, me: Any) -> None:
        if self.stored_by is not None:
            demand(self.stored_by is me, f"an MMA of what another partition has stored, in {self.name}")
            return
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
    landing: list[tuple[Slot, Part, Tensor]] = field(default_factory=list)
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

    def copy(self, slot: Slot, part: Part, found: Tensor) -> None:
        self.asked += found.numel() * found.element_size()
        demand(self.asked <= self.expected, f"{self.asked} bytes asked for, {self.expected} expected")
        self.landing.append((slot, part, found))
        slot.asked_for(part, self)

    def may_pass(self, parity: int) -> bool:
        """As the hardware sees it, to which all phases of a parity but the present one have ended."""
        return parity != self.phase & 1 or (self.came == self.count and self.asked == self.expected)

    def passed(self, parity: int, knows: Knowledge) -> None:
        if parity == self.phase & 1:
            self.end_phase()
        knows.learn_all(self.told)

    def end_phase(self) -> None:
        for slot, part, found in self.landing:
            slot.landed(part, found)
        self.told.learn_all(self.coming)
        self.told.learn(self, self.phase)
        self.phase, self.came, self.expected, self.asked, self.landing = self.phase + 1, 0, 0, 0, []
        self.coming = Knowledge()

    def __str__(self) -> str:
        bytes_of = f", {self.asked} of {self.expected} bytes are asked for" if self.expected else ""
        return f"phase {self.phase}, in which {self.came} of {self.count} came{bytes_of}"


class View:
    """Shared memory as kernels hold it: of all slots, or of one, of a part of it or transposed."""

    def __init__(self, slots: list[Slot], data: Tensor | None = None, part: Part | None = None) -> None:
        self.slots, self.data, self.part = slots, data, part
        """`part`: which of the slot, where it may be filled; None if transposed, or of all slots."""

    def index(self, place: Any) -> View:
        demand(self.data is None and 0 <= int(place) < len(self.slots), f"place {int(place)} of {len(self.slots)}")
        slot = self.slots[int(place)]
        return View([slot], slot.data, tuple(range(side) for side in slot.data.shape))

    def slice(self, start: int, length: int, dim: int = 0) -> View:
        demand(isinstance(start, int) and isinstance(length, int), "a slice of what is known at run time only")
        demand(self.part is not None, "a slice of other than a place as it lies")
        assert self.part is not None and self.data is not None
        sides, pattern = self.part[dim], WIDTH // self.data.element_size() if dim else SWIZZLED
        what = f"{'columns' if dim else 'rows'} {start} + {length}"
        demand(start >= 0 and start + length <= len(sides), f"{what} of {len(sides)}")
        step = pattern // 4  # an MMA may read 32 bytes of a row, a copy fills whole patterns
        if dim and not (start % step or length % step) and (start % pattern or length % pattern):
            return View(self.slots, self.data.narrow(dim, start, length))
        demand(start % pattern == length % pattern == 0, f"a slice of {what} cuts the pattern")
        part = tuple(sides[start : start + length] if at == dim else each for at, each in enumerate(self.part))
        return View(self.slots, self.data.narrow(dim, start, length), part)

    def load(self, layout: Any) -> Value:
        return self.one.program.load_shared(self)  # type: ignore[no-any-return]

    def store(self, value: Value) -> None:
        self.one.program.store_shared(self, value)

    @property
    def dtype(self) -> torch.dtype:
        return self.slots[0].data.dtype

    @property
    def shape(self) -> list[int]:
        return [len(self.slots), *self.slots[0].data.shape] if self.data is None else list(self.data.shape)

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
        self.sizes: dict[int, int] = {}
        """Bytes of a number of each tensor."""

    def _cells(self, flat: Tensor, places: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Who was last at the numbers of a tensor, and where these places are there. A tensor may also come as numbers
        of another size: then there are cells of the smaller size, and a larger number has several."""
        address, size = flat.data_ptr(), flat.element_size()
        if address not in self.last:
            self.sizes[address] = size
            self.last[address] = {name: torch.full((2, len(flat)), -1, dtype=torch.int32) for name in ("write", "read")}
        held = self.sizes[address]
        missing = -(-flat.nbytes // held) - self.last[address]["read"].shape[1]
        if missing > 0:  # it came as its first part before
            self.last[address] = {name: torch.nn.functional.pad(cells, (0, missing), value=-1)
                                  for name, cells in self.last[address].items()}
        if size < held:
            self.last[address] = {name: cells.repeat_interleave(held // size, 1)
                                  for name, cells in self.last[address].items()}
            self.sizes[address] = size
        elif size > held:
            places = places[..., None] * (size // held) + torch.arange(size // held)
        return self.last[address], places

    def touch(self, program: int, flat: Tensor, places: Tensor, writes: bool) -> None:
        last, places = self._cells(flat, places)
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
