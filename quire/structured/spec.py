"""What shape a caller may ask of an output: one of six, checked at once and refused by name."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json as jsonlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quire.errors import InvalidRequestError
from quire.structured.json_schema import check_schema
from quire.structured.regex import check_regex
from quire.structured.tags import check_tag, named_tokens

MAX_SCHEMA_BYTES: Final = 64 << 10
MAX_REGEX_BYTES: Final = 8 << 10
MAX_GRAMMAR_BYTES: Final = 64 << 10
MAX_TAG_BYTES: Final = 120 << 10
"""A structural tag holds the schemas of all tools of a request; with its quotes escaped it fits a packet to a cell."""
MAX_CHOICES: Final = 1024
MAX_CHOICE_BYTES: Final = 64 << 10
"""Of all choices together."""
_KNOWN_CHARACTERS: Final = 512
KINDS: Final = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
FIELD: Final = "structured_outputs"


def _refuse(kind: str, message: str) -> InvalidRequestError:
    name = f"{FIELD}.{kind}"
    return InvalidRequestError(f"{name} {message}", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The shape of an output: exactly one of the fields is set.

    A schema becomes JSON text and choices a tuple, so that this is plain data wherever it goes.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, as a dict or as JSON text."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Sequence[str] | None = None
    """Texts of which the output is one."""
    grammar: str | None = None
    """An EBNF grammar (as llama.cpp writes them, GBNF) whose rule `root` derives the output."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Texts, tokens and schemas put together, as a dict or as JSON text (`quire/structured/tags.py`)."""

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"{FIELD} needs exactly one of {', '.join(KINDS)}; {' and '.join(given) or 'none'} "
                f"{'is' if len(given) < 2 else 'are'} set", field=FIELD)
        check = {"json": _json, "json_object": _json_object, "regex": _regex, "choice": _choice, "grammar": _grammar,
                 "structural_tag": _structural_tag}
        object.__setattr__(self, given[0], check[given[0]](getattr(self, given[0])))

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def field(self) -> str:
        """What to call it when it is refused."""
        return f"{FIELD}.{self.kind}"

    @property
    def named_tokens(self) -> frozenset[int]:
        """Special tokens that it asks for by their ids."""
        return named_tokens(jsonlib.loads(str(self.structural_tag))) if self.structural_tag is not None else frozenset()

    @property
    def key(self) -> bytes:
        """The same for two that ask for the same."""
        text = jsonlib.dumps([self.kind, getattr(self, self.kind)])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` of it gives an equal object."""
        value = getattr(self, self.kind)
        return {self.kind: list(value) if isinstance(value, tuple) else value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StructuredOutputs:
        known = {f.name for f in dataclasses.fields(cls)}
        for name in data:
            if name not in known:
                raise InvalidRequestError(f"{FIELD} has no field {name!r}; known: {', '.join(KINDS)}",
                                          field=f"{FIELD}.{name}")
        return cls(**data)


def _text(kind: str, value: Any, most: int) -> str:
    if not isinstance(value, str):
        raise _refuse(kind, f"must be a text, not {type(value).__name__}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise _refuse(kind, f"is not valid Unicode: {error.reason}") from None
    if size > most:
        raise _refuse(kind, f"has {size} bytes; at most {most} are allowed")
    return value


def _json(value: Any) -> str:
    """The schema as JSON text, in its own order: properties are written in the order of the schema."""
    if isinstance(value, Mapping | bool):
        try:
            value = jsonlib.dumps(dict(value) if isinstance(value, Mapping) else value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refuse("json", f"is not plain JSON data: {error}") from None
    return _checked("json", _text("json", value, MAX_SCHEMA_BYTES), _schema_problem)


def _schema_problem(text: str) -> str | None:
    try:
        schema = jsonlib.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        return f"is not a JSON text: {error}"
    if not isinstance(schema, dict | bool):
        return f"must be a JSON schema (an object), not {type(schema).__name__}"
    return check_schema(schema)


def _checked(kind: str, text: str, problem_of: Callable[[str], str | None]) -> str:
    """What was found good lately is not looked at again: every request brings its schema, and so does each process that
    reads it. Only small ones, which take half a millisecond at most: longer times would tell whether another has asked
    for them."""
    if len(text) > _KNOWN_CHARACTERS:
        problem = problem_of(text)
    else:
        problem = _known_problem(problem_of, text)
    if problem is not None:
        raise _refuse(kind, problem)
    return text


@functools.lru_cache(64)
def _known_problem(problem_of: Callable[[str], str | None], text: str) -> str | None:
    return problem_of(text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _json_object(value: Any) -> bool:
    if value is not True:
        raise _refuse("json_object", f"must be True or left out, not {value!r:.80}")
    return True


def _regex(value: Any) -> str:
    return _checked("regex", _text("regex", value, MAX_REGEX_BYTES), check_regex)


def _choice(value: Any) -> tuple[str, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise _refuse("choice", f"must be a list of texts, not {type(value).__name__} {value!r:.80}")
    if not value:
        raise _refuse("choice", "is empty: give at least one text")
    if len(value) > MAX_CHOICES:
        raise _refuse("choice", f"has {len(value)} entries; at most {MAX_CHOICES} are allowed")
    size = 0
    for item in value:
        size += len(_text("choice", item, MAX_CHOICE_BYTES).encode())
        if not item:
            raise _refuse("choice", "may not hold an empty text: there would be nothing to generate")
        if "\0" in item:
            raise _refuse("choice", "may not hold the character NUL")
    if size > MAX_CHOICE_BYTES:
        raise _refuse("choice", f"has {size} bytes in all; at most {MAX_CHOICE_BYTES} are allowed")
    return tuple(dict.fromkeys(value))


def _grammar(value: Any) -> str:
    text = _text("grammar", value, MAX_GRAMMAR_BYTES)
    if not text.strip():
        raise _refuse("grammar", "is empty: give a grammar with a rule named root")
    return text


def _structural_tag(value: Any) -> str:
    if isinstance(value, Mapping):
        try:
            value = jsonlib.dumps(dict(value), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refuse("structural_tag", f"is not plain JSON data: {error}") from None
    return _checked("structural_tag", _text("structural_tag", value, MAX_TAG_BYTES), _tag_problem)


def _tag_problem(text: str) -> str | None:
    try:
        tag = jsonlib.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        return f"is not a JSON text: {error}"
    return check_tag(tag)
