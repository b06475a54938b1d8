"""Simpler cases with several engines: fewer faults and engines, and a simpler engine that decodes."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from quire.fuzz.fault_shrink import simpler_fault_cases
from quire.fuzz.pair_case import PairCase

_PLAIN_OPTIONS = {"max_num_batched_tokens": 64, "caching": False, "depth": 1, "host_blocks": 0, "offload": False,
                  "mode": "recompute", "policy": "decode-first", "queue": "fcfs"}


def simpler_pair_cases(case: PairCase) -> Iterator[PairCase]:
    """One change each."""
    for field in ("lost_steps", "ranges", "delays", "cuts", "pauses", "kills"):
        items = getattr(case, field)
        for size in (len(items) // 2, 1):
            for at in range(0, len(items) if size else 0, max(size, 1)):
                smaller = copy.deepcopy(case)
                del getattr(smaller, field)[at : at + size]
                yield smaller
    for decode in simpler_fault_cases(case.decode):
        smaller = copy.deepcopy(case)
        smaller.decode = decode
        names = {request.name for request in decode.requests}
        smaller.asks = {name: engines for name, engines in case.asks.items() if name in names}
        for options in smaller.prefill:
            options["windows"] = decode.options["windows"]
        yield smaller
    for name in case.asks:
        smaller = copy.deepcopy(case)
        del smaller.asks[name]
        yield smaller
    for index in range(-1, len(case.prefill)):  # engines of one rank
        smaller = copy.deepcopy(case)
        if (smaller.prefill[index] if index >= 0 else smaller.decode.options).pop("ranks", None):
            yield smaller
    for index, options in enumerate(case.prefill):
        for name, value in _PLAIN_OPTIONS.items():
            if options[name] != value:
                smaller = copy.deepcopy(case)
                smaller.prefill[index] |= {name: value} | ({"offload": False} if name == "caching" else {})
                yield smaller
