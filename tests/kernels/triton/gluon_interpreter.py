"""Runs Gluon kernels on the CPU, which Triton's interpreter cannot, and checks their protocol rather than only sums.

`with interpreting() as runs:` turns every launch of a Gluon kernel into a run of its Python text with stand-ins for
what it imports, one program after another in any order, each with its partitions in any interleaving. Copies and
MMAs are as late as the hardware may make them: what is not waited for is not there, and whoever touches it, fills a
place that is still read or was never read, counts bytes wrongly, waits for what never comes, reads what the kernel
before still writes or meets another program's numbers other than by atomics gets a `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from tests.kernels.triton.gluon_memory import (
    Barrier,
    Descriptor,
    InFlight,
    Mma,
    Pointer,
    Races,
    Slot,
    Value,
    View,
    demand,
    plain,
    scalar,
)
from tests.kernels.triton.gluon_partitions import Baton, Partition
from tests.kernels.triton.interpreter import fixed_order_matmul

SHARED_BYTES = 227 * 1024
"""Of a program on Hopper."""


@dataclass
class Copy:
    """What a program asked the copy engine for; `early` before gdc_wait."""

    program: int
    name: str
    place: tuple[int, ...]
    early: bool


@dataclass
class Run:
    """One launch."""

    programs: int
    copies: list[Copy] = field(default_factory=list)
    races: Races = field(init=False)

    def __post_init__(self) -> None:
        self.races = Races(self.programs)


class Program:
    """One program: its shared memory, its partitions, and a method for each thing that a kernel may call."""

    def __init__(self, number: int, run: Run, options: dict[str, Any], seed: int | None) -> None:
        self.number, self.run = number, run
        first = Partition("the program", options.get("num_warps", 4), not options.get("launch_pdl"))
        self.baton = Baton(first, None if seed is None else seed * 1009 + number)
        self.waited = first.may_read
        self.slots: list[Slot] = []
        self.shared = 0

    def specialize(self, parts: list[tuple[FunctionType, tuple[Any, ...]]], warps: list[int], regs: list[int]) -> Any:
        demand(len(parts) == len(warps) + 1 == len(regs) + 1, f"{len(parts)} partitions, but {warps} and {regs}")
        demand(all(each >= 24 and each % 8 == 0 for each in regs), f"a worker cannot have {regs} registers")
        first = self.baton.holder
        workers = [first.fork(part[0].__name__, count) for part, count in zip(parts[1:], warps)]
        first.name = parts[0][0].__name__
        for function, given in parts:
            for name, value in zip(function.__code__.co_varnames, given):
                if isinstance(value, View):
                    value.named(name)
        bodies = [(who, partial(function, *given)) for who, (function, given) in zip([first, *workers], parts)]
        result = self.baton.run(bodies)
        for worker in workers:
            first.knows.learn_all(worker.knows.told(worker))
        return result

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> View:
        demand(all(side & (side - 1) == 0 for side in shape[1:]), f"sides of {shape} must be powers of two")
        self.shared += prod(shape) * dtype.itemsize
        demand(self.shared <= SHARED_BYTES, f"{self.shared} bytes of shared memory")
        poison = float("nan") if dtype.is_floating_point else -1
        slots = [Slot(torch.full(shape[1:], poison, dtype=dtype), layout, "a place", self) for _ in range(shape[0])]
        self.slots += slots
        return View(slots)

    def make_barrier(self, view: View, count: int) -> None:
        demand(view.one.barrier is None, "a barrier is made twice")
        view.one.barrier = Barrier(count)

    def fence(self) -> None:
        for slot in self.slots:
            slot.fenced = True
            if slot.barrier is not None:
                slot.barrier.fenced = True

    def expect(self, barrier: View, size: int, pred: Any = True) -> None:
        me = self.baton.step()
        if pred:
            barrier.barrier.arrive(me.knows.told(me), size=size)

    def arrive(self, barrier: View, *, count: int = 1, pred: Any = True) -> None:
        me = self.baton.step()
        if pred:
            barrier.barrier.arrive(me.knows.told(me), count)

    def wait(self, barrier: View, parity: Any, pred: Any = True, deps: Any = ()) -> None:
        me, found, half = self.baton.step(), barrier.barrier, int(parity)
        if not pred:
            return
        demand(half in (0, 1), f"a parity of {half}")
        self.baton.until(lambda: found.may_pass(half), lambda: f"parity {half} of {barrier.one.name} ({found})")
        found.passed(half, me.knows)

    def copy(self, source: Descriptor, place: list[Any], barrier: View, target: View, pred: Any = True) -> None:
        me = self.baton.step()
        if not pred:
            return
        slot, corner = target.one, tuple(map(int, place))
        demand(me.may_read or not source.late, f"{source.name} is asked for before gdc_wait")
        demand(barrier.barrier.fenced, "a copy before the fence after its barrier was made")
        demand(target.part is not None, f"{source.name} is copied to what is transposed")
        assert target.part is not None and target.data is not None
        slot.may_be_filled(target.part, source.name, me.knows, me)
        demand(slot.layout == source.layout, f"{source.name} and its place are laid out in two ways")
        found = source.block(corner)
        room = target.data
        demand((room.shape, room.dtype) == (found.shape, found.dtype), f"{source.name} and its place differ")
        barrier.barrier.copy(slot, target.part, found)
        self.run.copies.append(Copy(self.number, source.name, corner, not me.may_read))

    def multiply(self, a: View | Value, b: View, acc: Value, *, use_acc: Any = True, is_async: bool = False) -> Value:
        """`a` may also lie in registers."""
        me, slots = self.baton.step(), [each.one for each in (a, b) if isinstance(each, View)]
        demand(me.warps % 4 == 0, f"{me.name} multiplies with {me.warps} warps")
        for slot in slots:
            slot.may_be_read(me.knows, me)
            demand(slot.fenced, f"an MMA of what is stored without a fence, in {slot.name}")
        assert a.data is not None and b.data is not None
        (m, k), n = a.data.shape, b.data.shape[1]
        demand(b.data.shape[0] == k and acc.shape == [m, n], f"{a.data.shape} by {b.data.shape} to {acc.shape}")
        demand(a.data.dtype == b.data.dtype and not (m % 64 or n % 8 or k % 16), "no such MMA of the tensor cores")
        mma = Mma(slots)
        for slot in slots:
            slot.readers.add(mma)
            slot.unread.clear()
        me.mmas.append(mma)
        result = InFlight(_product(a.data.float(), b.data.float()) + (acc.held if use_acc else 0), mma)
        return result if is_async else self.multiply_wait(0, deps=(result,))

    def multiply_wait(self, outstanding: int = 0, deps: tuple[Value, ...] = ()) -> Any:
        me = self.baton.step()
        while len(me.mmas) > outstanding:
            mma = me.mmas.pop(0)
            for slot in mma.reads:
                slot.readers.discard(mma)
                slot.read[me] = me.knows.now
        done = [
            Value(dep.held) if isinstance(dep, InFlight) and dep.mma not in me.mmas else dep for dep in deps
        ]
        return done[0] if len(done) == 1 else tuple(done)

    def load_shared(self, view: View) -> Value:
        """Shared memory to registers, which may be its only reading."""
        me, slot = self.baton.step(), view.one
        slot.may_be_read(me.knows, me)
        slot.unread.clear()
        slot.read[me] = me.knows.now
        assert view.data is not None
        return Value(view.data.clone())

    def store_shared(self, view: View, value: Value) -> None:
        assert view.data is not None
        view.one.store(view.data, value.data, self.baton.step())

    def multiply_registers(self, a: Value, b: Value, acc: Value) -> Value:
        """Operands and sums in registers, one matrix or a batch of them: it is done when it returns."""
        self.baton.step()
        (*batch, m, k), n = a.shape, b.shape[-1]
        demand([b.shape, acc.shape] == [[*batch, k, n], [*batch, m, n]], f"{a.shape} by {b.shape} to {acc.shape}")
        floats = a.dtype == b.dtype in (torch.bfloat16, torch.float16) and acc.dtype == torch.float32 and not k % 16
        known = floats or (a.dtype == b.dtype == torch.int8 and acc.dtype == torch.int32 and not k % 32)
        demand(known and not (m % 16 or n % 8), "no such MMA of the tensor cores known here")
        wide = a.data.float() if floats else a.data.int()
        return Value(_product(wide, b.data.to(wide.dtype)) + acc.data)

    def load(
        self, pointer: Pointer, mask: Value | None = None, other: Any = 0, cache_modifier: str = "",
        eviction_policy: str = "",
    ) -> Value:  # fmt: skip
        demand(self.baton.step().may_read or not pointer.late, "a load before gdc_wait")
        place, real = pointer.checked(mask)
        self.run.races.touch(self.number, pointer.flat, place[real], writes=False)
        found = pointer.flat[place]
        return Value(torch.where(real, found, torch.full_like(found, plain(other))))

    def store(self, pointer: Pointer, value: Any, mask: Value | None = None) -> None:
        me = self.baton.step()
        demand(me.may_read, "a store before gdc_wait")
        place, real = pointer.checked(mask)
        data = torch.as_tensor(plain(value))
        demand(data.ndim == 0 or data.shape == place.shape, f"{tuple(data.shape)} stored at {tuple(place.shape)}")
        self.run.races.touch(self.number, pointer.flat, place[real], writes=True)
        pointer.flat[place[real]] = data.to(pointer.flat.dtype).expand(place.shape)[real]
        me.unpublished = True

    def barrier(self) -> None:
        self.baton.holder.unpublished = False

    def atomic_add(self, pointer: Pointer, value: Any, sem: str = "acq_rel") -> Value:
        me = self.baton.step()
        demand(me.may_read, "an atomic before gdc_wait")
        demand(sem == "acq_rel" and not me.unpublished, "an atomic that does not publish the stores before it")
        place, _ = pointer.checked(None)
        demand(place.ndim == 0, "atomics of blocks are not known here")
        self.run.races.meet(self.number, pointer.flat, place)
        before = pointer.flat[place].clone()
        pointer.flat[place] += plain(value)
        return Value(before)

    def gdc_wait(self) -> None:
        self.baton.step().may_read = self.waited = True

    def end(self) -> None:
        self.baton.holder.end()
        demand(self.waited, "a program ended without gdc_wait")
        landing = [slot.name for slot in self.slots if slot.landing or (slot.barrier and slot.barrier.expected)]
        demand(not landing, f"a program ended with copies under way: {landing}")
        unread = [slot.name for slot in self.slots if slot.unread]
        demand(not unread, f"a program ended with copies that no MMA has read: {unread}")


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(fixed_order_matmul(a.numpy(), b.numpy()))


def _language(program: Program) -> Any:
    """`gl`, as far as kernels of the repository use it."""

    def arange(start: int, end: int, layout: Any = None) -> Value:
        demand((end - start) & (end - start - 1) == 0, f"a range of {end - start} is no power of two")
        return Value(torch.arange(start, end, dtype=torch.int32))

    def zeros(shape: Collection[int], dtype: torch.dtype, layout: Any = None) -> Value:
        demand(all(side & (side - 1) == 0 for side in shape), f"sides of {shape} must be powers of two")
        return Value(torch.zeros(tuple(shape), dtype=dtype))

    def static_range(*bounds: int) -> Iterable[int]:
        demand(all(isinstance(each, int) for each in bounds), "a static range of what is known at run time only")
        return range(*bounds)

    def stacked(a: Value, b: Value) -> Tensor:
        return torch.stack([a.data, b.data], -1)

    def extreme(function: Callable[..., Tensor]) -> Callable[..., Value]:
        def of(a: Any, b: Any) -> Value:
            """A number has the type of the block that it is compared with."""
            kind = next((each.dtype for each in (a, b) if isinstance(each, Value)), None)
            return Value(function(*(each.data if isinstance(each, Value) else torch.as_tensor(each, dtype=kind)
                                    for each in (a, b))))

        return of

    def full(shape: Collection[int], value: float, dtype: torch.dtype, layout: Any = None) -> Value:
        return Value(zeros(shape, dtype).data + value)

    def where(condition: Value, one: Any, other: Any) -> Value:
        return Value(torch.where(condition.data, plain(one), plain(other)))

    return SimpleNamespace(
        int32=torch.int32, int64=torch.int64, float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16,
        float8e4nv=torch.float8_e4m3fn, int16=torch.int16, int8=torch.int8,
        arange=arange, zeros=zeros, full=full, where=where, static_range=static_range,
        zeros_like=lambda value: Value(torch.zeros_like(value.data)), exp2=lambda value: Value(torch.exp2(value.data)),
        fma=lambda a, b, c: Value(plain(a) * plain(b) + plain(c)),
        max=lambda value, axis: Value(value.data.amax(axis)), sum=lambda value, axis: Value(value.data.sum(axis)),
        maximum=extreme(torch.maximum), minimum=extreme(torch.minimum),
        rsqrt=lambda value: Value(value.data.rsqrt()), split=lambda value: tuple(map(Value, value.data.unbind(-1))),
        SliceLayout=lambda dim, parent: None, DotOperandLayout=lambda operand, parent, width: None,
        convert_layout=lambda value, layout, assert_trivial=False: value, join=lambda a, b: Value(stacked(a, b)),
        broadcast=lambda a, b: (Value(a.data.expand(b.data.shape)), b),
        program_id=lambda axis: scalar(program.number), num_programs=lambda axis: scalar(program.run.programs),
        allocate_shared_memory=program.allocate, thread_barrier=program.barrier,
        warp_specialize=program.specialize, load=program.load, store=program.store, atomic_add=program.atomic_add,
    )  # fmt: skip


def _stand_ins(program: Program) -> list[tuple[Any, Any]]:
    barriers = SimpleNamespace(
        init=program.make_barrier,
        expect=program.expect,
        arrive=program.arrive,
        wait=program.wait,
        MBarrierLayout=hopper.mbarrier.MBarrierLayout,
    )
    return [
        (gl, _language(program)),
        (hopper.mbarrier, barriers),
        (hopper.tma, SimpleNamespace(async_copy_global_to_shared=program.copy)),
        (hopper.warpgroup_mma, program.multiply),
        (hopper.warpgroup_mma_wait, program.multiply_wait),
        (ampere.mma_v2, program.multiply_registers),
        (hopper.fence_async_shared, program.fence),
        (cuda.gdc_wait, program.gdc_wait),
        (cuda.gdc_launch_dependents, lambda: None),
    ]


def _python(kernel: GluonJITFunction, program: Program, assembly: Mapping[str, Any]) -> FunctionType:
    """The kernel's text, in a copy of its module and those of its helpers, where stand-ins and helpers' texts are."""
    stand_ins = _stand_ins(program)
    module: dict[str, Any] = {}
    for known in kernel.fn.__globals__.values():
        module |= known.fn.__globals__ if isinstance(known, GluonJITFunction) else {}
    module |= dict(kernel.fn.__globals__, range=lambda *bounds: map(scalar, range(*map(int, bounds))))
    for name, known in list(module.items()):
        if name in assembly:
            module[name] = assembly[name]
        elif isinstance(known, GluonJITFunction):
            module[name] = FunctionType(known.fn.__code__, module, name, known.fn.__defaults__)
        else:
            known = known.value if isinstance(known, gl.constexpr) else known
            module[name] = next((ours for theirs, ours in stand_ins if known is theirs), known)
    return FunctionType(kernel.fn.__code__, module, kernel.fn.__name__, kernel.fn.__defaults__)


def _argument(name: str, given: Any, late: bool) -> Any:
    if isinstance(given, TensorDescriptor):
        return Descriptor(name, given, late)
    if isinstance(given, Tensor):
        extent = 1 + sum((side - 1) * step for side, step in zip(given.shape, given.stride()))
        return Pointer(given.as_strided((extent,), (1,)), scalar(0), late)
    return scalar(given)


@contextmanager
def interpreting(
    order: Callable[[int], Iterable[int]] = range,
    seed: int | None = None,
    constant: Collection[str] = ("weight",),
    assembly: Mapping[str, Any] | None = None,
) -> Iterator[list[Run]]:
    """Launches of Gluon kernels run here, their programs in this order, their partitions in an order of this seed
    (None: each as far as it can).

    `assembly`: what takes the place of helpers that are assembler.
    `constant`: parameters that no kernel writes. All others are forbidden before gdc_wait if a launch sets launch_pdl.
    """
    runs: list[Run] = []

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        arguments = dict(zip([each.name for each in self.params], given)) | named
        values = {
            each.name: arguments[each.name] if each.is_constexpr
            else _argument(each.name, arguments[each.name], each.name not in constant)
            for each in self.params
        }  # fmt: skip
        runs.append(Run(grid[0]))
        for number in order(grid[0]):
            program = Program(number, runs[-1], named, seed)
            _python(self, program, assembly or {})(**values)
            program.end()

    GluonJITFunction.run = run
    try:
        yield runs
    finally:
        del GluonJITFunction.run  # its own: the inherited one is back
