"""A case with several engines as plain data: one that decodes, some that compute prompts for it, and a bad network."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass, field
from typing import Any

from quire.errors import InvalidRequestError
from quire.executor.faults import AT_COLLECT, AT_LAUNCH, HALFWAY
from quire.fuzz.fault_case import FaultCase, on_ranks, random_fault_case

PAIR_KIND = "pairs"
_MOST_RANGES = 80
_SIZES = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]


@dataclass(slots=True)
class PairCase:
    decode: FaultCase
    """The engine that asks, and all requests."""
    prefill: list[dict[str, Any]] = field(default_factory=list)
    """Options of those that compute prompts."""
    asks: dict[str, list[int]] = field(default_factory=dict)
    """By request: which of them it may ask, in this order."""
    lost_steps: list[list[Any]] = field(default_factory=list)
    """[prefill engine, step, where]."""
    ranges: list[list[Any]] = field(default_factory=list)
    """[number of a range that is sent, fields of a `RangeFault`]."""
    delays: list[list[int]] = field(default_factory=list)
    """[number of a message, ticks that it takes]."""
    cuts: list[int] = field(default_factory=list)
    """Ticks at which every link breaks."""
    pauses: list[list[int]] = field(default_factory=list)
    """[engine, tick, ticks]: it is stopped and does nothing. Engine 0 decodes."""
    kills: list[list[int]] = field(default_factory=list)
    """[prefill engine, tick]: it is gone from then on."""
    lease: int = 8
    patience: int = 20
    kind: str = PAIR_KIND

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> PairCase:
        try:
            return cls(**(data | {"decode": FaultCase.from_data(data["decode"])}))
        except (KeyError, TypeError) as error:
            raise InvalidRequestError(f"this is not a fuzz case as `quire fuzz` prints them: {error}") from None


def random_pair_case(seed: int) -> PairCase:
    """The case of a seed: the same on every machine."""
    rng = random.Random(f"{seed} pairs")
    decode = random_fault_case(seed)
    case = PairCase(decode, lease=rng.choice([4, 8, 16]), patience=rng.choice([6, 20, 60]))
    longest = max(len(request.prompt) for request in decode.requests)
    for _ in range(rng.choice([1, 1, 2])):
        case.prefill.append(_prefill_options(rng, random_fault_case(rng.getrandbits(20)).options, decode, longest))
    for request in decode.requests:
        if rng.random() < 0.85:
            case.asks[request.name] = rng.sample(range(len(case.prefill)), rng.randint(1, len(case.prefill)))
    if rng.random() < 0.75:
        _make_faults(rng, case)
    return case


def pair_on_ranks(case: PairCase, seed: int, decode: tuple[int, int] | None = None) -> PairCase:
    """The same with engines of several ranks, on which no step is lost. `decode`: tensor ranks and stages of the one
    that asks."""
    rng = random.Random(f"{seed} ranks of pairs")
    sizes = decode or rng.choice(_SIZES)
    played = case.decode if sizes == (1, 1) else on_ranks(case.decode, *sizes)
    prefill, spread = [], set()
    for index, options in enumerate(case.prefill):
        theirs = rng.choice(_SIZES)
        if theirs != (1, 1):
            spread.add(index)
            options = {**options, "ranks": list(theirs), "drafts_on_device": False}
            options.pop("units", None)
        prefill.append(options)
    lost = [each for each in case.lost_steps if each[0] not in spread]
    return dataclasses.replace(case, decode=played, prefill=prefill, lost_steps=lost)


def _prefill_options(rng: random.Random, options: dict[str, Any], decode: FaultCase, longest: int) -> dict[str, Any]:
    """Another engine of the same model; its pool nearly always holds the longest prompt."""
    size = rng.choice([decode.options["block_size"], options["block_size"]])
    least = -(-(longest + 1) // size)
    return {**options, "windows": decode.options["windows"], "block_size": size, "drafts": 0, "far": None,
            "num_blocks": max(1, least + rng.choice([-1, 0, 0, 1, 4, 12])), "fetch_timeout": 10_000}


def _make_faults(rng: random.Random, case: PairCase) -> None:
    """Ranges that fail, come late, come twice or are cut in the middle, at one in five; and worse."""
    case.ranges = [[number, _range_fault(rng)] for number in range(_MOST_RANGES) if rng.random() < 0.2]
    if rng.random() < 0.5:
        case.delays = [[number, rng.choice([1, 3, 9, 30])] for number in range(150) if rng.random() < 0.1]
    if rng.random() < 0.3:
        case.cuts = sorted(rng.randint(1, 80) for _ in range(rng.choice([1, 2, 4])))
    if rng.random() < 0.4:
        case.pauses = [[rng.randint(0, len(case.prefill)), rng.randint(1, 60), rng.choice([2, 10, 40])]
                       for _ in range(rng.choice([1, 2, 3]))]
    if rng.random() < 0.3:
        case.kills = [[rng.randrange(len(case.prefill)), rng.randint(1, 60)]]
    if rng.random() < 0.3:
        case.lost_steps = [[rng.randrange(len(case.prefill)), rng.randint(1, 40),
                            rng.choice([AT_LAUNCH, HALFWAY, AT_COLLECT])] for _ in range(rng.choice([1, 3, 8]))]


def _range_fault(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["fails", "late", "twice", "cut"])
    if kind == "late":
        return {"waits": rng.choice([0, 2, 9]), "travels": rng.choice([1, 4, 15, 40])}
    if kind == "twice":
        return {"again": rng.choice([1, 3, 12])}
    return {"cut": 0.0 if kind == "fails" else rng.random()}
