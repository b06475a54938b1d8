"""What an engine publishes of its cache is what its cache holds, whatever happens to it."""

from __future__ import annotations

import random

import pytest

from quire import LLM, SamplingParams
from quire.kvcache.held_names import NAME_BYTES, HeldNames
from quire.kvcache.manager import KVCacheManager
from tests.server.conftest import tiny as tiny


def names(joined: bytes) -> list[bytes]:
    return [joined[i : i + NAME_BYTES] for i in range(0, len(joined), NAME_BYTES)]


class Mirror:
    """Somebody who knows only what was published."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache, self._held_names = cache, HeldNames(cache)
        self.held: set[bytes] = set()

    def check(self) -> None:
        changes = self._held_names.take()
        if changes is not None:
            if changes.cleared:
                self.held.clear()
            assert self.held.issuperset(names(changes.evicted))
            self.held.difference_update(names(changes.evicted))
            assert self.held.isdisjoint(names(changes.stored))
            self.held.update(names(changes.stored))
        assert self.held == {key for key in self._cache.pools[0].hashes if key is not None}


@pytest.mark.parametrize("seed", range(3))
def test_a_mirror_of_the_changes_is_the_cache(seed: int, tiny: object) -> None:
    dice = random.Random(seed)
    options = {"swap_space": 0.001, "offload": True} if seed == 2 else {}
    with LLM(str(tiny), load_format="dummy", executor="dummy", device="cpu", num_kv_blocks=24, block_size=4,
             max_model_len=64, **options) as llm:
        mirror = Mirror(llm._engine.core.scheduler.cache)
        beginnings = [[dice.randrange(200) for _ in range(dice.choice([8, 16, 24]))] for _ in range(4)]
        for _ in range(60):
            prompt = dice.choice(beginnings) + [dice.randrange(200) for _ in range(dice.randrange(1, 12))]
            llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=dice.randrange(1, 12)),
                         use_tqdm=False)
            if dice.random() < 0.7:
                mirror.check()
            if dice.random() < 0.1:
                llm.clear_prefix_cache()
        mirror.check()
        assert mirror.held
        llm._engine.core.scheduler.cache.reset()
        mirror.check()
        assert not mirror.held
