"""The real model's beams are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import LLM
from quire.sampling.params import BeamSearchParams
from tests.test_groups import assert_same_beams, oracle

LENGTH = 12


@pytest.fixture(scope="module")
def network(smollm2: str) -> Any:
    """In double precision."""
    from quire.eval.transformers_model import load_in_transformers

    return load_in_transformers(smollm2)[0].double()


def assert_exact(output: Any, network: Any, beams: int) -> None:
    """Sums of log-probabilities are those of double precision. Not compared with the scores of transformers, which
    takes its log_softmax in float32 whatever the model: off by up to 4e-5 a token, always to the same side."""
    for beam in output.outputs[:beams]:
        known = output.prompt_token_ids + list(beam.token_ids)
        with torch.inference_mode():
            logprobs = network(torch.tensor([known[:-1]])).logits[0].log_softmax(-1)
        chosen = logprobs[len(output.prompt_token_ids) - 1 :].gather(1, torch.tensor(beam.token_ids)[:, None])
        assert beam.cumulative_logprob == pytest.approx(float(chosen.sum()), abs=1e-5 * LENGTH)


@pytest.mark.parametrize(("prompt", "width", "penalty", "early"), [
    ("The capital of France is", 4, 1.0, False), ("Q: What is 17 + 25?\nA:", 8, 0.0, True),
])
def test_the_beams_of_smollm2_are_those_of_transformers(smollm2: str, network: Any, prompt: str, width: int,
                                                        penalty: float, early: bool) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=LENGTH, length_penalty=penalty, early_stopping=early)
    with LLM(smollm2, max_model_len=256, dtype="float32") as llm:
        network.config.eos_token_id = network.generation_config.eos_token_id = sorted(llm._inputs._eos_token_ids)
        output = llm.beam_search(prompt, params)[0]
    expected = oracle(network, output.prompt_token_ids, width, LENGTH, length_penalty=penalty, early_stopping=early)
    assert_same_beams(output, expected, tolerance=5e-5 * LENGTH)
    assert_exact(output, network, width)
    assert any(one.text for one in output.outputs)


def test_scores_are_those_of_double_precision(smollm2: str, network: Any) -> None:
    with LLM(smollm2, max_model_len=256, dtype="float32") as llm:
        params = BeamSearchParams(beam_width=4, max_tokens=LENGTH, length_penalty=0.0)
        output = llm.beam_search("Photosynthesis is the process by which", params)[0]
    assert_exact(output, network, 2)
    assert [beam.score for beam in output.outputs] == [beam.cumulative_logprob for beam in output.outputs]
