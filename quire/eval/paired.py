"""How far one model is from another on the same questions and texts: paired differences, and KL of next tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # comparing answers must not cost the import of torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """Of some numbers, with the standard error of their mean."""

    value: float
    error: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Mean:
        count = len(numbers)
        value = sum(numbers) / count
        if count < 2:
            return cls(value, math.inf)
        variance = sum((number - value) ** 2 for number in numbers) / (count - 1)
        return cls(value, math.sqrt(variance / count))


def paired_difference(mine: Sequence[bool], reference: Sequence[bool]) -> Mean:
    """Right answers of `mine` less those of `reference`, question by question: what both get right or wrong cancels, so
    that the error is that of the questions on which they differ."""
    return Mean.of([int(a) - int(b) for a, b in zip(mine, reference, strict=True)])


def kl_by_position(mine: Tensor, reference: Tensor) -> Tensor:
    """KL(reference || mine) in nats of the next token's distribution, for each row of logits, in float64."""
    import torch

    own, other = (logits.to(torch.float64).log_softmax(-1) for logits in (mine, reference))
    return (other.exp() * (other - own)).sum(-1)
