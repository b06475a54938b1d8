"""Whether a head's table of rows is the target's, row for row: then it is not kept twice."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.linear import Embedding

_COMPARED = 4096
"""Rows that are compared at once."""


def same_rows(stored: Tensor, table: Embedding) -> bool:
    """`table`: the target's embeddings or its head. Ranks that share it come to the same answer."""
    for start in range(0, len(stored), _COMPARED):
        ids = torch.arange(start, min(start + _COMPARED, len(stored)))
        own = table.rows(ids)
        if not torch.equal(own, stored[ids].to(own.dtype)):
            return False
    return True
