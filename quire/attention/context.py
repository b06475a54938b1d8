"""Which tokens of a step belong to which sequence, and where their keys and values live."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class StepContext:
    """The step's metadata, built once per step and passed to every layer; there is no global copy of it.

    Sequence `s` owns the tokens `query_start[s]:query_start[s+1]`, which are consecutive in it. Its last
    token sees `context_len[s]` keys, itself included, so token `t` of `n` sees `context_len[s] - (n - 1 -
    t)` of them, and the key at absolute position `p` lies in block `block_tables[g][s, p // block_size]`.
    """

    positions: Tensor
    """int64 [T]: the position that rope and learned position embeddings see."""
    query_start: Tensor
    """int32 [S+1]"""
    context_len: Tensor
    """int32 [S]"""
    block_tables: tuple[Tensor, ...]
    """One per cache group: int32 [S, max_blocks]. Entries past a sequence's keys are never read. Those wholly
    behind its window may name any block that exists: its content must be finite, but does not matter."""
    slots: tuple[Tensor, ...]
    """One per cache group: int64 [T], `block * block_size + offset` where the token's keys and values go."""
