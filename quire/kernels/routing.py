"""How a router chooses experts, as plain data. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Which experts a token goes to, and with what weights."""

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalised: bool = True
    """The weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Multiplies the weights."""
    bias: bool = False
    """Of the router's projection."""
    choice_bias: bool = False
    """Added to the scores for the choice only, not for the weights."""
    groups: int = 1
    """Experts stand in so many equal groups; only the `chosen_groups` best ones may be chosen from."""
    chosen_groups: int = 1
    group_score: Literal["best", "best two"] = "best"
    """What a group counts: its best expert's score, or the sum of its best two."""


@dataclass(frozen=True, slots=True)
class Clamp:
    """A clamped SwiGLU (gpt-oss): gate at most `limit`, up within +-limit; gate * sigmoid(alpha gate) * (up + 1)."""

    limit: float
    alpha: float
