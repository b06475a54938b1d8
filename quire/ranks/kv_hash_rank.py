"""One of several ranks whose KV is numbers: each holds a part of every slot, and only all parts together are right.

A rank that missed a plan, a token, a copy or a transfer changes the text of everybody who reads there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from quire.executor.kv_hash import BlockStore, content_part, total
from quire.executor.kv_hash_worker import KVHashWorker
from quire.kernels.routing import LayerLoad
from quire.kvtransfer.memory import KVMemory
from quire.parallel.collectives import Collectives, receive_tensor, send_tensor
from quire.parallel.place import Place
from quire.ranks.kv_hash_memory import NumberMemory
from quire.scheduler.arrivals import ArrivalBox
from quire.scheduler.plan import HOST, StepPlan, StepResult, TransferReport, TransferStart


class RankPart:
    """This rank's part of a slot; what it reads is added up along the stages and among the last one's ranks."""

    def __init__(self, place: Place, collectives: Collectives) -> None:
        self.draws = place.is_last
        self._place, self._collectives = place, collectives

    def content(self, token: int, position: int) -> int:
        return content_part(token, position, self._place.index, self._place.num_ranks)

    def total(self, sums: list[int]) -> list[int]:
        place, talk = self._place, self._collectives
        if not sums:
            return []
        if talk.before is not None and not place.is_first:
            before = receive_tensor(talk.before, [len(sums)], torch.int64).tolist()
            sums = [total(pair) for pair in zip(sums, before, strict=True)]
        if talk.after is not None and not place.is_last:
            send_tensor(talk.after, torch.tensor(sums, dtype=torch.int64))
        elif talk.group is not None:
            everyone = talk.group.exchange(torch.tensor(sums, dtype=torch.int64))
            sums = [total(parts) for parts in zip(*(each.tolist() for each in everyone), strict=True)]
        return sums


class KVHashRank:
    """A rank's worker; its transfers are made at once."""

    launch = None

    def __init__(self, place: Place, collectives: Collectives | None, num_blocks: int, block_size: int,
                 num_host_blocks: int = 0, windows: Sequence[int | None] = (None,), vocab_size: int = 1000,
                 step_seconds: float = 0.0) -> None:
        part = RankPart(place, collectives or Collectives(None))
        self._worker = KVHashWorker(num_blocks, block_size, windows, vocab_size, part)
        self._tiers = {HOST: [BlockStore(num_host_blocks, block_size) for _ in windows]}
        self._blocks, self._part = (num_blocks, block_size), (place.index, place.num_ranks)
        self._sampler = place.is_sampler
        self._step_seconds = step_seconds
        self.arrivals = ArrivalBox()

    def execute(self, plan: StepPlan) -> StepResult:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        self._worker.apply(plan)
        reports = [self._move(start) for start in plan.transfers]
        results = self._worker.run(plan.entries)
        return StepResult(plan.step, results if self._sampler else [], reports)

    def learn(self, row: int, position: int, tokens: Sequence[int]) -> None:
        self._worker.learn(row, position, tokens)

    def _move(self, start: TransferStart) -> TransferReport:
        tier = self._tiers[start.tier]
        for move in start.moves:
            here, there = self._worker.device[move.group], tier[move.group]
            if start.out:
                there.put(move.tier, here.read(move.device))
            else:
                here.put(move.device, there.read(move.tier))
        return TransferReport(start.number, len(start.moves), finished=True)

    def device_bytes(self) -> int:
        return 0

    def expert_load(self) -> list[LayerLoad]:
        return []

    def kv_memory(self) -> KVMemory:
        return NumberMemory(self._worker.device, *self._blocks, *self._part)

    def close(self) -> None:
        pass
