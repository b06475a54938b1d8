"""From what a step drew to the results of its entries, for the runners of a CPU and of a GPU alike."""

from __future__ import annotations

from collections.abc import Sequence

from quire.sampling.logprobs import Candidates
from quire.sampling.sampler import FAILURES, NOT_FINITE, OK
from quire.scheduler.plan import EntryResult


def drawn_result(token: int, status: int) -> EntryResult:
    """One draw by itself."""
    return EntryResult(tokens=[token]) if status == OK else EntryResult(error=FAILURES[status])


def along_drafts(drafts: Sequence[int], places: Sequence[EntryResult]) -> EntryResult:
    """The result of an entry whose drafts were judged, from the draws before, between and after them: drafts are kept
    as long as they are what was drawn at their places; then comes what was drawn there.

    A draw that failed ends it: the tokens before it stand, and the next step says the same for itself.
    """
    result, *others = places
    result.num_drafts = len(drafts)
    for draft, place in zip(drafts, others, strict=False):
        if result.error is not None or result.tokens[-1:] != [draft] or place.error is not None:
            break
        result.tokens += place.tokens
        if result.logprobs is not None and place.logprobs is not None:
            result.logprobs += place.logprobs
    return result


def take_candidates(entries: Sequence[int], found: Candidates, results: Sequence[EntryResult]) -> None:
    """Candidates of beams, into the results of the entries that asked for them."""
    for entry, candidates in zip(entries, found.to_list(), strict=True):
        if candidates is None:
            results[entry].error = FAILURES[NOT_FINITE]
        else:
            results[entry].candidates = candidates
