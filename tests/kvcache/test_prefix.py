"""Hash chains name prefixes: equal prefixes alike, different ones differently, whatever they are made of."""

from __future__ import annotations

import hashlib
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kvcache.prefix import HashChain, cache_key
from quire.kvcache.table import SequenceKV

SHORT = st.lists(st.integers(0, 2), max_size=12)
KEYS = st.sampled_from([b"", cache_key(["x"])])


@settings(max_examples=200, deadline=None, database=None)
@given(a=SHORT, b=SHORT, key_a=KEYS, key_b=KEYS)
def test_hashes_are_equal_exactly_where_key_and_prefix_are(
    a: list[int], b: list[int], key_a: bytes, key_b: bytes
) -> None:
    chain = HashChain(2)
    one = chain.extend(SequenceKV(key_a), a, len(a))
    two = chain.extend(SequenceKV(key_b), b, len(b))
    for i in range(min(len(one), len(two))):
        same = key_a == key_b and a[: 2 * i + 2] == b[: 2 * i + 2]
        assert (one[i] == two[i]) is same


def test_a_chain_grown_in_pieces_is_the_chain_of_the_whole() -> None:
    chain, tokens = HashChain(3), list(range(20))
    pieces = SequenceKV()
    for n in (2, 3, 10, 10, 17):
        chain.extend(pieces, tokens, n)
    assert pieces.hashes == chain.extend(SequenceKV(), tokens, 17) and len(pieces.hashes) == 5


def test_names_are_those_that_other_processes_know() -> None:
    """KV that was stored or sent under a name is found under it by a later version too."""
    tokens = [(7919 * i + 5) % 151936 for i in range(16 * 70)]
    names = HashChain(16, b"k" * 32).extend(SequenceKV(cache_key(["salt", "x"])), tokens, len(tokens))
    parent = cache_key(["salt", "x"])
    for i, name in enumerate(names):
        words = b"".join(token.to_bytes(8, sys.byteorder) for token in tokens[16 * i : 16 * i + 16])
        parent = hashlib.blake2b(parent + words, digest_size=16, key=b"k" * 32).digest()
        assert name == parent
    assert len(names) == 70


def test_two_engines_name_the_same_prefix_differently() -> None:
    tokens = list(range(4))
    assert HashChain(4).extend(SequenceKV(), tokens, 4) != HashChain(4).extend(SequenceKV(), tokens, 4)
    assert (HashChain(4, b"k" * 32).extend(SequenceKV(), tokens, 4)
            == HashChain(4, b"k" * 32).extend(SequenceKV(), tokens, 4))


@settings(max_examples=100, deadline=None, database=None)
@given(a=st.lists(st.text(max_size=3), max_size=3), b=st.lists(st.text(max_size=3), max_size=3))
def test_cache_keys_are_equal_exactly_when_their_parts_are(a: list[str], b: list[str]) -> None:
    assert (cache_key(a) == cache_key(b)) is (a == b)
