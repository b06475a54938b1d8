"""Requests for a load test: random lengths, ShareGPT conversations, or a trace of production replayed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequestError

TRACE_BLOCK = 512
"""Tokens that a hash id of a trace in Mooncake's format stands for."""
_COMMON = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know get "
    "through back much before go good new write our used me man too any day same right look think also around another "
    "came come work three word must because does part even place well such here take why things help put years "
    "different away again off went old number great tell men say small every found still between name should home big "
    "give air line set own under read last never us left end along while might next sound below saw something thought "
    "both few those always looked show large often together asked house world going want school important until form "
    "food keep children feet land side without boy once animals life enough took sometimes four head above kind began "
    "almost live page got earth need far hand high year mother light parts country father let night following picture "
    "being study second eyes soon times story boys since white days ever paper hard near sentence better best across "
    "during today"
)
_WORDS = tuple(_COMMON.split())
"""Common words, each one token after a space in nearly every vocabulary."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load test."""

    prompt: str
    max_tokens: int
    at: float | None = None
    """Seconds after the start at which a trace sends it; None: the arrival process decides."""


Shorten = Callable[[str, int], str]
"""Cuts a text to a number of tokens."""


def words(rng: random.Random, count: int, shorten: Shorten | None = None) -> str:
    """Text of about `count` tokens: one a word, or exactly as a tokenizer counts."""
    if shorten is None:
        return " ".join(rng.choices(_WORDS, k=count))
    return shorten(" ".join(rng.choices(_WORDS, k=count + 8)), count)


def random_requests(count: int, input_len: int, output_len: int, *, prefix_len: int = 0, range_ratio: float = 0.0,
                    seed: int = 0, shorten: Shorten | None = None) -> list[LoadRequest]:
    """Random texts; lengths are spread by `range_ratio` to either side, after a prefix that all share."""
    rng = random.Random(seed)
    prefix = words(rng, prefix_len, shorten) + " " if prefix_len else ""
    made = []
    for _ in range(count):
        length, output = (rng.randint(max(1, math.floor(n * (1 - range_ratio))), math.ceil(n * (1 + range_ratio)))
                          for n in (input_len, output_len))
        made.append(LoadRequest(prefix + words(rng, length, shorten), output))
    return made


def sharegpt_requests(path: Path, count: int, *, output_len: int | None = None, seed: int = 0,
                      count_tokens: Callable[[str], int] | None = None) -> list[LoadRequest]:
    """First questions of conversations in ShareGPT's format; answers as long as those there, or `output_len`."""
    measure = count_tokens or (lambda text: math.ceil(len(text) / 4))
    found = []
    for conversation in _read_json(path):
        turns = conversation.get("conversations") or conversation.get("conversation") or [] \
            if isinstance(conversation, dict) else []
        texts = [turn.get("value") for turn in turns[:2] if isinstance(turn, dict)]
        if len(texts) == 2 and all(isinstance(text, str) and text.strip() for text in texts):
            found.append((str(texts[0]), str(texts[1])))
    random.Random(seed).shuffle(found)
    made: list[LoadRequest] = []
    for question, answer in found:
        length, output = measure(question), output_len or measure(answer)
        # As the field's benchmarks do: what is tiny or huge would measure something else.
        if 4 <= length <= 1024 and output >= 4 and length + output <= 2048:
            made.append(LoadRequest(question, output))
        if len(made) == count:
            break
    if not made:
        raise InvalidRequestError(f"{path} holds no conversation of two turns of useful length", "dataset_path")
    return made


def trace_requests(path: Path, count: int | None, *, speed: float = 1.0, max_input_len: int | None = None,
                   max_output_len: int | None = None, seed: int = 0) -> list[LoadRequest]:
    """A trace with words for contents: Mooncake's, of times, lengths and shared prefixes; Azure's has no prefixes."""
    made: list[LoadRequest] = []
    blocks: dict[int, str] = {}
    for entry in _azure_entries(path) if path.suffix.lower() == ".csv" else _mooncake_entries(path):
        if count is not None and len(made) >= count:
            break
        length = max(1, min(entry.length, max_input_len or entry.length))
        parts = []
        for block in entry.blocks[: -(-length // TRACE_BLOCK)]:
            if block not in blocks:
                blocks[block] = words(random.Random(f"{seed}-{block}"), TRACE_BLOCK)
            parts.append(blocks[block])
        text = " ".join(" ".join(parts).split(" ")[:length])
        made.append(LoadRequest(text, max(1, min(entry.output, max_output_len or entry.output)), entry.at / speed))
    if not made:
        raise InvalidRequestError(f"the trace {path} holds no requests", "dataset_path")
    first = min(request.at or 0.0 for request in made)
    return [LoadRequest(r.prompt, r.max_tokens, (r.at or 0.0) - first) for r in made]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One request of a trace; `at` in seconds."""

    at: float
    length: int
    output: int
    blocks: list[int]


def _mooncake_entries(path: Path) -> Iterator[_Entry]:
    for number, line in enumerate(_read_lines(path), 1):
        try:
            entry = json.loads(line)
            yield _Entry(float(entry["timestamp"]) / 1000, int(entry["input_length"]), int(entry["output_length"]),
                         [int(block) for block in entry["hash_ids"]])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError(f"line {number} of {path} is no line of a trace in Mooncake's format: it needs "
                                      f"timestamp, input_length, output_length and hash_ids", "dataset_path") from error


def _azure_entries(path: Path) -> Iterator[_Entry]:
    """Azure's traces are CSV files that tell lengths alone, so that every prompt is its own."""
    block = 0
    for number, line in enumerate(_read_lines(path), 1):
        if number == 1:
            continue  # the names of the columns
        try:
            when, length, output = line.decode().split(",")
            entry = _Entry(datetime.fromisoformat(when).timestamp(), int(length), int(output), [])
        except ValueError as error:
            raise InvalidRequestError(f"line {number} of {path} is no line of a trace in Azure's format: it needs "
                                      f"TIMESTAMP, ContextTokens and GeneratedTokens", "dataset_path") from error
        blocks = -(-max(1, entry.length) // TRACE_BLOCK)
        entry.blocks.extend(range(block, block + blocks))
        block += blocks
        yield entry


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When each request is sent: gamma gaps of mean 1/rate; burstiness 1 is Poisson, more is steadier."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(f"arrivals-{seed}")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times


def _read_json(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequestError(f"cannot read the dataset {path}: {error.strerror}", "dataset_path") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the dataset {path} is not JSON: {error}", "dataset_path") from error
    if not isinstance(found, list):
        raise InvalidRequestError(f"the dataset {path} must be a list of conversations", "dataset_path")
    return found


def _read_lines(path: Path) -> list[bytes]:
    try:
        return [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise InvalidRequestError(f"cannot read the trace {path}: {error.strerror}", "dataset_path") from error
