"""`quire generate`: the text of the engine, streamed or whole, from arguments, files and standard input."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.cli.conftest import PATIENCE, TEMPLATE, Done, command, environment

FAST = ("--max-tokens", "12", "--ignore-eos", "--num-threads", "1", "--num-kv-blocks", "256")


@pytest.fixture(scope="module")
def expected(tiny: Path) -> Callable[..., list[str]]:
    """What the library generates for prompts."""
    llm = LLM(str(tiny), load_format="dummy", num_threads=1, num_kv_blocks=256)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def texts(*prompts: str) -> list[str]:
        return [output.outputs[0].text for output in llm.generate(list(prompts), params, use_tqdm=False)]

    return texts


@pytest.fixture
def generate(tiny: Path, inside: Callable[..., Done]) -> Callable[..., Done]:
    def run(*words: str) -> Done:
        return inside("generate", "--model", str(tiny), "--load-format", "dummy", *FAST, *words)

    return run


def records(done: Done) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def test_the_command_writes_the_text_that_the_library_makes(
    tiny: Path, quire: Callable[..., Done], expected: Callable[..., list[str]]
) -> None:
    done = quire("generate", "--model", str(tiny), "--load-format", "dummy", *FAST, "-", stdin="Hello\n")
    assert done.code == 0 and done.err == ""
    assert done.out == expected("Hello")[0] + "\n"


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_an_answer_that_ends_at_once_is_an_empty_line(
    flag: str, generate: Callable[..., Done], expected: Callable[..., list[str]]
) -> None:
    """Not the ids of its tokens."""
    done = generate("Hello", flag, "--stop", expected("Hello")[0][:1])
    assert done.code == 0 and done.out == "\n"


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_several_prompts_are_shown_in_their_order(
    flag: str, generate: Callable[..., Done], expected: Callable[..., list[str]]
) -> None:
    done = generate("one", "second", flag)
    first, second = expected("one", "second")
    assert done.out == f"[1/2] one\n{first}\n\n[2/2] second\n{second}\n"


def test_json_has_a_line_for_every_prompt(
    tmp_path: Path, generate: Callable[..., Done], expected: Callable[..., list[str]]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("from a file\n\nsecond line\n")
    found = records(generate("--json", "--logprobs", "2", "--lines", "--file", str(file), "word"))
    assert [r["prompt"] for r in found] == ["word", "from a file", "second line"]
    assert [r["outputs"][0]["text"] for r in found] == expected("word", "from a file", "second line")
    for record in found:
        answer = record["outputs"][0]
        assert record["output_tokens"] == len(answer["token_ids"]) == 12
        assert answer["finish_reason"] == "length"
        assert [entry[0]["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
        assert record["time_to_first_token_s"] > 0 and record["error"] is None


def test_a_file_is_one_prompt_without_its_last_newline(tmp_path: Path, generate: Callable[..., Done]) -> None:
    (tmp_path / "a").write_text("two\nlines\n")
    assert [r["prompt"] for r in records(generate("--json", "--file", str(tmp_path / "a")))] == ["two\nlines"]


def test_chat_goes_through_the_template(generate: Callable[..., Done]) -> None:
    found = records(generate("--json", "--chat", "--system", "be brief", "Hi"))[0]
    raw = "<s>system:be brief</s><s>user:Hi</s><s>assistant:"
    assert TEMPLATE.startswith("{% for")
    assert found["prompt_token_ids"] == records(generate("--json", "--raw", raw))[0]["prompt_token_ids"]


def test_the_same_seed_draws_the_same_tokens(generate: Callable[..., Done]) -> None:
    def drawn(seed: str) -> list[int]:
        ids: list[int] = records(generate("--json", "--temperature", "1", "--seed", seed, "x"))[0]["outputs"][
            0
        ]["token_ids"]
        return ids

    assert drawn("1") == drawn("1") != drawn("2")


def test_without_a_tokenizer_prompts_and_answers_are_ids(generate: Callable[..., Done]) -> None:
    done = generate("--skip-tokenizer-init", "1 2 3")
    assert done.code == 0 and len(done.out.split()) == 12 and all(word.isdigit() for word in done.out.split())
    assert "token ids" in generate("--skip-tokenizer-init", "words").err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--max-model-len", "20", "x" * 50], "20"),
        ([""], "empty"),
        (["fine", ""], "prompt 2"),
        (["--stop-token-ids", "999999", "x"], "999999"),
        (["--num-kv-blocks", "1", "--max-model-len", "99", "x"], "max_model_len"),
        (["--tokenizer", "/no/such/folder", "x"], "/no/such/folder"),
    ],
)
def test_what_the_engine_refuses_is_one_line(
    words: list[str], part: str, generate: Callable[..., Done]
) -> None:
    done = generate(*words)
    assert done.code == 1 and done.out == ""
    assert part in done.err and done.err.count("\n") == 1


def test_input_that_is_no_text_is_refused(tmp_path: Path, inside: Callable[..., Done]) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    done = inside("generate", "--file", str(tmp_path / "bytes"))
    assert done.code == 1 and "UTF-8" in done.err


def test_ctrl_c_in_the_middle_of_an_answer_is_a_clean_exit(tiny: Path) -> None:
    words = ("--load-format", "dummy", "--max-tokens", "4000", "--ignore-eos", "--num-threads", "1", "x")
    process = subprocess.Popen(
        command("generate", "--model", str(tiny), *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        # A test run started in the background may ignore Ctrl-C; a person's shell does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.read(1)  # it is streaming
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert b"Traceback" not in errors
