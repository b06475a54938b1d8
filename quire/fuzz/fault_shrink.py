"""Simpler cases with faults: fewer requests and faults, plainer options, shorter texts."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from quire.fuzz.fault_case import FaultCase, blocks_needed

_PLAIN_OPTIONS = {
    "windows": [None],
    "max_num_batched_tokens": 64,
    "max_num_partial_prefills": 1,
    "long_prefill_token_threshold": 0,
    "caching": False,
    "queue": "fcfs",
    "policy": "decode-first",
    "depth": 1,
    "host_blocks": 0,
    "offload": False,
    "mode": "recompute",
    "fetch_timeout": 10_000,
    "drafts": 0,
    "tree": None,
}
_PLAIN_REQUEST = {"temperature": 0.0, "n": 1, "beam": None, "ignore_eos": True, "prompt_logprobs": False, "priority": 0,
                  "salt": "", "tenant": "", "abort_at": None, "at_step": 0}


def simpler_fault_cases(case: FaultCase) -> Iterator[FaultCase]:
    """One change each; the pool always takes every request."""
    for candidate in _changed(case):
        need = max(blocks_needed(request, candidate.options["block_size"]) for request in candidate.requests)
        candidate.options["num_blocks"] = max(need, candidate.options["num_blocks"])
        yield candidate


def _changed(case: FaultCase) -> Iterator[FaultCase]:
    for field in ("requests", "lost_steps", "transfers", "clears"):
        items = getattr(case, field)
        fewest = 1 if field == "requests" else 0
        # First halves, then one by one: most transfers behave, and a case lists dozens.
        for size in (len(items) // 2, 1):
            for at in range(0, len(items) if size else 0, max(size, 1)):
                if len(items) - len(items[at : at + size]) >= fewest:
                    smaller = copy.deepcopy(case)
                    del getattr(smaller, field)[at : at + size]
                    yield smaller
    for name, value in _PLAIN_OPTIONS.items():
        if case.options.get(name) != value:
            plainer = copy.deepcopy(case)
            plainer.options[name] = value
            if name in ("caching", "host_blocks"):
                plainer.options["offload"] = False
            yield plainer
    for index in range(len(case.requests)):
        yield from _simpler_requests(case, index)


def _simpler_requests(case: FaultCase, index: int) -> Iterator[FaultCase]:
    request = case.requests[index]
    for place in range(len(request.ends)):
        simpler = copy.deepcopy(case)
        del simpler.requests[index].ends[place]
        yield simpler
    for name, value in _PLAIN_REQUEST.items():
        if getattr(request, name) != value:
            simpler = copy.deepcopy(case)
            setattr(simpler.requests[index], name, value)
            if name == "n":
                simpler.requests[index].ends = [end for end in request.ends if end[0] == 0]
            yield simpler
    if len(request.prompt) > 1:
        simpler = copy.deepcopy(case)
        simpler.requests[index].prompt = request.prompt[: len(request.prompt) // 2]
        yield simpler
    if request.max_tokens > 1 and request.beam is None:
        simpler = copy.deepcopy(case)
        simpler.requests[index].max_tokens = request.max_tokens // 2
        yield simpler
