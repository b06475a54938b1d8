"""A worker made of lists: rows, block tables and block contents; it checks all that a plan assumes."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from quire.executor.base import Executor
from quire.executor.dummy import dummy_candidates, dummy_token
from quire.kvcache.host_tier import HostTier
from quire.kvcache.manager import GroupWindow, KVCacheManager
from quire.kvcache.move_cost import MoveCost
from quire.sampling.params import BeamSearchParams, SamplingParams
from quire.sampling.token_logprobs import LogprobRecord, TokenLogprobs
from quire.scheduler.beam import BeamSearch
from quire.scheduler.plan import (
    BlockMove,
    EntryResult,
    PlanEntry,
    RowStart,
    StepPlan,
    StepResult,
    TransferReport,
    TransferStart,
)
from quire.scheduler.policy import BATCHING_POLICIES
from quire.scheduler.preemption import Preemption, PreemptionMode
from quire.scheduler.queue import QUEUES
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Limits, Scheduler
from tests.kvcache.contents import BlockContents, Names, fingerprints

VOCAB = 1000


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    queue: str = "fcfs",
    policy: str = "decode-first",
    caching: bool = True,
    host_blocks: int = 0,
    mode: str = "auto",
    offload: bool = False,
    cost: MoveCost | None = None,
    window_blocks: int | None = None,
    **limits: int | bool,
) -> Scheduler:
    """A scheduler in one line; limits default to generous ones."""
    wanted = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256} | limits
    group_blocks = tuple(num_blocks if w is None or window_blocks is None else window_blocks for w in windows)
    tiers = [HostTier(host_blocks, len(windows), offload)] if host_blocks else []
    cache = KVCacheManager(num_blocks, block_size, tuple(GroupWindow(w) for w in windows), caching, tiers=tiers,
                           cost=cost, block_bytes=(100,) * len(windows), group_blocks=group_blocks)
    return Scheduler(Limits(**wanted), cache, QUEUES[queue](), BATCHING_POLICIES[policy](),  # type: ignore[arg-type]
                     preemption=Preemption(cache, PreemptionMode(mode), cost))


def make_request(name: str, prompt: list[int], max_tokens: int | None = 4, *, seed: int | None = None,
                 priority: int = 0, cache_key: bytes = b"", eos: frozenset[int] = frozenset(),
                 beams: BeamSearchParams | None = None, tenant: str = "", **params: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return Request(name, prompt, sampling, hash(name) & 0xFFFF if seed is None else seed, 0.0, eos,
                   priority=priority, cache_key=cache_key, tenant=tenant,
                   beams=None if beams is None else BeamSearch(beams, eos))


def expected_beams(request: Request) -> list[list[int]]:
    """What a beam request must return, worked out without any engine."""
    assert request.beams is not None
    search = BeamSearch(request.beams.params, request.eos_token_ids)
    prompt = len(request.prompt_token_ids)
    beams: list[list[int]] = [[]]
    while True:
        for place, tokens in enumerate(beams):
            entry = PlanEntry(0, 0, prompt + len(tokens), False, given=tuple(tokens[-1:]),
                              candidates=search.num_candidates)
            search.report(place, dummy_candidates(request.seed, entry, VOCAB))
        choices = search.advance(request.max_len - prompt)
        if search.done:
            return [hypothesis.tokens for hypothesis in search.hypotheses]
        beams = [[*beams[choice.parent], choice.token] for choice in choices]


def expected_tokens(request: Request, max_len: int, index: int = 0) -> list[int]:
    """What a request's sequence must generate, worked out without any engine."""
    params = request.params
    prompt = len(request.prompt_token_ids)
    stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(request.eos_token_ids))
    tokens: list[int] = []
    while prompt + len(tokens) < max_len and len(tokens) < (params.max_tokens or max_len):
        tokens.append(dummy_token(request.seed, index, prompt + len(tokens), VOCAB))
        if tokens[-1] in stops:
            break
    return tokens


@dataclass(eq=False)
class Row:
    """One row of the request table; its identity tells one tenant of a row from the next."""

    start: RowStart
    tokens: list[int]
    tables: list[list[int]]
    computed: int = -1


