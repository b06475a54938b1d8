"""Values that a model writes as plain text, as JSON of the type that the tool's schema gives them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,), "array": (list,),
    "null": (type(None),),
}


def json_of(text: str, name: str, schema: Mapping[str, Any], says_json: bool = False) -> str:
    """The JSON of one argument: what its schema allows besides text, if the text is that, or else the text.
    `says_json`: the model says that it is JSON, which counts where the schema does not tell."""
    kinds = _kinds(_property(schema, name), schema) or (set(_KINDS) if says_json else set())
    listed = _listed(_property(schema, name), schema)
    if text not in listed and text.strip() in listed:
        text = text.strip()  # of listed texts one is meant, whatever white space the tags have
    if kinds and kinds != {"string"}:
        found, value = _value(text.strip())
        if found and any(_is(value, kind) for kind in kinds):
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _listed(schema: Any, root: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists, where it does."""
    schema = _followed(schema, root)
    found = schema.get("enum", [schema.get("const")]) if isinstance(schema, Mapping) else []
    return found if isinstance(found, list) else []


def _followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference leads to."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    target: Any = root
    for step in reference[2:].split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return target


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if "$ref" in schema:
        target = _followed(schema, root)
        return set() if target is schema else _kinds(target, root, depth + 1)
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else {each for each in kind if isinstance(each, str)} \
        if isinstance(kind, list) else set()
    for word in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(word) or () if isinstance(schema.get(word), list) else ():
            found |= _kinds(each, root, depth + 1)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if not found:
        found = {next((kind for kind in _KINDS if _is(value, kind)), "string") for value in values}
    return found


def _is(value: Any, kind: str) -> bool:
    """JSON's booleans are no numbers, and a whole number may be written with a point."""
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _KINDS.get(kind, ()))


def _value(text: str) -> tuple[bool, Any]:
    if text in _PYTHON_WORDS:
        return True, _PYTHON_WORDS[text]
    try:
        return True, json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return False, None


def _finite(text: str) -> float:
    """1e999 is a number of JSON, but none that could be written again."""
    if math.isinf(found := float(text)):
        raise ValueError(f"{text} is too large")
    return found


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")
