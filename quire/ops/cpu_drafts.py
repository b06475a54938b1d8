"""What a draft head does on a CPU beside its layer: states by slot, and the likeliest tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.cpu.sampling import Rules, check_rules
from quire.kernels.quantized import Rounding
from quire.kernels.types import StepContext
from quire.ops.cpu_step import NO_TABLE, CpuLayerCache, Step, rows_of


class ChainStep(ctypes.Structure):
    """`chain_step` of drafts.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "positions", "slots", "context_len", "table")),
        *((name, ctypes.c_int64) for name in ("stride", "seqs", "block_size")),
    )


class RecordedPass(ctypes.Structure):
    """`recorded_pass` of drafts.c."""

    _fields_ = (("calls", ctypes.c_void_p), ("count", ctypes.c_int64), ("words", ctypes.c_void_p),
                ("logits", ctypes.c_void_p))


@dataclass(slots=True)
class Guesses:
    """Tokens that follow one another, of several sequences."""

    tokens: npt.NDArray[np.int64]
    """[passes, sequences]"""
    chances: npt.NDArray[np.float32]
    """[1 + passes, sequences]: of the chains before, and with each token, by the head's own account; less than 0 where
    its logits are not finite."""
    passes: int = 0
    """That were run."""


@dataclass(frozen=True, slots=True)
class Chain:
    """What holds for all chains of a head."""

    guessed: Tensor | None
    """The tokens that its logits stand for; None: all."""
    floor: float
    """A chain ends before the token with which its chance, by the head's own account, falls below this."""
    block_size: int


class DraftKernels:
    """Part of `CpuOps`. Of each token's slot something is kept: a row of a cache of features."""

    _library: Any
    _rounding: Rounding | None

    def _step_of(self, ctx: StepContext, group: int, window: int, layer: CpuLayerCache) -> Step:
        raise NotImplementedError

    @contextmanager
    def rounding_to(self, rounding: Rounding) -> Iterator[None]:
        before, self._rounding = self._rounding, rounding
        try:
            yield
        finally:
            self._rounding = before

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """[M, sum of widths]: rows side by side."""
        rows, widths = parts[0].shape[0], [part.shape[1] for part in parts]
        if any(rows_of(part, width) != rows for part, width in zip(parts, widths, strict=True)):
            raise EngineError(f"rows {[tuple(part.shape) for part in parts]} do not stand side by side")
        out, at = torch.empty(rows, sum(widths)), 0
        for part, width in zip(parts, widths, strict=True):
            self._library.quire_put_columns(part.data_ptr(), out.data_ptr(), rows, width, out.shape[1], at)
            at += width
        return out

    def states_before(self, kept: CpuLayerCache, ctx: StepContext, group: int) -> Tensor:
        """[T, width]: what is kept of the token before each; zeros before the first."""
        step, width = self._step_of(ctx, group, 0, kept), kept.spec.parts[0].width
        out = torch.empty(step.tokens, width)
        self._library.quire_states_before(
            kept.v_ptr, step.positions, step.query_start, step.tables[group], step.strides[group], step.seqs,
            kept.block_size, width, out.data_ptr(),
        )  # fmt: skip
        return out

    def keep_rows(self, rows: Tensor, kept: CpuLayerCache, ctx: StepContext, group: int) -> None:
        """Keep a row for each token."""
        step, width = self._step_of(ctx, group, NO_TABLE, kept), kept.spec.parts[0].width
        if rows_of(rows, width) != step.tokens:
            raise EngineError(f"{rows.shape[0]} rows to be kept, the step has {step.tokens} tokens")
        self._library.quire_keep_rows(rows.data_ptr(), kept.v_ptr, step.slots[group], step.tokens, width)

    def keep_last(self, rows: Tensor, kept: CpuLayerCache, ctx: StepContext, group: int) -> Tensor:
        """[S, width]: the rows of each sequence's last token, which are kept."""
        step, width = self._step_of(ctx, group, NO_TABLE, kept), kept.spec.parts[0].width
        if rows_of(rows, width) != step.tokens:
            raise EngineError(f"{rows.shape[0]} rows of a step of {step.tokens} tokens")
        out = torch.empty(ctx.context_len.shape[0], width)
        self._library.quire_keep_last(
            rows.data_ptr(), kept.v_ptr, step.slots[group], step.query_start, step.seqs, width, out.data_ptr()
        )
        return out

    def guess(self, logits: Tensor, ids: Tensor | None, rules: Rules | None = None) -> Guesses:
        """The likeliest token of each row, or one drawn by its rule; `ids`: the tokens that the columns stand for."""
        width = logits.shape[1]
        rows = rows_of(logits, width)
        check_ids(ids, width)
        check_rules(rules, rows)
        found = Guesses(np.empty((1, rows), np.int64), np.ones((2, rows), np.float32), 1)
        self._library.quire_guess(
            logits.data_ptr(), rows, width, None if ids is None else ids.data_ptr(), rules, found.tokens.ctypes.data,
            found.chances[1].ctypes.data,
        )  # fmt: skip
        return found


def check_ids(ids: Tensor | None, width: int) -> None:
    if ids is not None and (ids.shape != (width,) or ids.dtype is not torch.int64 or not ids.is_contiguous()):
        raise EngineError(f"the tokens of {width} logits are int64 [{width}], not {ids.dtype} {tuple(ids.shape)}")
