"""A tier of another kind: whoever implements the two halves of a connector is used like the host's memory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine import assembly
from quire.kernels.types import LayerCache
from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.connector import KVConnector
from quire.kvcache.manager import KVCacheManager
from quire.worker.transfer import KVTransfer
from tests.checkpoints import make_checkpoint

PROMPT = [random.Random(3).randrange(3, 97) for _ in range(37)]


class FilesOfPrefixes(KVConnector):
    """Never forgets, takes no swapped groups, and has nothing in common with the host tier but its interface."""

    name, offload, num_blocks = "files", True, 1000

    def __init__(self) -> None:
        self.stored: dict[tuple[int, bytes], int] = {}
        self.holders: Counter[tuple[int, int]] = Counter()
        self._drafted: list[tuple[int, bytes, int]] = []
        self._settling: list[tuple[int, list[tuple[int, bytes, int]]]] = []
        self._names = iter(range(self.num_blocks))

    def match(self, group: int, key: bytes) -> int:
        return self.stored.get((group, key), NO_BLOCK)

    def hold(self, group: int, block: int) -> None:
        self.holders[group, block] += 1

    def fetched(self, group: int, block: int, key: bytes | None) -> None:
        self.holders[group, block] -= 1

    def evicted(self, group: int, key: bytes) -> int:
        if (group, key) in self.stored:
            return NO_BLOCK
        self._drafted.append((group, key, next(self._names)))
        return self._drafted[-1][2]

    def room(self, group: int) -> int:
        return 0

    def allocate(self, group: int) -> int:
        raise AssertionError("there is no room")

    def give_back(self, group: int, blocks: list[int]) -> None:
        assert not blocks

    def submitted(self, step: int) -> None:
        self._settling.append((step, self._drafted))
        self._drafted = []

    def settled(self, step: int, done: bool) -> None:
        while self._settling and self._settling[0][0] <= step:
            for group, key, block in self._settling.pop(0)[1]:
                if done:
                    self.stored.setdefault((group, key), block)

    @property
    def num_used(self) -> int:
        return sum(count > 0 for count in self.holders.values())

    @property
    def num_cached(self) -> int:
        return len(self.stored) - self.num_used

    def drop_cached(self) -> int:
        return 0

    def reset(self) -> None:
        self.stored.clear()

    def check(self, held: list[list[int]]) -> None:
        assert not any(held)


class FileTransfer(KVTransfer):
    """A file for each block; done only when asked a second time. `broken` makes the next transfer fail."""

    name = "files"

    def __init__(self, folder: Path) -> None:
        self.folder, self.polls, self.broken = folder, 0, False
        self.pending: list[tuple[int, int, int, bool]] = []

    def register(self, layers: Sequence[LayerCache], group_of_layer: Sequence[int]) -> None:
        self.layers, self.group_of_layer = list(layers), list(group_of_layer)

    def start(self, group: int, device: list[int], tier: list[int], out: bool) -> None:
        self.pending += [(group, block, place, out) for block, place in zip(device, tier, strict=True)]

    def poll(self) -> bool:
        self.polls += 1
        if self.broken:
            self.broken, self.pending = False, []
            raise OSError("the disk is gone")
        if self.polls % 2:
            return False
        for group, block, place, out in self.pending:
            path = self.folder / f"{group}-{place}"
            parts = [part[block] for layer, belongs in zip(self.layers, self.group_of_layer, strict=True)
                     if belongs == group for part in (layer.k, layer.v)]
            if out:
                path.write_bytes(torch.stack([part.reshape(-1) for part in parts]).numpy().tobytes())
            else:
                content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(len(parts), -1)
                for part, row in zip(parts, content, strict=True):
                    part.copy_(row.view(part.shape))
        self.pending = []
        return True


@pytest.fixture(params=["llama", "gemma3"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine with a pool of 24 blocks above such a tier."""
    make_checkpoint(tmp_path, request.param, eos_token_id=2)
    tier = FilesOfPrefixes()

    def build_cache(config: Any, spec: Any, pool: Any, cost: Any) -> KVCacheManager:
        groups = tuple(assembly.CacheGroup(group.window) for group in spec.cache_groups())
        return KVCacheManager(pool.num_blocks, config.cache.block_size, groups, tier=tier)

    monkeypatch.setattr(assembly, "build_cache", build_cache)
    transfer = FileTransfer(tmp_path / "blocks")
    transfer.folder.mkdir()
    with LLM(str(tmp_path), skip_tokenizer_init=True, block_size=4, num_kv_blocks=24, eviction_policy="lru") as llm:
        worker_cache = llm._core.executor._worker._cache  # type: ignore[attr-defined]
        worker_cache._transfers["files"] = transfer
        transfer.register(worker_cache.layers, worker_cache._group_of_layer)
        yield llm, transfer


def answer(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    return llm.generate(prompts, params, use_tqdm=False)


def test_prefixes_go_to_files_and_come_back_with_every_bit(engine: tuple[LLM, FileTransfer]) -> None:
    llm, transfer = engine
    first = answer(llm, [PROMPT])[0]
    crowd = answer(llm, [[random.Random(i).randrange(3, 97) for _ in range(40)] for i in range(8)])
    again = answer(llm, [PROMPT])[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.outputs[0].logprobs == first.outputs[0].logprobs
    assert again.num_cached_tokens == 36 and again.metrics.counts.tier_hits > 0 and transfer.polls > 2
    assert llm.metrics()["tier_hits"] == sum(output.metrics.counts.tier_hits for output in [*crowd, again])
    llm.check()


def test_a_transfer_that_fails_loses_its_step_and_nothing_else(engine: tuple[LLM, FileTransfer]) -> None:
    llm, transfer = engine
    first = answer(llm, [PROMPT])[0]
    answer(llm, [[random.Random(i).randrange(3, 97) for _ in range(40)] for i in range(8)])
    transfer.broken = True
    failed = answer(llm, [PROMPT])[0]
    assert failed.error is not None and "the disk is gone" in failed.error
    llm.check()
    assert answer(llm, [PROMPT])[0].outputs[0].token_ids == first.outputs[0].token_ids
