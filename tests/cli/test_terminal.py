"""Text above a status line, sizes, and throughput as it is counted."""

from __future__ import annotations

import io
import re

import pytest

from quire.cli import terminal
from quire.cli.throughput import measure
from quire.engine.outputs.output import CompletionOutput, RequestMetrics, RequestOutput


class Screen(io.StringIO):
    """A terminal of 30 columns that remembers what was written to it."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What is on the screen: text, cursor up and forward, clear to the end."""
        rows, row, column = [""], 0, 0
        for up, forward, clear, other, char in re.findall(
            r"\x1b\[(\d+)A|\x1b\[(\d+)C|(\x1b\[J)|(\x1b\[\d*[mK])|(.|\n|\r)", self.getvalue()
        ):
            if up:
                row -= int(up)
            elif forward:
                column += int(forward)
            elif clear:
                rows = [*rows[:row], rows[row][:column]]
            elif char == "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            elif char == "\r":
                column = 0
            elif not other:
                rows[row] = rows[row].ljust(column)[:column] + char + rows[row][column + 1 :]
                column += 1
        return [line.rstrip() for line in rows]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setattr(terminal, "terminal_width", lambda: 30)
    return Screen()


def test_text_is_wrapped_between_words_above_the_status(screen: Screen) -> None:
    with terminal.LiveText(screen) as live:
        for piece in ("The qui", "ck brown fox ju", "mps over the lazy", " dog ", "and sleeps"):
            live.write(piece, "status")
            assert screen.lines()[-1] == "status"
    assert screen.lines() == ["The quick brown fox jumps", "over the lazy dog and sleeps", ""]


def test_a_status_is_cut_to_one_line(screen: Screen) -> None:
    live = terminal.LiveText(screen)
    live.write("text ", "s" * 100)
    assert screen.lines() == ["text", "s" * 29]


def test_text_of_a_model_cannot_drive_the_terminal(screen: Screen) -> None:
    with terminal.LiveText(screen) as live:
        live.write("a\x1b[2Jb\x07c\x9bd\n")
    assert "\x07" not in screen.getvalue() and "\x9b" not in screen.getvalue()
    assert screen.lines()[0] == "a[2Jbcd"


def test_piped_text_is_left_alone() -> None:
    stream = io.StringIO()
    with terminal.LiveText(stream) as live:
        live.write("word " * 40, "status")
    assert stream.getvalue() == "word " * 40 + "\n"


def test_wide_characters_take_two_columns() -> None:
    assert [terminal.columns_of(char) for char in "a\u4f60\u0301\u200d"] == [1, 2, 0, 0]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (538_060_032, "538.1 MB"), (2e12, "2.0 TB")],
)
def test_sizes_are_for_people(size: float, text: str) -> None:
    assert terminal.size_text(size) == text


def output(
    arrival: float, first: float | None, end: float, prompt: int, cached: int, made: int
) -> RequestOutput:
    metrics = RequestMetrics(arrival, arrival, first, end)
    completion = CompletionOutput(0, "", list(range(made)))
    return RequestOutput("r", None, list(range(prompt)), [completion], True, None, cached, metrics)


def test_throughput_of_one_request_counts_what_was_computed() -> None:
    found = measure([output(10.0, 10.5, 12.5, prompt=100, cached=40, made=21)])
    assert found is not None
    assert (found.prompt_tokens, found.output_tokens) == (60, 21)
    assert found.line() == (
        "21 tokens in 2.5 s · prefill 120 tok/s · decode 10.0 tok/s · first token after 500 ms"
    )


def test_requests_that_overlap_are_not_counted_twice() -> None:
    found = measure([output(0.0, 1.0, 3.0, 10, 0, 5), output(0.0, 2.0, 4.0, 10, 0, 5)])
    assert found is not None
    assert (found.prefill_seconds, found.decode_seconds) == (2.0, 2.0)


def test_requests_without_a_token_have_no_throughput() -> None:
    assert measure([output(0.0, None, 1.0, 10, 0, 0)]) is None
