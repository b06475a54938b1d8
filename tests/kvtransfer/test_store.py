"""KV in the wire form: whatever the two sides' layouts, every number comes to its place and nothing else is touched."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import KVMismatchError, KVTransferError
from quire.kvtransfer.layout import (
    LayoutDescription,
    Span,
    check_compatible,
    first_read,
    shares,
    spans,
    written_straight,
)
from quire.kvtransfer.store import KVStore
from tests.kvtransfer.layouts import UNTOUCHED, Model, fill, make_store

MODELS = [Model(4, 3, (None, None)), Model(4, 2, (None, 5, None, 5)), Model(1, 4, (None,)), Model(3, 2, (7, None))]


def cut(total: int, ranks: int) -> list[range]:
    """Runs of as even a length as can be; more ranks than heads share them."""
    if ranks > total:
        return [range(rank * total // ranks, rank * total // ranks + 1) for rank in range(ranks)]
    borders = [rank * total // ranks for rank in range(ranks + 1)]
    return [range(a, b) for a, b in itertools.pairwise(borders)]


@st.composite
def sides(draw: st.DrawFn, model: Model) -> list[KVStore]:
    """The ranks of one side: TP by heads, PP by layers."""
    size, last = draw(st.integers(1, 9)), draw(st.booleans())
    tp, pp = draw(st.integers(1, 4)), draw(st.integers(1, min(2, len(model.windows))))
    staged = draw(st.booleans())
    return [make_store(model, size, 64 // size + 8, tokens_last=last, layers=layers, heads=heads, staged=staged)
            for layers in cut(len(model.windows), pp) for heads in cut(model.heads, tp)]


def random_tables(store: KVStore, groups: int, tokens: int, seed: int) -> list[list[int]]:
    count = -(-tokens // store.layout.block_size)
    shuffle = random.Random(seed)
    tables = []
    for _ in range(groups):
        blocks = list(range(store.layout.num_blocks))
        if shuffle.random() < 0.7:
            shuffle.shuffle(blocks)
        tables.append(blocks[:count])
    return tables


def expected(store: KVStore, model: Model, tables: list[list[int]], span: Span) -> list[torch.Tensor]:
    made = make_store(model, store.layout.block_size, store.layout.num_blocks, tokens_last=False)
    blank = [torch.full_like(raw, UNTOUCHED) for raw in store.raw]
    del made
    for index, (layer, part) in enumerate(store.layout.tensors()):
        content = model.content(layer.layer, part.name, span.end)[:, part.first_head : part.first_head + part.num_heads]
        for token in range(*span.of_group(layer.group)):
            block, slot = tables[layer.group][token // store.layout.block_size], token % store.layout.block_size
            if part.tokens_last:
                blank[index][block, :, :, slot] = content[token]
            else:
                blank[index][block, :, slot] = content[token]
    return blank


@settings(max_examples=120, deadline=None)
@given(data=st.data(), model=st.sampled_from(MODELS), tokens=st.integers(1, 40), seed=st.integers(0, 99))
def test_any_layout_reaches_any_other(data: st.DataObject, model: Model, tokens: int, seed: int) -> None:
    writers, readers = data.draw(sides(model)), data.draw(sides(model))
    start = data.draw(st.integers(0, tokens - 1))
    end = data.draw(st.integers(start + 1, tokens))
    starts = tuple(first_read(window, start, tokens) for window in sorted(set(model.windows), key=lambda w: w or -1))
    span = Span(start, end, starts)
    here = random_tables(writers[0], model.num_groups, tokens, seed)
    there = random_tables(readers[0], model.num_groups, tokens, seed + 1)
    for writer in writers:
        fill(writer, model, here, tokens)
    for reader in readers:
        sent = shares([writer.layout for writer in writers], reader.layout)
        for writer, pieces in zip(writers, sent, strict=True):
            if not pieces:
                continue
            wire = memoryview(bytearray(span.nbytes(pieces, 4)))
            assert writer.gather(here, span, pieces, wire) == len(wire)
            reader.scatter(there, span, pieces, wire)
        for raw, wanted in zip(reader.raw, expected(reader, model, there, span), strict=True):
            assert torch.equal(raw, wanted)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), model=st.sampled_from(MODELS), start=st.integers(0, 50), length=st.integers(1, 50),
       most=st.integers(1, 4000), align=st.integers(1, 9))
def test_spans_cover_the_range_within_their_limit(data: st.DataObject, model: Model, start: int, length: int,
                                                  most: int, align: int) -> None:
    store = make_store(model, 4, 8, tokens_last=True)
    pieces = shares([store.layout], store.layout)[0]
    made = spans(start, start + length, [0] * model.num_groups, pieces, 4, most, align)
    assert [span.start for span in made] == [start, *(span.end for span in made[:-1])]
    assert made[-1].end == start + length
    one_token = Span(0, 1, (0,) * model.num_groups).nbytes(pieces, 4)
    assert all(span.nbytes(pieces, 4) <= max(most, one_token) for span in made)
    if most >= one_token * align:
        assert all(span.end % align == 0 for span in made[:-1])


def test_types_are_converted_where_the_sender_has_another() -> None:
    model = Model(2, 4, (None,))
    writer = make_store(model, 4, 4, tokens_last=True)
    reader = make_store(model, 3, 6, tokens_last=False, dtype=torch.bfloat16)
    writer.raw[0].normal_()
    pieces, span = shares([writer.layout], reader.layout)[0], Span(0, 7, (0,))
    wire = memoryview(bytearray(span.nbytes(pieces, 4)))
    writer.gather([[2, 1]], span, pieces, wire)
    with pytest.raises(KVTransferError, match="bytes of KV came"):
        reader.scatter([[0, 5, 2]], span, pieces, wire)
    reader.scatter([[0, 5, 2]], span, pieces, wire, "float32")
    for token in range(7):
        sent = writer.raw[0][[2, 1][token // 4], :, :, token % 4]
        assert torch.equal(reader.raw[0][[0, 5, 2][token // 3], :, token % 3], sent.to(torch.bfloat16))
    with pytest.raises(KVMismatchError, match="another cache dtype") as refused:
        check_compatible(writer.layout, reader.layout)
    assert refused.value.field == "dtype"
    check_compatible(writer.layout, reader.layout, convert=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("last", [True, False])
def test_the_kernel_and_torch_copy_the_same_bytes(dtype: torch.dtype, last: bool) -> None:
    """Of every element size; torch's way is the one of a GPU."""
    model = Model(3, 5, (None, 6))
    ours, torchs = (make_store(model, 4, 12, tokens_last=last, dtype=dtype, staged=staged) for staged in (False, True))
    generator = torch.Generator().manual_seed(1)
    for raw, other in zip(ours.raw, torchs.raw, strict=True):
        bits = torch.randint(0, 256, (raw.nbytes,), generator=generator, dtype=torch.uint8)
        for each in (raw, other):
            each.view(torch.uint8).view(-1).copy_(bits)
    span, tables, pieces = Span(3, 30, (3, 21)), [[3, 4, 5, 0, 9, 8, 11, 1]] * 2, ours.layout.pieces()
    wires = [memoryview(bytearray(span.nbytes(pieces, dtype.itemsize))) for _ in range(2)]
    for store, wire in zip((ours, torchs), wires, strict=True):
        store.gather(tables, span, pieces, wire)
    assert wires[0] == wires[1]
    fresh = [make_store(model, 4, 12, tokens_last=last, dtype=dtype, staged=staged) for staged in (False, True)]
    for store in fresh:
        store.scatter([[7, 0, 1, 2, 3, 11, 10, 9]] * 2, span, pieces, wires[0])
    for one, other in zip(fresh[0].raw, fresh[1].raw, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_only_equal_layouts_are_written_straight_into_blocks() -> None:
    model = Model(4, 4, (None, 5))
    one = make_store(model, 4, 4, tokens_last=True).layout
    pieces = shares([one], one)[0]
    assert pieces == one.pieces() and set(pieces) == {*one.pieces(0), *one.pieces(1)}
    assert written_straight(one, make_store(model, 4, 9, tokens_last=True).layout, pieces)
    for other in (make_store(model, 8, 4, tokens_last=True), make_store(model, 4, 4, tokens_last=False),
                  make_store(model, 4, 4, tokens_last=True, dtype=torch.float16)):
        assert not written_straight(one, other.layout, pieces)
    half = make_store(model, 4, 4, tokens_last=True, heads=range(2, 4)).layout
    assert not written_straight(one, half, shares([one], half)[0])
    stage = make_store(model, 4, 4, tokens_last=True, layers=range(1, 2)).layout
    assert written_straight(one, stage, shares([one], stage)[0])


def test_what_is_not_there_is_refused() -> None:
    model = Model(4, 2, (None, 5))
    whole, half = make_store(model, 4, 4, tokens_last=True), make_store(model, 4, 4, tokens_last=True, heads=range(2))
    with pytest.raises(KVMismatchError, match="no rank of the writer has head 2 of k in layer 0"):
        shares([half.layout], whole.layout)
    pieces, wire = shares([whole.layout], whole.layout)[0], memoryview(bytearray(1 << 16))
    for table in ([-1, 1], [0], [0, 4]):
        with pytest.raises(KVTransferError):
            whole.gather([table, [0, 1]], Span(0, 8, (0, 0)), pieces, wire)
    with pytest.raises(KVTransferError, match="not on this rank"):
        half.gather([[0], [0]], Span(0, 4, (0, 0)), pieces, wire)
    with pytest.raises(KVTransferError, match="do not fit"):
        whole.gather([[0], [0]], Span(0, 4, (0, 0)), pieces, wire[:100])
    with pytest.raises(KVMismatchError, match="another model: layer 1"):
        check_compatible(whole.layout, make_store(Model(4, 2, (None, 6)), 4, 4, tokens_last=True).layout)


def test_a_description_survives_as_plain_data() -> None:
    import json

    layout = make_store(Model(4, 2, (None, 5)), 4, 6, tokens_last=True, heads=range(1, 3)).layout
    data = json.loads(json.dumps(layout.to_data()))
    assert LayoutDescription.from_data(data) == layout
    wrong = [None, [], {}, {**data, "version": 2}, {**data, "dtype": "int8"}, {**data, "block_size": 0},
             {**data, "block_size": True}, {**data, "layers": []}, {**data, "layers": data["layers"][::-1]},
             {**data, "scale": float("nan")}, {**data, "layers": [[0, 0, None, [["k", 4, 2, 3, 2, True]]]]},
             {**data, "layers": [[0, 0, 0, [["k", 4, 2, 0, 4, True]]]]}, {**data, "layers": [[0, 0, None, []]]}]
    for each in wrong:
        with pytest.raises(KVTransferError):
            LayoutDescription.from_data(each)
