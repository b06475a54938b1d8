"""What a program of decode attention does, as kernels in Gluon read it from the step's split."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def load_task(number, task_seq, task_piece, piece_count, piece_length, context_len, rows, HAS_ROWS: gl.constexpr):
    """As `attention_decode.load_task`, of the program's task; a row is never negative."""
    seq = gl.load(task_seq + number)
    owner = gl.maximum(seq, 0)
    piece = gl.load(task_piece + number)
    pieces = gl.load(piece_count + owner)
    step = gl.load(piece_length)
    length = gl.load(context_len + owner)
    row = owner
    if HAS_ROWS:
        row = gl.maximum(gl.load(rows + owner), 0)
    return seq, (number, piece, pieces), row, length, step
