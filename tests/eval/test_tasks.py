"""Questions are read and answers scored as the tasks' definitions say, whoever answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from quire.eval.tasks import Options, Scored, arc, gsm8k, lambada, last_number, questions


class Oracle:
    """Knows the log-probability of each continuation, and a text for each context."""

    def __init__(self, logprobs: dict[str, float] | None = None, texts: dict[str, str] | None = None) -> None:
        self.logprobs, self.texts = logprobs or {}, texts or {}
        self.contexts: list[str] = []

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
        self.contexts = [context for context, _ in pairs]
        return [Scored(self.logprobs[c], self.logprobs[c] > -1.0) for _, c in pairs]

    def complete(self, contexts: Sequence[str], stops: Sequence[str], max_tokens: int) -> list[str]:
        assert "\n\n" in stops
        return [self.texts[context] for context in contexts]


def choice(document: int, index: int, text: str, gold: int) -> dict[str, Any]:
    return {"doc_id": document, "idx": index, "label": gold, "doc": {"query": f"Q{document}"},
            "request": {"context": f"shots Q{document}", "continuation": f" {text}"}}


CHOICES = [
    choice(0, 0, "a", 0), choice(0, 1, "long answer", 0),
    choice(1, 0, "yes", 1), choice(1, 1, "no", 1),
    choice(1_000_000, 0, "a", 0), choice(1_000_000, 1, "long answer", 0),
]


def rows_of(rows: list[dict[str, Any]]) -> Any:
    def rows_by_name(name: str) -> Iterator[dict[str, Any]]:
        return iter(rows)

    return rows_by_name


def test_lambada_counts_greedy_words_and_takes_the_mean_logprob() -> None:
    rows = [{"request": {"context": "c", "continuation": word}} for word in (" one", " two")]
    (result,) = lambada(Oracle({" one": -0.5, " two": -3.5}), rows_of(rows), Options())
    assert result.metrics == {"acc": 0.5, "perplexity": pytest.approx(math.exp(2.0))}
    assert result.answers == [True, False] and result.shots == 0


def test_arc_divides_by_the_length_of_the_answer() -> None:
    # By itself "a" is likelier; per character the long answer is.
    oracle = Oracle({" a": -4.0, " long answer": -11.0, " yes": -3.0, " no": -1.0})
    easy, challenge = arc(oracle, rows_of(CHOICES), Options())
    assert easy.metrics == {"acc": 1.0, "acc_norm": 0.5} and easy.answers == [1, 1]
    assert (easy.task, challenge.task) == ("arc_easy", "arc_challenge")


def test_arc_leaves_the_solved_questions_out_when_asked_to() -> None:
    assert [q.context for q in questions(iter(CHOICES), None, 0)] == ["Q0", "Q1"]
    assert [q.context for q in questions(iter(CHOICES), None, 5)] == ["shots Q0", "shots Q1"]
    assert [q.gold for q in questions(iter(CHOICES), 1, 5)] == [0]


def test_gsm8k_compares_the_last_number() -> None:
    request = {"stop_sequences": ["\n\n"]}
    rows = [{"doc": {"short_answer": gold}, "request": {"context": context, **request}}
            for context, gold in (("a", "1,450"), ("b", "7"), ("c", "3"))]
    texts = {"a": " 1000 + 450. So the answer is 1450.", "b": "7 or 8", "c": "no idea"}
    (result,) = gsm8k(Oracle(texts=texts), rows_of(rows), Options())
    assert result.answers == ["1450", "8", None]
    assert result.metrics == {"exact_match": pytest.approx(1 / 3)}


@pytest.mark.parametrize(("text", "number"), [
    ("$2,125.00.", "2125"), ("is -5", "-5"), ("16-3", "3"), ("3.50 dollars", "3.5"), ("", None), ("x = 1, 2, 3", "3"),
])
def test_the_last_number_is_read_whole(text: str, number: str | None) -> None:
    assert last_number(text) == number
