"""From what a step drew to the results of its entries, for the runners of a CPU and of a GPU alike."""

from __future__ import annotations

from collections.abc import Sequence

from quire.sampling.logprobs import Candidates
from quire.sampling.sampler import FAILURES, NOT_FINITE, OK
from quire.scheduler.plan import EntryResult, PlanEntry
from quire.speculation.tree import ROOT, Parents, child_with, path_along


def drawn_result(token: int, status: int) -> EntryResult:
    """One draw by itself."""
    return EntryResult(tokens=[token]) if status == OK else EntryResult(error=FAILURES[status])


def along_drafts(drafts: Sequence[int], places: Sequence[EntryResult], parents: Parents = (),
                 most: int | None = None) -> EntryResult:
    """The result of an entry whose drafts were judged, from the draws before them and after each of them: drafts are
    kept as long as they are what was drawn at their places, at most `most`; then comes what was drawn there.

    A draw that failed ends it: the tokens before it stand, and the next step says the same for itself.
    """
    result, *others = places
    result.num_drafts, result.parents = len(drafts), parents
    node: int | None = ROOT
    for _ in range(len(others) if most is None else most):
        if result.error is not None or node is None:
            break
        node = child_with(drafts, parents, node, result.tokens[-1])
        if node is None or node >= len(others) or others[node].error is not None:
            break
        place = others[node]
        if parents:
            result.kept += (node,)
        result.tokens += place.tokens
        if result.logprobs is not None and place.logprobs is not None:
            result.logprobs += place.logprobs
    return result


def kept_moves(entry: PlanEntry, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """(row, from, to) of the tokens that an entry with a tree kept and that do not lie at their position yet."""
    first = entry.start + 1
    path = path_along(entry.drafts, entry.parents, tokens)
    return [(entry.row, first + node, first + place) for place, node in enumerate(path) if node != place]


def take_candidates(entries: Sequence[int], found: Candidates, results: Sequence[EntryResult]) -> None:
    """Candidates of beams, into the results of the entries that asked for them."""
    for entry, candidates in zip(entries, found.to_list(), strict=True):
        if candidates is None:
            results[entry].error = FAILURES[NOT_FINITE]
        else:
            results[entry].candidates = candidates
