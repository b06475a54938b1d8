"""Scores of continuations in a file, a line for each: what was asked once is not asked again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.errors import QuireError
from quire.eval.tasks import Engine, Scored

_AT_ONCE = 32


class KeptScores:
    """An engine in front of another, which is made when something has not been asked before.

    Lines stand in the order of the questions, so a run that was stopped goes on where it was, and one with more
    questions takes over those that it begins with.
    """

    def __init__(self, file: Path, engine: Callable[[], Engine]) -> None:
        self._file, self._engine = file, engine

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
        found = self._read(pairs)
        if len(found) == len(pairs):
            return found
        engine = self._engine()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            for at in range(len(found), len(pairs), _AT_ONCE):
                some = pairs[at : at + _AT_ONCE]
                scores = engine.score(some)
                for pair, one in zip(some, scores, strict=True):
                    file.write(json.dumps([_key(pair), one.logprob, one.greedy]) + "\n")
                file.flush()
                found += scores
        return found

    def _read(self, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
        if not self._file.exists():
            return []
        text = self._file.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # stopped inside a line
            self._file.write_text(whole, encoding="utf-8")
        lines = [json.loads(line) for line in whole.splitlines()]
        for (key, _, _), pair in zip(lines, pairs, strict=False):
            if key != _key(pair):
                raise QuireError(f"{self._file} has answers to other questions than {pair[0][-60:]!r}: remove it")
        return [Scored(logprob, greedy) for _, logprob, greedy in lines[: len(pairs)]]

    def complete(self, contexts: Sequence[str], stops: Sequence[str], max_tokens: int) -> list[str]:
        return self._engine().complete(contexts, stops, max_tokens)


def _key(pair: tuple[str, str]) -> str:
    return hashlib.sha256("\0".join(pair).encode()).hexdigest()[:12]
