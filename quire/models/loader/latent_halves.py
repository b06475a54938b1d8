"""The projection of latents to keys and values, which newer GGUF files hold as two tensors: joined to the one it was.

A converter cuts `kv_b_proj` [heads * (key + value), rank] into `k_b_proj` [heads, rank, key], turned over, and
`v_b_proj` [heads, value, rank].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from quire.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

Read = TypeVar("Read")
_KEYS, _VALUES, _WHOLE = (f".self_attn.{part}_proj.weight" for part in ("k_b", "v_b", "kv_b"))


def whole_of(name: str) -> str | None:
    """The tensor of which this one is a half; None where it is none."""
    half = next((ending for ending in (_KEYS, _VALUES) if name.endswith(ending)), None)
    return None if half is None else name.removesuffix(half) + _WHOLE


def join(keys: Tensor, values: Tensor, name: str) -> Tensor:
    import torch

    if keys.dim() != 3 or values.dim() != 3 or keys.shape[0] != values.shape[0] or keys.shape[1] != values.shape[2]:
        raise ModelLoadError(f"{name}: halves of shapes {tuple(keys.shape)} and {tuple(values.shape)} do not match")
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


def joined(
    weights: Iterable[tuple[str, Read]], whole: Callable[[str, Read, Read], Read]
) -> Iterator[tuple[str, Read]]:
    """The same tensors, with each pair of halves as the tensor that `whole` makes of them: keys first."""
    waiting: dict[str, tuple[str, Read]] = {}
    for name, tensor in weights:
        target = whole_of(name)
        if target is None:
            yield name, tensor
        elif target not in waiting:
            waiting[target] = name, tensor
        else:
            _, other = waiting.pop(target)
            keys, values = (tensor, other) if name.endswith(_KEYS) else (other, tensor)
            yield target, whole(target, keys, values)
    for name, _ in waiting.values():
        raise ModelLoadError(f"tensor {name!r} has no counterpart: the keys' or the values' half is missing")
