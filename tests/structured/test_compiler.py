"""Grammars are compiled beside the steps, kept within bounds, and fail whoever asked for them, alone."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import InvalidRequestError, SamplingParams, StructuredOutputs
from quire.structured import compiler as compiler_module
from quire.structured.compiler import CompileLimits, GrammarCompiler
from quire.structured.vocabulary import Vocabulary, read_vocabulary
from tests.structured.tiny import tiny_llm, tokenizer_of


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = tokenizer_of("byte_level")
    return read_vocabulary(tokenizer, tokenizer.vocab_size, {2})


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars of the regex 'slow' are not parsed before the event is set."""
    event = threading.Event()
    parse = compiler_module.parse_grammar

    def waiting(spec: StructuredOutputs) -> Any:
        if spec.regex == "slow" and threading.current_thread() is not threading.main_thread():
            event.wait(20)
        return parse(spec)

    monkeypatch.setattr(compiler_module, "parse_grammar", waiting)
    yield event
    event.set()


def settle(pending: Any) -> Any:
    deadline = time.monotonic() + 20
    while not pending.settled and time.monotonic() < deadline:
        pending.wait(0.05)
    return pending.result()


def test_the_same_grammar_is_compiled_once(vocabulary: Vocabulary) -> None:
    grammars = GrammarCompiler(lambda: vocabulary)
    first = settle(grammars.submit(StructuredOutputs(regex="a+")))
    assert settle(grammars.submit(StructuredOutputs(regex="a+"))) is first
    assert settle(grammars.submit(StructuredOutputs(regex="a*b"))) is not first
    grammars.close()


def test_the_cache_stays_within_its_bytes_and_forgets_the_least_recently_used(vocabulary: Vocabulary) -> None:
    one = settle(GrammarCompiler(lambda: vocabulary).submit(StructuredOutputs(regex="[a-z]{3}0"))).num_bytes
    grammars = GrammarCompiler(lambda: vocabulary, CompileLimits(cache_bytes=3 * one + one // 2))
    kept = {}
    for digit in range(9):
        kept[digit] = settle(grammars.submit(StructuredOutputs(regex=f"[a-z]{{3}}{digit}")))
        settle(grammars.submit(StructuredOutputs(regex="[a-z]{3}0")))
        assert grammars.cached_bytes <= grammars.limits.cache_bytes
    assert 2 <= grammars.num_cached <= 4
    assert settle(grammars.submit(StructuredOutputs(regex="[a-z]{3}0"))) is kept[0]
    assert settle(grammars.submit(StructuredOutputs(regex="[a-z]{3}1"))) is not kept[1]
    grammars.close()


def test_one_that_is_too_large_is_refused_by_name(vocabulary: Vocabulary) -> None:
    grammars = GrammarCompiler(lambda: vocabulary, CompileLimits(cache_bytes=1000))
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.json.*grammar_cache_memory") as caught:
        settle(grammars.submit(StructuredOutputs(json=json_schema_of(30))))
    assert caught.value.field == "structured_outputs.json"
    assert grammars.num_cached == 0
    grammars.close()


def json_schema_of(count: int) -> Any:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def test_a_compilation_in_progress_holds_up_nobody_else(tiny_folder: Path, held: threading.Event) -> None:
    with tiny_llm(tiny_folder) as llm:
        llm.add_request("slow", "x", SamplingParams(structured_outputs={"regex": "slow"}))
        llm.add_request("free", "x", SamplingParams(max_tokens=5))
        llm.add_request("fast", "x", SamplingParams(structured_outputs={"regex": "fast"}))
        done: dict[str, str] = {}
        deadline = time.monotonic() + 20
        while len(done) < 3 and time.monotonic() < deadline:
            for output in llm.step():
                if output.finished:
                    done[output.request_id] = output.outputs[0].text
            if len(done) == 2:
                assert "slow" not in done
                held.set()
        assert done["fast"] == "fast" and done["slow"] == "slow" and "free" in done
        llm.check()


def test_a_request_may_be_aborted_while_its_grammar_is_compiled(tiny_folder: Path, held: threading.Event) -> None:
    with tiny_llm(tiny_folder) as llm:
        llm.add_request("slow", "x", SamplingParams(structured_outputs={"regex": "slow"}))
        assert llm.step() == []
        llm.abort("slow")
        (output,) = llm.step()
        assert output.finished and output.outputs[0].finish_reason == "abort"
        assert not llm.has_unfinished_requests()


def test_one_that_takes_too_long_fails_its_request_and_no_other(tiny_folder: Path, held: threading.Event) -> None:
    with tiny_llm(tiny_folder, grammar_timeout=0.3) as llm:
        slow = SamplingParams(structured_outputs={"regex": "slow"})
        outputs = llm.generate(["x", "y"], [slow, SamplingParams(max_tokens=4)], use_tqdm=False)
        assert outputs[0].error is not None and "structured_outputs.regex took longer than 0.3 s" in outputs[0].error
        assert outputs[1].error is None
        llm.check()


def test_a_failure_while_compiling_names_the_field(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only shows in the compiling thread reaches the request as its error."""
    monkeypatch.setattr(GrammarCompiler, "check", lambda self, spec: None)
    with tiny_llm(tiny_folder) as llm:
        bad = SamplingParams(structured_outputs={"grammar": "root ::= missing"})
        outputs = llm.generate(["x", "y"], [bad, SamplingParams(max_tokens=4)], use_tqdm=False)
        assert outputs[0].error is not None and outputs[0].error.startswith("structured_outputs.grammar cannot be used")
        assert outputs[1].error is None


def test_without_the_package_the_error_says_how_to_get_it(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with tiny_llm(tiny_folder) as llm, pytest.raises(InvalidRequestError, match="pip install xgrammar"):
        llm.generate(["x"], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)
