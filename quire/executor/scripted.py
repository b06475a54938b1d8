"""An executor that writes given texts, token by token: a model whose lines are known, to test what stands around it.

A script is a file with a JSON object in each line: `{"after": "text of a prompt", "say": "what the model writes"}`.
The last line whose `after` is part of a prompt is what the model says to that prompt; a line without `after` fits any.
So a session of many turns is a script of as many lines, each told by something that only the conversation up to there
has, and it does not matter which requests come first, or again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.sampling.params import NOTHING_TO_DRAW
from quire.sampling.token_logprobs import LogprobRecord, TokenLogprobs
from quire.scheduler.plan import EntryResult, PlanEntry, RowStart, StepPlan, StepResult
from quire.speculation.tree import ROOT, child_with

_FIELD = "dummy_script"
_NO_LINE = "the script has no line for this prompt"


class ScriptTokenizer(Protocol):
    """The part of a tokenizer that is needed."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Line:
    after: str
    say: str


def read_script(path: str) -> list[Line]:
    """Raises ConfigError that says which line is wrong."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_FIELD} {path} cannot be read: {error}", field=_FIELD) from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            found.append(Line(**{"after": "", **fields}))
            good = isinstance(found[-1].after, str) and isinstance(found[-1].say, str)
        except (ValueError, TypeError, RecursionError):
            good = False
        if not good:
            raise ConfigError(f'line {number} of {path} is not like {{"after": "text", "say": "text"}}', field=_FIELD)
    return found


def _mask(entry: PlanEntry, place: int) -> int | None:
    """The tokens that a grammar allows after so many drafts, as bits; None: all of them."""
    if not entry.masks:
        return None
    size = len(entry.masks) // (entry.num_drafts + 1)
    return int.from_bytes(entry.masks[place * size:(place + 1) * size], "little")


class ScriptedExecutor(Executor):
    """Keeps for every row the tokens that its prompt is answered with."""

    def __init__(self, lines: list[Line], tokenizer: Callable[[], ScriptTokenizer], eos_token_id: int,
                 vocab_size: int) -> None:
        """`tokenizer` is called when the first request comes."""
        self._lines = lines
        self._make_tokenizer = tokenizer
        self._tokenizer: ScriptTokenizer | None = None
        self._eos = eos_token_id
        self._vocab_size = vocab_size
        self._rows: dict[int, tuple[RowStart, list[int] | None]] = {}

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        for row in plan.freed_rows:
            self._rows.pop(row, None)
        for start in plan.starts:
            self._rows[start.row] = (start, self._answer(start))
        future: Future[StepResult] = Future()
        future.set_result(StepResult(plan.step, [self._run(entry) for entry in plan.entries]))
        return future

    def _answer(self, start: RowStart) -> list[int] | None:
        """The tokens for a row; None where no line fits its prompt."""
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        prompt = self._tokenizer.decode(start.token_ids[:start.num_prompt_tokens], skip_special_tokens=False)
        fitting = [line for line in self._lines if line.after in prompt]
        if not fitting:
            return None
        return [*self._tokenizer.encode(fitting[-1].say, add_special_tokens=False), self._eos]

    def _run(self, entry: PlanEntry) -> EntryResult:
        start, answer = self._rows[entry.row]
        if answer is None:
            return EntryResult(error=_NO_LINE)
        if entry.candidates:
            return EntryResult(error="a scripted model has no beams")
        if not entry.sample:
            return EntryResult()
        known = entry.start + entry.num_tokens - entry.num_drafts - start.num_prompt_tokens
        tokens: list[int] = []
        node: int | None = ROOT
        while node is not None:
            token = self._drawn(answer, known + len(tokens), _mask(entry, 1 + node))
            if token is None:
                return EntryResult(error=NOTHING_TO_DRAW)
            tokens.append(token)
            node = child_with(entry.drafts, entry.parents, node, token)
        result = EntryResult(tokens, num_drafts=entry.num_drafts, parents=entry.parents)
        if start.params.logprobs is not None:
            result.logprobs = [self._certain(token, start.params.logprobs) for token in tokens]
        return result

    def _drawn(self, answer: list[int], place: int, mask: int | None) -> int | None:
        """The answer's token at a place; after its end the model goes on ending. Where a grammar does not allow it,
        the first token that is allowed, or None."""
        token = answer[min(place, len(answer) - 1)]
        if mask is None or mask >> token & 1:
            return token
        return (mask & -mask).bit_length() - 1 if mask else None

    def _certain(self, token: int, count: int) -> LogprobRecord:
        """The log-probabilities of a model that is sure of its lines."""
        others = [each for each in range(min(count, self._vocab_size)) if each != token][:max(0, count - 1)]
        top = [token, *others] if count else []
        return TokenLogprobs(token, 0.0, 1, top, [0.0, *[-math.inf] * len(others)] if count else []).pack()
