"""Sequences that grow out of one another: samples forked from a prompt, beams forked from beams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from quire.kvcache.manager import KVCacheManager
from quire.scheduler.beam import BeamStep, Hypothesis
from quire.scheduler.request import Request, Sequence
from quire.scheduler.rows import RowBook


def unforked(request: Request) -> list[Sequence]:
    """Siblings of a running leader that wait for it to reach the end of the prompt."""
    return [seq for seq in request.live if seq.row < 0]


def fork_from(leader: Sequence, siblings: list[Sequence], at: int, cache: KVCacheManager,
              rows: RowBook) -> None:
    """Seat siblings on the leader's blocks, which hold `at` tokens (or will, after this plan)."""
    for seq in siblings:
        seq.kv = cache.fork(leader.kv)
        seq.num_computed = at
        seq.num_confirmed = min(at, leader.num_confirmed)
        rows.take(seq)
    leader.held_at = None


def heir_of(leader: Sequence) -> Sequence | None:
    """Who goes on with the prompt when `leader`, the only one of its group with a row, ends."""
    if leader.row < 0 or leader.request.beams is not None:
        return None
    others = [seq for seq in leader.request.live if seq is not leader]
    return others[0] if others and all(seq.row < 0 for seq in others) else None


def inherit(leader: Sequence, heir: Sequence, cache: KVCacheManager, rows: RowBook) -> bool:
    """Seat `heir` on the leader's blocks, at what is confirmed of them: a step in flight may still be lost.

    False, and no change, where a window has passed what the heir would have to see again.
    """
    at = leader.num_confirmed
    if any(cache.first_needed(group, at) < table.first_live
           for group, table in zip(cache.groups, leader.kv.tables, strict=True)):
        return False
    heir.kv = cache.fork(leader.kv)
    heir.num_computed = heir.num_confirmed = at
    heir.held_at = leader.held_at
    rows.take(heir)
    return True


def extra_blocks(request: Request, cache: KVCacheManager) -> int:
    """Blocks that a group's sequences will soon need besides those of the first."""
    if request.width == 1:
        return 0
    shared = request.num_prompt_tokens // cache.block_size
    own = [cache.blocks_for(min(len(seq.tokens) + 1, request.max_len)) - shared for seq in request.live[1:]]
    own += [1] * (request.rows_wanted - len(own) - 1)
    return sum(own)


def blocks_to_go_on(request: Request, seats: list[Sequence], cache: KVCacheManager) -> int:
    """Blocks that a group needs beside those it brings back: room to compute what it knows, and one for each to write.

    With less it would be moved out again by its own next step.
    """
    lacking = [cache.blocks_for(min(len(seq.tokens) + 1, request.max_len)) - cache.blocks_for(seq.num_computed)
               for seq in seats]
    return sum(max(1, blocks) for blocks in lacking) + len(request.live) - len(seats)


def blocks_owed(running: Iterable[Request], cache: KVCacheManager) -> int:
    """Blocks that running sequences in the middle of a prompt do not have yet."""
    return sum(max(0, cache.blocks_for(len(seq.tokens)) - len(seq.kv.tables[0].blocks))
               for request in running for seq in request.sequences if seq.row >= 0 and seq.num_to_compute > 1)


def reseat_beams(request: Request, choices: list[BeamStep], cache: KVCacheManager, rows: RowBook,
                 leave: Callable[[Sequence], object]) -> int:
    """Let the chosen beams go on: a parent's first child keeps its row and blocks, the others fork them.

    Returns the number of forks. `leave` takes row and blocks from a beam without a successor.
    """
    parents = [request.places[choice.parent] for choice in choices]
    heirs: dict[int, int] = {}
    for place, parent in enumerate(parents):
        heirs.setdefault(parent.index, place)
    forks = [place for place, parent in enumerate(parents) if heirs[parent.index] != place]
    # All that children need of their parents is taken before anything changes.
    kvs = {place: cache.fork(parents[place].kv) for place in forks}
    texts = {place: [*parents[place].tokens, choices[place].token] for place in forks}
    spare = [seq for seq in request.sequences if seq.index not in heirs]
    for seq in spare:
        leave(seq)
    while len(spare) < len(forks):
        spare.append(request.add_sequence())
    seats = list(parents)
    for place, seq in zip(forks, spare, strict=False):
        seq.kv, seq.tokens = kvs[place], texts[place]
        seq.num_computed = seq.num_confirmed = parents[place].num_computed
        seats[place] = seq
        rows.take(seq)
    for parent, place in [(parents[place], place) for place in heirs.values()]:
        parent.tokens.append(choices[place].token)
    request.places = seats
    request.sequences = sorted(seats, key=lambda seq: seq.index)
    return len(forks)


def seat_hypotheses(request: Request) -> Iterator[tuple[Sequence, Hypothesis]]:
    """The search is over: let the request's sequences be the complete beams, best first."""
    found = request.beams.hypotheses if request.beams is not None else []
    while len(request.sequences) < len(found):
        request.add_sequence()
    for seq, hypothesis in zip(request.sequences, found, strict=True):
        seq.tokens = [*request.prompt_token_ids, *hypothesis.tokens]
        seq.cumulative_logprob, seq.score = hypothesis.cumulative_logprob, hypothesis.score
        yield seq, hypothesis
