"""A tier of another kind: whoever implements the two halves of a connector is used like the host's memory."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.assembly import engine as assembly
from quire.kernels.types import LayerCache, pair_cache
from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.connector import KVConnector, Lookup
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.token_prefix import TokenPrefix
from quire.scheduler.plan import BlockMove
from quire.worker.transfer import HostTransfer, ThreadedTransfer, parts_of
from tests.checkpoints import make_checkpoint

PROMPT = random.Random(3).choices(range(3, 97), k=37)


class FilesOfPrefixes(KVConnector):
    """Never forgets, takes no swapped groups, answers later, and has nothing in common with the host tier but its
    interface."""

    name, offload, num_blocks = "files", True, 1000
    lookup_timeout = 5.0

    def __init__(self) -> None:
        self.known: dict[tuple[int, bytes], int] = {}
        self.holders: Counter[tuple[int, int]] = Counter()
        self._under_way: set[tuple[int, bytes]] = set()
        self._names = iter(range(self.num_blocks))
        self.num_asked = 0

    def lookup(self, keys: Sequence[bytes], num_groups: int, prefix: TokenPrefix | None = None) -> Lookup:
        asked = Lookup(keys, num_groups, self.wake)
        self.num_asked += 1
        found = [[self.known.get((group, key), NO_BLOCK) for key in keys] for group in range(num_groups)]
        threading.Timer(0.01, asked.answer, [found]).start()
        return asked

    def hold(self, group: int, block: int, key: bytes | None = None) -> bool:
        self.holders[group, block] += 1
        return True

    def give_back(self, group: int, block: int, key: bytes | None = None) -> None:
        self.holders[group, block] -= 1

    def evicted(self, group: int, key: bytes) -> int:
        if (group, key) in self.known or (group, key) in self._under_way:
            return NO_BLOCK
        self._under_way.add((group, key))
        block = next(self._names)
        self.holders[group, block] += 1
        return block

    def settled(self, group: int, block: int, key: bytes, stored: bool) -> None:
        self._under_way.discard((group, key))
        if stored:
            self.known.setdefault((group, key), block)
        self.give_back(group, block)

    @property
    def num_used(self) -> int:
        return sum(count > 0 for count in self.holders.values())

    @property
    def num_cached(self) -> int:
        return len(self.known) - self.num_used

    def drop_cached(self) -> int:
        return 0

    def reset(self) -> None:
        self.known.clear()

    def check(self, held: list[list[int]]) -> None:
        counts = Counter((group, block) for group, blocks in enumerate(held) for block in blocks)
        assert counts == +self.holders


class FileTransfer(ThreadedTransfer):
    """A file for each block. `broken` makes moves from the second one on fail."""

    name = "files"
    blocks_at_once = 2

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.num_moves, self.broken = folder, 0, False

    def register(self, layers: Sequence[LayerCache], group_of_layer: Sequence[int]) -> None:
        self.layers, self.group_of_layer = list(layers), list(group_of_layer)

    def move(self, moves: Sequence[BlockMove], out: bool) -> None:
        if self.broken and self.num_moves:
            raise OSError("the disk is gone")
        for move in moves:
            self.num_moves += 1
            path = self.folder / f"{move.group}-{move.tier}"
            parts = [part[move.device] for layer, belongs in zip(self.layers, self.group_of_layer, strict=True)
                     if belongs == move.group for part in parts_of(layer)]
            if out:
                path.write_bytes(torch.stack([part.reshape(-1) for part in parts]).numpy().tobytes())
            else:
                content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(len(parts), -1)
                for part, row in zip(parts, content, strict=True):
                    part.copy_(row.view(part.shape))


@pytest.fixture(params=["llama", "gemma3"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine with a pool of 24 blocks above such a tier."""
    make_checkpoint(tmp_path, request.param, eos_token_id=2)
    tier = FilesOfPrefixes()

    def build_cache(config: Any, spec: Any, pool: Any, cost: Any) -> KVCacheManager:
        groups = tuple(assembly.GroupWindow(group.window) for group in spec.cache_groups())
        return KVCacheManager(pool.num_blocks, config.cache.block_size, groups, tiers=[tier])

    monkeypatch.setattr(assembly, "build_cache", build_cache)
    transfer = FileTransfer(tmp_path / "blocks")
    transfer.folder.mkdir()
    with LLM(str(tmp_path), skip_tokenizer_init=True, block_size=4, num_kv_blocks=24, eviction_policy="lru") as llm:
        llm._core.executor._worker._cache.connect(transfer)  # type: ignore[attr-defined]
        yield llm, transfer


def answer(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    return llm.generate(prompts, params, use_tqdm=False)


def strangers() -> list[list[int]]:
    """Prompts that have nothing in common with PROMPT, and need the whole pool several times."""
    dice = random.Random(0)
    return [[(PROMPT[0] + 1 + i) % 90 + 3, *(dice.randrange(3, 97) for _ in range(39))] for i in range(8)]


def test_prefixes_go_to_files_and_come_back_with_every_bit(engine: tuple[LLM, FileTransfer]) -> None:
    llm, transfer = engine
    first = answer(llm, [PROMPT])[0]
    crowd = answer(llm, strangers())
    again = answer(llm, [PROMPT])[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.outputs[0].logprobs == first.outputs[0].logprobs
    assert again.num_cached_tokens == 36 and again.metrics.counts.tier_hits > 0 and transfer.num_moves > 2
    assert llm.metrics()["tier_hits"] == sum(output.metrics.counts.tier_hits for output in [*crowd, again])
    llm.check()


def test_who_needs_a_transfer_that_fails_computes_and_nobody_else_notices(engine: tuple[LLM, FileTransfer]) -> None:
    """A failed transfer used to end every sequence of its step with an error."""
    llm, transfer = engine
    first = answer(llm, [PROMPT])[0]
    answer(llm, strangers())
    transfer.broken, transfer.num_moves = True, 0
    other = [5, 7, 9]
    again, beside = answer(llm, [PROMPT, other])
    assert again.error is None and beside.error is None
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.outputs[0].logprobs == first.outputs[0].logprobs
    assert llm.metrics()["fetches_failed"] == 1
    llm.check()
    transfer.broken = False
    assert answer(llm, [other])[0].outputs[0].token_ids == beside.outputs[0].token_ids


def test_scattered_blocks_of_all_layers_move_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for each copy would wait for the GIL after every one, beside a thread that plans steps."""
    layers = [pair_cache(torch.rand(9, 2, 4, 8), torch.rand(9, 2, 4, 8), 4) for _ in range(3)]
    before = [[part.clone() for part in parts_of(layer)] for layer in layers]
    host = HostTransfer(9)
    host.register(layers, [0, 0, 0])
    calls: list[int] = []
    copy = torch._foreach_copy_

    def counting(targets: Any, sources: Any, non_blocking: bool) -> None:
        calls.append(len(targets))
        copy(targets, sources, non_blocking=non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", counting)
    moves = [BlockMove(0, block, 8 - block) for block in (7, 2, 5, 0)]
    host.move(moves, out=True)
    for layer in layers:
        for part in parts_of(layer):
            part.zero_()
    host.move(moves, out=False)
    assert calls == [2 * 3 * 4] * 2
    for layer, parts in zip(layers, before, strict=True):
        for found, known in zip(parts_of(layer), parts, strict=True):
            assert torch.equal(found[[7, 2, 5, 0]], known[[7, 2, 5, 0]]) and not found[[1, 3, 4, 6, 8]].any()
