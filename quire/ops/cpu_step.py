"""What the CPU kernels are told of a step and of a cache: checked once, then plain addresses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.types import HeadShape, LatentShape, LayerCache, StepContext

F32, I32, I64 = torch.float32, torch.int32, torch.int64
MAX_HEAD_DIM = 576  # MAX_DIM of attention.c
NO_TABLE = -1  # in place of a window: this operation writes to slots and follows no block table
STEP_FAULTS = {
    1: "query_start must rise from 0 to the number of tokens",
    2: "context_len must hold a sequence's queries and fit its block table",
    3: "a block table names a block outside the cache",
    4: "a slot lies outside the cache",
    5: "a detour leads outside its block table, is too short, or is that of several queries",
}


@dataclass(slots=True)
class CpuLayerCache(LayerCache):
    """A layer's cache with what its kernels need to know of it, taken once."""

    blocks: int
    k_ptr: int
    v_ptr: int
    """Of latents, which have no keys beside: theirs."""
    shape: HeadShape | LatentShape | None = None
    """The heads that read and write it, once they were found to suit it."""


class StepNumber(int):
    """A number that is another in the next step, among the arguments of a kernel; `word` is its place in the step's
    words (`Step.words`)."""

    word: int

    @classmethod
    def at(cls, word: int, value: int) -> StepNumber:
        number = cls(value)
        number.word = word
        return number


# Places in the words of a step. Those of cache group g begin at GROUP_WORDS + 4 * g: slots, table, stride, width.
ZERO, RESULTS, IDS, POSITIONS, QUERY_START, CONTEXT_LEN, SEQS, DETOURS, DETOUR_STRIDE, GROUP_WORDS = range(10)


@dataclass(slots=True)
class Step:
    """The addresses of one StepContext, taken once per step and not per layer; keeps its tensors alive."""

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
    detours: int | None = None
    detour_stride: int = 0
    checked: set[tuple[int, ...]] = field(default_factory=set)
    rope: Tensor | None = None
    rope_ptr: int | None = None
    rot: int = 0

    def words(self, results: int, ids: int) -> list[int]:
        """Everything that a recorded step reads and that changes from step to step, in the order of the places above.
        `results` is where intermediate results lie."""
        words = [0, results, ids, self.positions, self.query_start, self.context_len, self.seqs,
                 self.detours or 0, self.detour_stride]
        for group in zip(self.slots, self.tables, self.strides, self.widths, strict=True):
            words += group
        return words

    def addresses(self, ids: int) -> dict[int, int]:
        """The place of each address among the words."""
        found = {ids: IDS, self.positions: POSITIONS, self.query_start: QUERY_START, self.context_len: CONTEXT_LEN}
        if self.detours is not None:
            found[self.detours] = DETOURS
        for group, (slots, table) in enumerate(zip(self.slots, self.tables, strict=True)):
            found |= {slots: GROUP_WORDS + 4 * group, table: GROUP_WORDS + 4 * group + 1}
        return found


def rows_of(x: Tensor, width: int) -> int:
    """Rows of a contiguous float32 [rows, width] tensor; anything else must not reach a pointer."""
    shape = x.shape
    if len(shape) != 2 or shape[1] != width or x.dtype is not F32 or not x.is_contiguous() or not x.is_cpu:
        raise EngineError(
            f"the CPU kernels want a contiguous float32 [rows, {width}] tensor, not {x.dtype} {tuple(shape)} "
            f"with strides {x.stride()} on {x.device}"
        )
    return shape[0]


def dense(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() and tensor.is_cpu for tensor in tensors)


def vector(x: Tensor) -> int:
    """Length of a contiguous float32 vector."""
    shape = x.shape
    if len(shape) != 1 or x.dtype is not F32 or not x.is_contiguous() or not x.is_cpu:
        raise EngineError(f"the CPU kernels want a contiguous float32 vector, not {x.dtype} {tuple(shape)}")
    return shape[0]


