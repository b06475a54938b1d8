"""What a model is asked while texts for a head are made: questions such as people ask, and beginnings that the model
itself goes on from.

A head guesses best on what it was trained on. Questions that a small model makes up alone are often odd, and so are the
answers to them; so most are put together from kinds of requests and subjects, and some ask about an earlier answer.
None of them is one of the prompts of `quire bench speculative`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_MADE_UP = 0.25
"""Share of questions that the model goes on with from a few words, and share of those about a text."""
_ABOUT_TEXT = 0.2
_LONGEST_PASSAGE = 600
"""Characters."""

_REQUESTS = (
    "What is {}?", "What are the benefits of {}?", "How does {} work?", "Explain {} in simple words.",
    "Explain {} to a child.", "Why is {} important?", "Tell me about {}.", "Give me five tips for {}.",
    "What should I know about {} before I start?", "Write a short story about {}.", "Write a poem about {}.",
    "Write a haiku about {}.", "What is the history of {}?", "List three common mistakes with {}.",
    "How can I learn more about {}?", "What are the pros and cons of {}?", "Can you recommend a book about {}?",
    "I am new to {}. Where do I begin?", "Describe {} in two sentences.", "What is the difference between {} and {}?",
    "Compare {} with {}.", "How do I explain {} to my friend?", "Write an email to a colleague about {}.",
    "Write a short essay about {}.", "What questions could come up about {} in an interview?", "Give me a fun fact "
    "about {}.", "Plan a week around {}.", "Is {} good for beginners?", "How much does {} usually cost?",
    "Write a dialogue between two people who talk about {}.", "Make an outline for a talk on {}.",
    "What tools do I need for {}?", "Who are well known people in {}?", "How has {} changed in the last fifty years?",
    "Suggest a title for an article about {}.", "Create a quiz with three questions about {}.",
    "What would happen without {}?", "Should schools teach {}?",
)
_SUBJECTS = (
    "photosynthesis", "the water cycle", "climate change", "renewable energy", "solar panels", "electric cars",
    "gardening", "growing tomatoes", "house plants", "cooking pasta", "baking bread", "healthy breakfasts",
    "vegetarian meals", "making coffee", "running", "yoga", "swimming", "hiking", "cycling to work",
    "meditation", "stress", "time management", "public speaking", "writing a resume", "saving money",
    "budgeting", "taxes", "inflation", "the stock market", "buying a house", "renting a flat", "moving to a new city",
    "learning a language", "playing the guitar", "the piano", "painting with watercolours", "photography", "chess",
    "board games", "football", "basketball", "tennis", "cats", "dogs", "birds", "bees", "whales", "elephants",
    "dinosaurs", "the moon", "black holes", "gravity", "the solar system", "space travel", "atoms", "electricity",
    "magnets", "vaccines", "the human heart", "the immune system", "vitamins", "bacteria and viruses", "DNA",
    "evolution", "earthquakes", "volcanoes", "the weather", "rainbows", "deserts", "rivers", "the ocean", "coral reefs",
    "recycling", "plastic waste", "city parks", "public transport", "trains", "airplanes", "bridges", "ancient Rome",
    "ancient Egypt", "the Middle Ages", "the French Revolution", "the Second World War", "the Silk Road", "democracy",
    "elections", "human rights", "the United Nations", "Shakespeare", "jazz", "opera", "classical music", "film making",
    "museums", "Paris", "Tokyo", "New York", "the Alps", "a trip to Italy", "camping with children", "a birthday party",
    "a wedding speech", "raising a puppy", "being a good neighbour", "making friends", "teamwork",
    "leadership", "remote work", "email etiquette", "online safety", "passwords", "artificial intelligence",
    "machine learning", "the internet", "computers", "robots", "programming", "open source software", "databases",
    "mathematics", "fractions", "geometry", "probability", "statistics", "philosophy", "psychology", "happiness",
    "memory", "learning from mistakes", "critical thinking", "good habits", "reading books", "poetry", "folk tales",
)
_CODE = (
    "Write a Python function that {}.", "Write a JavaScript function that {}.", "Write a function in C that {}.",
    "Show me Python code that {}, and explain it.", "How do I write a program that {}?",
    "Write a Python class that {}.",
    "Write a Java method that {}.", "Write a unit test for a function that {}.", "Write a bash script that {}.",
)
_TASKS = (
    "returns the sum of a list of numbers", "finds the largest number in a list", "reverses a string",
    "checks whether a word is a palindrome", "counts the words in a text", "removes duplicates from a list",
    "sorts a list of names", "computes the factorial of a number", "prints Fibonacci numbers", "finds prime numbers",
    "converts Celsius to Fahrenheit", "reads a file line by line", "merges two dictionaries",
    "computes the average of a list", "finds the longest word in a sentence", "checks a password", "parses a date",
    "reads a CSV file", "makes a request to a web page", "flattens a nested list", "searches a sorted list",
    "rolls two dice", "keeps a list of contacts", "models a bank account", "prints a multiplication table",
    "counts how often each letter occurs", "validates an email address", "rounds numbers to two decimals",
    "rotates a matrix", "finds common elements of two lists", "generates a random password", "compares two files",
    "joins two tables and filters by date", "computes compound interest",
)
_OF_TEXT = (
    "Summarize this in two sentences.\n\n{}", "Summarize the following text:\n\n{}", "Give me the main points of this "
    "text.\n\n{}", "Rewrite this in simple words:\n\n{}", "Translate into French: {}", "Translate into Spanish: {}",
    "Translate into German: {}", "Correct the grammar of this text:\n\n{}", "What is the following text about?\n\n{}",
    "Make this shorter:\n\n{}", "Give this text a title:\n\n{}", "Ask me three questions about this text.\n\n{}",
    "Answer in one sentence: what does this text say?\n\n{}", "Turn this into a list:\n\n{}",
)
_OPENINGS = (
    "", "", "", "What", "How do I", "How does", "Why", "Explain", "Describe", "Write", "Write a story about", "Give me",
    "Can you help me", "I am", "I need", "My", "If", "Please", "Hello", "Solve this problem step by step:", "Calculate",
    "Who was", "When did", "Where is", "Is it", "Should I", "What happens if", "Create a JSON object",
    "Write a SQL query", "Fix this code:\n```python\ndef ", "Write a Python function that", "Translate into English:",
    "Answer the question:", "Here is a text:\n\n", "Write a product description for", "Convert", "Define", "Recommend",
)
_SHORT = ("Translate into",)
"""Requests about one sentence, not a whole text."""


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    whole: bool
    """Else the model goes on from there."""

    @property
    def begins(self) -> str:
        """What the model goes on from."""
        return "" if self.whole else self.text


def question(draw: random.Random, passages: Sequence[str]) -> Question:
    """`passages`: answers given before, to ask about."""
    kind = draw.random()
    if kind < _MADE_UP:
        return Question(draw.choice(_OPENINGS), False)
    if kind < _MADE_UP + _ABOUT_TEXT and passages:
        asked, passage = draw.choice(_OF_TEXT), _cut(draw.choice(passages))
        if asked.startswith(_SHORT):
            passage = draw.choice([part.strip() for part in passage.split(". ") if part.strip()] or [passage])
        return Question(asked.format(passage.replace("{", "(").replace("}", ")")), True)
    if kind > 0.85:
        return Question(draw.choice(_CODE).format(draw.choice(_TASKS)), True)
    return Question(draw.choice(_REQUESTS).format(*draw.sample(_SUBJECTS, 2)), True)


def _cut(passage: str) -> str:
    """To its first few sentences."""
    if len(passage) <= _LONGEST_PASSAGE:
        return passage.strip()
    end = passage.rfind(". ", 0, _LONGEST_PASSAGE)
    return passage[: _LONGEST_PASSAGE if end < 0 else end + 1].strip()
