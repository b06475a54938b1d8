"""Fields of `speculative_config`: parsed and checked at once, refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quire.errors import ConfigError
from quire.speculation.tree import TreeShape

NGRAM, SUFFIX, DRAFT_MODEL, SKIP_LAYERS, EAGLE, MTP = "ngram", "suffix", "draft_model", "skip_layers", "eagle", "mtp"
COUPLED, REJECTION = "coupled", "rejection"
METHODS = (NGRAM, SUFFIX, DRAFT_MODEL, SKIP_LAYERS, EAGLE, MTP)
_CHOICES = {
    "method": METHODS,
    "verifier": (COUPLED, REJECTION),
    "load_format": ("auto", "gguf", "safetensors", "dummy"),
}
_HABITS: dict[str, dict[str, Any]] = {EAGLE: {"num_speculative_tokens": 4}, MTP: {"num_speculative_tokens": 2}}
"""Defaults by method that differ from the fields': a head drafts well only as deep as it was trained."""
_USUAL_FLOOR = 0.03
"""Default `min_draft_probability`. It is this low because heads underestimate their drafts."""
_CAREFUL_FLOOR = 0.15
"""The same for texts whose drafts have not come true."""
_FIELD = "speculative_config"
_TREE_WIDTH = 4
_MOST_NODES = 64
"""Most drafts of one sequence in one step."""


