"""A tokenizer's vocabulary as the grammar compiler wants it: the bytes of every token the model can draw."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from quire.errors import InvalidRequestError


class TokenBytes(Protocol):
    """The part of a tokenizer that is needed."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def vocab_size(self) -> int: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the compiler and the matchers of one model share."""

    info: Any
    """xgrammar's TokenizerInfo."""
    size: int
    silent_ids: frozenset[int]
    """Tokens that are no part of any text: end of text, other special ones, ids without a token."""
    spaced_ids: tuple[int, ...]
    """Tokens that begin with a space, where the decoder drops a text's first space; else none."""
    after: Mapping[int, tuple[int, ...]]
    """By token that ends in a byte which not every continuation byte may follow: the tokens that may not."""

    def drawable_with(self, named: Iterable[int]) -> np.ndarray:
        """One bit for each token that is part of a text or one of `named`, in words of 32."""
        bits = np.zeros(-(-self.size // 32) * 32, bool)
        bits[: self.size] = True
        bits[list(self.silent_ids)] = False
        bits[list(named)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


_NEVER_AFTER = {0xE0: range(0x80, 0xA0), 0xED: range(0xA0, 0xC0), 0xF0: range(0x80, 0x90), 0xF4: range(0x90, 0xC0)}
"""By first byte of a character: second bytes that no UTF-8 has (overlong forms, halves of UTF-16 pairs, beyond
Unicode). The compiler lets them pass."""


def import_xgrammar() -> Any:
    """The package, or an error that says how to get it."""
    try:
        import xgrammar
    except ImportError as error:
        raise InvalidRequestError(
            f"structured_outputs needs the package xgrammar, which cannot be imported here ({error}): "
            "pip install xgrammar", field="structured_outputs") from None
    return xgrammar


def read_vocabulary(tokenizer: TokenBytes, vocab_size: int, eos_token_ids: Collection[int]) -> Vocabulary:
    """`vocab_size` is the model's: its logits may be wider than the tokenizer's vocabulary, or narrower.

    End tokens are silent whatever the file says, and unknown to the compiler: where a text may end is the
    matcher's question, and which tokens end it depends on the request.
    """
    xgrammar = import_xgrammar()
    silent = {token for token in (*eos_token_ids, *tokenizer.special_ids) if token < vocab_size}
    known = min(vocab_size, tokenizer.vocab_size)
    texts = [b"" if token in silent else tokenizer.token_bytes(token) for token in range(known)]
    silent.update(token for token, text in enumerate(texts) if not text)
    silent.update(range(known, vocab_size))
    texts, after = _only_utf8(texts, silent)
    for token in tokenizer.special_ids:
        if token < known:
            # No text has this byte: only a grammar that names the token by its id gets there.
            texts[token] = b"\xff" + tokenizer.token_bytes(token)
    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[])
    spaced = [token for token, text in enumerate(texts) if text.startswith(b" ")]
    drops = any(not tokenizer.decode([token]).startswith(" ") for token in spaced[:1])
    return Vocabulary(info, vocab_size, frozenset(silent), tuple(spaced) if drops else (), after)


def _only_utf8(texts: list[bytes], silent: set[int]) -> tuple[list[bytes], dict[int, tuple[int, ...]]]:
    """Silence tokens that are no UTF-8 by themselves, and find those that are none after another."""
    for token, text in enumerate(texts):
        if any(after in _NEVER_AFTER.get(first, ()) for first, after in pairwise(text)):
            texts[token] = b""
            silent.add(token)
    wrong = {first: tuple(token for token, text in enumerate(texts) if text and text[0] in never)
             for first, never in _NEVER_AFTER.items()}
    return texts, {token: wrong[text[-1]] for token, text in enumerate(texts) if text and text[-1] in wrong}
