"""The real model: the tokens of transformers, and an answer that makes sense."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "<|im_start|>user\nWrite a haiku about autumn.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a pirate.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "El zorro marrón salta sobre el perro",
    "今天天气很好，我们去",
    "Die Geschichte der Stadt beginnt im Jahr",
    "🙂🚀 emoji are",
    "SELECT name, count(*) FROM users WHERE",
    "a",
    "1, 1, 2, 3, 5, 8, 13,",
    "\n\n\n",
    "import numpy as np\nimport torch\n\nclass Attention(",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "<html><head><title>",
    "Photosynthesis is the process by which",
    "x" * 200,
    "List three colours:\n1.",
    "To be, or not to be, that is the question: " * 40,
    "\\begin{equation} E = mc^2 \\end{equation} where",
    "Translate to French: The cat sits on the table.",
]


@pytest.fixture(scope="module")
def llm(smollm2: str) -> Any:
    with LLM(smollm2, max_model_len=2048, dtype="float32") as engine:
        yield engine


def greedy_of_transformers(network: Any, prompt: list[int], candidate: list[int]) -> list[int]:
    """What transformers puts at each place of `candidate` given all before it.

    By induction its greedy continuation is `candidate` exactly if this is; one pass instead of 64.
    """
    with torch.inference_mode():
        logits = network(torch.tensor([prompt + candidate])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_64_greedy_tokens_are_those_of_transformers_on_24_prompts(llm: LLM, smollm2: str) -> None:
    from quire.eval.transformers_model import load_in_transformers

    network, _ = load_in_transformers(smollm2)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == 64
        assert tokens == greedy_of_transformers(network, output.prompt_token_ids, tokens), repr(prompt)
    first = torch.tensor([outputs[0].prompt_token_ids])
    with torch.inference_mode():
        generated = network.generate(first, attention_mask=torch.ones_like(first), do_sample=False,
                                     max_new_tokens=16, min_new_tokens=16, pad_token_id=0)
    assert generated[0, first.shape[1]:].tolist() == outputs[0].outputs[0].token_ids[:16]


def test_it_answers_a_question_through_its_chat_template(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat(question, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)[0]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_its_tokenizer_and_weights_come_from_gguf(llm: LLM) -> None:
    assert llm.vocab_size == 49152
    assert llm.tokenizer is not None and llm.tokenizer.decode(llm.tokenizer.encode("Grüße, 世界!")) == "Grüße, 世界!"
