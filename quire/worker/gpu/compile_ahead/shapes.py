"""Tensors of a GPU that is not there: a shape, a type and an aligned address, and no memory behind them.

Launches depend on nothing else, so an engine over such tensors asks for the kernels that it would ask for on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_GPU = "cuda"
_ADDRESS = 1 << 12
"""Where every allocation begins: as aligned as those of torch's allocator on a GPU."""


class Shape(Tensor):
    """Looks like a tensor on a GPU; `meta` has its shape and strides."""

    meta: Tensor
    _on: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> Shape:
        made: Shape = Tensor._make_subclass(cls, meta)
        made.meta, made._on = meta, device
        return made

    def __init__(self, meta: Tensor, device: torch.device) -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """torch's own code sees a tensor on `meta`, for which no GPU is asked."""
        return self._on

    def data_ptr(self) -> int:
        return _ADDRESS + int(self.meta.storage_offset()) * self.meta.element_size()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _shaped(func, args, dict(kwargs or {}))


class ShapesOnly(TorchDispatchMode):
    """Inside, whatever would be on a GPU is a `Shape`, and nothing is computed there. Tensors of the CPU are real."""

    def _shape(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        given.pop("pin_memory", None)
        return _shaped(func, args, given)


# As in `ops.recording`: a method that the class is born with would import all of torch._dynamo.
ShapesOnly.__torch_dispatch__ = ShapesOnly._shape  # type: ignore[assignment, method-assign]


def _shaped(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operation's result, on the device that it would be on."""
    name = func._schema.name.removeprefix("aten::")
    given = [each for each in _tensors([args, kwargs]) if isinstance(each, Shape)]
    named = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device)]
    device = named[0] if named else given[0].device if given else None
    if not given and (device is None or device.type != _GPU):
        return func(*args, **kwargs)
    if name == "equal":  # of norms and their narrower copies: weights of checkpoints lose nothing
        return True
    if name == "scaled_dot_product_attention":
        return Shape(torch.empty_like(args[0].meta), args[0].device)
    if func._schema.is_mutable and not func.is_view:
        return _written(func, args, kwargs)
    if device is not None and name == "arange":  # `meta` would import all of torch's compiler for it
        found = func(*args, **{**kwargs, "device": torch.device("cpu")})
        return Shape(torch.empty_like(found, device="meta"), device)
    known: dict[int, Tensor] = {}
    return _real(func(*_meta(args, known), **_meta(kwargs, known)), device, known)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that an operation writes to and returns."""
    for argument, place in zip(func._schema.arguments, range(len(func._schema.arguments)), strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[place] if place < len(args) else kwargs[argument.name]
    return None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [each for part in value for each in _tensors(part)]


def _meta(value: Any, known: dict[int, Tensor]) -> Any:
    """The same with `meta` tensors; `known` remembers whose they are."""
    if isinstance(value, Tensor):
        meta = value.meta if isinstance(value, Shape) else torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device="meta")
        known[id(meta)] = value
        return meta
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, Mapping):
        return {key: _meta(each, known) for key, each in value.items()}
    return type(value)(_meta(each, known) for each in value) if type(value) in (list, tuple) else value


def _real(value: Any, device: torch.device | None, known: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        mine = known.get(id(value))
        if mine is not None:
            return mine
        if device is None or device.type != _GPU:
            return torch.zeros(value.shape, dtype=value.dtype)
        return Shape(value, device)
    return type(value)(_real(each, device, known) for each in value) if type(value) in (list, tuple) else value
