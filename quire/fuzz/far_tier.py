"""A second tier of fuzz cases: it answers late or never, and loses what it has found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.connector import Lookup
from quire.kvcache.host_tier import HostTier
from quire.kvcache.token_prefix import TokenPrefix

FAR = "far"
STORED, FINISHED, EVICTED = "stored", "finished", "evicted"


def random_far_tier(rng: random.Random) -> dict[str, Any]:
    """Options of a `FarTier`."""
    return {
        "seed": rng.getrandbits(32),
        "num_blocks": rng.choice([4, 30, 100]),
        "first": rng.random() < 0.3,
        "takes": rng.choice([[STORED], [FINISHED], [EVICTED], [STORED, EVICTED]]),
        "late": rng.choice([0.0, 0.3, 0.8]),
        "loses": rng.choice([0.0, 0.1, 0.5]),
    }


class FarTier(HostTier):
    """Blocks of another place. Time passes for it when it is told to (`tick`)."""

    name, swaps, lookup_timeout = FAR, False, 3.0

    def __init__(self, options: dict[str, Any], num_groups: int) -> None:
        super().__init__(options["num_blocks"], num_groups)
        self._options = options
        self._rng = random.Random(options["seed"])
        self._late: list[tuple[int, Lookup]] = []
        self._now = 0

    def tick(self) -> None:
        self._now += 1
        for due, lookup in [each for each in self._late if each[0] <= self._now]:
            self._late.remove((due, lookup))
            found = super().lookup(lookup.keys, lookup.num_groups)
            lookup.answer([[found.block(group, i) for i in range(len(lookup.keys))]
                           for group in range(lookup.num_groups)])

    def _happens(self, what: str) -> bool:
        return self._rng.random() < self._options[what]

    def lookup(self, keys: Sequence[bytes], num_groups: int, prefix: TokenPrefix | None = None) -> Lookup:
        if not self._happens("late"):
            return super().lookup(keys, num_groups)
        lookup = Lookup(keys, num_groups, self.wake)
        self._late.append((self._now + self._rng.randint(1, 6), lookup))
        return lookup

    def hold(self, group: int, block: int, key: bytes | None = None) -> bool:
        if key is not None and self._happens("loses"):
            return False
        return super().hold(group, block, key)

    def stored(self, group: int, key: bytes) -> int:
        return self._place(STORED, group, key)

    def finished(self, group: int, keys: Sequence[bytes]) -> list[int]:
        return [self._place(FINISHED, group, key) for key in keys]

    def evicted(self, group: int, key: bytes) -> int:
        return self._place(EVICTED, group, key)

    def _place(self, event: str, group: int, key: bytes) -> int:
        return super().evicted(group, key) if event in self._options["takes"] else NO_BLOCK
