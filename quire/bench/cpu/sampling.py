"""`quire bench cpu --sampling`: what drawing 32 tokens out of 151,936 takes of a decode step of Qwen3-0.6B's shapes."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROWS: Final = 32
LIMIT: Final = 0.1
"""Most of a step that sampling may take."""
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "temperature alone": {},
    "greedy": {"temperature": 0.0},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.95, top_k 20": {"top_p": 0.95, "top_k": 20},
    "presence 0.5, repetition 1.1": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs 5": {"logprobs": 5},
}


def measure(config: dict[str, Any], rows: int = ROWS, tokens: int = 4, repeat: int = 5) -> Iterator[dict[str, Any]]:
    """A line for each setting: milliseconds of sampling, of a step, and the share."""
    step = step_seconds(config, rows, tokens)
    for name, chosen in SETTINGS.items():
        seconds = sampling_seconds({"temperature": 0.8, **chosen}, rows, config["vocab_size"], repeat)
        yield {"bench": "cpu", "case": "sampling", "setting": name, "sequences": rows,
               "vocabulary": config["vocab_size"],
               "sampling_ms": round(1e3 * seconds, 2), "step_ms": round(1e3 * step, 1),
               "share": round(seconds / step, 4), "met": seconds <= LIMIT * step}


def step_seconds(config: dict[str, Any], rows: int, tokens: int) -> float:
    """Of a decode step without anything to choose: greedy, through `generate`, the quickest of some."""
    from quire.llm import LLM
    from quire.sampling.params import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        with LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=rows, max_model_len=128,
                 num_kv_blocks=8 * rows) as llm:
            prompts = [[7 + i, 8, 9] for i in range(rows)]
            llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), use_tqdm=False)
            times = [time.perf_counter()]
            params = SamplingParams(temperature=0.0, max_tokens=2 + tokens, ignore_eos=True)
            for _ in llm.stream(prompts, params):
                times.append(time.perf_counter())
    # Outputs of one step come together: what lies between two of them in a row of `rows` is a step.
    ends = times[rows::rows]
    return min(later - sooner for sooner, later in itertools.pairwise(ends))


def sampling_seconds(chosen: dict[str, Any], rows: int, vocab: int, repeat: int) -> float:
    """The quickest of some passes, from the rows' settings to tokens, over logits like those of a language model."""
    import torch

    from quire.kernels.cpu.sampling import CpuSampling
    from quire.sampling.batch import SamplingRow
    from quire.sampling.params import SamplingParams
    from quire.worker.draws import draw_rows

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator) * 2.5
    logits[:, :40] += torch.rand(rows, 40, generator=generator) * 20
    text = list(range(min(300, vocab)))
    states = [SamplingRow(SamplingParams(**chosen), i, 0, text, len(text) // 3) for i in range(rows)]
    kernels, times = CpuSampling(), []
    for _ in range(repeat):
        began = time.perf_counter()
        draw_rows(logits, states, kernels)
        times.append(time.perf_counter() - began)
    return min(times)
