"""Walks a JSON schema and says what in it would not be enforced, so that it is refused and never ignored.

The grammar compiler enforces a part of JSON Schema and passes over the rest in silence. What it enforces was
found by asking it for every keyword whether a grammar made of it accepts a wrong value; the list is in
`docs/structured-output.md`, and a test asks again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from quire.structured.regex import check_regex, portable_regex

MAX_DEPTH: Final = 48
"""The compiler's time grows steeply with the depth of a schema."""
FORMATS: Final = frozenset({
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uuid",
    "uri-template", "json-pointer", "relative-json-pointer",
})
TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
_ANNOTATIONS: Final = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$defs", "definitions",
})
_KEYWORDS: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"}),
    "object": frozenset({"properties", "required", "additionalProperties", "patternProperties", "propertyNames",
                         "minProperties", "maxProperties", "unevaluatedProperties"}),
}
_TYPED: Final = frozenset().union(*_KEYWORDS.values())
_COMBINING: Final = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_INSTEAD: Final = {
    "not": "say what is allowed",
    "if": "use anyOf with one branch for each case",
    "dependentRequired": "use anyOf with one branch for each case",
    "dependentSchemas": "use anyOf with one branch for each case",
    "dependencies": "use anyOf with one branch for each case",
    "contains": "use prefixItems",
    "uniqueItems": "leave it out, and check afterwards",
    "nullable": "use a type list with 'null'",
    "additionalItems": "use items after prefixItems",
}
_EXACT_INTEGER: Final = 1 << 53


class _Refused(Exception):
    """Why a schema cannot be used."""


def check_schema(schema: dict[str, Any] | bool) -> str | None:
    """What in the schema would not be enforced, and where; None if all of it would be.

    The schema given is changed where the compiler needs other words: patterns become portable, and bounds on the
    length of a text become a pattern, since for them it would let control characters into a JSON string.
    """
    if schema is False:
        return "is false, which allows no output at all"
    try:
        _Walker(schema).walk(schema, "#", 0)
    except _Refused as refused:
        return str(refused)
    return None


