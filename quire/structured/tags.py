"""Structural tags: shapes put together from texts, tokens and schemas, in the words of xgrammar.

The server makes them, to force a tool call in the format of a model's family or to apply a schema after a model's
thoughts. What they hold is checked as if it were asked for by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from quire.structured.json_schema import check_schema
from quire.structured.regex import check_regex, portable_regex

KINDS: Final = frozenset({"const_string", "json_schema", "any_text", "token", "grammar", "regex", "sequence", "or",
                          "optional", "star"})
MAX_DEPTH: Final = 16


def check_tag(tag: Any) -> str | None:
    """Why a structural tag cannot be used, or None."""
    if not isinstance(tag, Mapping) or not isinstance(tag.get("format"), Mapping):
        return "must be an object with a 'format'"
    for part, depth in _parts(tag["format"], 0):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in KINDS:
            return f"has a part of type {kind!r:.40}; known: {', '.join(sorted(KINDS))}"
        if depth > MAX_DEPTH:
            return f"is nested deeper than {MAX_DEPTH}"
        problem = None
        if kind == "json_schema":
            problem = check_schema(part.get("json_schema"))
        elif kind == "regex":
            problem = check_regex(str(part.get("pattern")))
        if problem is not None:
            return problem
    return None


def enforced_tag(tag: Mapping[str, Any]) -> dict[str, Any]:
    """The same in the words that the compiler enforces."""
    return {"type": "structural_tag", "format": _enforced(tag["format"])}


def named_tokens(tag: Mapping[str, Any]) -> frozenset[int]:
    """The tokens that it asks for by their ids: special ones, which no text has."""
    return frozenset(part["token"] for part, _ in _parts(tag["format"], 0) if part.get("type") == "token")


def _parts(part: Any, depth: int) -> Iterator[tuple[Any, int]]:
    yield part, depth
    if isinstance(part, Mapping) and depth <= MAX_DEPTH:
        inner = part.get("elements") or ([part["content"]] if "content" in part else [])
        for each in inner if isinstance(inner, list) else [None]:
            yield from _parts(each, depth + 1)


def _enforced(part: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(part)
    if part["type"] == "json_schema":
        check_schema(part["json_schema"])  # it also puts the schema in such words, in place
    if part["type"] == "regex":
        found["pattern"] = portable_regex(part["pattern"])
    if "elements" in part:
        found["elements"] = [_enforced(each) for each in part["elements"]]
    if "content" in part:
        found["content"] = _enforced(part["content"])
    return found