def _only(*methods: str) -> dict[str, Any]:
    return {"methods": methods}


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How drafts are made and verified. Made by `SpeculationOptions.parse({"method": "ngram"})`."""

    method: str
    num_speculative_tokens: int = 8
    """Most drafts of one sequence in one step."""
    verifier: str = COUPLED
    """coupled: exactly the tokens of plain decoding; rejection: the same distribution."""
    adaptive: bool = True
    """As many drafts as pay by measured costs and acceptance, down to none; False: always all."""
    prompt_lookup_min: int = field(default=1, metadata=_only(NGRAM, SUFFIX))
    """Fewest tokens that must match."""
    max_cached_tokens: int = field(default=65_536, metadata=_only(SUFFIX))
    """Tokens of recent outputs to keep, over all tenants."""
    model: str | None = field(default=None, metadata=_only(DRAFT_MODEL, EAGLE))
    """The draft model: alias, path or hub id; the EAGLE head: path or hub id, by default the one in the package."""
    load_format: str = field(default="auto", metadata=_only(DRAFT_MODEL))
    tree: TreeShape | None = None
    """Draft trees: at most `width` children of a node, `depth` drafts in a row, `nodes` in all. Defaults: width 4,
    depth num_speculative_tokens, nodes twice the depth."""
    min_draft_probability: float | None = field(default=None, metadata=_only(EAGLE, MTP))
    """A greedy chain ends where its probability, by the head's own estimate, falls below this; 0: never. Default:
    `_USUAL_FLOOR` for adaptive chains of a head (`_CAREFUL_FLOOR` until drafts come true), else 0. Only on device
    cpu."""
    skipped_layers: tuple[int, ...] | None = field(default=None, metadata=_only(SKIP_LAYERS))
    """Layers of the target that drafting skips; by default every second of the middle ones."""

    @property
    def on_device(self) -> bool:
        """A model in the worker makes the drafts."""
        return self.method in (DRAFT_MODEL, SKIP_LAYERS, EAGLE, MTP)

    @property
    def reads_states(self) -> bool:
        """A head makes the drafts, which reads the target's hidden states."""
        return self.method in (EAGLE, MTP)

    @property
    def own_kv(self) -> bool:
        """The drafting model has KV of its own."""
        return self.method == DRAFT_MODEL or self.reads_states

    @property
    def chain_floor(self) -> float:
        if self.min_draft_probability is not None:
            return self.min_draft_probability
        return _USUAL_FLOOR if self.adaptive and self.reads_states else 0.0

    @property
    def careful_floor(self) -> float:
        """The same for texts whose drafts have not come true (`ChainFloors`)."""
        chosen = self.min_draft_probability is None and self.chain_floor > 0.0
        return _CAREFUL_FLOOR if chosen else self.chain_floor

    @property
    def most_drafts(self) -> int:
        """Of one sequence in one step."""
        return self.num_speculative_tokens if self.tree is None else self.tree.nodes

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> SpeculationOptions:
        if not isinstance(given, Mapping):
            raise _refused(f"must be a mapping such as {{'method': 'ngram'}}, not {type(given).__name__}")
        known = {f.name for f in fields(cls)}
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
                raise _refused(f"has no field {name!r}; {hint}")
        if "method" not in given:
            raise _refused(f"needs a method: one of {', '.join(_CHOICES['method'])}")
        values = _HABITS.get(str(given["method"]), {}) | dict(given)
        if isinstance(values.get("skipped_layers"), list):
            values["skipped_layers"] = tuple(values["skipped_layers"])
        shape = values.pop("tree", None)
        options = cls(**values)
        options._check()
        if shape is not None:
            if options.min_draft_probability is not None:
                raise _refused("min_draft_probability is for chains: leave it out, or leave tree out")
            options = replace(options, tree=_tree_shape(shape, options, given.get("num_speculative_tokens")))
        for f in fields(cls):
            methods = f.metadata.get("methods")
            if methods and f.name in given and options.method not in methods:
                raise _refused(f"{f.name} is for method {' or '.join(methods)}, not {options.method!r}")
        return options

    def _check(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _refused(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        _integer("num_speculative_tokens", self.num_speculative_tokens, 1, _MOST_NODES)
        _integer("prompt_lookup_min", self.prompt_lookup_min, 1, 1 << 16)
        _integer("max_cached_tokens", self.max_cached_tokens, 2, 1 << 24)
        if not isinstance(self.adaptive, bool):
            raise _refused(f"adaptive must be true or false, not {self.adaptive!r}")
        if self.method == DRAFT_MODEL and (not isinstance(self.model, str) or not self.model):
            raise _refused("method 'draft_model' needs a model: its alias, path or hub id")
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise _refused(f"model must be an alias, path or hub id, not {self.model!r:.80}")
        floor = self.min_draft_probability
        if floor is not None and (type(floor) not in (int, float) or not 0.0 <= floor <= 1.0):
            raise _refused(f"min_draft_probability must be a number between 0 and 1, not {floor!r:.80}")
        layers = self.skipped_layers
        if layers is not None and (not isinstance(layers, tuple) or not layers
                                   or any(type(layer) is not int or layer < 0 for layer in layers)):
            raise _refused(f"skipped_layers must be a list of layer numbers, not {layers!r:.80}")


def refuse_with_heads(method: str, asked: Mapping[str, bool]) -> None:
    """Raise for the first field of the engine's config that is set and that heads do not support yet."""
    for name, value in asked.items():
        if value:
            raise ConfigError(f"{name} does not go with speculative_config method {method!r} yet: leave {name} out, or "
                              "use another method", field=name)


def _tree_shape(given: Any, options: SpeculationOptions, drafts: object) -> TreeShape:
    """`drafts`: num_speculative_tokens, if it was given."""
    known = [f.name for f in fields(TreeShape)]
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise _refused(f"tree must be a mapping with some of {', '.join(known)}, such as {{'width': 4}}, not "
                       f"{given!r:.80}")
    deep = given.get("depth", options.num_speculative_tokens)
    _integer("tree depth", deep, 1, _MOST_NODES)
    if drafts not in (None, deep):
        raise _refused(f"num_speculative_tokens is {drafts} and tree depth {deep}: with a tree they are the same, so "
                       "leave one out")
    shape = TreeShape(given.get("width", _TREE_WIDTH), deep, given.get("nodes", min(2 * deep, _MOST_NODES)))
    _integer("tree width", shape.width, 2, 16)
    _integer("tree nodes", shape.nodes, deep, _MOST_NODES)
    return shape


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise _refused(f"{name} must be an integer between {low} and {high}, not {value!r:.80}")


def _refused(message: str) -> ConfigError:
    return ConfigError(f"{_FIELD} {message}", field=_FIELD)
