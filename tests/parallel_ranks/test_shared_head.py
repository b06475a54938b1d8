"""A tied head that two stages compute together gives the logits of one, whoever helps and however late."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.models.build import build_decoder, dummy_weights
from quire.models.registry import read_spec
from quire.models.shard import shard_of
from quire.ops.cpu import CpuOps
from quire.parallel.place import Place
from quire.parallel.shared_head import HEAD_BYTES, HeadHelper, HeadMemory, HeadOwner
from quire.worker.stage_head import share_head
from tests.checkpoints import config_of, make_checkpoint, make_model

ROWS = [1, 2, 7, 12, 13, 33, 64]
WEIGHTS = {
    "bfloat16": lambda n, k: torch.randn(n, k).bfloat16().float(),
    "float32": torch.randn,
}


@pytest.fixture
def head() -> Iterator[HeadMemory]:
    yield HeadMemory(memoryview(mmap.mmap(-1, HEAD_BYTES)))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("columns", [4096, 5003, 20000])
def test_logits_are_those_of_one_stage(head: HeadMemory, name: str, columns: int) -> None:
    ops = CpuOps(num_threads=1)
    packed = ops.pack_linear(WEIGHTS[name](columns, 96))
    assert packed.format == name
    owner = HeadOwner(head, packed, lambda x, ctx, out: pytest.fail("it was not shared"))
    helper = HeadHelper(head, packed)
    try:
        for turn in range(3):
            for rows in ROWS:
                x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(turn * 100 + rows))
                assert torch.equal(owner.logits(x, None), ops.linear(x, packed))
    finally:
        helper.close()


def test_the_helper_does_part_of_it(head: HeadMemory) -> None:
    """With another table it gives other logits: so one sees which are its own."""
    ops = CpuOps(num_threads=1)
    packed = ops.pack_linear(torch.ones(60000, 64))
    helper = HeadHelper(head, ops.pack_linear(torch.full((60000, 64), 2.0)))
    owner = HeadOwner(head, packed, lambda x, ctx, out: pytest.fail("it was not shared"))
    try:
        until, seen = time.monotonic() + 20.0, {64.0}
        while len(seen) < 2 and time.monotonic() < until:
            seen |= set(owner.logits(torch.ones(32, 64), None).flatten().tolist())
        assert seen == {64.0, 128.0}
    finally:
        helper.close()


def test_without_a_helper_it_is_computed_alone(head: HeadMemory) -> None:
    ops = CpuOps(num_threads=1)
    packed = ops.pack_linear(torch.randn(8192, 64))
    x = torch.randn(5, 64)
    assert torch.equal(HeadOwner(head, packed, ops.linear).logits(x, None), ops.linear(x, packed))


def test_a_helper_that_took_a_piece_and_never_came_back_is_not_waited_for(head: HeadMemory) -> None:
    """Pieces are taken through memory: here by the test, which computes nothing."""
    ops = CpuOps(num_threads=1)
    packed = ops.pack_linear(torch.randn(40000, 64))
    owner = HeadOwner(head, packed, ops.linear)
    next_piece = torch.frombuffer(head.memory, dtype=torch.int64, count=8)[3:4]
    assert int(next_piece) == 0
    stop, taken = threading.Event(), []

    def take() -> None:
        while not stop.is_set():
            now = int(next_piece)
            if 0 < now & 0xFFFFFFFF < 20:
                next_piece.fill_(now + 5)
                taken.append(now)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        until = time.monotonic() + 20.0
        while not taken and time.monotonic() < until:
            for rows in (1, 16, 64):
                x = torch.randn(rows, 64)
                assert torch.equal(owner.logits(x, None), ops.linear(x, packed))
    finally:
        stop.set()
        thread.join()
    assert taken


def test_too_many_rows_and_formats_of_integers_are_not_shared(head: HeadMemory) -> None:
    ops = CpuOps(num_threads=1)
    packed = ops.pack_linear(torch.randn(8192, 64))
    asked: list[int] = []

    def alone(x: torch.Tensor, ctx: object, out: torch.Tensor | None) -> torch.Tensor:
        asked.append(x.shape[0])
        return ops.linear(x, packed, None, out)

    owner = HeadOwner(head, packed, alone)
    for rows in (0, 64, 65, 200):
        owner.logits(torch.randn(rows, 64), None)
    assert asked == [0, 65, 200]
    small = ops.pack_linear(torch.randn(512, 64))
    HeadOwner(head, small, lambda x, ctx, out: asked.append(-1) or ops.linear(x, small)).logits(
        torch.randn(3, 64), None)
    assert asked[-1] == -1


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_two_stages_with_a_tied_head_draw_what_one_process_draws(
    family: str, tmp_path: Path
) -> None:
    """Gemma2 caps its logits after the head."""
    make_checkpoint(tmp_path, family, vocab_size=8192, tie_word_embeddings=True)
    prompts = [{"prompt_token_ids": [5, 6, 7 + i]} for i in range(3)]
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory": 64 << 20}
    found = []
    for more in ({"num_threads": 1}, {"pipeline_parallel_size": 2, "num_threads": 1}):
        with LLM(str(tmp_path), **options, **more) as llm:
            found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(
                prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


def test_who_shares_and_who_does_not() -> None:
    """The ends of a pipeline of one machine where the table is tied; nobody else."""
    for tied, memory, expected in ((True, True, True), (False, True, False), (True, False, False)):
        config = config_of(make_model("llama", vocab_size=8192, tie_word_embeddings=tied))
        spec = read_spec(config)
        decoder = build_decoder(config, dummy_weights(config), CpuOps(num_threads=1),
                                shard=shard_of(spec, Place(0, 1, 1, 2)))
        head = HeadMemory(memoryview(mmap.mmap(-1, HEAD_BYTES))) if memory else None
        assert share_head(decoder, head) is None
        assert isinstance(decoder._shared_head, HeadOwner) is expected
        first = build_decoder(config, dummy_weights(config), CpuOps(num_threads=1),
                              shard=shard_of(spec, Place(0, 1, 0, 2)))
        helper = share_head(first, head)
        assert (helper is not None) is expected
        if helper is not None:
            helper.close()
            assert not helper._thread.is_alive()
