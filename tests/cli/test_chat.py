"""`quire chat` on a terminal of its own: history, commands, several lines, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire import LLM
from quire.cli.chat import Chat
from quire.cli.conversation import Conversation
from quire.errors import InvalidRequestError
from quire.sampling.params import SamplingParams
from tests.cli.conftest import Done
from tests.cli.terminal import Terminal

CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture
def terminal(tiny: Path) -> Iterator[Terminal]:
    made = Terminal(
        *("chat", str(tiny), "--load-format", "dummy", "--max-tokens", "3000", "--num-threads", "1"),
        *("--ignore-eos", "--temperature", "1"),
    )
    yield made
    made.close()


def test_a_chat_on_a_terminal(terminal: Terminal) -> None:
    prompt = "› "
    terminal.wait_for("/help lists commands")
    terminal.wait_for(prompt)

    terminal.type("/help\n")
    terminal.wait_for("/system TEXT")
    terminal.wait_for(prompt)

    terminal.type("/nonsense\n")
    terminal.wait_for("no command /nonsense")
    terminal.wait_for(prompt)

    terminal.type("/system You are brief.\n")
    terminal.wait_for("system prompt: You are brief.")
    terminal.wait_for(prompt)

    terminal.type("Hello\n")
    terminal.wait_for("Hello")
    terminal.wait_for("\n")
    terminal.wait_for_more(10)  # the answer has begun, and has thousands of tokens to go
    terminal.type(CTRL_C)
    terminal.wait_for("(stopped)")
    terminal.wait_for(prompt)

    terminal.type("several \\\nlines")
    terminal.wait_for("… ")
    terminal.wait_for("lines")
    terminal.press_until(CTRL_C, "/exit leaves")  # at the prompt it takes the line back
    terminal.wait_for(prompt)

    terminal.type("/reset\n")
    terminal.wait_for("forgotten")
    terminal.wait_for(prompt)
    terminal.type(CTRL_D)
    assert terminal.finish()[0] == 0


def test_a_chat_reads_a_pipe(tiny: Path, quire: Callable[..., Done]) -> None:
    words = ("--load-format", "dummy", "--max-tokens", "8", "--ignore-eos", "--num-threads", "1")
    done = quire("chat", str(tiny), *words, "--max-model-len", "64", stdin="Hi\n\nHello\n/nope\n" + "x" * 99)
    assert done.code == 1  # the last message got no answer
    assert "no command /nope" in done.err
    assert "this message alone makes" in done.err
    assert "›" not in done.out and len(done.out) > 8


@pytest.mark.parametrize("text", ['"""Hi\nyou', "Hi\\\nyou", "Hi\\", '"""Hi\n'])
def test_a_message_that_a_pipe_ends_within_is_answered(
    text: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    chat = Chat(llm, SamplingParams(), None)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    monkeypatch.setattr(chat, "_interactive", False)
    monkeypatch.setattr(chat, "_answer", asked.append)
    chat.talk()
    assert asked == ["Hi\nyou" if "you" in text else "Hi"]


def test_a_model_without_a_template_is_sent_to_generate(
    tiny: Path, tmp_path: Path, inside: Callable[..., Done]
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    done = inside("chat", str(tmp_path), "--load-format", "dummy", "--num-threads", "1")
    assert done.code == 1 and "quire generate" in done.err and done.err.count("\n") == 1


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), load_format="dummy", num_threads=1, num_kv_blocks=256, max_model_len=128) as made:
        yield made


def read_messages(llm: LLM, monkeypatch: pytest.MonkeyPatch, *lines: str) -> list[str | None]:
    """What a chat takes these lines for."""
    typed = iter(lines)
    chat = Chat(llm, SamplingParams(), None)
    monkeypatch.setattr(chat, "_input", lambda prompt: next(typed))
    found = []
    while True:
        try:
            found.append(chat._read())
        except StopIteration:
            return found


def test_lines_join_by_a_backslash_or_between_quotes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_messages(
        llm, monkeypatch, "one", "", "two \\", "three\\", "four", '"""five', "", 'six"""', '"""seven"""'
    )
    assert found == ["one", None, "two \nthree\nfour", "five\n\nsix", "seven"]


def test_a_conversation_remembers_and_resets(llm: LLM) -> None:
    talk = Conversation(llm, "S")
    prompt, forgotten = talk.ask("a", 8)
    assert (prompt["prompt"], forgotten) == ("<s>system:S</s><s>user:a</s><s>assistant:", 0)
    talk.answered("b")
    prompt, _ = talk.ask("c", 8)
    assert "<s>user:a</s><s>assistant:b</s><s>user:c</s>" in prompt["prompt"]
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "S"}]


def test_a_full_context_forgets_the_oldest_messages_but_not_the_system_prompt(llm: LLM) -> None:
    talk = Conversation(llm, "S")
    total = 0
    for turn in range(12):
        prompt, forgotten = talk.ask(f"question {turn}", 16)
        total += forgotten
        text = prompt["prompt"]
        assert llm.tokenizer is not None and len(llm.tokenizer.encode(text, add_special_tokens=False)) <= 128 - 16
        assert text.startswith("<s>system:S</s>") and f"question {turn}" in text
        talk.answered("x" * 16)
    assert total > 0 and total % 2 == 0


def test_a_message_that_cannot_fit_is_refused_and_leaves_no_trace(llm: LLM) -> None:
    talk = Conversation(llm)
    talk.ask("a", 8)
    talk.answered("b")
    before = talk.messages
    with pytest.raises(InvalidRequestError, match="shorten it"):
        talk.ask("long " * 100, 8)
    assert talk.messages == before