@dataclass
class SimulatedWorker:
    """Carries out plans in order. `keys` gives the cache key of a request by its seed.

    Transfers are made after the forward pass of the plan that starts them: at once, or, with `chance`, block by block
    whenever `advance` is called, and some of them fail (a share of `failing`).
    """

    contents: BlockContents
    keys: dict[int, bytes] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    tiers: dict[tuple[str, int, int], list[int | None]] = field(default_factory=dict)
    moving: dict[int, tuple[TransferStart, int]] = field(default_factory=dict)
    """Transfers under way, with how many of their moves are made."""
    chance: random.Random | None = None
    failing: float = 0.0
    cancelled: set[int] = field(default_factory=set)

    @classmethod
    def beside(cls, scheduler: Scheduler) -> SimulatedWorker:
        cache = scheduler.cache
        return cls(BlockContents(cache.num_blocks, cache.block_size, [g.window for g in cache.groups]))

    def execute(self, plan: StepPlan) -> StepResult:
        for row in plan.freed_rows:
            self.rows.pop(row, None)
        for start in plan.starts:
            assert start.row not in self.rows, f"row {start.row} was started while in use"
            self.rows[start.row] = Row(start, list(start.token_ids), [[] for _ in self.contents.windows])
        for diff in plan.diffs:
            table = self.rows[diff.row].tables[diff.group]
            assert diff.start <= len(table), "a diff leaves a hole in the block table"
            table[diff.start : diff.start + len(diff.blocks)] = diff.blocks
        names = self.contents.begin(plan.step)
        self._copy(plan, names)
        assert len({entry.row for entry in plan.entries}) == len(plan.entries), "a row is in the plan twice"
        result = StepResult(plan.step, [self._run(entry, names) for entry in plan.entries])
        self.begin(plan)
        result.arrivals = self.advance()
        return result

    def begin(self, plan: StepPlan) -> None:
        self.moving |= {start.number: (start, 0) for start in plan.transfers}
        self.cancelled.update(plan.cancels)

    def advance(self, most: bool = False) -> list[TransferReport]:
        """Make some moves, or all of them, and tell."""
        reports = []
        for number, (start, done) in list(self.moving.items()):
            left = len(start.moves) - done
            count = left if self.chance is None or most else self.chance.randint(0, left)
            for move in start.moves[done : done + count]:
                self._move(start, move)
            done += count
            failed = self.chance is not None and self.chance.random() < self.failing and done < len(start.moves)
            if done == len(start.moves) or failed or number in self.cancelled:
                del self.moving[number]
                error = None if done == len(start.moves) else "the link is down"
                reports.append(TransferReport(number, done, True, error))
            else:
                self.moving[number] = (start, done)
                reports.append(TransferReport(number, done))
        return reports

    def _copy(self, plan: StepPlan, names: Names) -> None:
        starts = {entry.row: entry.start for entry in plan.entries}
        for copy in plan.copies:
            users = [diff for diff in plan.diffs if diff.group == copy.group and copy.target in diff.blocks]
            if not users:  # who wanted the copy was preempted while the plan was drafted
                self.contents.slots[copy.group][copy.target] = list(
                    self.contents.slots[copy.group][copy.source])
            for diff in users:
                index = diff.start + diff.blocks.index(copy.target)
                valid = starts[diff.row] - index * self.contents.block_size
                self.contents.copy(
                    names, copy.group, copy.source, copy.target, self.rows[diff.row], index, valid)

    def _move(self, start: TransferStart, move: BlockMove) -> None:
        device, place = self.contents.slots[move.group], (start.tier, move.group, move.tier)
        if start.out:
            self.tiers[place] = list(device[move.device])
            return
        for names in self.contents.in_flight:
            assert not any((move.group, move.device, offset) in names.users
                           for offset in range(self.contents.block_size)), "a block is fetched that a step uses"
        device[move.device] = list(self.tiers[place])

    def _run(self, entry: PlanEntry, names: Names) -> EntryResult:
        row = self.rows[entry.row]
        end = entry.start + entry.num_tokens
        if entry.given:
            row.tokens[end - len(entry.given) : end] = entry.given
        assert end <= len(row.tokens), "a token is computed before it is known"
        assert row.computed in (-1, entry.start), f"row {entry.row} is at {row.computed}, not {entry.start}"
        assert (entry.num_tokens > 0) == (entry.shares is None)
        row.computed = end
        chain = fingerprints(self.keys.get(row.start.seed, b""), row.tokens)
        if entry.shares is None:
            self.contents.run(names, row, row.tables, chain, entry.start, end)
        else:
            leader = self.rows[entry.shares]
            assert leader.computed == end and leader.tokens[:end] == row.tokens[:end]
        result = EntryResult(prompt_logprobs=self._prompt_logprobs(entry, row))
        assert (entry.sample or entry.candidates > 0) == (end == len(row.tokens))
        if entry.candidates:
            result.candidates = dummy_candidates(
                row.start.seed, replace(entry, given=tuple(row.tokens[row.start.num_prompt_tokens:])[-1:]), VOCAB)
        if entry.sample:
            row.tokens.append(dummy_token(row.start.seed, row.start.sequence_index, end, VOCAB))
            result.tokens.append(row.tokens[-1])
        return result

    def _prompt_logprobs(self, entry: PlanEntry, row: Row) -> list[LogprobRecord] | None:
        if entry.prompt_logprobs_from is None:
            return None
        assert entry.start <= entry.prompt_logprobs_from
        last = min(entry.start + entry.num_tokens, row.start.num_prompt_tokens - 1)
        return [TokenLogprobs(row.tokens[p + 1], -float(p), 1, [], []).pack()
                for p in range(entry.prompt_logprobs_from, last)]

    def retire(self, step: int) -> None:
        """The step's result is with the scheduler: it names no block any more."""
        self.contents.retire(step)

    def close(self) -> None:
        self.rows.clear()


class SimulatedExecutor(Executor):
    """Runs a `SimulatedWorker`; a step counts as in flight until its result is asked for.

    `fail_steps` lose their step before anything of it was carried out; `fail_rows` maps a step to rows whose
    entry comes back with an error.
    """

    def __init__(self, worker: SimulatedWorker) -> None:
        self.worker = worker
        self.fail_steps: set[int] = set()
        self.fail_rows: dict[int, set[int]] = {}
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        self.plans.append(plan)
        future: Future[StepResult] = _Collected(self.worker, plan.step)
        if plan.step in self.fail_steps:
            self.worker.contents.begin(plan.step)
            for start in plan.transfers:
                self.arrivals.put(TransferReport(start.number, 0, True, "the device fell over"))
            future.set_exception(RuntimeError("the device fell over"))
            return future
        result = self.worker.execute(plan)
        for entry, entry_result in zip(plan.entries, result.entries, strict=True):
            if entry.row in self.fail_rows.get(plan.step, ()):
                entry_result.tokens, entry_result.error = [], "this row is cursed"
        future.set_result(result)
        return future


class _Collected(Future[StepResult]):
    def __init__(self, worker: SimulatedWorker, step: int) -> None:
        super().__init__()
        self._worker, self._step, self._retired = worker, step, False

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._retired:
            self._retired = True
            self._worker.retire(self._step)
        return super().exception(timeout)
