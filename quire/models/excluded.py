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
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from quire.errors import UnsupportedModelError

if TYPE_CHECKING:
    from quire.models.spec import Shape
    from quire.models.weight_names import WeightNames

_CONFIG = "quantization_config"
_FIELDS = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
_EXPRESSION = "re:"
_WILD = frozenset("*?[")


class ExcludedModules:
    """Asked by the names of tensors, as the checkpoint has them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Of a model's config, which may have no `quantization_config`."""
        self._expressions: list[re.Pattern[str]] = []
        self._runs: dict[int, set[tuple[str, ...]]] = {}
        """Parts of names that follow one another, by their number."""
        self._known: dict[str, bool] = {}
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
                run = tuple(entry.split("."))
                self._runs.setdefault(len(run), set()).add(run)

    def holds(self, tensor: str) -> bool:
        """Whether a tensor belongs to an excluded module."""
        return bool(self._expressions or self._runs) and self._inside(tensor.rpartition(".")[0])

    def parameters(self, tensors: Iterable[str], names: WeightNames, shapes: Mapping[str, Shape]) -> Iterator[str]:
        """The decoder's parameters in those of a checkpoint's tensors that belong to excluded modules."""
        for tensor in tensors:
            if self.holds(tensor):
                try:
                    yield from names.parameters_in(tensor, shapes)
                except KeyError:  # the family has none of this name: who loads the checkpoint says so
                    continue

    def _inside(self, module: str) -> bool:
        """Whether a module is excluded, or lies in one that is. Modules are seldom asked for once."""
        if not module:
            return False
        if module not in self._known:
            self._known[module] = self._inside(module.rpartition(".")[0]) or self._named(module)
        return self._known[module]

    def _named(self, module: str) -> bool:
        """By an entry that matches this module, or by parts at the end of its name."""
        parts = tuple(module.split("."))
        if any(parts[-size:] in runs for size, runs in self._runs.items() if size <= len(parts)):
            return True
        return any(expression.match(module) for expression in self._expressions)


def _compiled(field: str, expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error:
        _refuse(field, _EXPRESSION + expression)


def _refuse(field: str, value: object) -> NoReturn:
    raise UnsupportedModelError(
        f"config.json: {_CONFIG}.{field}={value!r:.200} is not supported: it is a list of modules' names"
    )
