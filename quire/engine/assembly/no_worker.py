"""The worker's stand-in for executors without a model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from quire.errors import InvariantError

if TYPE_CHECKING:
    from quire.kvtransfer.memory import KVMemory
    from quire.models.spec import DecoderSpec
    from quire.worker.memory import PoolSize
    from quire.worker.unit_transfer import UnitTransfer


@dataclasses.dataclass(slots=True)
class NoWorker:
    spec: DecoderSpec
    pool: PoolSize

    def kv_memory(self) -> KVMemory | None:
        return None

    def connect(self, transfer: UnitTransfer) -> None:
        raise InvariantError("without a model there is no KV to move")
