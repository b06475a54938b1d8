"""Plays a case with several engines: every text must be what it is without any other engine, whatever goes wrong.

A prompt that does not come is computed where it is needed, so only a step that the decoding engine itself lost excuses
an error. When all is over no engine that is left may hold a block.
"""

from __future__ import annotations

from typing import Any

from quire.engine.core import EngineCore
from quire.executor.faults import FaultyExecutor
from quire.fuzz.fault_case import VOCABULARY, FaultCase
from quire.fuzz.fault_run import FuzzedRanks, Play, faulty_scheduler, fuzzed_executor
from quire.fuzz.pair_case import PairCase
from quire.fuzz.pair_net import NumberMover, RankMover
from quire.peers.hub import PeerHub
from quire.peers.memory import MemoryMover, Net, Node, RangeFault
from quire.ranks.shared_kv import SharedKV
from quire.scheduler.request import Request


def find_pair_fault(case: PairCase) -> str | None:
    """None when every request got what it must get, else the first that did not."""
    play = PairPlay(case)
    try:
        play.run()
    except Exception as error:
        return f"the engines raised {type(error).__name__}: {error}"
    finally:
        play.close()
    return play.difference()


class PairPlay(Play):
    def __init__(self, pair: PairCase) -> None:
        super().__init__(pair.decode)
        self.pair = pair
        self.net = Net(lambda: self.now, {number: RangeFault(**fault) for number, fault in pair.ranges},
                       {number: ticks for number, ticks in pair.delays})
        self.hub = self._join(self.core, self.executor, pair.decode.options, computes=False)
        self.others: list[tuple[EngineCore, FaultyExecutor | FuzzedRanks]] = []
        for index, options in enumerate(pair.prefill):
            lost = [[step, where] for engine, step, where in pair.lost_steps if engine == index]
            executor = fuzzed_executor(FaultCase(options, lost_steps=lost))
            core = EngineCore(faulty_scheduler(options, lambda: float(self.now)), executor, options["depth"])
            self._join(core, executor, options, computes=True)
            self.others.append((core, executor))

    def close(self) -> None:
        for executor in (self.executor, *(executor for _, executor in self.others)):
            executor.close()

    def _join(self, core: EngineCore, executor: FaultyExecutor | FuzzedRanks, options: dict[str, Any],
              computes: bool) -> PeerHub:
        number = len(self.net.nodes)
        if isinstance(executor, FuzzedRanks):
            mover: MemoryMover = RankMover(number, SharedKV(executor, executor.listen_to_kv), executor.num_ranks)
        else:
            mover = NumberMover(number, executor.worker.device, options["block_size"])
        hub = PeerHub(core, mover, VOCABULARY, len(options["windows"]), computes=computes, asks=not computes,
                      lease=float(self.pair.lease), patience=float(self.pair.patience))
        self.net.add(Node(hub, mover))
        return hub

    # ---- what a case asks for

    def prepare(self, request: Request) -> None:
        self.hub.prepare(request, [str(1 + index) for index in self.pair.asks.get(request.request_id, [])])

    @property
    def stopped(self) -> bool:
        return self.net.stopped(0)

    @property
    def quiet(self) -> bool:
        busy = any(core.has_work or not executor.quiet or self.net.nodes[1 + index].hub.busy
                   for index, (core, executor) in enumerate(self.others) if not self.net.nodes[1 + index].killed)
        return super().quiet and self.net.quiet and not busy and not self.hub.busy

    def beside(self) -> None:
        super().beside()
        pair, net = self.pair, self.net
        for engine, tick, ticks in pair.pauses:
            if tick == self.now and engine < len(net.nodes):
                net.nodes[engine].paused_until = self.now + ticks
        for engine, tick in pair.kills:
            if tick == self.now:
                net.kill(1 + engine)
        if self.now in pair.cuts:
            net.cut()
        net.tick()
        for index, (core, _) in enumerate(self.others):
            if not net.stopped(1 + index):
                core.step()
                core.scheduler.check()

    def difference(self) -> str | None:
        found = super().difference()
        if found is not None:
            return found
        for index, (core, _) in enumerate(self.others):
            cache = core.scheduler.cache
            used = [sum(pool.num_used for pool in cache.pools), *(tier.num_used for tier in cache.tiers)]
            if any(used) and not self.net.nodes[1 + index].killed:
                return f"prefill engine {index} holds {used} blocks (device, tiers) when all is over"
            if core.scheduler.stats.invariant_errors:
                return f"prefill engine {index} found its bookkeeping broken"
        return None