class _Walker:
    """Visits every schema inside a schema once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._followed: set[str] = set()

    def walk(self, schema: Any, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _Refused(f"is nested deeper than {MAX_DEPTH} levels, at {path:.200}")
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise _Refused(f"has {type(schema).__name__} at {path} where a schema (an object) is wanted")
        self._check_names(schema, path)
        for name in ("$defs", "definitions"):
            for key, inner in _object(schema, name, path).items():
                self.walk(inner, f"{path}/{name}/{key}", depth + 1)
        combining = [name for name in _COMBINING if name in schema]
        if combining:
            self._combined(schema, combining, path, depth)
        else:
            self._typed(schema, path, depth)

    def _check_names(self, schema: dict[str, Any], path: str) -> None:
        known = {"type", "$id", *_TYPED, *_COMBINING, *_ANNOTATIONS}
        for name in schema:
            if name not in known and not name.startswith("x-"):
                instead = _INSTEAD.get(name)
                raise _Refused(f"uses the keyword {name!r} at {path}, which is not enforced"
                               + (f": {instead}" if instead else ": leave it out"))
        if "$id" in schema and path != "#":
            raise _Refused(f"has $id at {path}: only the root may have one, and references start with '#/'")

    # ---- schemas made of schemas

    def _combined(self, schema: dict[str, Any], combining: list[str], path: str, depth: int) -> None:
        """The compiler looks at one of these keywords and at nothing beside it."""
        name = combining[0]
        beside = [other for other in schema if other != name and other not in _ANNOTATIONS and other != "$id"
                  and not other.startswith("x-")]
        if name in ("enum", "const"):
            self._values(schema, name, path)
            beside = [other for other in beside if other != "type"]
        if beside:
            raise _Refused(f"has {beside[0]!r} beside {name!r} at {path}, where it is not enforced: move it into "
                           f"{'the schema that is referred to' if name == '$ref' else 'the branches'}")
        if name == "$ref":
            self._reference(schema["$ref"], path)
        elif name in ("anyOf", "oneOf", "allOf"):
            self._branches(schema[name], name, f"{path}/{name}", depth)

    def _branches(self, branches: Any, name: str, path: str, depth: int) -> None:
        if not isinstance(branches, list) or not branches:
            raise _Refused(f"has {path} which is no list of schemas")
        if name == "allOf" and len(branches) > 1:
            raise _Refused(f"has allOf with {len(branches)} schemas at {path}, which is not enforced: merge them")
        for place, branch in enumerate(branches):
            self.walk(branch, f"{path}/{place}", depth + 1)
        if name == "oneOf" and not self._disjoint(branches):
            raise _Refused(f"has oneOf at {path} whose branches may overlap, which is not enforced: use anyOf, or tell "
                           "the branches apart by type or by a required property with a const of its own")

    def _disjoint(self, branches: list[Any]) -> bool:
        resolved = [self._resolve(branch) for branch in branches]
        return all(_exclude(first, second) for place, first in enumerate(resolved) for second in resolved[:place])

    def _resolve(self, schema: Any) -> Any:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self._target(schema["$ref"])
        return {}

    def _target(self, reference: str) -> Any:
        found = self._root
        for part in reference.split("/")[1:]:
            found = found[part]
        return found

    def _reference(self, reference: Any, path: str) -> None:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise _Refused(f"refers to {reference!r:.80} at {path}: only references into the schema itself, which "
                           "start with '#/', are supported")
        try:
            target = self._target(reference)
        except (KeyError, TypeError, IndexError):
            raise _Refused(f"refers to {reference!r:.80} at {path}, which is not there") from None
        if not isinstance(target, dict | bool):
            raise _Refused(f"refers to {reference!r:.80} at {path}, which is no schema")
        parts = reference.split("/")[1:]
        if reference not in self._followed and parts and not (len(parts) == 2 and parts[0] in ("$defs", "definitions")):
            self._followed.add(reference)
            self.walk(target, reference, len(parts))

    def _values(self, schema: dict[str, Any], name: str, path: str) -> None:
        values = schema["enum"] if name == "enum" else [schema["const"]]
        if not isinstance(values, list) or not values:
            raise _Refused(f"has enum at {path} which is no list of values")
        if "enum" in schema and "const" in schema:
            raise _Refused(f"has const beside enum at {path}: leave one out")
        types = _types(schema, path)
        for value in values:
            if types and not any(_is_of(value, kind) for kind in types):
                raise _Refused(f"has {name} with a value that its type {schema['type']!r:.80} excludes, at {path}")
            _check_numbers(value, path)

    # ---- schemas of one type or several

    def _typed(self, schema: dict[str, Any], path: str, depth: int) -> None:
        types = _types(schema, path)
        used = [name for name in schema if name in _TYPED]
        if not types and used:
            # Without a type the compiler takes these to mean it; others it does not look at.
            implied = {"properties": "object", "additionalProperties": "object", "items": "array",
                       "prefixItems": "array"}
            types = [implied[name] for name in used if name in implied][:1]
        for name in used:
            if not any(name in _KEYWORDS.get(kind, ()) for kind in types):
                kinds = " or ".join(kind for kind, names in _KEYWORDS.items() if name in names)
                raise _Refused(f"has {name!r} at {path} where it is not enforced: it needs type {kinds}")
        if "number" in types and "multipleOf" in schema:
            raise _Refused(f"has 'multipleOf' at {path}, which is enforced for type integer only")
        checks: dict[str, Callable[[dict[str, Any], str, int], None]] = {
            "string": self._string, "number": self._number, "integer": self._number, "array": self._array,
            "object": self._object}
        for kind in types:
            if kind in checks:
                checks[kind](schema, path, depth)

    def _string(self, schema: dict[str, Any], path: str, depth: int) -> None:
        lengths = _bounds(schema, "minLength", "maxLength", path)
        for name in ("pattern", "format"):
            if name in schema and lengths:
                raise _Refused(f"has {lengths[0]!r} beside {name!r} at {path}, where it is not enforced: put the "
                               "length into a pattern")
        if "pattern" in schema and "format" in schema:
            raise _Refused(f"has 'format' beside 'pattern' at {path}, where it is not enforced")
        if "format" in schema and schema["format"] not in FORMATS:
            raise _Refused(f"has format {schema['format']!r:.80} at {path}, which is not enforced; known: "
                           f"{', '.join(sorted(FORMATS))}")
        if "pattern" in schema:
            schema["pattern"] = _checked_pattern(schema["pattern"], path)
        if lengths:
            low, high = schema.pop("minLength", 0), schema.pop("maxLength", "")
            schema["pattern"] = f"^.{{{low},{high}}}$"

    def _number(self, schema: dict[str, Any], path: str, depth: int) -> None:
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            value = schema.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _Refused(f"has {name} {value!r:.80} at {path}, which is no number")
            if abs(value) >= _EXACT_INTEGER:
                raise _Refused(f"has {name} {value!r:.80} at {path}, beyond 2**53")
        for low, high in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if low in schema and high in schema:
                raise _Refused(f"has {low!r} and {high!r} at {path}: give one of them")
        if schema.get("multipleOf", 1) <= 0:
            raise _Refused(f"has multipleOf {schema['multipleOf']!r} at {path}, which is not above 0")
        bounds = sum(name in schema for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
        if "multipleOf" in schema and bounds == 1:
            raise _Refused(f"has 'multipleOf' beside one bound at {path}, where it is not enforced: give two, or none")

    def _array(self, schema: dict[str, Any], path: str, depth: int) -> None:
        _bounds(schema, "minItems", "maxItems", path)
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise _Refused(f"has prefixItems at {path} which is no list of schemas")
        for place, inner in enumerate(prefix):
            self.walk(inner, f"{path}/prefixItems/{place}", depth + 1)
        for name in ("items", "unevaluatedItems"):
            if isinstance(schema.get(name), list):
                raise _Refused(f"has a list of {name} at {path}: use prefixItems")
            if name in schema:
                self.walk(schema[name], f"{path}/{name}", depth + 1)

    def _object(self, schema: dict[str, Any], path: str, depth: int) -> None:
        bounds = _bounds(schema, "minProperties", "maxProperties", path)
        properties = _object(schema, "properties", path)
        patterns = _object(schema, "patternProperties", path)
        _check_required(schema.get("required", []), properties, path)
        _check_open_names(schema, properties, patterns, bounds, path)
        for name, inner in properties.items():
            self.walk(inner, f"{path}/properties/{name}", depth + 1)
        for pattern, inner in patterns.items():
            self.walk(inner, f"{path}/patternProperties/{pattern}", depth + 1)
            schema["patternProperties"] = {_checked_pattern(pattern, f"{path}/patternProperties"): inner}
        for name in ("additionalProperties", "unevaluatedProperties"):
            if name in schema:
                self.walk(schema[name], f"{path}/{name}", depth + 1)
        if "propertyNames" in schema:
            names = schema["propertyNames"]
            if properties or patterns:
                raise _Refused(f"has 'propertyNames' beside properties at {path}, where it is not enforced")
            if isinstance(names, dict):
                names.setdefault("type", "string")
            self.walk(names, f"{path}/propertyNames", depth + 1)


def _check_required(required: Any, properties: dict[str, Any], path: str) -> None:
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _Refused(f"has required at {path} which is no list of names")
    for name in required:
        if name not in properties:
            raise _Refused(f"requires {name!r:.80} at {path}, which is not among its properties, so that it would not "
                           "be enforced: declare it there")


def _check_open_names(schema: dict[str, Any], properties: dict[str, Any], patterns: dict[str, Any],
                      bounds: list[str], path: str) -> None:
    """Names that are not listed one by one can clash with each other, or with a listed one."""
    extra = any(schema.get(name, False) is not False for name in ("additionalProperties", "unevaluatedProperties"))
    if len(patterns) > 1:
        raise _Refused(f"has {len(patterns)} patternProperties at {path}: a name may match several, of which one is "
                       "enforced; give one pattern")
    if patterns and extra:
        raise _Refused(f"has 'additionalProperties' beside 'patternProperties' at {path}: a name of the pattern may be "
                       "taken for an additional one")
    for pattern in patterns:
        for name in properties:
            try:
                clash = re.search(pattern, name) is not None
            except re.error:
                clash = True
            if clash:
                raise _Refused(f"has the property {name!r:.80} at {path}, which matches patternProperties: only one of "
                               "the two is enforced")
    named_only = bool(properties) and not patterns and not extra
    if "minProperties" in bounds and schema["minProperties"] > 1 and not named_only:
        raise _Refused(f"has minProperties {schema['minProperties']} at {path} and names that are not listed: the same "
                       "name twice would count for two")


def _object(schema: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    value = schema.get(name, {})
    if not isinstance(value, dict):
        raise _Refused(f"has {name} at {path} which is no object")
    return value


def _types(schema: dict[str, Any], path: str) -> list[str]:
    given = schema.get("type", [])
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list) or any(kind not in TYPES for kind in types) or ("type" in schema and not types):
        raise _Refused(f"has type {given!r:.80} at {path}; known: {', '.join(TYPES)}")
    return types


def _bounds(schema: dict[str, Any], low: str, high: str, path: str) -> list[str]:
    """Which of the two are given, once they are known to make sense."""
    given = [name for name in (low, high) if name in schema]
    for name in given:
        value = schema[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise _Refused(f"has {name} {value!r:.80} at {path}, which is no count")
    if len(given) == 2 and schema[low] > schema[high]:
        raise _Refused(f"has {low} {schema[low]} above {high} {schema[high]} at {path}")
    return given


def _checked_pattern(pattern: Any, path: str) -> str:
    """The pattern in the words that the compiler enforces."""
    problem = check_regex(pattern, in_json=True) if isinstance(pattern, str) else "is no text"
    if problem is not None:
        raise _Refused(f"has a pattern at {path} that {problem}")
    return portable_regex(pattern, in_json=True)


def _check_numbers(value: Any, path: str) -> None:
    """Large integers would come out rounded."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT_INTEGER:
        raise _Refused(f"has the value {value!r:.80} at {path}, beyond 2**53")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_numbers(inner, path)


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and float(value).is_integer())
    names = {str: "string", dict: "object", list: "array", type(None): "null"}
    return names[type(value)] == kind


def _exclude(first: Any, second: Any) -> bool:
    """Is there surely no value that both allow?"""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return first is False or second is False
    values = [_allowed_values(schema) for schema in (first, second)]
    if values[0] is not None and values[1] is not None:
        return not any(one == other for one in values[0] for other in values[1])
    kinds = [_kinds(schema) for schema in (first, second)]
    if kinds[0] is None or kinds[1] is None:
        return False
    if not kinds[0] & kinds[1]:
        return True
    if kinds[0] != {"object"} or kinds[1] != {"object"}:
        return False
    shared = set(first.get("required", ())) & set(second.get("required", ()))
    return any(
        _exclude(first["properties"][name], second["properties"][name])
        for name in shared if name in first.get("properties", {}) and name in second.get("properties", {}))


def _allowed_values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _kinds(schema: dict[str, Any]) -> set[str] | None:
    """Its types, an integer being a number; None if it says none."""
    values = _allowed_values(schema)
    if values is not None:
        return {kind for value in values for kind in TYPES if kind != "integer" and _is_of(value, kind)}
    given = schema.get("type")
    if given is None:
        return None
    return {"number" if kind == "integer" else kind for kind in ([given] if isinstance(given, str) else given)}
