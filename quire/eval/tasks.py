"""What is asked and how answers are scored, as the field does it; whoever answers is an argument.

lambada: the last word of a passage (OpenAI's version, no examples before it). `acc` is the share of passages
  after which greedy decoding writes that word; `perplexity` is exp of its mean negative log-probability.
arc: science questions with four answers, of which the likeliest counts as chosen, ARC-Easy and ARC-Challenge,
  test split, with OLMES' five solved questions before each or with none. `acc_norm` divides an answer's
  log-probability by its length in characters, `acc` does not.
gsm8k: grade-school arithmetic after eight solved problems with their steps, greedy, up to an empty line.
  `exact_match` compares the last number written with the one that is right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

Rows = Callable[[str], Iterator[dict[str, Any]]]
"""Name of a dataset to its requests."""

@dataclass(frozen=True, slots=True)
class Scored:
    """What a model thinks of a continuation: log-probability, and whether it is what greedy would write."""

    logprob: float
    greedy: bool


class Engine(Protocol):
    """The engine under test."""

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
        """Log-probability of each (context, continuation)'s continuation."""
        ...

    def complete(self, contexts: Sequence[str], stops: Sequence[str], max_tokens: int) -> list[str]:
        """Greedy text after each context, up to the first of the stop strings."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """How much is asked, and how: `limit` None is all."""

    limit: int | None = None
    shots: int = 5
    """Solved questions before each of arc's."""
    max_tokens: int = 512
    """Longest answer to gsm8k's."""


@dataclass(frozen=True, slots=True)
class Result:
    """Metrics of one task, and what was answered to each question, for comparison."""

    task: str
    metrics: dict[str, float]
    answers: list[Any]
    shots: int
    right: list[bool]
    """Which answers count as right in the task's first metric."""


def first(rows: Iterator[dict[str, Any]], limit: int | None) -> list[dict[str, Any]]:
    return [row for row, _ in zip(rows, range(limit), strict=False)] if limit else list(rows)


def lambada(engine: Engine, rows: Rows, options: Options) -> list[Result]:
    wanted = [row["request"] for row in first(rows("lambada"), options.limit)]
    scored = engine.score([(request["context"], request["continuation"]) for request in wanted])
    metrics = {
        "acc": _mean([answer.greedy for answer in scored]),
        "perplexity": math.exp(-_mean([answer.logprob for answer in scored])),
    }
    greedy = [answer.greedy for answer in scored]
    return [Result("lambada", metrics, greedy, 0, greedy)]


def arc(engine: Engine, rows: Rows, options: Options) -> list[Result]:
    return [_choices(name, engine, rows, options) for name in ("arc_easy", "arc_challenge")]


def arc_easy(engine: Engine, rows: Rows, options: Options) -> list[Result]:
    return [_choices("arc_easy", engine, rows, options)]


@dataclass(frozen=True, slots=True)
class Question:
    context: str
    choices: list[str]
    """As they continue the context, with the space before them."""
    gold: int


def questions(rows: Iterator[dict[str, Any]], limit: int | None, shots: int) -> list[Question]:
    """The rows of one document are its choices. Documents of answers without their question are skipped."""
    found: list[Question] = []
    for document, group in groupby(rows, key=lambda row: row["doc_id"]):
        if document >= _WITHOUT_QUESTION:
            continue
        if limit and len(found) == limit:
            break
        choices = list(group)
        context = choices[0]["request"]["context"] if shots else choices[0]["doc"]["query"]
        answers = [row["request"]["continuation"] for row in choices]
        found.append(Question(context, answers, choices[0]["label"]))
    return found


_WITHOUT_QUESTION = 1_000_000


def _choices(name: str, engine: Engine, rows: Rows, options: Options) -> Result:
    asked = questions(rows(name), options.limit, options.shots)
    scored = iter(engine.score([(q.context, choice) for q in asked for choice in q.choices]))
    plain, normed = [], []
    for question in asked:
        logprobs = [next(scored).logprob for _ in question.choices]
        plain.append(_best(logprobs))
        # The space before an answer is no part of it.
        lengths = [len(choice.removeprefix(" ")) for choice in question.choices]
        normed.append(_best([logprob / length for logprob, length in zip(logprobs, lengths, strict=True)]))
    gold = [question.gold for question in asked]
    metrics = {"acc_norm": _share_equal(normed, gold), "acc": _share_equal(plain, gold)}
    return Result(name, metrics, normed, options.shots, _equal(normed, gold))


def gsm8k(engine: Engine, rows: Rows, options: Options) -> list[Result]:
    wanted = first(rows("gsm8k"), options.limit)
    stops = wanted[0]["request"]["stop_sequences"]
    texts = engine.complete([row["request"]["context"] for row in wanted], stops, options.max_tokens)
    answers = [last_number(text) for text in texts]
    right = [last_number(row["doc"]["short_answer"]) for row in wanted]
    return [Result("gsm8k", {"exact_match": _share_equal(answers, right)}, answers, 8, _equal(answers, right))]


_NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> str | None:
    """The last number in a text, without thousands separators and needless zeros; None if there is none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    whole, point, part = found[-1].replace(",", "").partition(".")
    part = part.rstrip("0")
    return whole + point + part if part else whole


TASKS: dict[str, Callable[[Engine, Rows, Options], list[Result]]] = {
    "lambada": lambada,
    "arc": arc,
    "arc_easy": arc_easy,
    "gsm8k": gsm8k,
}


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _mean(values: Sequence[float | bool]) -> float:
    return sum(values) / len(values)


def _share_equal(answers: Sequence[Any], gold: Sequence[Any]) -> float:
    return _mean(_equal(answers, gold))


def _equal(answers: Sequence[Any], gold: Sequence[Any]) -> list[bool]:
    return [answer == right for answer, right in zip(answers, gold, strict=True)]
