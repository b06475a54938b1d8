"""Which modules a checkpoint's `quantization_config` keeps out of quantization: their weights stay floats, whatever a
user wants to be made of floats at load.

| who wrote it | field | an entry is |
|---|---|---|
| compressed-tensors | ignore | a module's name, or `re:` and an expression that matches its beginning |
| ModelOpt | exclude_modules, ignore | a name, which may hold `*` |
| AWQ, fp8, MXFP4 | modules_to_not_convert | a module's name, or some parts of it (`self_attn`, `mlp.gate`) |
| fp8 of other tools | ignored_layers | a module's name |

A name stands for the module and all that lies in it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from quire.errors import UnsupportedModelError

_CONFIG = "quantization_config"
_FIELDS = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
_EXPRESSION = "re:"
_WILD = frozenset("*?[")


class ExcludedModules:
    """Asked by the names of tensors, as the checkpoint has them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Of a model's config, which may have no `quantization_config`."""
        self._expressions: list[re.Pattern[str]] = []
        self._runs: list[tuple[str, ...]] = []
        """Parts of names that follow one another."""
        stored = config.get(_CONFIG)
        if isinstance(stored, Mapping):
            for field in _FIELDS:
                self._take(field, stored.get(field))

    def _take(self, field: str, entries: Any) -> None:
        if entries is None:
            return
        if not isinstance(entries, list | tuple):
            _refuse(field, entries)
        for entry in entries:
            if not isinstance(entry, str):
                _refuse(field, entry)
            if entry.startswith(_EXPRESSION):
                self._expressions.append(_compiled(field, entry.removeprefix(_EXPRESSION)))
            elif _WILD & set(entry):
                self._expressions.append(re.compile(fnmatch.translate(entry)))
            elif entry:
                self._runs.append(tuple(entry.split(".")))

    def holds(self, tensor: str) -> bool:
        """Whether a tensor belongs to an excluded module."""
        parts = tuple(tensor.split("."))[:-1]
        modules = [".".join(parts[: count + 1]) for count in range(len(parts))]
        if any(expression.match(module) for expression in self._expressions for module in modules):
            return True
        return any(parts[start : start + len(run)] == run for run in self._runs
                   for start in range(len(parts) - len(run) + 1))


def _compiled(field: str, expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error:
        _refuse(field, _EXPRESSION + expression)


def _refuse(field: str, value: object) -> NoReturn:
    raise UnsupportedModelError(
        f"config.json: {_CONFIG}.{field}={value!r:.200} is not supported: it is a list of modules' names"
    )
