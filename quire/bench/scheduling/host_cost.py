"""`quire bench scheduler --host`: what the host pays for a token of `LLM.generate`: plain, with log-probabilities, and
with a draft head that rests because drafts would not pay.

The device is replaced by tensors that are there at once; all else is what a GPU's steps go through: planning, results
off the device, their way through the scheduler, the outputs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Final

import torch

from quire.config import EngineConfig
from quire.engine.assembly.engine import Engine
from quire.engine.core import EngineCore
from quire.executor.base import Executor
from quire.kernels.sampled_row import REPORT_WORDS, TOP
from quire.kvcache.manager import KVCacheManager
from quire.llm import LLM
from quire.sampling.logprobs import PackedLogprobs
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.scheduler import Limits, Scheduler
from quire.speculation.device_speculator import DeviceSpeculator
from quire.worker.gpu.results import PendingStep, ResultCopier

SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "plain": {}, "logprobs=0": {"logprobs": 0}, "logprobs=5": {"logprobs": 5}, "logprobs=20": {"logprobs": 20},
    "resting head": {}}
_STEP_SECONDS: Final = {1: 0.42e-3, 8: 0.51e-3, 64: 0.65e-3, 256: 1.1e-3}
"""Of a model so small that drafts are far from paying: SmolLM2-135M's on an H200, by sequences."""
_PROMPT_TOKENS = 128
_BLOCK_SIZE = 16
_VOCAB = 151936


class ReadyResults(Executor):
    """Every entry of a plan draws; what a GPU would have drawn and reported is there before."""

    def __init__(self, max_num_seqs: int, logprobs: int | None) -> None:
        self._copier = ResultCopier(torch.device("cpu"))
        self._tokens = torch.zeros(max_num_seqs, 2, dtype=torch.int32)
        self._tokens[:, 0] = torch.arange(max_num_seqs) + 1000
        self._logprobs = logprobs
        self._reports = torch.zeros(max_num_seqs, REPORT_WORDS, dtype=torch.int32)
        self._reports[:, 0] = self._tokens[:, 0]
        self._reports[:, 2] = 1
        self._reports[:, 3 : 3 + TOP] = torch.arange(TOP) + 1000
        floats = self._reports.view(torch.float32)
        floats[:, 1] = -0.25
        floats[:, 3 + TOP : 3 + 2 * TOP] = -0.25 - torch.arange(TOP)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        count = len(plan.entries)
        pending = PendingStep(plan.step, count, range(count), self._tokens[:count])
        if self._logprobs is not None:
            rows = list(range(count))
            found = PackedLogprobs(rows, [self._logprobs] * count, self._reports[:count], TOP)
            pending.logprobs.append((rows, found))
        return self._copier.send(pending)

    def close(self) -> None:
        self._copier.close()


def measure(num_sequences: int, num_tokens: int, repeat: int = 5) -> dict[str, list[float]]:
    """Microseconds of processor time, of all threads, for a token of each setting. Settings take turns, so that a
    machine that slows down meanwhile slows all of them."""
    prompts = [[(7919 * i + j) % 1000 for j in range(_PROMPT_TOKENS)] for i in range(num_sequences)]
    doors = {name: front_door(num_sequences, num_tokens, wanted.get("logprobs"),
                              resting_head() if name == "resting head" else None)
             for name, wanted in SETTINGS.items()}
    found: dict[str, list[float]] = {name: [] for name in SETTINGS}
    try:
        for round_ in range(repeat + 1):
            for name, llm in doors.items():
                params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1, **SETTINGS[name])
                gc.collect()
                begin = time.process_time()
                llm.generate(prompts, params, use_tqdm=False)
                if round_:
                    found[name].append(1e6 * (time.process_time() - begin) / (num_sequences * num_tokens))
    finally:
        for llm in doors.values():
            llm.close()
    return found


def resting_head() -> DeviceSpeculator:
    """Of a GPU whose worker would make drafts, were they believed to pay."""
    speculator = DeviceSpeculator(4, own_kv=True, gpu=True, ahead=True, rests=True)
    speculator.most_in_step = 256
    for size, seconds in _STEP_SECONDS.items():
        speculator.times.observe(size, seconds)
    speculator.drafting.observe(1, 10 * _STEP_SECONDS[1])
    return speculator


def front_door(num_sequences: int, num_tokens: int, logprobs: int | None,
               speculator: DeviceSpeculator | None = None) -> LLM:
    longest = _PROMPT_TOKENS + num_tokens
    cache = KVCacheManager(num_sequences * (longest // _BLOCK_SIZE + 2), _BLOCK_SIZE)
    limits = Limits(num_sequences, num_sequences * _PROMPT_TOKENS, longest + 1)
    core = EngineCore(Scheduler(limits, cache, speculator=speculator), ReadyResults(num_sequences, logprobs), 2)
    source: Any = SimpleNamespace(eos_token_ids=())
    spec: Any = SimpleNamespace(vocab_size=_VOCAB)
    pool: Any = SimpleNamespace(max_model_len=longest + 1)
    return LLM.over(Engine(EngineConfig.create(skip_tokenizer_init=True), source, spec, pool, core))


def lines(sequences: Sequence[int], num_tokens: int) -> Iterator[dict[str, Any]]:
    for num_sequences in sorted(sequences):
        found = measure(num_sequences, num_tokens)
        for name, times in found.items():
            beyond = [mine - plain for mine, plain in zip(times, found["plain"], strict=True)]
            yield {"bench": "scheduler", "case": "host", "setting": name, "sequences": num_sequences,
                   "tokens": num_tokens, "us_per_token": round(statistics.median(times), 2),
                   "low": round(min(times), 2), "high": round(max(times), 2),
                   "us_beyond_plain": round(statistics.median(beyond), 2)}
