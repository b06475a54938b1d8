"""Prefill here, decode there, where either engine is several ranks: tokens and log-probabilities of one engine."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM
from tests.checkpoints import make_checkpoint
from tests.peers.pairs import SECRET, answers, pair
from tests.peers.test_exact import OPTIONS, PARAMS, PROMPTS


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KV_SECRET", SECRET)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[str, list[Any]]] = {}

    def model(family: str) -> tuple[str, list[Any]]:
        """Its folder, and what one engine of one rank answers."""
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            make_checkpoint(folder, family)
            with LLM(str(folder), **OPTIONS) as llm:
                made[family] = str(folder), answers(llm, PROMPTS, PARAMS)
        return made[family]

    return model


def ranks(tensor: int, stages: int = 1, backend: str = "threads", **options: Any) -> dict[str, Any]:
    return {**OPTIONS, "tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "num_threads": 1,
            "distributed_executor_backend": backend, **options}


SIDES = {
    "2 ranks to one, in processes": ("llama", ranks(2, backend="mp"), {**OPTIONS, "block_size": 8}),
    "one to 2 x 2, in processes": ("gemma3", {**OPTIONS}, ranks(2, 2, backend="mp")),
}


@pytest.mark.parametrize("kind", SIDES)
def test_the_bits_of_one_engine(models: Any, kind: str) -> None:
    family, prefill, decode = SIDES[kind]
    model, expected = models(family)
    with pair(model, {**prefill}, {**decode}) as (_, llm):
        assert answers(llm, PROMPTS, PARAMS) == expected
        found = llm.metrics()
        assert found["kv_prompts_arrived"] >= 5 and found["kv_prompts_failed"] == 0
        assert found["kv_tokens_received"] > 150
