"""What the CPU's kernels read of a step: the addresses and sizes of its context, taken once per step and checked."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.types import StepContext

_I32, _I64 = torch.int32, torch.int64


class StepNumber(int):
    """A number that is another in the next step, among the arguments of a kernel; `word` is its place in the step's
    words (`CpuStep.words`)."""

    word: int

    @classmethod
    def at(cls, word: int, value: int) -> StepNumber:
        number = cls(value)
        number.word = word
        return number


# Places in the words of a step. Those of cache group g begin at GROUP_WORDS + 4 * g: slots, table, stride, width.
ZERO, RESULTS, IDS, POSITIONS, QUERY_START, CONTEXT_LEN, SEQS, GROUP_WORDS = range(8)


@dataclass(slots=True)
class CpuStep:
    """The addresses of one StepContext; keeps its tensors alive."""

    ctx: StepContext
    tensors: tuple[object, ...]
    tokens: int
    seqs: int
    positions: int
    query_start: int
    context_len: int
    slots: list[int]
    tables: list[int]
    strides: list[int]
    widths: list[int]
    checked: set[tuple[int, ...]] = field(default_factory=set)
    rope: Tensor | None = None
    rope_ptr: int | None = None
    rot: int = 0

    def words(self, results: int, ids: int) -> list[int]:
        """Everything that a recorded step reads and that changes from step to step, in the order of the places above.
        `results` is where intermediate results lie."""
        words = [0, results, ids, self.positions, self.query_start, self.context_len, self.seqs]
        for group in zip(self.slots, self.tables, self.strides, self.widths, strict=True):
            words += group
        return words

    def addresses(self, ids: int) -> dict[int, int]:
        """The place of each address among the words."""
        found = {ids: IDS, self.positions: POSITIONS, self.query_start: QUERY_START, self.context_len: CONTEXT_LEN}
        for group, (slots, table) in enumerate(zip(self.slots, self.tables, strict=True)):
            found |= {slots: GROUP_WORDS + 4 * group, table: GROUP_WORDS + 4 * group + 1}
        return found


def read_step(ctx: StepContext) -> CpuStep:
    """Check the types of a step's tensors and take their addresses."""
    tokens, seqs = ctx.positions.shape[0], ctx.context_len.shape[0]
    _check(ctx.positions, _I64, (tokens,))
    _check(ctx.query_start, _I32, (seqs + 1,))
    _check(ctx.context_len, _I32, (seqs,))
    for slots in ctx.slots:
        _check(slots, _I64, (tokens,))
    for table in ctx.block_tables:
        _check(table, _I32, (seqs, table.shape[-1]))
    places = range(GROUP_WORDS, GROUP_WORDS + 4 * len(ctx.block_tables), 4)
    return CpuStep(
        ctx=ctx,
        tensors=(ctx.positions, ctx.query_start, ctx.context_len, ctx.slots, ctx.block_tables),
        tokens=tokens,
        seqs=StepNumber.at(SEQS, seqs),
        positions=ctx.positions.data_ptr(),
        query_start=ctx.query_start.data_ptr(),
        context_len=ctx.context_len.data_ptr(),
        slots=[slots.data_ptr() for slots in ctx.slots],
        tables=[table.data_ptr() for table in ctx.block_tables],
        strides=[StepNumber.at(at + 2, table.stride(0)) for at, table in zip(places, ctx.block_tables, strict=True)],
        widths=[StepNumber.at(at + 3, table.shape[1]) for at, table in zip(places, ctx.block_tables, strict=True)],
    )


def _check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_cpu:
        raise EngineError(f"the step wants {dtype} {shape}, not {tensor.dtype} {tuple(tensor.shape)}")
    if not tensor.is_contiguous() and not (tensor.dim() == 2 and tensor.stride(1) == 1):
        raise EngineError("the step's context must be contiguous")
