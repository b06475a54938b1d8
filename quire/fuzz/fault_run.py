"""Plays a case with faults, and says where an answer is not what it must be, whatever went wrong around it.

Whoever had an entry in a lost step may end with an error. Nobody else may notice anything: not a lost step of others,
not a transfer that failed or came late. All texts are those that plain functions give without any engine.
"""

from __future__ import annotations

from typing import Any

from quire.engine.core import EngineCore
from quire.executor.faults import Faults, FaultyExecutor, TransferFault
from quire.executor.kv_hash import BlockStore, PlainKV, drawn_token, log_likelihood, ranked_candidates
from quire.executor.kv_hash_worker import KVHashWorker
from quire.fuzz.far_tier import FAR, FarTier
from quire.fuzz.fault_case import END, VOCABULARY, FaultCase, FaultRequest
from quire.fuzz.unit_tier import NUM_PLACES, UNITS, SmallUnits
from quire.kvcache.connector import KVConnector
from quire.kvcache.host_tier import HostTier
from quire.kvcache.manager import GroupWindow, KVCacheManager
from quire.parallel.place import Place
from quire.ranks.threads import ThreadExecutor, start_threads
from quire.ranks.workers import KV_HASH
from quire.sampling.params import BeamSearchParams, SamplingParams
from quire.sampling.token_logprobs import logprob_of
from quire.scheduler.beam import BeamSearch
from quire.scheduler.policy import BATCHING_POLICIES
from quire.scheduler.preemption import Preemption, PreemptionMode
from quire.scheduler.queue import QUEUES
from quire.scheduler.request import FinishReason, Request
from quire.scheduler.scheduler import Limits, Scheduler
from quire.speculation.assembly import build_speculator
from quire.speculation.options import NGRAM, SKIP_LAYERS, SpeculationOptions
from quire.speculation.tree import TreeShape

_STEPS_BOUND = 5_000
_LENGTH = 128
_EOS = frozenset({END})


def find_fault(case: FaultCase) -> str | None:
    """None when every request got what it must get, else the first that did not."""
    play = Play(case)
    try:
        play.run()
    except Exception as error:
        return f"the engine raised {type(error).__name__}: {error}"
    finally:
        play.executor.close()
    return play.difference()


