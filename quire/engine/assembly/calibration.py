"""Measures at start what moving KV and recomputing it cost on this machine, so that the cheaper one can be chosen."""

from __future__ import annotations

import time

from quire.config import EngineConfig
from quire.executor.base import Executor
from quire.kvcache.move_cost import MoveCost
from quire.models.spec import DecoderSpec
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import HOST, BlockMove, PlanEntry, RowStart, StepPlan, TableDiff, TransferStart
from quire.speculation.device_speculator import DeviceSpeculator
from quire.speculation.speculator import Speculator
from quire.worker.memory import PoolSize, groups_with_draft

_PROMPT_TOKENS = 128
_COPIED_BLOCKS = 32
_REPEATS = 2
_PATIENCE = 10.0
"""Seconds that some blocks may take to the host."""
_ROUNDS = 4
_DRAFT_COUNTS = (1, 2, 3, 5, 8, 12, 16, 24, 32, 48)
_MANY_DRAFTS = (7, 15, 31, 63, 127, 255)
"""As many as several sequences have: on a GPU what a row more costs with few of them says nothing of many."""


def measure_move_cost(executor: Executor, config: EngineConfig, spec: DecoderSpec, pool: PoolSize) -> MoveCost | None:
    """Rates of this machine, from steps that the executor carries out; None where nothing will be decided by them."""
    decides = config.scheduler.preemption_mode == "auto" or config.cache.offload
    pooled = config.cache.kv_disk is not None or config.cache.kv_pool is not None
    if not pooled and not (pool.num_host_blocks and decides):
        return None
    groups = len(groups_with_draft(spec, pool.draft_bytes_per_token))
    length = min(_PROMPT_TOKENS, pool.max_model_len, pool.num_blocks * config.cache.block_size)
    prompt = _fastest(executor, _prompt_step(length, groups, config.cache.block_size))
    executor.submit(StepPlan(0, freed_rows=[0])).result()
    if not pool.num_host_blocks:
        return MoveCost(tokens_per_second=length / prompt, bytes_per_second=float("inf"))
    count = min(_COPIED_BLOCKS, pool.num_blocks, pool.num_host_blocks)
    seconds = min([_moving_seconds(executor, count, groups) for _ in range(1 + _REPEATS)][1:])
    return MoveCost(tokens_per_second=length / prompt, bytes_per_second=2 * count * pool.bytes_per_block / seconds)


def measure_step_times(speculator: Speculator, executor: Executor, config: EngineConfig, spec: DecoderSpec,
                       pool: PoolSize) -> None:
    """Times steps of one to k + 1 tokens: what a draft costs is judged by these."""
    most, size = speculator.most_drafts, config.cache.block_size
    length = min(_PROMPT_TOKENS, pool.max_model_len, pool.num_blocks * size) - most - 1
    if length < 1:
        return
    groups = len(groups_with_draft(spec, pool.draft_bytes_per_token))
    counts = [0, *(n for n in _DRAFT_COUNTS if n < most), most]
    room = min(pool.max_model_len, pool.num_blocks * size) - length - 1
    counts += [n for n in _MANY_DRAFTS if most < n <= min(room, speculator.most_in_step or 0)]
    prompt = _prompt_step(length, groups, size, room=counts[-1] + 1)
    executor.submit(prompt).result()
    steps = {1 + n: StepPlan(0, entries=[PlanEntry(0, length - 1, 1 + n, True, drafts=(0,) * n)]) for n in counts}
    found = dict.fromkeys(steps, float("inf"))
    # In turns, so that a moment in which the machine is busy with something else makes no size look dear.
    for _ in range(_ROUNDS):
        for size, plan in steps.items():
            found[size] = min(found[size], _seconds(executor, plan))
    for size in found:
        # More tokens are not cheaper, whatever the clock says.
        speculator.times.observe(size, min(seconds for other, seconds in found.items() if other >= size))
    if isinstance(speculator, DeviceSpeculator):
        first = StepPlan(0, entries=[PlanEntry(0, length - 1, 2, True, device_drafts=1)])
        # The first time also compiles and allocates; a prompt that is computed again is text that nobody has read.
        read = [_seconds(executor, first)]
        for _ in range(_REPEATS if speculator.own_kv else 0):
            executor.submit(StepPlan(0, freed_rows=[0])).result()
            executor.submit(prompt).result()
            read.append(_seconds(executor, first))
        caught_up = min(read) - _fastest(executor, first)
        if speculator.own_kv:
            speculator.seconds_behind = max(0.0, caught_up) / length
        for count in {1, speculator.most}:
            own = PlanEntry(0, length - 1, 1 + count, True, device_drafts=count)
            step = StepPlan(0, entries=[own])
            # The model may have fewer drafts to offer, and then has looked once more.
            there = executor.submit(step).result().entries[0].num_drafts
            drafting = _fastest(executor, step) - speculator.times.estimate(1 + there)
            passes = speculator.pass_shares(min(count, there + 1))
            speculator.drafting.observe(1, max(1e-9, drafting / passes))
    executor.submit(StepPlan(0, freed_rows=[0])).result()


def _prompt_step(length: int, groups: int, block_size: int, room: int = 0) -> StepPlan:
    """Prefill of a dummy sequence; its blocks are free again when the engine starts."""
    blocks = list(range(-(-(length + room) // block_size)))
    return StepPlan(
        0,
        starts=[RowStart(0, [0] * length, length, SamplingParams(temperature=0.0), seed=0, sequence_index=0)],
        diffs=[TableDiff(0, group, 0, blocks) for group in range(groups)],
        entries=[PlanEntry(0, 0, length, sample=False)],
    )


def _moving_seconds(executor: Executor, count: int, groups: int) -> float:
    """Blocks out to the host and back, by transfers that nobody will hear of. Without a host's answer it takes for
    ever: then everything else is cheaper."""
    moves = [BlockMove(group, i, i) for group in range(groups) for i in range(count)]
    began = time.perf_counter()
    for out in (True, False):
        reports = executor.submit(StepPlan(0, transfers=[TransferStart(0, HOST, out, moves)])).result().arrivals
        until = time.perf_counter() + _PATIENCE
        while not any(report.finished for report in reports):
            if time.perf_counter() > until:
                return float("inf")
            executor.arrivals.wait(0.1)
            reports = reports + executor.arrivals.take()
        if any(report.error is not None for report in reports):
            return float("inf")
    return max(time.perf_counter() - began, 1e-9)


def _fastest(executor: Executor, plan: StepPlan) -> float:
    """Seconds, without those of the first time, which also warms up."""
    return min([_seconds(executor, plan) for _ in range(1 + _REPEATS)][1:])


def _seconds(executor: Executor, plan: StepPlan) -> float:
    began = time.perf_counter()
    executor.submit(plan).result()
    return max(time.perf_counter() - began, 1e-9)
