"""A unit that is torn, changed or foreign is never taken for the one that was asked for."""

from __future__ import annotations

import random

import pytest

from quire.errors import KVUnitError
from quire.kvcache.token_prefix import TokenPrefix
from quire.kvpool.keys import KEY_BYTES, UNIT_TOKENS, UnitKeys, unit_name
from quire.kvpool.unit import HEADER_BYTES, check, seal

NAME = unit_name(bytes(range(KEY_BYTES)), 0)
CONTENT = random.Random(1).randbytes(200)
SEED = 12345
UNIT = seal(NAME, CONTENT, SEED) + CONTENT


def test_a_whole_unit_comes_back() -> None:
    assert bytes(check(NAME, UNIT, SEED, len(CONTENT))) == CONTENT
    assert check(NAME, seal(NAME, b"", SEED), SEED) == b""


@pytest.mark.parametrize("length", range(len(UNIT)))
def test_cut_off_at_any_byte_it_is_a_miss(length: int) -> None:
    with pytest.raises(KVUnitError):
        check(NAME, UNIT[:length], SEED)


def test_with_any_bit_flipped_it_is_a_miss() -> None:
    padding = range(8 + 4 + len(NAME), 8 + 4 + len(NAME) + 2)
    for at in range(len(UNIT)):
        if at in padding:
            continue
        for bit in range(8):
            damaged = bytearray(UNIT)
            damaged[at] ^= 1 << bit
            with pytest.raises(KVUnitError):
                check(NAME, damaged, SEED)


def test_another_name_another_secret_or_more_bytes_are_a_miss() -> None:
    for name, unit, seed, size in (
            (unit_name(bytes(KEY_BYTES), 0), UNIT, SEED, None), (unit_name(NAME[:KEY_BYTES], 1), UNIT, SEED, None),
            (NAME, UNIT, SEED + 1, None), (NAME, UNIT + b"x", SEED, None), (NAME, UNIT, SEED, len(CONTENT) + 4),
            (NAME, bytes(len(UNIT)), SEED, None), (NAME, bytes(HEADER_BYTES), SEED, None)):
        with pytest.raises(KVUnitError):
            check(name, unit, seed, size)


def prefix(tokens: list[int], root: bytes = b"") -> TokenPrefix:
    return TokenPrefix(root, tokens, len(tokens))


def test_keys_depend_on_every_token_before_the_secret_the_model_and_the_root() -> None:
    tokens = random.Random(7).choices(range(50000), k=3 * UNIT_TOKENS + 10)
    keys = UnitKeys(b"secret of one tenant", b"model").extend(prefix(tokens))
    assert len(keys) == 3 and len(set(keys)) == 3
    assert UnitKeys(b"secret of one tenant", b"model").extend(prefix(tokens[: 2 * UNIT_TOKENS])) == keys[:2]
    others = [UnitKeys(b"secret of another", b"model").extend(prefix(tokens)),
              UnitKeys(b"secret of one tenant", b"other").extend(prefix(tokens)),
              UnitKeys(b"secret of one tenant", b"model").extend(prefix(tokens, b"salt")),
              UnitKeys(b"secret of one tenant", b"model").extend(prefix([tokens[0] + 1, *tokens[1:]]))]
    found = {key for each in [keys, *others] for key in each}
    assert len(found) == 15


def test_keys_are_extended_and_not_computed_again() -> None:
    tokens = list(range(4 * UNIT_TOKENS))
    keys = UnitKeys(b"s" * 16, b"model")
    known = prefix(tokens)
    known.num_tokens = UNIT_TOKENS
    first = list(keys.extend(known))
    known.unit_keys[0] = b"\1" * KEY_BYTES  # were the first computed again, the second would not follow from this
    known.num_tokens = 2 * UNIT_TOKENS
    second = keys.extend(known)
    assert second[0] != first[0] and second[1] != keys.extend(prefix(tokens))[1]
