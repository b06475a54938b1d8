"""A regular expression is enforced to the letter in every dialect, or refused by name."""

from __future__ import annotations

import random
import re

import pytest

from quire.errors import InvalidRequestError
from quire.structured.compiler import parse_grammar
from quire.structured.matcher import CompiledGrammar
from quire.structured.spec import StructuredOutputs
from quire.structured.vocabulary import Vocabulary
from tests.structured.test_json_schema import vocabulary as vocabulary
from tests.structured.test_json_schema import walk

REFUSED = {
    "a(?=b)b": "lookahead", "a(?!b)c": "lookahead", "(?<=a)b": "lookbehind", "(?<!a)b": "lookbehind",
    r"(a)\1": "backreference", r"\bfoo\b": r"\\b", "(?i)ab": "flags", "(?P<n>a)": "named groups",
    "(?<n>a)": "named groups",
    r"\p{L}+": "Unicode property", r"\Aa\Z": r"\\A", r"\z": r"\\z", "a^b": "anchors", "a$b": "anchors",
    "(^a|b)c": "anchors",
    "(?>a)b": "atomic", "[[:alpha:]]": "POSIX", "[": "never closed", "(a": "never closed", "a)": "closes nothing",
    "a{,3}": "repetition", "a{": "repetition", "a\\": "middle of an escape", r"\x4": "hexadecimal",
    r"[\W]": "inside of brackets",
}
ACCEPTED = [r"\W{3}", r"\D\S[^\w]{2}[^\d\s]x", r"[^\s]{1,3}", ".{3}", r"^(a|b)+$|^c$", r"[\w.-]+@[a-z]{2,3}\.(com|de)",
            r"\$\d+\.\d{2}", r"é[à-ÿ]?\u4e2d\x41", "(?:x|y){2,}?z", "[^a-z]{2}", r"\[\]\{\}\\/", r"[\]\[]",
            "[-a]+", "a|", "x{0}y"]


@pytest.mark.parametrize("pattern", REFUSED, ids=repr)
def test_what_would_not_be_enforced_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match=REFUSED[pattern]) as caught:
        StructuredOutputs(regex=pattern)
    assert caught.value.field == "structured_outputs.regex"


@pytest.mark.parametrize("pattern", ACCEPTED)
def test_every_walk_along_the_masks_ends_in_a_match(pattern: str, vocabulary: Vocabulary) -> None:
    import xgrammar

    compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
    grammar = CompiledGrammar(compiler.compile_grammar(parse_grammar(StructuredOutputs(regex=pattern))), vocabulary)
    found = [walk(grammar, random.Random(seed), 60) for seed in range(30)]
    assert any(text is not None for text in found)
    assert all(re.fullmatch(pattern, text) for text in found if text is not None)
