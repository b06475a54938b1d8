"""`quire demo`: three answers and a closing line, piped and on a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from quire.cli.demo import QUESTIONS
from tests.cli.conftest import Done
from tests.cli.terminal import Terminal

CLOSING = re.compile(
    r"3 answers, \d+ tokens in [\d.]+ s · prefill \d+ tok/s · decode [\d.]+ tok/s · "
    r"first token after \d+ ms · ready [\d.]+ s after start"
)


def test_the_real_model_answers_three_questions(smollm2: str, quire: Callable[..., Done]) -> None:
    done = quire("demo", "--max-tokens", "8")
    assert done.code == 0, done.err
    for question in QUESTIONS:
        assert f"› {question}\n" in done.out
    assert "The capital of France is Paris" in done.out
    assert CLOSING.search(done.out.splitlines()[-1])
    assert "\x1b" not in done.out + done.err


def test_a_terminal_shows_a_bar_while_text_is_made(tiny: Path) -> None:
    words = ("--model", str(tiny), "--load-format", "dummy", "--num-threads", "1", "--max-tokens", "6")
    terminal = Terminal("demo", *words)
    code, shown = terminal.finish()
    terminal.close()
    assert code == 0, shown
    assert "loaded in" in shown
    assert "░" in shown and "answer 3 of 3" in shown
    assert CLOSING.search(shown)
