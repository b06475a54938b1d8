"""With the engine in its own process: the shape travels with the request, and what is wrong with it comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire import AsyncLLM, InvalidRequestError, SamplingParams, StructuredOutputs
from quire.engine.process import messages as m
from tests.async_engines import last, run


@pytest.mark.parametrize("shape", [
    StructuredOutputs(json={"type": "object", "properties": {"é": {"type": "integer"}}}),
    StructuredOutputs(json_object=True), StructuredOutputs(regex="a+"), StructuredOutputs(choice=["a", "b"]),
    StructuredOutputs(grammar='root ::= "x"'),
], ids=lambda shape: shape.kind)
def test_params_with_a_shape_survive_the_way_to_the_engine(shape: StructuredOutputs) -> None:
    params = SamplingParams(structured_outputs=shape)
    body = m.RequestBody("r", [1, 2], params, 7, 0.0)
    message = m.decode_to_engine(m.encode(m.add(3, body)))
    assert isinstance(message, m.Add)
    assert m.decode_body(message.body).params == params
    assert SamplingParams.from_dict(params.to_dict()) == params


def test_shapes_hold_and_a_bad_one_is_refused_by_name_and_alone(tiny_folder: Path) -> None:
    async def job(llm: AsyncLLM) -> None:
        def ask(shape: dict[str, object], **more: object) -> asyncio.Task[object]:
            params = SamplingParams(max_tokens=40, seed=1, structured_outputs=StructuredOutputs(**shape), **more)
            return asyncio.create_task(last(llm.generate("The fox", params)))

        good = [ask({"choice": ["left", "right"]}), ask({"regex": "[0-9]{3}"}, n=2)]
        bad = ask({"grammar": "root ::= missing"})
        found = [await task for task in good]
        assert found[0].outputs[0].text in ("left", "right")
        assert all(one.text.isdigit() and len(one.text) == 3 for one in found[1].outputs)
        with pytest.raises(InvalidRequestError, match="missing") as caught:
            await bad
        assert caught.value.field == "structured_outputs.grammar"
        assert (await last(llm.generate("x", SamplingParams(max_tokens=3)))).error is None

    run(job, tiny_folder, load_format="dummy", num_kv_blocks=64)