class Play:
    """One engine and the requests of one case."""

    def __init__(self, case: FaultCase) -> None:
        self.case = case
        self.now = 0
        self._windows = list(case.options["windows"])
        self.executor = fuzzed_executor(case)
        scheduler = faulty_scheduler(case.options, lambda: float(self.now))
        self.core = EngineCore(scheduler, self.executor, case.options["depth"])
        self.requests: dict[str, Request] = {}
        self._logprobs: dict[str, list[float]] = {}
        self._due: dict[tuple[str, int], int] = {}
        """By request and sequence: the step at which it is ended from outside."""

    def run(self) -> None:
        arrivals = sorted(self.case.requests, key=lambda r: r.at_step)
        while self.now < _STEPS_BOUND:
            self.now += 1
            while arrivals and arrivals[0].at_step < self.now:
                self._add(arrivals.pop(0))
            self._from_outside()
            self.beside()
            if self.stopped:
                continue
            for update in self.core.step():
                found = self._logprobs.setdefault(update.request.request_id, [])
                found += [logprob_of(each) for each in update.prompt_logprobs or ()]
            self.core.scheduler.check()
            if not arrivals and not self.core.has_work:
                break
        else:
            raise RuntimeError(f"requests were still unfinished after {_STEPS_BOUND} steps")
        self._rest()

    def _add(self, wanted: FaultRequest) -> None:
        beams = None if wanted.beam is None else BeamSearch(BeamSearchParams(**wanted.beam), _EOS)
        params = SamplingParams(max_tokens=wanted.max_tokens, temperature=wanted.temperature, n=wanted.n,
                                ignore_eos=wanted.ignore_eos, prompt_logprobs=0 if wanted.prompt_logprobs else None)
        request = Request(wanted.name, wanted.prompt, params, wanted.seed, float(self.now), _EOS,
                          priority=wanted.priority, cache_key=wanted.salt.encode(), tenant=wanted.tenant, beams=beams)
        self.prepare(request)
        self.core.add(request)
        self.requests[wanted.name] = request

    def _from_outside(self) -> None:
        """Aborts, ends and an emptied cache, as a front door sends them between two steps."""
        if self.now in self.case.clears:
            self.core.clear_prefix_cache()
        for wanted in self.case.requests:
            request = self.requests.get(wanted.name)
            if request is None or request.finished:
                continue
            if wanted.abort_at is not None and self.now >= wanted.abort_at:
                self.core.abort(wanted.name)
            for index, tokens, later in wanted.ends:
                seq = request.sequences[index]
                if seq.num_output_tokens >= tokens:
                    due = self._due.setdefault((wanted.name, index), self.now + later)
                    if self.now >= due:
                        self.core.finish(seq, FinishReason.STOP, "the end")

    def prepare(self, request: Request) -> None:
        """Before it is added."""

    @property
    def stopped(self) -> bool:
        """The engine does not get to run now."""
        return False

    @property
    def quiet(self) -> bool:
        """Nothing is under way that no request waits for."""
        return self.executor.quiet

    def beside(self) -> None:
        """What happens beside the engine before each of its steps."""
        for tier in self.core.scheduler.cache.tiers:
            if isinstance(tier, FarTier):
                tier.tick()

    def _rest(self) -> None:
        """Let transfers that nobody waits for come to their end: then nothing may be held."""
        for _ in range(_STEPS_BOUND):
            if not self.stopped:
                self.core.take_arrivals()
            if self.quiet and not self.core.has_work:
                break
            self.now += 1
            self.beside()
            if not self.stopped:
                self.core.take_arrivals()
                self.core.step()
            self.executor.arrivals.wait(0.01)
        cache = self.core.scheduler.cache
        self.core.scheduler.check()
        used = [sum(pool.num_used for pool in cache.pools), *(tier.num_used for tier in cache.tiers)]
        if any(used):
            raise RuntimeError(f"{used} blocks (device, tiers) are held after the last request")

    # ---- what must have come of it

    def difference(self) -> str | None:
        for wanted in self.case.requests:
            found = self._difference(wanted, self.requests[wanted.name])
            if found is not None:
                return f"request {wanted.name}: {found}"
        if self.core.scheduler.stats.invariant_errors:
            return "the engine found its bookkeeping broken"
        return None

    def _difference(self, wanted: FaultRequest, request: Request) -> str | None:
        failed = next((seq.error for seq in request.sequences if seq.error is not None), None)
        if failed and wanted.seed not in self.executor.hit:
            return f"failed and was in no lost step: {failed}"
        if not all(seq.finished for seq in request.sequences):
            return "is not finished"
        if wanted.beam is not None:
            if failed or wanted.abort_at is not None:
                return None  # which beams are the best is decided at the end
            expected = plain_beams(wanted, request.max_len, self._windows)
            got = [seq.tokens[seq.num_prompt_tokens :] for seq in request.sequences]
            return None if got == expected else f"gave the beams {got}, and must give {expected}"
        for seq in request.sequences:
            tokens = seq.tokens[seq.num_prompt_tokens :]
            plain = plain_tokens(wanted, seq.index, request.max_len, self._windows)
            cut = failed or seq.finish_reason is FinishReason.ABORT or (wanted.name, seq.index) in self._due
            if tokens != plain[: len(tokens) if cut else None]:
                return f"sequence {seq.index} gave {tokens}, and must give {plain}"
        if wanted.prompt_logprobs:
            found, must = self._logprobs.get(wanted.name, []), plain_prompt_logprobs(wanted, self._windows)
            if found != must[: len(found)] or (not failed and len(found) < len(must) and not _may_end_early(wanted)):
                return f"gave the prompt log-probabilities {found}, and must give {must}"
        return None


def _may_end_early(wanted: FaultRequest) -> bool:
    return wanted.abort_at is not None or bool(wanted.ends)


class FuzzedRanks(ThreadExecutor):
    """Ranks on which nothing goes wrong."""

    hit: frozenset[int] = frozenset()


def fuzzed_executor(case: FaultCase) -> FaultyExecutor | FuzzedRanks:
    return _on_ranks(case.options) if case.options.get("ranks") else faulty_executor(case)


def _on_ranks(options: dict[str, Any]) -> FuzzedRanks:
    """The same KV dealt to `options["ranks"]`: tensor ranks, and stages."""
    executor = FuzzedRanks(Place.all(*options["ranks"]))
    start_threads(executor, {
        "kind": KV_HASH, "num_blocks": options["num_blocks"], "block_size": options["block_size"],
        "num_host_blocks": options["host_blocks"], "windows": options["windows"], "vocab_size": VOCABULARY})
    return executor


