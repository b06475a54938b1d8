"""How far each number format on a GPU is from float32 on the CPU, with a real model's weights and real text.

The texts are the docstrings of this package. On the same text, position by position: how much log-probabilities
move, how often the likeliest token is another one, the mean negative log-probability; then, writing freely, how many
of the answers are the same to the last token.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS: dict[str, dict[str, Any]] = {
    "cpu float32": {"device": "cpu", "dtype": "float32"},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "bfloat16, fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
_TOKENS = 64
_LEAST_LETTERS = 300


@dataclass(slots=True)
class Reading:
    """What a model made of the texts: the log-probability of each token, the likeliest one there, and its answers."""

    logprobs: list[float]
    best: list[int]
    answers: list[list[int]]


def texts(count: int) -> list[str]:
    """The first docstrings of this package that say something."""
    return [text for _, text in zip(range(count), _docstrings(), strict=False)]


def _docstrings() -> Iterator[str]:
    for file in sorted(Path(__file__).resolve().parents[1].rglob("*.py")):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        if len(text) >= _LEAST_LETTERS:
            yield text


def read(model: str, prompts: list[str], options: dict[str, Any]) -> Reading:
    from quire import LLM, SamplingParams

    on_gpu = {"device": "cuda", "kv_cache_memory": "2GiB"} if "device" not in options else {}
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True, prompt_logprobs=1)
    with LLM(model, max_model_len=1024, **{**on_gpu, **options}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found = Reading([], [], [])
    for output in outputs:
        for token, position in zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True):
            entries: Any = position
            found.logprobs.append(entries[token].logprob)
            found.best.append(min(entries, key=lambda other, e=entries: e[other].rank))  # type: ignore[misc]
        found.answers.append(list(output.outputs[0].token_ids))
    return found


def compare(name: str, got: Reading, want: Reading) -> dict[str, Any]:
    """One line of the result; both readings are of the same texts."""
    moved = sorted(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True))
    others = sum(a != b for a, b in zip(got.best, want.best, strict=True))
    same = sum(a == b for a, b in zip(got.answers, want.answers, strict=True))
    return {
        "bench": "gpu", "case": "accuracy", "format": name, "positions": len(moved),
        "mean_nll": round(-sum(got.logprobs) / len(got.logprobs), 5),
        "moved_median": moved[len(moved) // 2], "moved_p99": moved[math.ceil(0.99 * len(moved)) - 1],
        "moved_most": moved[-1], "other_likeliest": round(others / len(moved), 5),
        "answers_same": same, "answers": len(got.answers), "answer_tokens": _TOKENS,
    }  # fmt: skip


def measure(model: str, count: int) -> Iterator[dict[str, Any]]:
    prompts = texts(count)
    want = None
    for name, options in FORMATS.items():
        got = read(model, prompts, options)
        want = got if want is None else want
        yield {**compare(name, got, want), "model": model}
