"""A matcher's state is a function of the output: forward, back, and along drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.sampling.masks import TokenMasks
from quire.structured.compiler import parse_grammar
from quire.structured.matcher import CompiledGrammar, SequenceGrammar, allows_any
from quire.structured.spec import StructuredOutputs
from quire.structured.vocabulary import Vocabulary, read_vocabulary
from tests.structured.test_json_schema import END
from tests.structured.test_json_schema import vocabulary as vocabulary
from tests.structured.tiny import tokenizer_of


def start(vocabulary: Vocabulary, regex: str, ends: frozenset[int] = frozenset({END})) -> SequenceGrammar:
    import xgrammar

    compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
    grammar = parse_grammar(StructuredOutputs(regex=regex))
    return CompiledGrammar(compiler.compile_grammar(grammar), vocabulary).start(ends)


def allowed(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


A, B, C = b"abc"


def test_it_follows_an_output_wherever_that_goes(vocabulary: Vocabulary) -> None:
    matcher = start(vocabulary, "a(b|c)*")
    fresh = {tuple(output): start(vocabulary, "a(b|c)*").mask(output) for output in ([], [A], [A, B], [A, C, C])}
    for output in ([], [A], [A, B], [A, C, C], [A], [A, B], [], [A, C, C]):
        assert matcher.mask(output) == fresh[tuple(output)]
    assert allowed(fresh[(A, B)]) == {B, C, END}


def test_masks_along_drafts_are_those_of_the_outputs_they_make(vocabulary: Vocabulary) -> None:
    matcher = start(vocabulary, "ab{2}c?")
    masks = matcher.masks([A], [B, B, C])
    assert [allowed(mask) for mask in masks] == [{B}, {B}, {C, END}, {END}]
    assert matcher.mask([A, B]) == masks[1]


def test_masks_of_several_sequences_at_once_are_those_of_each(vocabulary: Vocabulary) -> None:
    outputs = [[], [A], [A, B], [B], [A, C, C], [A, B, END]]
    patterns = ["a(b|c)*", "ab?", "a(b|c)*", "a", "a(b|c)*", "a(b|c)*"]
    ends = [frozenset({END}), frozenset()] * 3
    several = [start(vocabulary, *pair) for pair in zip(patterns, ends, strict=True)]
    alone = [start(vocabulary, *pair).mask(output) for *pair, output in zip(patterns, ends, outputs, strict=True)]
    for _ in range(2):
        assert SequenceGrammar.masks_of_all(list(zip(several, outputs, strict=True))) == alone
    assert [bool(allowed(mask)) for mask in alone] == [allows_any(mask) for mask in alone]
    assert not allows_any(alone[3]) and allows_any(alone[0])


def test_after_a_draft_that_is_not_allowed_nothing_is(vocabulary: Vocabulary) -> None:
    matcher = start(vocabulary, "ab{2}c?")
    assert [allowed(mask) for mask in matcher.masks([A], [B, C, B])] == [{B}, {B}, set(), set()]
    assert allowed(matcher.mask([A, B])) == {B}


def test_an_output_outside_of_the_grammar_allows_nothing(vocabulary: Vocabulary) -> None:
    assert allowed(start(vocabulary, "ab").mask([B])) == set()


def test_it_is_over_only_without_an_end_token_and_with_nothing_left(vocabulary: Vocabulary) -> None:
    assert not start(vocabulary, "ab").over([A, B])
    endless = start(vocabulary, "ab?", frozenset())
    assert not endless.over([A]) and endless.over([A, B])


def test_text_tokens_named_as_ends_stay_text(vocabulary: Vocabulary) -> None:
    assert allowed(start(vocabulary, "ab", frozenset({B, END})).mask([])) == {A}


@pytest.mark.parametrize("kind", ["byte_level", "gemma", "llama2"])
def test_special_tokens_and_padding_are_never_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    size = tokenizer.vocab_size + 40
    found = read_vocabulary(tokenizer, size, {2})
    assert {0, 1, 2, 3, *range(tokenizer.vocab_size, size)} <= found.silent_ids
    assert bool(found.spaced_ids) == (kind == "llama2")
    free = allowed(start(found, ".*", frozenset({2})).mask([]))
    assert free & found.silent_ids == {2} and max(free) < tokenizer.vocab_size


def test_bytes_that_are_no_utf8_are_never_allowed(vocabulary: Vocabulary) -> None:
    matcher = start(vocabulary, ".{2}")
    assert {0x80, 0x9F} <= allowed(matcher.mask([0xED])) and not {0xA0, 0xBF} & allowed(matcher.mask([0xED]))
    assert not {0x80, 0x9F} & allowed(matcher.mask([0xE0])) and not {0x90} & allowed(matcher.mask([0xF4]))


def test_masks_leave_allowed_logits_and_other_rows_as_they_are() -> None:
    logits = torch.randn(3, 70)
    bits = np.zeros(96, np.uint8)
    bits[[0, 31, 32, 69, 80]] = 1
    masks = TokenMasks.of({1: np.packbits(bits, bitorder="little").tobytes()}, torch.device("cpu"))
    assert masks is not None
    found = logits.clone()
    masks.apply_(found)
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    assert torch.isfinite(found[1]).nonzero().flatten().tolist() == [0, 31, 32, 69]
    assert torch.equal(found[1, [0, 31, 32, 69]], logits[1, [0, 31, 32, 69]])
