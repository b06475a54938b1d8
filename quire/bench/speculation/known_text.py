"""A model of any shape whose text is known beforehand: what speculation costs and gains can then be set, not guessed.

The layers compute all that they always do, but write next to nothing into the stream, so a token's embedding reaches
the head as it was; and the head holds, in the row of the token that shall follow, that embedding. The text of random
weights says nothing about drafts, and in bfloat16 it takes another turn whenever the batch does: this one does not.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.speculation.proposer import Proposal, Proposer, ProposerSource

PERIOD = 24
_FAINT = 2.0**-12
"""What is left of the matrices that write into the stream."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WRITERS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


class KnownText:
    """Which token follows which: the lower half of the vocabulary goes round in circles, the upper half counts."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._circles = vocab_size // 2 // PERIOD
        self._counted = vocab_size - self._circles * PERIOD

    def after(self, token: int) -> int:
        first = self._circles * PERIOD
        if token < first:
            return token // PERIOD * PERIOD + (token + 1) % PERIOD
        return first + (token - first + 1) % self._counted

    def following(self, token: int, count: int) -> list[int]:
        found: list[int] = []
        for _ in range(count):
            token = self.after(token)
            found.append(token)
        return found

    # ---- prompts, and the text that follows each

    def prompt(self, kind: str, length: int, number: int, answer: int) -> list[int]:
        """`repeating`: it goes in a circle; `free`: no token comes twice; `misleading`: every token of the answer
        stands in it (where there is room), followed by another than the answer has."""
        rng = random.Random(f"{kind} {number}")
        if kind == "repeating":
            start = rng.randrange(self._circles) * PERIOD
            return [start, *self.following(start, length - 1)]
        first = self._circles * PERIOD + rng.randrange(self._counted)
        if kind == "free":
            return [first, *self.following(first, length - 1)]
        pairs = self.following(first, min(answer, (length - 1) // 2))
        misled = [token for each in pairs for token in (each, rng.randrange(self._circles * PERIOD))]
        return [*misled, *[rng.randrange(self._circles * PERIOD) for _ in range(length - 1 - len(misled))], first]


def weights_of_known_text(weights: Iterable[tuple[str, Tensor]], text: KnownText) -> Iterator[tuple[str, Tensor]]:
    """Random weights of an untied Qwen3 changed so that they say `text`."""
    follow = torch.tensor([text.after(token) for token in range(text.vocab_size)])
    embedding: Tensor | None = None
    for name, weight in weights:
        if name == _EMBEDDING:
            embedding = weight
        elif name.endswith(_WRITERS):
            weight = weight * _FAINT
        elif name == _HEAD:
            if embedding is None:
                raise ValueError("the embedding comes before the head")
            weight = torch.empty_like(embedding)
            weight[follow.to(embedding.device)] = embedding
        yield name, weight


def untied(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "tie_word_embeddings": False}


class KnownProposer(Proposer):
    """Proposes what will follow, each token wrong with the given probability."""

    def __init__(self, text: KnownText, last: int, acceptance: float, rng: random.Random) -> None:
        self._text = text
        self._last = last
        self._acceptance = acceptance
        self._rng = rng

    def extend(self, tokens: Sequence[int]) -> None:
        self._last = tokens[-1]

    def propose(self, most: int) -> Proposal:
        right = self._text.following(self._last, most)
        size = self._text.vocab_size
        return Proposal(tuple(token if self._rng.random() < self._acceptance else (token + size // 3) % size
                              for token in right), evidence=1)


class KnownSource(ProposerSource):
    def __init__(self, text: KnownText, acceptance: float) -> None:
        self._text = text
        self._acceptance = acceptance
        self._rng = random.Random(0)

    def open(self, tokens: Sequence[int], num_prompt_tokens: int, domain: object) -> Proposer:
        return KnownProposer(self._text, tokens[-1], self._acceptance, self._rng)
