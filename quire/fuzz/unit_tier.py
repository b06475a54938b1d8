"""A tier of units in fuzz cases: small units, a store that forgets, copies that fail or come late like all others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from quire.kvpool.keys import UnitKeys
from quire.kvpool.memory import MemoryStore
from quire.kvpool.publishing import BenefitPublisher
from quire.kvpool.rates import StoreRate
from quire.kvpool.staging import Staging, UnitWriter
from quire.kvpool.tier import UnitTier

UNITS = "units"
NUM_PLACES = 4096
"""More than the units of a case have blocks."""
_HEADER = 80


def random_unit_tier(rng: random.Random) -> dict[str, Any]:
    """Options of a `SmallUnits`."""
    return {
        "seed": rng.getrandbits(32),
        "blocks": rng.choice([1, 2, 3]),
        "capacity": rng.choice([3, 20, 500]),
        "loses": rng.choice([0.0, 0.1, 0.4]),
        "first": rng.random() < 0.3,
    }


class _Forgetful(MemoryStore):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options["capacity"] * _HEADER)
        self._rng, self._loses = random.Random(options["seed"]), options["loses"]

    def find(self, names: Sequence[bytes]) -> list[bool]:
        for name in names:
            if self._rng.random() < self._loses:
                self.discard(name)
        return super().find(names)


class _Inline(UnitWriter):
    def put(self, name: bytes) -> None:
        self._write(name)
        self._staging.drop(name)


class SmallUnits(UnitTier):
    """Units of a few blocks. Their content is the executor's; the store has only their names."""

    def __init__(self, options: dict[str, Any], block_size: int, num_groups: int) -> None:
        keys = UnitKeys(b"the secret of a case", b"model", options["blocks"] * block_size)
        store, staging = _Forgetful(options), Staging(1 << 20)
        writer = _Inline(store, staging, keys.check_seed, StoreRate(), lambda: None)
        super().__init__(UNITS, store, keys, block_size, [0] * num_groups, staging, BenefitPublisher(100, None),
                         always=True, writer=writer)

    def patience(self, num_bytes: int) -> float | None:
        return None

    def late(self) -> None:
        """Real time does not pass here: a circuit that opened would stay so."""
