"""Detokenization: pieces join to the full decode, never half a character, never a part of a stop string."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.outputs.detokenizer import ByteDetokenizer, StopStrings, WindowDetokenizer, make_detokenizer
from tests.engine import vocabularies

KINDS = vocabularies.all_kinds()
every_kind = pytest.mark.parametrize("kind", KINDS)


def pieces_of(tokenizer, ids, skip):
    detokenizer = make_detokenizer(tokenizer, skip)
    return [detokenizer.push(token) for token in ids] + [detokenizer.finish()]


def check_exact(tokenizer, ids):
    for skip in (True, False):
        pieces = pieces_of(tokenizer, ids, skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@every_kind
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_random_tokens_join_to_the_full_decode(kind, data):
    tokenizer = KINDS[kind]
    check_exact(tokenizer, data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40)))


@every_kind
def test_pieces_of_soups_of_bytes_and_special_tokens_join_to_the_full_decode(kind):
    """Uniform tokens seldom make long runs of bytes, cut characters or start a text with special tokens."""
    tokenizer, rng = KINDS[kind], random.Random(1)
    size = tokenizer.vocab_size
    known = [tokenizer.backend.token_to_id(byte) for byte in vocabularies.BYTES]
    bytes_ = [i for i in known if i is not None] or list(range(4, min(size, 260)))
    special = sorted(tokenizer.special_ids)
    spaces = [i for i in range(size) if not tokenizer.token_text(i).strip("▁ Ġ")]
    pools = [
        spaces * 8 + list(range(size)),
        bytes_,
        bytes_ + special * 40,
        special * 20 + list(range(size)),
        [*bytes_, size, size + 1, *range(size)],
    ]
    for _ in range(600):
        pool = rng.choice(pools)
        check_exact(tokenizer, [rng.choice(pool) for _ in range(rng.randrange(30))])


@every_kind
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60) | st.sampled_from(vocabularies.TEXTS))
def test_pieces_of_real_text_join_and_show_no_half_character(kind, text):
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    check_exact(tokenizer, ids)
    whole = tokenizer.decode(ids)
    shown = ""
    for piece in pieces_of(tokenizer, ids, skip=True):
        shown += piece
        assert whole.startswith(shown)
        assert shown.count("\ufffd") <= whole[: len(shown)].count("\ufffd")


def test_bytes_of_a_character_are_withheld_until_it_is_whole():
    for kind in ("byte_level", "llama2", "gemma"):
        tokenizer = KINDS[kind]
        ids = tokenizer.encode("ab 🦜 c", add_special_tokens=False)
        pieces = pieces_of(tokenizer, ids, skip=True)
        assert "".join(pieces).strip() == "ab 🦜 c"
        assert not any("\ufffd" in piece for piece in pieces)
        assert sum("🦜" in piece for piece in pieces) == 1
        assert "" in pieces[:-1]  # some token gave nothing yet: the test would be empty otherwise


def test_an_unfinished_character_comes_out_as_replacement_at_the_end():
    tokenizer = KINDS["byte_level"]
    ids = tokenizer.encode("a🦜", add_special_tokens=False)[:-1]
    pieces = pieces_of(tokenizer, ids, skip=True)
    assert "".join(pieces[:-1]) == "a" and pieces[-1] == "\ufffd"


def test_valid_byte_tokens_followed_by_a_bad_one_are_not_shown_too_early():
    """The byte-fallback decoder turns the whole run into U+FFFD then, the good bytes too."""
    tokenizer = KINDS["llama2"]
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in [*"你".encode(), 0xFF]]
    assert tokenizer.decode(ids) == "\ufffd" * 4
    assert pieces_of(tokenizer, ids, skip=True) == ["", "", "", "", "\ufffd" * 4]


def test_byte_level_vocabularies_take_the_byte_path_and_others_the_window():
    assert isinstance(make_detokenizer(KINDS["byte_level"], True), ByteDetokenizer)
    assert all(
        isinstance(make_detokenizer(KINDS[kind], True), WindowDetokenizer)
        for kind in KINDS
        if kind != "byte_level"
    )


class CountingTokenizer:
    """Counts the ids that are decoded."""

    def __init__(self, inner):
        self._inner = inner
        self.special_ids, self.token_text, self.token_bytes = (
            inner.special_ids,
            inner.token_text,
            inner.token_bytes,
        )
        self.decoded = 0

    def decode(self, ids, skip_special_tokens=True):
        self.decoded += len(ids)
        return self._inner.decode(ids, skip_special_tokens)


@every_kind
@pytest.mark.parametrize("soup", ["words", "one bad byte for ever", "random"])
def test_work_per_token_does_not_grow_with_the_text(kind, soup):
    tokenizer, rng, n = KINDS[kind], random.Random(2), 3000
    bad = tokenizer.backend.token_to_id("<0xFF>") or tokenizer.backend.token_to_id("Ā") or 7
    ids = {
        "words": tokenizer.encode(" ".join(vocabularies.TEXTS) * 12, add_special_tokens=False)[:n],
        "one bad byte for ever": [bad] * n,
        "random": [rng.randrange(tokenizer.vocab_size) for _ in range(n)],
    }[soup]
    counting = CountingTokenizer(tokenizer)
    detokenizer = WindowDetokenizer(counting, True)
    text = "".join([detokenizer.push(token) for token in ids] + [detokenizer.finish()])
    assert text == tokenizer.decode(ids)
    assert counting.decoded < 25 * n


def stop_reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """First complete, then longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    include=st.booleans(),
)
def test_stop_strings_are_found_however_the_text_is_cut_and_never_leak(pieces, stops, include):
    text = "".join(pieces)
    expected, stop = stop_reference(text, stops, include)
    matcher, shown = StopStrings(stops, include), ""
    for piece in pieces:
        shown += matcher.push(piece)
        assert expected.startswith(shown)
        if matcher.matched:
            break
        # No more is withheld than a stop string could still need.
        pending = "".join(pieces)[: len(shown) + len(matcher._held)][len(shown) :]
        assert not pending or any(s.startswith(pending) for s in stops)
    if not matcher.matched:
        shown += matcher.finish()
    assert (shown, matcher.matched) == (expected, stop)


def test_matches_that_end_while_unarmed_do_not_count_but_one_completed_later_does():
    matcher = StopStrings(["END"])
    assert matcher.push("xENDy", armed=False) == "xENDy"
    assert matcher.push("aEN", armed=False) == "a"
    assert matcher.push("D!", armed=True) == ""
    assert matcher.matched == "END"


def test_without_stop_strings_text_passes_through():
    matcher = StopStrings([])
    assert matcher.push("abc") == "abc" and matcher.finish() == "" and matcher.matched is None