def describe(cache: LayerCache) -> CpuLayerCache:
    """Check a cache's tensors against its spec and take their addresses."""
    if cache.spec.kind == "latent":
        return _describe_latents(cache)
    heads, dim = cache.spec.heads_of_pair()
    k, v, blocks, size = cache.k, cache.v, cache.num_blocks, cache.block_size
    if dim > MAX_HEAD_DIM:
        raise EngineError(f"heads of {dim}: heads are at most {MAX_HEAD_DIM} wide on a CPU")
    width, dtype = cache.spec.parts[0].width, F32 if cache.spec.coded_dim is None else I32
    if k.shape != (blocks, heads, width, size) or v.shape != (blocks, heads, size, width):
        raise EngineError(f"a cache {tuple(k.shape)} does not suit {heads} kv heads of {dim} in blocks of {size}")
    if not (k.dtype is v.dtype is dtype and dense(k, v)):
        raise EngineError(f"the CPU kernels want a contiguous cache of {dtype}; get one from allocate_cache")
    return CpuLayerCache(cache.spec, size, cache.tensors, blocks, k.data_ptr(), v.data_ptr(), tokens_last=("k",))


def _describe_latents(cache: LayerCache) -> CpuLayerCache:
    (part,) = cache.spec.parts
    kept, blocks, size = cache.latents, cache.num_blocks, cache.block_size
    if part.width > MAX_HEAD_DIM:
        raise EngineError(f"latents of {part.width}: they are at most {MAX_HEAD_DIM} wide on a CPU")
    if kept.shape != (blocks, 1, size, part.width) or kept.dtype is not F32 or not dense(kept):
        raise EngineError(f"a cache {tuple(kept.shape)} of {kept.dtype} does not suit latents of {part.width} in "
                          f"blocks of {size}; get one from allocate_cache")
    return CpuLayerCache(cache.spec, size, cache.tensors, blocks, 0, kept.data_ptr())


def check_latents(cache: CpuLayerCache, shape: LatentShape) -> None:
    """As `check_heads`."""
    if cache.spec.kind != "latent" or cache.spec.parts[0].width != shape.width:
        raise EngineError(f"the cache was made for {cache.spec}, not for {shape}")
    cache.shape = shape


def check_heads(cache: CpuLayerCache, shape: HeadShape) -> None:
    """Whether heads of this shape may use the cache; remembered, since a layer asks at every step."""
    if cache.spec.heads_of_pair() != (shape.num_kv_heads, shape.head_dim):
        heads, dim = cache.spec.heads_of_pair()
        raise EngineError(f"the cache was made for {heads} kv heads of {dim}, not for {shape}")
    cache.shape = shape


def read_step(ctx: StepContext) -> Step:
    """Check the types of a step's tensors and take their addresses."""
    tokens, seqs = ctx.positions.shape[0], ctx.context_len.shape[0]
    _check(ctx.positions, I64, (tokens,))
    _check(ctx.query_start, I32, (seqs + 1,))
    _check(ctx.context_len, I32, (seqs,))
    for slots in ctx.slots:
        _check(slots, I64, (tokens,))
    for table in ctx.block_tables:
        _check(table, I32, (seqs, table.shape[-1]))
    if ctx.detours is not None:
        _check(ctx.detours, I32, (seqs, ctx.detours.shape[-1]))
    places = range(GROUP_WORDS, GROUP_WORDS + 4 * len(ctx.block_tables), 4)
    return Step(
        ctx=ctx,
        tensors=(ctx.positions, ctx.query_start, ctx.context_len, ctx.slots, ctx.block_tables, ctx.detours),
        tokens=tokens,
        seqs=StepNumber.at(SEQS, seqs),
        positions=ctx.positions.data_ptr(),
        query_start=ctx.query_start.data_ptr(),
        context_len=ctx.context_len.data_ptr(),
        slots=[slots.data_ptr() for slots in ctx.slots],
        tables=[table.data_ptr() for table in ctx.block_tables],
        strides=[StepNumber.at(at + 2, table.stride(0)) for at, table in zip(places, ctx.block_tables, strict=True)],
        widths=[StepNumber.at(at + 3, table.shape[1]) for at, table in zip(places, ctx.block_tables, strict=True)],
        detours=None if ctx.detours is None else ctx.detours.data_ptr(),
        detour_stride=StepNumber.at(DETOUR_STRIDE, 0 if ctx.detours is None else ctx.detours.stride(0)),
    )


def _check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_cpu:
        raise EngineError(f"the step wants {dtype} {shape}, not {tensor.dtype} {tuple(tensor.shape)}")
    if not tensor.is_contiguous() and not (tensor.dim() == 2 and tensor.stride(1) == 1):
        raise EngineError("the step's context must be contiguous")
