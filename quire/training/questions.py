"""What a model is asked while texts for a head are made: questions such as people ask, and beginnings that the model
itself goes on from.

A head guesses best on what it was trained on, and remembers answers that it saw often: what helps is questions that are
many and unlike each other. They are put together from phrasings (`forms.py`) and topics (`topics.py`); a part is cut
short, and the model goes on as a user would; some ask about an earlier answer, or go on after it. None of them is one
of the prompts of `quire bench speculative`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.training import forms

Message = dict[str, str]

_KINDS = ((0.14, "opening"), (0.30, "cut"), (0.10, "text"), (0.08, "further"), (0.38, "whole"))
"""Share of each kind: the model goes on from a few words, or from a part of a question; about an earlier answer;
after one; all the others."""
_LONGEST_PASSAGE = 600
"""Characters."""
_SYSTEM = 0.12
"""Share with instructions of their own; the others have those of the chat template, if it has any."""
_DRESSED, _CARELESS = 0.3, 0.07
"""Share with words before or behind the question, and of those written without care."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question that was answered."""

    asked: str
    answer: str


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    whole: bool
    """Else the model goes on from there."""
    before: tuple[Message, ...] = ()
    """What the conversation begins with."""

    @property
    def begins(self) -> str:
        """What the model goes on from."""
        return "" if self.whole else self.text

    def messages(self, text: str | None = None) -> list[Message]:
        """The conversation, with another last turn if one is given."""
        return [*self.before, {"role": "user", "content": self.text if text is None else text}]


def question(draw: random.Random, told: Sequence[Exchange]) -> Question:
    """`told`: answers given before, to ask about."""
    kind = draw.choices([name for _, name in _KINDS], [share for share, _ in _KINDS])[0]
    before = _system(draw)
    if kind == "opening":
        return Question(draw.choice(forms.OPENINGS), False, before)
    if kind == "text" and told:
        passage = _cut(draw.choice(told).answer)
        return Question(_filled(draw.choice(forms.OF_TEXT), passage), True, before)
    if kind == "further" and told:
        earlier = draw.choice(told)
        turns = ({"role": "user", "content": earlier.asked}, {"role": "assistant", "content": _cut(earlier.answer)})
        asked = _filled(draw.choice(forms.FOLLOW_UPS), draw.choice(forms.topics.SUBJECTS))
        return Question(asked, True, (*before, *turns))
    asked = _composed(draw)
    words = asked.split(" ")
    if kind == "cut" and len(words) > 3 and "\n" not in asked:
        return Question(" ".join(words[: draw.randrange(2, len(words) - 1)]), False, before)
    return Question(_dressed(draw, asked), True, before)


def _system(draw: random.Random) -> tuple[Message, ...]:
    return ({"role": "system", "content": draw.choice(forms.SYSTEMS)},) if draw.random() < _SYSTEM else ()


def _composed(draw: random.Random) -> str:
    kind = draw.random()
    for share, made in _MAKERS:
        if kind < share:
            return made(draw)
        kind -= share
    _, phrasings, topics = draw.choices(forms.KINDS, [weight for weight, *_ in forms.KINDS])[0]
    return draw.choice(phrasings).format(*draw.sample(topics, 2))


def _code(draw: random.Random) -> str:
    if draw.random() < 0.12:
        return draw.choice(forms.QUERIES).format(*draw.sample(forms.TABLES, 2))
    return draw.choice(forms.CODE).format(language=draw.choice(forms.LANGUAGES), task=draw.choice(forms.PROGRAMS))


def _writing(draw: random.Random) -> str:
    begins = draw.choice(("Write", "Write", "Please write", "Can you write", "Help me write", "Draft", "I need"))
    parts = [begins, draw.choice(forms.WRITINGS)]
    if draw.random() < 0.5:
        parts.append(draw.choice(forms.READERS))
    parts.append(draw.choice(forms.OCCASIONS))
    return " ".join(parts) + ("?" if begins.startswith("Can") else ".")


def _sentence(draw: random.Random) -> str:
    said = " ".join(draw.choice(part) for part in (forms.SPEAKERS, forms.DEEDS, forms.CIRCUMSTANCES)) + "."
    if draw.random() < 0.3:
        said += " " + " ".join(draw.choice(part) for part in (forms.SPEAKERS, forms.DEEDS)) + "."
    form = draw.choice(forms.OF_SENTENCES[:5] if draw.random() < 0.6 else forms.OF_SENTENCES)
    return form.format(tongue=draw.choice(forms.TONGUES), sentence=said)


def _sum(draw: random.Random) -> str:
    a, b, c = draw.randrange(2, 60), draw.randrange(2, 30), draw.randrange(2, 12)
    return draw.choice((
        f"What is {a} times {b}?", f"What is {a * b} divided by {b}?", f"Calculate {a} + {b} * {c}.",
        f"A shirt costs {a} dollars and is {5 * c}% off. What do I pay?", f"What is {5 * c}% of {a * 10}?",
        f"Anna has {a} apples and gives {min(a - 1, b)} to Tom. How many are left?", f"Solve {c}x + {b} = {a + b}.",
        f"A train goes {a * 3} km in {c} hours. How fast is it?", f"How many minutes are {c} hours and {a} minutes?",
        f"A room is {c} meters long and {b} meters wide. What is its area?", f"Convert {a} miles to kilometers.",
        f"{c} workers need {b} days. How long do {2 * c} workers need? Explain step by step.",
        f"If {c} tickets cost {c * b} euros, how much do {a} tickets cost?", f"Is {a * b + 1} a prime number?",
        f"What are the next numbers: {a}, {a + c}, {a + 2 * c}, ...?", f"Round {a}.{b}7 to one decimal.",
    ))


def _small_talk(draw: random.Random) -> str:
    return draw.choice(forms.SMALL_TALK)


_MAKERS: tuple[tuple[float, Callable[[random.Random], str]], ...] = (
    (0.12, _code), (0.09, _writing), (0.06, _sentence), (0.04, _sum), (0.01, _small_talk))
"""Shares of questions that are not phrasings with a topic."""


def _dressed(draw: random.Random, asked: str) -> str:
    """With what people write around a question."""
    kind = draw.random()
    if kind < _DRESSED / 2:
        asked = draw.choice(forms.BEFORE) + asked
    elif kind < _DRESSED:
        asked += draw.choice(forms.BEHIND)
    if draw.random() < _CARELESS:
        asked = asked.lower().rstrip("?.")
    return asked


def _filled(form: str, text: str) -> str:
    return form.replace("{}", text)


def _cut(passage: str) -> str:
    """To its first few sentences."""
    if len(passage) <= _LONGEST_PASSAGE:
        return passage.strip()
    end = passage.rfind(". ", 0, _LONGEST_PASSAGE)
    return passage[: _LONGEST_PASSAGE if end < 0 else end + 1].strip()
