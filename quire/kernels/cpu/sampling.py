"""Draws and log-probabilities by the compiled kernels: the choices of `quire.sampling.sampler`, a thread to a row."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire.errors import EngineError, InvariantError, OutOfMemoryError
from quire.kernels.cpu.library import load

_NO_MEMORY = -2
"""Of sampling.c; any other negative number: the logits are not finite."""


class DrawRule(ctypes.Structure):
    """`draw_rule` of sampling.h."""

    _fields_ = (("temperature", ctypes.c_float), ("log_min_p", ctypes.c_float), ("top_k", ctypes.c_int64),
                ("top_p", ctypes.c_double), ("key", ctypes.c_int64 * 3))


Rules = ctypes.Array[DrawRule]
"""One for each row of logits."""


def check_rules(rules: Rules | None, rows: int) -> None:
    if rules is not None and len(rules) != rows:
        raise EngineError(f"{len(rules)} rules for drawing from {rows} rows of logits")


class CpuSampling:
    """`quire.sampling.kernels.SamplingKernels` on a CPU."""

    def __init__(self) -> None:
        self._library = load()

    def choose(self, logits: Tensor, rules: Rules | None) -> list[int]:
        """A token of each row of float32 logits, by its rule (None: the likeliest of each); negative where the logits
        are not finite. One call, where torch needs a dozen."""
        count, width = logits.shape
        check_rules(rules, count)
        logits, out = logits.contiguous(), (ctypes.c_int64 * count)()
        self._library.quire_choose(logits.data_ptr(), rules, out, count, width)
        tokens = list(out)
        if _NO_MEMORY in tokens:
            raise _no_memory()
        return tokens

    def draw(self, logits: Tensor, rows: Tensor, peak: Tensor, temperature: Tensor, floor: Tensor, top_k: Tensor,
             top_p: Tensor, keys: Tensor) -> Tensor:
        """One token of each of the `rows` of float32 logits [R, V]; all else is by place in `rows`. `keys`, int64
        [rows, 3]: seed, sequence index, position."""
        logits = logits.contiguous()
        out = torch.empty(len(rows), dtype=torch.int64)
        given = (logits, rows.contiguous(), peak.contiguous(), temperature.contiguous(), floor.contiguous(),
                 top_k.contiguous(), top_p.contiguous(), keys.contiguous(), out)
        self._library.quire_draw(*(tensor.data_ptr() for tensor in given), len(rows), logits.shape[1])
        if bool((out < 0).any()):
            raise _no_memory()
        return out

    def mask_(self, logits: Tensor, rows: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """Take from the `rows` of contiguous float32 logits what their masks (int32 [rows, words]) do not allow. The
        largest logit of every row before and after, of which a pass of its own takes as long."""
        width, mask_words = logits.shape[1], words.shape[1]
        if not logits.is_contiguous() or mask_words * 32 < width:
            raise InvariantError(f"masks of {mask_words} words do not fit logits of {width} tokens in a row")
        places = torch.full((len(logits),), -1)
        places[rows] = torch.arange(len(rows))
        before, after = torch.empty(2, len(logits))
        given = (logits, places, words.contiguous(), before, after)
        self._library.quire_mask(*(tensor.data_ptr() for tensor in given), len(logits), width, mask_words)
        return before, after

    def rank(self, logits: Tensor, token_ids: Tensor, peak: Tensor, count: int
             ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(Weight of all tokens, rank of the given one, the `count` likeliest ids, their logits) of each row."""
        logits = logits.contiguous()
        rows, width = logits.shape
        total, rank = torch.empty(2, rows, dtype=torch.int64)
        ids = torch.zeros(rows, count, dtype=torch.int64)
        values = torch.full((rows, count), -torch.inf)
        given = (logits, token_ids.contiguous(), peak.contiguous(), total, rank, ids, values)
        self._library.quire_rank(*(tensor.data_ptr() for tensor in given), rows, width, count)
        return total, rank, ids, values


def _no_memory() -> OutOfMemoryError:
    return OutOfMemoryError("no memory to draw a token: lower max_num_seqs, or stop what else runs here")
