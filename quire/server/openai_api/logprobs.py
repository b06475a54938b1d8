"""Log-probabilities in the two shapes that the OpenAI API has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.outputs.output import Logprob, PositionLogprobs
from quire.tokenizer.tokenizer import Tokenizer

_LOWEST = -9999.0
"""JSON has no infinity; OpenAI sends this for a token that cannot be."""


def _value(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)


def token_name(token: int, entry: Logprob, tokenizer: Tokenizer | None) -> str:
    """The token's text; one that is a piece of a character only is told by its bytes."""
    text = entry.decoded_token
    if text is None:
        return f"token_id:{token}"
    if "\ufffd" in text and tokenizer is not None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token))
    return text


def chat_logprobs(positions: Sequence[PositionLogprobs], count: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def described(token: int, entry: Logprob) -> dict[str, Any]:
        raw = None if tokenizer is None else list(tokenizer.token_bytes(token))
        return {"token": token_name(token, entry, tokenizer), "logprob": _value(entry), "bytes": raw}

    content = []
    for position in positions:
        (drawn, first), *_ = position.items()
        best = [described(token, entry) for token, entry in _best(position, count)]
        content.append({**described(drawn, first), "top_logprobs": best})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion; offsets count on from one piece of a stream to the next."""

    def __init__(self, count: int, tokenizer: Tokenizer | None, offset: int = 0) -> None:
        self._count = count
        self._tokenizer = tokenizer
        self._offset = offset

    def prompt(self, tokens: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        """Of an echoed prompt, whose first token has none."""
        filled: list[PositionLogprobs] = []
        for token, position in zip(tokens, positions, strict=False):
            word = None if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)
            filled.append({token: Logprob(0.0, None, word)} if position is None else position)
        return self.piece(filled, missing_first=bool(positions) and positions[0] is None)

    def piece(self, positions: Sequence[PositionLogprobs], missing_first: bool = False) -> dict[str, Any]:
        tokens: list[str] = []
        values: list[float | None] = []
        best: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for place, position in enumerate(positions):
            (drawn, first), *_ = position.items()
            name = token_name(drawn, first, self._tokenizer)
            missing = missing_first and place == 0
            tokens.append(name)
            values.append(None if missing else _value(first))
            offsets.append(self._offset)
            self._offset += len(first.decoded_token or "")
            if missing:
                best.append(None)
            else:
                top = {token_name(t, e, self._tokenizer): _value(e) for t, e in _best(position, self._count)}
                top.setdefault(name, _value(first))
                best.append(top)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": best if self._count else None,
                "text_offset": offsets}


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {key: None if first[key] is None else first[key] + second[key] for key in first}


def _best(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The likeliest ones. The drawn token stands first in a position whether it is one of them or not."""
    ranked = [(token, entry) for token, entry in position.items() if entry.rank is not None and entry.rank <= count]
    return sorted(ranked, key=lambda item: item[1].rank or 0)
