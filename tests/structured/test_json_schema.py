"""What the compiler would not enforce is refused by name; what is accepted is enforced, as random walks show."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from quire.errors import InvalidRequestError
from quire.structured.compiler import parse_grammar
from quire.structured.json_schema import FORMATS, check_schema
from quire.structured.matcher import CompiledGrammar
from quire.structured.spec import StructuredOutputs
from quire.structured.vocabulary import Vocabulary, read_vocabulary

AB = {"a": {"type": "integer"}, "b": {"type": "integer"}}
NOT_ENFORCED: list[tuple[str, Any]] = [
    ("minLength", {"type": "string", "pattern": "^a+$", "minLength": 3}),
    ("maxLength", {"type": "string", "format": "email", "maxLength": 3}),
    ("format", {"type": "string", "format": "regex"}),
    ("multipleOf", {"type": "number", "multipleOf": 0.5}),
    ("multipleOf", {"type": "integer", "multipleOf": 5, "minimum": 1}),
    ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {"const": 3}}),
    ("additionalItems", {"type": "array", "prefixItems": [{}], "additionalItems": False}),
    ("prefixItems", {"type": "array", "items": [{"type": "integer"}]}),
    ("propertyNames", {"type": "object", "properties": AB, "propertyNames": {"pattern": "^a$"}}),
    ("'c'", {"type": "object", "properties": AB, "required": ["c"]}),
    ("dependentRequired", {"type": "object", "properties": AB, "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "properties": AB, "dependentSchemas": {"a": {}}}),
    ("dependencies", {"type": "object", "properties": AB, "dependencies": {"a": ["b"]}}),
    ("'if'", {"type": "object", "properties": AB, "if": {}, "then": {}}),
    ("'not'", {"type": "integer", "not": {"const": 1}}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ("anyOf", {"type": "string", "anyOf": [{"type": "integer"}, {"type": "string"}]}),
    ("allOf", {"allOf": [{"type": "integer"}, {"minimum": 5}]}),
    ("allOf", {"type": "object", "properties": AB, "allOf": [{"required": ["a"]}]}),
    (r"\$ref", {"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 5}),
    ("refers to", {"$ref": "http://example.com/schema.json"}),
    ("refers to", {"$ref": "#/$defs/none"}),
    (r"\$anchor", {"$defs": {"x": {"$anchor": "foo", "type": "integer"}}, "$ref": "#/$defs/x"}),
    (r"\$dynamicRef", {"$dynamicRef": "#x"}),
    ("enum", {"type": "string", "enum": [1, "a"]}),
    ("const", {"type": "string", "const": 1}),
    ("minimum", {"minimum": 5}),
    ("pattern", {"pattern": "^a$"}),
    ("contentEncoding", {"type": "string", "contentEncoding": "base64"}),
    ("nullable", {"type": "string", "nullable": True}),
    ("fooBar", {"type": "string", "fooBar": 1}),
    ("minProperties", {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}),
    ("patternProperties", {"type": "object", "patternProperties": {"^a": {}, "^b": {}}}),
    ("patternProperties", {"type": "object", "properties": AB, "patternProperties": {"^a": {"type": "null"}}}),
    ("beyond", {"const": 12345678901234567890}),
    ("escaped", {"type": "string", "pattern": '^a"b$'}),
    ("type 'strin'", {"type": "strin"}),
    ("false", False),
]


@pytest.mark.parametrize("named, schema", NOT_ENFORCED, ids=lambda value: str(value)[:60])
def test_it_is_refused_and_the_message_names_it(named: str, schema: Any) -> None:
    with pytest.raises(InvalidRequestError, match=named) as caught:
        StructuredOutputs(json=schema)
    assert caught.value.field == "structured_outputs.json"


def test_refusals_name_the_place() -> None:
    inner = {"type": "array", "uniqueItems": True}
    schema = {"type": "object", "properties": {"list": {"type": "array", "items": inner}}}
    assert "#/properties/list/items" in str(check_schema(schema))


def test_a_schema_deeper_than_the_compiler_can_take_is_refused() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequestError, match="nested"):
        StructuredOutputs(json=schema)


def test_references_that_go_in_circles_end() -> None:
    assert check_schema({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}) is None
    circle = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    assert check_schema({"$defs": circle, "$ref": "#/$defs/a"}) is None


def test_annotations_and_discriminated_unions_are_accepted() -> None:
    """As pydantic writes them."""
    def kind(name: str) -> dict[str, Any]:
        return {"type": "object", "title": name, "properties": {"kind": {"const": name, "type": "string"}},
                "required": ["kind"]}

    schema = {"$defs": {"A": kind("a"), "B": kind("b")}, "title": "Union", "description": "one of two", "examples": [1],
              "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    assert check_schema(schema) is None


# ---- random walks

WORDS = [b"true", b"false", b"null", b'"a"', b'":', b'", "', b'{"', b"}}", b"],[", b"  ", b"\n\n", b"\\u0061", b"12",
         b"-0", b".5", b"e+", b'"b":', b"a1", "é".encode(), "日".encode(), b"10"]
TOKENS = [bytes([byte]) for byte in range(256)] + WORDS + [b""]
END = len(TOKENS) - 1


class ByteTokenizer:
    special_ids = frozenset({END})
    vocab_size = len(TOKENS)

    def token_bytes(self, token_id: int) -> bytes:
        return TOKENS[token_id]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(TOKENS[token] for token in ids).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return read_vocabulary(ByteTokenizer(), len(TOKENS), {END})


def walk(grammar: CompiledGrammar, rng: random.Random, most: int = 200) -> str | None:
    """A text that the masks lead to, at random; None if it did not come to an end."""
    matcher, output = grammar.start(frozenset({END})), list[int]()
    while len(output) < most:
        bits = np.unpackbits(np.frombuffer(matcher.mask(output), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed and allowed[-1] <= END
        if allowed[-1] == END and (rng.random() < 0.3 or len(allowed) == 1):
            return b"".join(TOKENS[token] for token in output).decode("utf-8")
        texts = [token for token in allowed if token != END]
        usual = [token for token in texts if token >= 256 or chr(token) in '"}],:0123456789abA ']
        high = [token for token in texts if 128 <= token < 256]
        kind = rng.random()
        output.append(rng.choice(high if high and kind < 0.2 else usual if usual and kind < 0.85 else texts))
    return None


VALUES = [1, -2, 1.5, "a", 'é"\n\\', None, True, [1, "x"], {"k": {"z": []}}, "", 0, 12345678]
PATTERNS = ["^[a-c]+$", "b", "^a.c$", "[^a]{2}", "^\\d{2}-\\w$", "^(a|bb)*$", "^\\S\\s\\D\\W$", "a|b", "^[ -~]{1,4}$",
            "é+", "^[\\w.-]+@x$", "[^\\w\\s]é"]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    made_of_others = ["array", "object", "object", "anyOf", "types"]
    kind = rng.choice(["string", "number", "integer", "enum", "boolean"] + made_of_others * (depth < 3))
    if kind == "string":
        lengths = {"minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 5)}
        formats: list[dict[str, Any]] = [{"format": rng.choice(sorted(FORMATS))}, {"pattern": rng.choice(PATTERNS)}]
        return {"type": "string", **rng.choice([{}, lengths, *formats])}
    if kind in ("number", "integer"):
        low, high = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
        part = 0 if kind == "integer" else rng.choice([0, 0.5, -0.125])
        bounds = {low: rng.randint(-200, 50) + part, high: rng.randint(60, 2000) + part}
        return {"type": kind, **rng.choice([{}, bounds, {low: bounds[low]}, {high: bounds[high]}])}
    if kind == "enum":
        return {"enum": rng.sample(VALUES, rng.randint(1, 4))}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 2),
                "maxItems": rng.randint(2, 4)}
    if kind == "object":
        names = rng.sample(["a", "b", "c d", "é", 'x"y', "name"], rng.randint(1, 4))
        return {"type": "object", "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": rng.choice([False, False, True])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    if kind == "types":
        return {"type": rng.sample(["string", "integer", "null", "boolean", "array", "object", "number"], 2)}
    return {"type": "boolean"}


def test_every_walk_along_the_masks_ends_in_a_value_of_the_schema(vocabulary: Vocabulary) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    import xgrammar

    compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
    ended = 0
    for seed in range(250):
        rng = random.Random(seed)
        schema = random_schema(rng)
        grammar = CompiledGrammar(compiler.compile_grammar(parse_grammar(StructuredOutputs(json=schema))), vocabulary)
        for _ in range(3):
            text = walk(grammar, rng)
            if text is not None:
                ended += 1
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert ended > 600
