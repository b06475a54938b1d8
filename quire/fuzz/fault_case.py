"""A case with faults as plain data: an engine on KV that is numbers, requests, and what goes wrong at which step."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass, field
from typing import Any

from quire.errors import InvalidRequestError
from quire.executor.faults import AT_COLLECT, AT_LAUNCH, HALFWAY
from quire.fuzz.far_tier import random_far_tier
from quire.fuzz.unit_tier import random_unit_tier

KIND = "faults"
VOCABULARY = 61
END = 0
"""The token that ends a text."""


@dataclass(slots=True)
class FaultRequest:
    """A prompt that arrives before step `at_step`."""

    name: str
    at_step: int
    prompt: list[int]
    max_tokens: int
    seed: int
    temperature: float = 0.0
    n: int = 1
    beam: dict[str, Any] | None = None
    ignore_eos: bool = False
    prompt_logprobs: bool = False
    priority: int = 0
    salt: str = ""
    tenant: str = ""
    abort_at: int | None = None
    ends: list[list[int]] = field(default_factory=list)
    """[sequence, output tokens, steps]: ended from outside so many steps after it had so many tokens, as by a stop
    string."""

    @property
    def num_sequences(self) -> int:
        return self.n if self.beam is None else int(self.beam["beam_width"])


@dataclass(slots=True)
class FaultCase:
    options: dict[str, Any]
    requests: list[FaultRequest] = field(default_factory=list)
    lost_steps: list[list[Any]] = field(default_factory=list)
    """[step, where]."""
    transfers: list[list[Any]] = field(default_factory=list)
    """[number, fields of a `TransferFault`]."""
    clears: list[int] = field(default_factory=list)
    """Steps before which the prefix cache is emptied."""
    kind: str = KIND

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> FaultCase:
        try:
            requests = [FaultRequest(**request) for request in data["requests"]]
            return cls(**(data | {"requests": requests}))
        except (KeyError, TypeError) as error:
            raise InvalidRequestError(f"this is not a fuzz case as `quire fuzz` prints them: {error}") from None


def random_fault_case(seed: int) -> FaultCase:
    """The case of a seed: the same on every machine."""
    rng = random.Random(f"{seed} faults")
    case = FaultCase({})
    widest, longest = rng.choice([1, 1, 2, 4]), rng.choice([6, 16, 32])
    # Groups of about one size outgrow the pool together.
    crowded = rng.random() < 0.3
    if crowded:
        widest, longest = rng.randint(2, 4), 32
    texts = [_tokens(rng, rng.randint(4, 12 if crowded else 30)) for _ in range(rng.randint(1, 3))]
    last = rng.choice([0, 8, 40])
    for index in range(rng.randint(3, 6) if crowded else rng.randint(2, 10)):
        at_step = rng.randint(0, last)
        case.requests.append(FaultRequest(
            name=f"r{index}",
            at_step=at_step,
            prompt=_prompt(rng, texts),
            max_tokens=rng.randint(longest // 2, longest),
            seed=rng.getrandbits(32),
            temperature=rng.choice([0.0, 1.0]),
            ignore_eos=rng.random() < 0.8,
            prompt_logprobs=rng.random() < 0.1,
            priority=rng.randint(-1, 1),
            salt=rng.choice(["", "", "", "", "a"]),
            tenant=rng.choice(["", "x", "y"]),
            abort_at=at_step + rng.randint(0, 30) if rng.random() < 0.1 else None,
        ))
        _make_group(rng, case.requests[-1], widest, crowded)
    case.options = _options(rng, case.requests)
    _make_faults(rng, case)
    # Drawn apart, so that the rest of a case is what its seed always gave.
    apart = random.Random(f"far {seed}")
    if case.options["host_blocks"] and case.options["caching"] and apart.random() < 0.25:
        case.options["far"] = random_far_tier(apart)
    apart = random.Random(f"units {seed}")
    if case.options["caching"] and apart.random() < 0.25:
        case.options["units"] = random_unit_tier(apart)
    apart = random.Random(f"trees {seed}")
    if case.options["drafts"] and apart.random() < 0.5:
        depth = apart.choice([1, 2, 3, 5])
        case.options["tree"] = {"width": apart.choice([2, 3]), "depth": depth, "nodes": depth + apart.choice([1, 2, 6])}
    return case


def on_ranks(case: FaultCase, tensor_size: int, num_stages: int) -> FaultCase:
    """The same requests on several ranks, without what only one worker can do wrong on demand."""
    options = {**case.options, "ranks": [tensor_size, num_stages]}
    options.pop("far", None)
    options.pop("units", None)  # a tier that one worker plays
    if num_stages > 1:  # drafts that the worker makes itself are known to the last stage only
        options["drafts_on_device"] = False
    return dataclasses.replace(case, options=options, lost_steps=[], transfers=[])


def _prompt(rng: random.Random, texts: list[list[int]]) -> list[int]:
    """One of the texts, the beginning of one with an end of its own, or something new."""
    kind, text = rng.random(), rng.choice(texts)
    if kind < 0.4:
        return list(text)
    return (text[: rng.randint(1, len(text))] if kind < 0.8 else []) + _tokens(rng, rng.randint(1, 10))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCABULARY) for _ in range(count)]


def _make_group(rng: random.Random, request: FaultRequest, widest: int, crowded: bool) -> None:
    """Several sequences or beams where a case has groups; of any but beams some end from outside."""
    kind = rng.choice(["many", "many", "many", "beams"] if crowded else ["one", "many", "many", "beams"])
    if kind == "many":
        request.n = widest if crowded else rng.randint(1, widest)
        request.temperature = rng.choice([0.0, 1.0, 1.0])
    elif kind == "beams" and rng.random() < 0.7:
        request.beam = {"beam_width": rng.randint(1, widest), "max_tokens": request.max_tokens,
                        "ignore_eos": request.ignore_eos}
        return
    if rng.random() < (0.7 if crowded else 0.4):
        chosen = rng.sample(range(request.n), rng.randint(1, request.n))
        most = max(1, request.max_tokens - 1)
        request.ends = [[index, rng.choice([rng.randint(0, 6), rng.randint(0, most)]), rng.choice([0, 0, 1, 2, 5, 12])]
                        for index in chosen]


def blocks_needed(request: FaultRequest, block_size: int) -> int:
    """Of all its sequences at their longest: what the engine demands of a pool before it takes the request."""
    shared = len(request.prompt) // block_size
    longest = -(-(len(request.prompt) + request.max_tokens) // block_size)
    return shared + request.num_sequences * (longest - shared)


def _options(rng: random.Random, requests: list[FaultRequest]) -> dict[str, Any]:
    """An engine with room for the largest request and little more."""
    block_size = rng.choice([1, 2, 2, 3, 4, 4, 8])
    caching = rng.random() < 0.85
    options: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": max(blocks_needed(r, block_size) for r in requests) + rng.choice([0, 0, 0, 1, 3]),
        "windows": rng.choice([[None], [None], [None], [7], [None, 5], [None, 9, 3]]),
        "max_num_seqs": max(rng.randint(1, 6), max(r.num_sequences for r in requests)),
        "max_num_batched_tokens": rng.choice([1, 5, 16, 64]),
        "max_num_partial_prefills": rng.randint(1, 3),
        "long_prefill_token_threshold": rng.choice([0, 0, 3]),
        "caching": caching,
        "queue": rng.choice(["fcfs", "priority", "fair"]),
        "policy": rng.choice(["decode-first", "decode-first", "prefill-first"]),
        "depth": rng.choice([1, 2, 2, 3]),
        "host_blocks": 0,
        "offload": False,
        "mode": "recompute",
        "fetch_timeout": rng.choice([10_000, 10_000, 4]),
        "drafts": 0,
        "drafts_on_device": False,
    }
    if rng.random() < 0.75:
        options |= {"host_blocks": rng.choice([3, 12, 40, 200]), "offload": caching and rng.random() < 0.7,
                    "mode": rng.choice(["swap", "swap", "recompute"])}
    if rng.random() < 0.3:
        options |= {"drafts": rng.choice([1, 3, 5]), "drafts_on_device": rng.random() < 0.5}
    return options


def _make_faults(rng: random.Random, case: FaultCase) -> None:
    """In most cases something goes wrong: steps, transfers, or both."""
    if rng.random() < 0.5:
        steps = sorted(rng.sample(range(1, 60), rng.choice([1, 2, 6, 15])))
        case.lost_steps = [[step, rng.choice([AT_LAUNCH, AT_LAUNCH, HALFWAY, AT_COLLECT])] for step in steps]
    if case.options["host_blocks"]:
        share = rng.choice([0.0, 0.2, 0.7])
        case.transfers = [[number, _transfer(rng)] for number in range(1, 60) if rng.random() < share]
    if rng.random() < 0.2:
        case.clears = [rng.randint(1, 30) for _ in range(2)]


def _transfer(rng: random.Random) -> dict[str, Any]:
    fault: dict[str, Any] = {"delay": rng.choice([0, 1, 3, 8]), "moves_a_tick": rng.choice([0, 0, 1, 2])}
    if rng.random() < 0.4:
        fault["fails_after"] = rng.randint(0, 3)
    fault["reports_twice"] = rng.random() < 0.2
    fault["ignores_cancel"] = rng.random() < 0.5
    return fault
