"""What the parts of the scheduler share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.kvcache.manager import KVCacheManager
from quire.kvcache.reservations import Reservation
from quire.scheduler.chunks import ChunkSizes
from quire.scheduler.limits import Limits
from quire.scheduler.pacing import StepPacer
from quire.scheduler.policy import BatchingPolicy
from quire.scheduler.preemption import Preemption
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.request import Request
from quire.scheduler.roster import Roster
from quire.scheduler.stats import SchedulerStats
from quire.speculation.speculator import Speculator


@dataclass(slots=True)
class SchedulerState:
    limits: Limits
    cache: KVCacheManager
    waiting: WaitingQueue
    policy: BatchingPolicy
    preemption: Preemption
    stats: SchedulerStats
    roster: Roster
    clock: Callable[[], float]
    chunks: ChunkSizes
    pacer: StepPacer | None = None
    speculator: Speculator | None = None
    tells_speculator: bool = False
    """It is told what the step whose results come in gave."""
    asking: list[tuple[Request, Reservation]] = field(default_factory=list)
    """Requests whose prompt another engine is to compute, with the blocks reserved for the KV it sends."""
    on_start: Callable[[Request], None] | None = None
    """Told of every request that begins for the first time."""
    short: bool = False
    """A running sequence found no memory in the last draft: what comes free is for those who run."""
    gave_way: bool = False
    """The last draft preempted a request: the next one may find room where that one did not."""

    def can_spare(self, tokens: int) -> bool:
        """Whether every running sequence could still take a block after one that takes blocks for so many tokens."""
        wanted = len(self.roster.running) + tokens // self.cache.block_size + 1
        return all(pool.num_available >= wanted for pool in self.cache.pools)
