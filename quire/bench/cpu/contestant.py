"""Runs one CPU case on one engine in a process of its own and prints what it took, as JSON.

`python -m quire.bench.cpu.contestant quire A smollm2-135m`. Separate processes, since a library's thread settings and
memory would colour the other's figures.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from quire.bench.cpu.cases import Workload, workload
from quire.machine import peak_memory_bytes

_STATIC_BATCH = 8


def run_quire(case: str, model: str, repeat: int, options: dict[str, Any]) -> dict[str, Any]:
    from quire import LLM, SamplingParams

    with LLM(model, **{"max_model_len": 4096, **options}) as llm:
        work = workload(case, llm.vocab_size)
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in work.outputs]
        llm.generate([work.prompts[0][:8]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        seconds = []
        for _ in range(repeat):
            llm.clear_prefix_cache()
            start = time.perf_counter()
            outputs = llm.generate(work.prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        metrics = outputs[0].metrics
        pool = llm.metrics()["kv_pool_bytes"]
    return {"seconds": seconds, "peak_bytes": peak_memory_bytes(), "kv_pool_bytes": pool,
            "first_token_seconds": metrics.time_to_first_token,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs]}


def run_transformers(case: str, model: str, repeat: int, options: dict[str, Any]) -> dict[str, Any]:
    from quire.eval.transformers_model import load_in_transformers

    network, vocab_size = load_in_transformers(model)
    work = workload(case, vocab_size)
    seconds, tokens = [], []
    _generate_static(network, Workload([work.prompts[0][:8]], [2]))
    for _ in range(repeat):
        start = time.perf_counter()
        tokens = _generate_static(network, work)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "peak_bytes": peak_memory_bytes(), "tokens": tokens}


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
    engine, case, model, repeat = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    run = {"quire": run_quire, "transformers": run_transformers}[engine]
    print(json.dumps(run(case, model, repeat, json.loads(sys.argv[5]))))


if __name__ == "__main__":
    main()
