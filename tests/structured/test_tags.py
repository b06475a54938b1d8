"""Structural tags: what they hold is checked, special tokens come by their ids, and the engine obeys them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import InvalidRequestError
from quire.structured.spec import StructuredOutputs
from tests.server.conftest import tiny

__all__ = ["tiny"]
pytest.importorskip("xgrammar")
HI = {"type": "const_string", "value": "hi"}


def tag(*parts: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": list(parts)}}


@pytest.mark.parametrize(("given", "word"), [
    ({}, "format"), ({"format": []}, "format"), (tag({"type": "triggered_tags"}), "triggered_tags"),
    (tag({"type": "json_schema", "json_schema": {"not": {}}}), "not"), (tag({"type": "regex", "pattern": "(?=x)"}), ""),
    (tag({"type": "optional", "content": {"type": "nonsense"}}), "nonsense"), ("[", "JSON"), (5, "text"),
])
def test_what_would_not_be_enforced_is_refused(given: Any, word: str) -> None:
    with pytest.raises(InvalidRequestError, match="structural_tag") as refused:
        StructuredOutputs(structural_tag=given)
    assert word in str(refused.value)


def test_it_is_plain_data_and_names_its_tokens() -> None:
    spec = StructuredOutputs(structural_tag=tag({"type": "token", "token": 7}, {"type": "star", "content": HI}))
    assert StructuredOutputs.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert spec.named_tokens == {7} and StructuredOutputs(json_object=True).named_tokens == frozenset()


def test_a_special_token_comes_where_it_is_named_and_nowhere_else(tiny: Path) -> None:
    free = {"type": "any_text", "excludes": ["!"]}
    with LLM(str(tiny), executor="dummy", load_format="dummy") as llm:
        tokenizer = llm.tokenizer
        start = tokenizer.special_id("<s>")
        assert start is not None
        shapes = [tag({"type": "token", "token": start}, HI, {"type": "token", "token": start}), tag(free)]
        params = [SamplingParams(max_tokens=60, skip_special_tokens=False, ignore_eos=True, seed=seed,
                                 structured_outputs=StructuredOutputs(structural_tag=shape))
                  for seed, shape in enumerate(shapes)]
        first, second = llm.generate(["x", "y"], params, use_tqdm=False)
    assert first.outputs[0].text == "<s>hi<s>"
    assert second.outputs[0].token_ids and not {start} & set(second.outputs[0].token_ids)
