"""Where structured outputs hold a request up: until its grammar is compiled, and between two tokens until the mask is
there; and how they end it. Everybody else goes on meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from quire.errors import InvalidRequestError, QuireError
from quire.structured.isolated import PATIENCE_S, IsolatedGrammars, IsolatedSequence
from quire.structured.output import Output

if TYPE_CHECKING:
    from quire.scheduler.plan import PlanEntry
    from quire.scheduler.request import Request, Sequence
    from quire.speculation.speculator import Drafts


GRAMMAR_END = "structured_outputs"
"""The stop_reason of a sequence that ends because its grammar has nothing more to say and no token may say so."""
_PATIENCE_SHARE, _MOST_PATIENCE = 0.2, 0.03
"""Of the last step's seconds, and seconds: so long a step may wait for masks. Who is not in it waits for the next one,
and the step is not much shorter for that: on a CPU a batch that came apart costs more than the wait."""
_LONGEST_BLOCK = 0.05
"""Seconds that a request at the head of the queue may wait for a mask while others wait behind it."""


class GrammarGate:
    """Holds requests until their grammar is settled."""

    def __init__(self) -> None:
        self.isolated: IsolatedGrammars | None = None
        """Where matchers live in processes of their own."""
        self._requests: dict[str, Request] = {}
        self._seen_over = 0
        self._patience = PATIENCE_S

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
        if self.isolated is not None:
            self.isolated.pump(self._patience if self.isolated.owes_masks else 0.0)
        for request in [r for r in self._requests.values() if r.grammar is None or r.grammar.settled]:
            del self._requests[request.request_id]
            yield request

    def failures(self, requests: Iterable[Request]) -> Iterator[tuple[Request, str]]:
        """Those of the requests whose grammar took more than it may, and what they are told."""
        if self.isolated is None or not self.isolated.failed:
            return
        failed, self.isolated.failed = self.isolated.failed, []
        for request in [r for r in requests if r.grammar in failed and r.request_id not in self._requests]:
            error = take_grammar(request)
            if error is not None:
                yield request, error

    def ended(self, running: Iterable[Request]) -> list[Sequence]:
        """Running sequences of which the last mask said that there is nothing more to say."""
        if self.isolated is None or self._seen_over == self.isolated.num_over:
            return []
        self._seen_over = self.isolated.num_over
        return [seq for request in running for seq in request.live if seq.grammar is not None and seq.grammar.is_over]

    def with_masks(self, drafts: dict[int, Drafts], sequences: Iterable[Sequence]) -> dict[int, Drafts]:
        """Those of the drafts (by row) that have no grammar to follow, or whose masks are made in time."""
        if self.isolated is None or not drafts:
            return drafts
        asked: dict[int, tuple[IsolatedSequence, Drafts]] = {}
        for seq in sequences:
            found = drafts.get(seq.row)
            if found is not None and isinstance(seq.grammar, IsolatedSequence):
                seq.grammar.draft(_output(seq), found.tokens)
                asked[seq.row] = (seq.grammar, found)
        if not asked:
            return drafts
        self.isolated.pump(PATIENCE_S)
        return {row: found for row, found in drafts.items()
                if row not in asked or asked[row][0].drafted(asked[row][1].tokens)}

    def step_took(self, seconds: float) -> None:
        """The longer steps take, the longer one may wait for masks."""
        self._patience = min(max(PATIENCE_S, _PATIENCE_SHARE * seconds), _MOST_PATIENCE)

    def ask_now(self) -> None:
        """Send what was asked for: the caller goes on to something else."""
        if self.isolated is not None:
            self.isolated.ask_now()

    @property
    def owes_masks(self) -> bool:
        """Does any sequence wait for its mask?"""
        return self.isolated is not None and self.isolated.owes_masks

    def wait(self, seconds: float) -> None:
        """For the first of them, but no longer than that: there is nothing else to do."""
        if self.isolated is not None:
            self.isolated.wait(seconds)
            return
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


def release_grammar(request: Request) -> None:
    """The request has ended: what is computed for it is given up."""
    if request.grammar is not None:
        request.grammar.release()


def mask_ready(seq: Sequence) -> bool:
    """May the sequence's next token be planned, as far as its grammar is concerned?"""
    request = seq.request
    if request.start_grammar is None:
        return True
    if seq.grammar is None:
        seq.grammar = request.start_grammar(request.stop_ids)
    return seq.grammar.ready(_output(seq))


def fail_if_slow(request: Request) -> None:
    """Fail a request that has no mask for long and keeps others waiting: nobody may overtake it any more."""
    grammar = request.live[0].grammar
    if isinstance(grammar, IsolatedSequence) and grammar.seconds_waited > _LONGEST_BLOCK:
        grammar.claim.fail("was too slow to go on after a preemption: simplify it")


def add_masks(planned: Iterable[tuple[Sequence, PlanEntry]]) -> bool:
    """Tell a plan's entries which tokens may be drawn, where their sequences have a grammar to follow. Those without
    drafts are filled together, if their matchers are here and can be. Returns whether any has a grammar."""
    together: list[tuple[PlanEntry, Any, Output]] = []
    masked = False
    for seq, entry in planned:
        request = seq.request
        if request.start_grammar is None or not entry.sample:
            continue
        masked = True
        if seq.grammar is None:
            seq.grammar = request.start_grammar(request.stop_ids)
        output = _output(seq)
        if entry.drafts or seq.grammar.masks_of_all is None:
            entry.masks = b"".join(seq.grammar.masks(output, entry.drafts))
        else:
            together.append((entry, seq.grammar, output))
    if together:
        fill = together[0][1].masks_of_all
        found = fill([(grammar, output) for _, grammar, output in together])
        for (entry, _, _), mask in zip(together, found, strict=True):
            entry.masks = mask
    return masked


def grammar_over(seq: Sequence) -> bool:
    """Has the sequence nothing more to say, and no token to say so?"""
    if seq.grammar is None:
        return False
    return seq.grammar.over(_output(seq), must_know=len(seq.tokens) >= seq.request.max_len)


def _output(seq: Sequence) -> Output:
    """Tokens of a sequence that follows a grammar are only ever appended: it is drawn, and beams have no grammars."""
    return Output(seq.tokens, seq.num_prompt_tokens)
