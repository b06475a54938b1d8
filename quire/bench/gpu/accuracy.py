"""How far each number format on a GPU is from float32 on the CPU, with a real model's weights and real text.

The texts are the docstrings of this package. On the same text, position by position: how much log-probabilities
move, how often the likeliest token is another one, the mean negative log-probability; then, writing freely, how many
of the answers are the same to the last token. Where there is no GPU the formats are emulated: plain torch computes in
float32 and rounds where the GPU's kernels do, so what is seen is the format's effect, and no answers are written.
"""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.bench.whole_pass import logits_of
from quire.errors import KernelBuildError
from quire.kernels.slices import Slices
from quire.kernels.types import HeadShape, LayerCache, StepContext
from quire.ops.reference import PlainLinear, TorchOps

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
    for file in sorted(Path(__file__).resolve().parents[2].rglob("*.py")):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        if len(text) >= _LEAST_LETTERS:
            yield text


def read(model: str, prompts: list[str], options: dict[str, Any]) -> Reading:
    from quire import LLM, SamplingParams

    on_gpu = {"device": "cuda", "kv_cache_memory": "2GiB", "max_num_seqs": 64} if "device" not in options else {}
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
    """Against the CPU, or against float32 on the GPU where the CPU's kernels are not built."""
    prompts = texts(count)
    want, reference = None, ""
    for name, options in FORMATS.items():
        began = time.perf_counter()
        try:
            got = read(model, prompts, options)
        except KernelBuildError:
            if options.get("device") != "cpu":
                raise
            continue
        if want is None:
            want, reference = got, name
        seconds = round(time.perf_counter() - began, 1)
        yield {**compare(name, got, want), "against": reference, "model": model, "seconds": seconds}


class RoundedOps(TorchOps):
    """Operations whose results are rounded to `dtype` (and keys and values to `cache`), as those of a GPU are."""

    def __init__(self, dtype: torch.dtype, cache: torch.dtype | None = None) -> None:
        self._dtype, self._cache = dtype, cache or dtype

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self._dtype).float()

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, slices: Slices | None = None
    ) -> PlainLinear:
        return super().pack_linear(self._round(weight), None if bias is None else self._round(bias), slices)

    def linear(
        self, x: Tensor, w: PlainLinear, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        found = self._round(super().linear(x, w, residual))
        return found if out is None else out.copy_(found)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._round(super().rms_norm(x, weight, eps))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._round(super().layer_norm(x, weight, bias, eps))

    def act(self, x: Tensor, kind: str) -> Tensor:
        return self._round(super().act(x, kind))

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        return self._round(super().act_mul(gate_up, kind))

    def rope_and_cache(
        self,
        qkv: Tensor,
        layer: LayerCache,
        ctx: StepContext,
        group: int,
        shape: HeadShape,
        rope: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        norm_eps: float,
    ) -> None:
        super().rope_and_cache(qkv, layer, ctx, group, shape, rope, q_norm, k_norm, norm_eps)
        qkv.copy_(self._round(qkv))
        for part in layer.tensors.values():
            part.copy_(part.to(self._dtype).to(self._cache).float())

    def attend(
        self,
        qkv: Tensor,
        layer: LayerCache,
        ctx: StepContext,
        group: int,
        shape: HeadShape,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._round(super().attend(qkv, layer, ctx, group, shape, scale, window, softcap, sinks))


EMULATED: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "bfloat16, fp8 cache": (torch.bfloat16, torch.float8_e4m3fn),
}


def emulate(model: str, count: int) -> Iterator[dict[str, Any]]:
    """The formats' effect on texts that are read, by plain torch on a CPU."""
    from quire.models.loader.source import resolve_model

    source = resolve_model(model)
    tokenizer = source.tokenizer()
    prompts = [tokenizer.encode(text) for text in texts(count)]
    want = None
    for name, (dtype, cache) in EMULATED.items():
        got = _read_emulated(source, prompts, RoundedOps(dtype, cache))
        want = got if want is None else want
        yield {**compare(name, got, want), "model": model, "emulated": True}


@torch.inference_mode()
def _read_emulated(source: Any, prompts: list[list[int]], ops: RoundedOps) -> Reading:
    from quire.models.build import build_decoder

    longest = max(map(len, prompts))
    decoder = build_decoder(source.config, source.weights(), ops, max_model_len=longest)
    found = Reading([], [], [])
    for prompt in prompts:
        ids = torch.tensor(prompt)
        logits = logits_of(decoder, prompt).float().log_softmax(-1)[:-1]
        found.logprobs += logits.gather(1, ids[1:, None]).squeeze(1).tolist()
        found.best += logits.argmax(-1).tolist()
    return found
