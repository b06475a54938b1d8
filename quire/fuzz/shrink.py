"""Makes a failing case small: fewer requests, plainer options, shorter prompts, as long as it still fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TypeVar

from quire.fuzz.case import FuzzCase, blocks_needed

_PLAIN_OPTIONS = {
    "enable_prefix_caching": False,
    "max_num_partial_prefills": 1,
    "long_prefill_token_threshold": 0,
    "scheduling_policy": "fcfs",
    "batching_policy": "decode-first",
    "max_steps_in_flight": 1,
    "num_threads": 1,
    "offload": False,
    "preemption_mode": "recompute",
    "max_num_batched_tokens": 256,
    "speculative_config": None,
}


Case = TypeVar("Case")


def shrink(case: Case, fails: Callable[[Case], bool], simpler: Callable[[Case], Iterator[Case]],
           tries: int = 200) -> Case:
    """The smallest case found that still fails; each try runs the whole case."""
    progress = True
    while progress and tries > 0:
        progress = False
        for candidate in simpler(case):
            tries -= 1
            if fails(candidate):
                case, progress = candidate, True
                break
            if tries <= 0:
                break
    return case


def simpler_cases(case: FuzzCase) -> Iterator[FuzzCase]:
    """One change each; the pool always takes every request."""
    for candidate in _simpler(case):
        _keep_servable(candidate)
        yield candidate


def _keep_servable(case: FuzzCase) -> None:
    """A shorter prompt may share fewer blocks: the pool must still take every request."""
    need = max(blocks_needed(request, case.options["block_size"]) for request in case.requests)
    case.options["num_kv_blocks"] = max(need, case.options["num_kv_blocks"])


def _simpler(case: FuzzCase) -> Iterator[FuzzCase]:
    for index in range(len(case.requests)):
        if len(case.requests) > 1:
            smaller = copy.deepcopy(case)
            del smaller.requests[index]
            yield smaller
    for name, value in _PLAIN_OPTIONS.items():
        if case.options.get(name, value) != value:
            plainer = copy.deepcopy(case)
            plainer.options[name] = value
            if name == "enable_prefix_caching":
                plainer.options["offload"] = False
            yield plainer
    for index, request in enumerate(case.requests):
        yield from _simpler_request(case, index, len(request.prompt))


def _simpler_request(case: FuzzCase, index: int, length: int) -> Iterator[FuzzCase]:
    params = case.requests[index].params
    if length > 1:
        shorter = copy.deepcopy(case)
        shorter.requests[index].prompt = case.requests[index].prompt[: length // 2]
        yield shorter
    if params["max_tokens"] > 1:
        shorter = copy.deepcopy(case)
        shorter.requests[index].params["max_tokens"] = params["max_tokens"] // 2
        shorter.requests[index].params.pop("min_tokens", None)
        yield shorter
    if case.requests[index].beam is not None:
        plainer = copy.deepcopy(case)
        plainer.requests[index].beam = None
        yield plainer
    extras = set(params) - {"max_tokens", "temperature", "seed", "logprobs", "ignore_eos"}
    if extras:
        plainer = copy.deepcopy(case)
        for name in extras:
            del plainer.requests[index].params[name]
        yield plainer
    if case.requests[index].abort_at is not None or case.requests[index].at_step:
        simpler = copy.deepcopy(case)
        simpler.requests[index].abort_at = None
        simpler.requests[index].at_step = 0
        yield simpler