def faulty_executor(case: FaultCase) -> FaultyExecutor:
    options = case.options
    groups = len(options["windows"])
    worker = KVHashWorker(options["num_blocks"], options["block_size"], options["windows"], VOCABULARY)
    sizes = {"host": options["host_blocks"]}
    if options.get("far") is not None:
        sizes[FAR] = options["far"]["num_blocks"]
    if options.get("units") is not None:
        sizes[UNITS] = NUM_PLACES
    tiers = {name: [BlockStore(size, options["block_size"]) for _ in range(groups)] for name, size in sizes.items()}
    faults = Faults({step: where for step, where in case.lost_steps},
                    {number: TransferFault(**fault) for number, fault in case.transfers})
    return FaultyExecutor(worker, tiers, faults)


def faulty_scheduler(options: dict[str, Any], clock: Any) -> Scheduler:
    groups = tuple(GroupWindow(window) for window in options["windows"])
    tiers: list[KVConnector] = []
    if options["host_blocks"]:
        tiers.append(HostTier(options["host_blocks"], len(groups), options["offload"]))
    if options.get("far") is not None:
        tiers.insert(0 if options["far"]["first"] else len(tiers), FarTier(options["far"], len(groups)))
    if options.get("units") is not None:
        units = SmallUnits(options["units"], options["block_size"], len(groups))
        tiers.insert(0 if options["units"]["first"] else len(tiers), units)
    cache = KVCacheManager(options["num_blocks"], options["block_size"], groups, options["caching"], tiers=tiers,
                           block_bytes=(1,) * len(groups))
    limits = Limits(options["max_num_seqs"], options["max_num_batched_tokens"], _LENGTH,
                    max_num_partial_prefills=options["max_num_partial_prefills"],
                    long_prefill_token_threshold=options["long_prefill_token_threshold"],
                    fetch_timeout=float(options["fetch_timeout"]), num_stages=options.get("ranks", (1, 1))[1])
    speculator = None
    if options["drafts"]:
        method = SKIP_LAYERS if options["drafts_on_device"] else NGRAM
        tree = None if options.get("tree") is None else TreeShape(**options["tree"])
        speculator = build_speculator(SpeculationOptions(method, options["drafts"], adaptive=False, tree=tree))
    return Scheduler(limits, cache, QUEUES[options["queue"]](), BATCHING_POLICIES[options["policy"]](), clock=clock,
                     preemption=Preemption(cache, PreemptionMode(options["mode"])), speculator=speculator)


# ---- without any engine


def _read(tokens: list[int], windows: list[int | None]) -> PlainKV:
    kv = PlainKV(windows)
    for token in tokens:
        kv.append(token)
    return kv


def plain_tokens(wanted: FaultRequest, index: int, max_len: int, windows: list[int | None]) -> list[int]:
    """What a sequence of a request must give."""
    kv, tokens = _read(wanted.prompt, windows), list[int]()
    params = SamplingParams(temperature=wanted.temperature)
    while len(wanted.prompt) + len(tokens) < max_len:
        position = len(wanted.prompt) + len(tokens)
        tokens.append(drawn_token(kv.state, params, wanted.seed, index, position, VOCABULARY))
        if tokens[-1] == END and not wanted.ignore_eos:
            break
        kv.append(tokens[-1])
    return tokens


def plain_beams(wanted: FaultRequest, max_len: int, windows: list[int | None]) -> list[list[int]]:
    """The beams that a request must give, best first."""
    search = BeamSearch(BeamSearchParams(**(wanted.beam or {})), _EOS)
    beams: list[list[int]] = [[]]
    while True:
        for place, tokens in enumerate(beams):
            state = _read(wanted.prompt + tokens, windows).state
            search.report(place, ranked_candidates(state, search.num_candidates, VOCABULARY))
        choices = search.advance(max_len - len(wanted.prompt))
        if search.done:
            return [hypothesis.tokens for hypothesis in search.hypotheses]
        beams = [[*beams[choice.parent], choice.token] for choice in choices]


def plain_prompt_logprobs(wanted: FaultRequest, windows: list[int | None]) -> list[float]:
    kv = _read(wanted.prompt, windows)
    return [log_likelihood(kv.state_at(position), wanted.prompt[position])
            for position in range(1, len(wanted.prompt))]
