"""How a router chooses experts, as plain data, and what it has to choose for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # what a model is can be said without the import of torch
    from torch import Tensor


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
class RoutedRows:
    """Rows of a step that wait for their experts."""

    router: RouterSpec
    logits: Tensor
    """[T, experts]"""
    choice_bias: Tensor | None
    """float32 [experts]"""
    slots: Tensor | None
    """int64 [T]: negative for rows of padding, which get no expert; None: there are none of them."""
    load: Tensor | None
    """int64 [experts]: so many rows have gone through each expert so far; counted on."""


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """How many rows have gone through each expert of a layer since the model was built."""

    layer: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Clamp:
    """A clamped SwiGLU (gpt-oss): gate at most `limit`, up within +-limit; gate * sigmoid(alpha gate) * (up + 1)."""

    limit: float
    alpha: float
