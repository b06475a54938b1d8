"""A scripted model says its lines, to every prompt the line that fits it, through the whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, QuireError
from quire.executor.scripted import read_script
from quire.structured.spec import StructuredOutputs
from tests.server.conftest import tiny

__all__ = ["tiny"]
LINES = [{"say": "Hello."}, {"after": "weather", "say": "Rain in Zürich 🌧."}, {"after": "and then", "say": "Sun."}]


def script(folder: Path, lines: list[Any]) -> str:
    path = folder / "script.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def test_the_last_line_that_fits_is_said(tiny: Path, tmp_path: Path) -> None:
    prompts = ["Hi", "The weather?", "The weather, and then?", "Hi again"]
    for options in ({}, {"max_num_batched_tokens": 3}, {"num_kv_blocks": 8, "max_num_seqs": 3},
                    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}):
        with LLM(str(tiny), executor="dummy", load_format="dummy", dummy_script=script(tmp_path, LINES),
                 **options) as llm:
            found = llm.generate(prompts, SamplingParams(max_tokens=50, logprobs=2), use_tqdm=False)
        texts = [each.outputs[0].text for each in found]
        assert texts == ["Hello.", "Rain in Zürich 🌧.", "Sun.", "Hello."], options
        assert all(each.outputs[0].finish_reason == "stop" for each in found)


def test_a_prompt_without_a_line_fails_alone(tiny: Path, tmp_path: Path) -> None:
    with LLM(str(tiny), executor="dummy", load_format="dummy", dummy_script=script(tmp_path, LINES[1:])) as llm:
        found = llm.generate(["nothing", "weather"], SamplingParams(max_tokens=50), use_tqdm=False)
    assert found[0].error is not None and "no line" in found[0].error
    assert found[1].outputs[0].text.startswith("Rain")


def test_a_grammar_is_obeyed(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    with LLM(str(tiny), executor="dummy", load_format="dummy", dummy_script=script(tmp_path, LINES)) as llm:
        for choice, said in ((["Hello.", "No."], "Hello."), (["Bye."], "Bye.")):
            shape = StructuredOutputs(choice=choice)
            (found,) = llm.generate(["Hi"], SamplingParams(max_tokens=50, structured_outputs=shape), use_tqdm=False)
            assert found.outputs[0].text == said


@pytest.mark.parametrize("line", ["no json", '{"say": 1}', '{"after": "x"}', '{"say": "x", "more": 1}', "[]"])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        read_script(script(tmp_path, [LINES[0], line]))


def test_a_script_needs_the_dummy_executor(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="dummy_script"):
        LLM(str(tiny), load_format="dummy", dummy_script=script(tmp_path, LINES))
    with pytest.raises(QuireError, match="cannot be read"):
        LLM(str(tiny), load_format="dummy", executor="dummy", dummy_script=str(tmp_path / "none"))
