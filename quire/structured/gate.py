"""Requests whose grammar is being compiled: neither waiting nor running, and in nobody's way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.errors import InvalidRequestError, QuireError

if TYPE_CHECKING:
    from quire.scheduler.plan import PlanEntry
    from quire.scheduler.request import Request, Sequence


GRAMMAR_END = "structured_outputs"
"""The stop_reason of a sequence that ends because its grammar has nothing more to say and no token may say so."""


class GrammarGate:
    """Holds requests until their grammar is settled."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def names(self) -> list[str]:
        return list(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def remove(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)

    def settled(self) -> Iterator[Request]:
        """Let go of those whose grammar is there, or will not come."""
        for request in [r for r in self._requests.values() if r.grammar is None or r.grammar.settled]:
            del self._requests[request.request_id]
            yield request

    def wait(self, seconds: float) -> None:
        """For the first of them, but no longer than that: there is nothing else to do."""
        for request in self._requests.values():
            if request.grammar is not None:
                request.grammar.wait(seconds)
            return


def take_grammar(request: Request) -> str | None:
    """Give a request its grammar, which is settled; why it cannot be used, if it cannot."""
    if request.grammar is None:
        return None
    try:
        grammar = request.grammar.result()
    except InvalidRequestError as error:
        request.refusal = error
        return str(error)
    except QuireError as error:
        return str(error)
    request.start_grammar = grammar.start
    return None


def add_masks(seq: Sequence, entry: PlanEntry) -> None:
    """Tell a plan's entry which tokens may be drawn, if its sequence has a grammar to follow."""
    request = seq.request
    if request.start_grammar is None or not entry.sample:
        return
    if seq.grammar is None:
        seq.grammar = request.start_grammar(request.stop_ids)
    entry.masks = b"".join(seq.grammar.masks(seq.tokens[seq.num_prompt_tokens :], entry.drafts))


def grammar_over(seq: Sequence) -> bool:
    """Has the sequence nothing more to say, and no token to say so?"""
    return seq.grammar is not None and seq.grammar.over(seq.tokens[seq.num_prompt_tokens :])
