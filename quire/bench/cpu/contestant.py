"""Runs one CPU case on one engine in a process of its own, once for every line it reads; prints the seconds as JSON.

`python -m quire.bench.cpu.contestant quire A smollm2-135m '{}'`. Separate processes, since a library's thread settings
and memory would colour the other's figures; one run a line, so that several engines can take turns. The last line,
after the end of the input, says what was generated and how much memory it took.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quire.bench.cpu.cases import Workload, workload
from quire.bench.cpu.rivals import Runner, llama_runner, onnxruntime_runner
from quire.machine import peak_memory_bytes

_STATIC_BATCH = 8
Contestant = tuple[Runner, Workload, Callable[[], dict[str, Any]]]
"""What runs, on what, and more to say of it at the end."""


@contextmanager
def _quire(case: str, model: str, options: dict[str, Any]) -> Iterator[Contestant]:
    from quire import LLM, SamplingParams

    with LLM(model, **{"max_model_len": 4096, **options}) as llm:
        first_token = 0.0

        def run(work: Workload) -> list[list[int]]:
            nonlocal first_token
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
                      for n in work.outputs]
            llm.clear_prefix_cache()
            outputs = llm.generate(work.prompts, params, use_tqdm=False)
            metrics = outputs[0].metrics
            first_token = (metrics.time_to_first_token if metrics is not None else None) or 0.0
            return [list(output.outputs[0].token_ids) for output in outputs]

        yield run, workload(case, llm.vocab_size), lambda: {
            "kv_pool_bytes": llm.metrics()["kv_pool_bytes"], "preemptions": llm.metrics()["preemptions"],
            "first_token_seconds": first_token}


@contextmanager
def _transformers(case: str, model: str, options: dict[str, Any]) -> Iterator[Contestant]:
    from quire.eval.transformers_model import load_in_transformers

    network, vocab_size = load_in_transformers(model)
    yield lambda work: _generate_static(network, work), workload(case, vocab_size), dict


@contextmanager
def _onnxruntime(case: str, model: str, options: dict[str, Any]) -> Iterator[Contestant]:
    yield onnxruntime_runner(model), workload(case, options["vocab_size"]), dict


@contextmanager
def _llama(case: str, model: str, options: dict[str, Any]) -> Iterator[Contestant]:
    work = workload(case, options["vocab_size"])
    yield llama_runner(model, work, options["vocab_size"]), work, dict


_ENGINES = {"quire": _quire, "transformers": _transformers, "onnxruntime-genai": _onnxruntime, "llama.cpp": _llama}


def _generate_static(network: Any, work: Workload) -> list[list[int]]:
    """Batches of 8 in order of arrival, left-padded, each as long as its longest member wants."""
    import torch

    found: list[list[int]] = []
    for at in range(0, len(work.prompts), _STATIC_BATCH):
        prompts, outputs = work.prompts[at : at + _STATIC_BATCH], work.outputs[at : at + _STATIC_BATCH]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            result = network.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max(outputs),
                                      min_new_tokens=max(outputs), pad_token_id=0)
        found += [row[width : width + n].tolist() for row, n in zip(result, outputs, strict=True)]
    return found


def main() -> None:
    engine, case, model, options = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    with _ENGINES[engine](case, model, options) as (run, work, more):
        tokens = run(Workload([work.prompts[0][:8]], [2]))
        print(json.dumps("ready"), flush=True)
        for _ in sys.stdin:
            start = time.perf_counter()
            tokens = run(work)
            print(json.dumps(time.perf_counter() - start), flush=True)
        print(json.dumps({"peak_bytes": peak_memory_bytes(), "tokens": tokens, **more()}), flush=True)


if __name__ == "__main__":
    main()
