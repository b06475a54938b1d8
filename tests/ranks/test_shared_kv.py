"""The KV of several ranks as one memory: gathered and scattered it is what one rank would have, however it is cut."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import EngineDeadError, KVTransferError
from quire.kvtransfer.layout import Piece, Span, shares
from quire.kvtransfer.store import KVStore
from quire.ranks import shared_kv
from quire.ranks.rank_kv import GATHER, Job, RankKV
from quire.ranks.shared_kv import SharedKV
from tests.kvtransfer.layouts import Model, fill, make_store, slots

MODEL = Model(heads=3, width=4, windows=(None, 6, None, 6))
TOKENS, BLOCK = 29, 4
NUM_BLOCKS = 24
CUTS = {
    "one": [(range(4), range(3))],
    "two": [(range(4), range(2)), (range(4), range(1, 3))],
    "more ranks than heads": [(range(4), range(1)), (range(4), range(1)), (range(4), range(1, 3)),
                              (range(4), range(2, 3))],
    "stages": [(range(1), range(3)), (range(1, 4), range(3))],
    "2 x 2": [(range(3), range(2)), (range(3), range(1, 3)), (range(3, 4), range(2)), (range(3, 4), range(1, 3))],
}


class Ranks:
    """Ranks without processes; the engine's side hears them as it hears real ones."""

    def __init__(self, stores: list[KVStore]) -> None:
        self.num_ranks = len(stores)
        self.steps_over = 0
        self.failure: EngineDeadError | None = None
        self.heard: Any = None
        self.ranks = [RankKV(lambda mine=store: mine, lambda told, rank=index: self.heard.answered(rank, told))
                      for index, store in enumerate(stores)]

    def tell_kv(self, rank: int, job: Job) -> None:
        self.ranks[rank].take(job)

    def shared(self) -> SharedKV:
        return SharedKV(self, lambda made: setattr(self, "heard", made))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def stores(cut: str) -> list[KVStore]:
    return [make_store(MODEL, BLOCK, NUM_BLOCKS, tokens_last=index % 2 == 0, layers=layers, heads=heads)
            for index, (layers, heads) in enumerate(CUTS[cut])]


def tables_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.sample(range(NUM_BLOCKS), -(-TOKENS // BLOCK)) for _ in range(MODEL.num_groups)]


def wire(store: Any, tables: list[list[int]], span: Span, pieces: tuple[Piece, ...]) -> bytes:
    out = bytearray(span.nbytes(pieces, 4) + 3)
    assert store.gather(tables, span, pieces, memoryview(out)) == len(out) - 3
    return bytes(out[:-3])


@pytest.mark.parametrize("cut", CUTS)
@settings(max_examples=12)
@given(data=st.data())
def test_ranks_gather_and_scatter_what_one_rank_would(cut: str, data: st.DataObject) -> None:
    """Any tokens, for a reader that wants any of the heads and layers, in slots so small that a call takes several."""
    start = data.draw(st.integers(0, TOKENS - 1))
    span = Span(start, data.draw(st.integers(start + 1, TOKENS)), (start, data.draw(st.integers(0, TOKENS))))
    wanted = make_store(MODEL, 2, 1, tokens_last=False, layers=data.draw(st.sampled_from([range(4), range(1, 3)])),
                        heads=data.draw(st.sampled_from([range(3), range(1, 2), range(1, 3)])))
    there, tables = stores(cut), tables_of(data.draw(st.integers(0, 9)))
    whole = make_store(MODEL, BLOCK, NUM_BLOCKS, tokens_last=True)
    pieces = shares([whole.layout], wanted.layout)[0]
    for store in (whole, *there):
        fill(store, MODEL, tables, TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_kv, "_SLOT_BYTES", data.draw(st.sampled_from([1, 1000, 1 << 20])))
        ranks, others = Ranks(there), Ranks(stores(cut))
        together, target = ranks.shared(), others.shared()
    assert together.layout.pieces() == whole.layout.pieces()
    expected = wire(whole, tables, span, pieces)
    assert wire(together, tables, span, pieces) == expected
    moved = tables_of(77)
    target.scatter(moved, span, pieces, memoryview(expected))
    assert wire(target, moved, span, pieces) == expected
    ranks.close()
    others.close()


def test_a_head_that_several_ranks_hold_goes_to_all_of_them_and_nothing_else_is_touched() -> None:
    there, tables = stores("more ranks than heads"), tables_of(1)
    source = make_store(MODEL, BLOCK, NUM_BLOCKS, tokens_last=True)
    fill(source, MODEL, tables, TOKENS)
    ranks = Ranks(there)
    together = ranks.shared()
    span, pieces = Span(5, 22, (5, 17)), source.layout.pieces()
    together.scatter(tables, span, pieces, memoryview(wire(source, tables, span, pieces)))
    for (_, heads), store in zip(CUTS["more ranks than heads"], there, strict=True):
        for layer, part in store.layout.tensors():
            first = span.of_group(layer.group)[0]
            found = slots(store, layer.layer, part.name, tables[layer.group])
            content = MODEL.content(layer.layer, part.name, TOKENS)[:, heads.start : heads.stop]
            assert (found[first:22] == content[first:22]).all()
            assert (found[:first] == -7.0).all() and (found[22:] == -7.0).all()
    ranks.close()


def test_blocks_are_touched_when_the_steps_that_are_over_are_over_on_every_rank() -> None:
    """The rank that draws may be ahead of another, which still writes the KV that is to be read."""
    there, tables = stores("two"), tables_of(1)
    ranks = Ranks(there)
    together = ranks.shared()
    pieces, span, found = together.layout.pieces(), Span(0, TOKENS, (0, 0)), []
    fill(there[0], MODEL, tables, TOKENS)
    ranks.steps_over = 3
    ranks.ranks[0].step_over(3)
    reader = threading.Thread(target=lambda: found.append(wire(together, tables, span, pieces)), daemon=True)
    reader.start()
    fill(there[1], MODEL, tables, TOKENS)  # what the second rank writes in its third step
    assert not found
    ranks.ranks[1].step_over(3)
    reader.join(60)
    whole = make_store(MODEL, BLOCK, NUM_BLOCKS, tokens_last=True)
    fill(whole, MODEL, tables, TOKENS)
    assert found == [wire(whole, tables, span, pieces)]
    ranks.close()


def test_what_fails_on_one_rank_is_said_when_all_have_ended_and_a_lost_rank_ends_the_wait() -> None:
    there = stores("two")
    ranks = Ranks(there)
    together = ranks.shared()
    pieces, span = together.layout.pieces(), Span(0, 8, (0, 0))
    with pytest.raises(KVTransferError, match="has no block here"):
        wire(together, [[1], [1]], span, pieces)
    asked = threading.Event()
    answer = ranks.ranks[1].take
    ranks.ranks[1].take = lambda job: asked.set() if job["do"] == GATHER else answer(job)  # type: ignore[method-assign]
    failed: list[str] = []

    def gather() -> None:
        try:
            wire(together, tables_of(1), span, pieces)
        except KVTransferError as error:
            failed.append(str(error))

    waiting = threading.Thread(target=gather, daemon=True)
    waiting.start()
    assert asked.wait(60)
    together.lost("rank 1 is lost")
    waiting.join(60)
    assert failed == ["rank 1 is lost"]
    ranks.failure = EngineDeadError("all are lost")
    with pytest.raises(KVTransferError, match="all are lost"):
        wire(together, tables_of(1), span, pieces)
    ranks.close()
