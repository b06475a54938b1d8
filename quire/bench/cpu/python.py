"""What Python costs one stream: CPU time of the engine's thread outside the compiled kernels, per token of case A.

Everything else counts as Python's: scheduler, sampling (torch's part of it too), detokenization, the checks and the
conversion of arguments before a kernel runs. CPU time of the thread, so that a busy machine hardly changes it.
`python -m quire.bench.cpu.python smollm2-135m 3` measures in a process of its own and prints JSON.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from typing import Any

from quire.bench.cpu.cases import workload
from quire.kernels.cpu import library


class ClockedLibrary(ctypes.CDLL):
    """The kernels, with the CPU time that the calling thread spends in them."""

    seconds = 0.0
    calls = 0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        clock = time.thread_time

        class Clocked(self._FuncPtr):  # type: ignore[name-defined,misc]
            _flags_, _restype_ = self._FuncPtr._flags_, self._FuncPtr._restype_

            def __call__(self, *arguments: Any) -> Any:
                start = clock()
                try:
                    return super().__call__(*arguments)
                finally:
                    ClockedLibrary.seconds += clock() - start
                    ClockedLibrary.calls += 1

        self._FuncPtr = Clocked


def measure(model: str, repeat: int, temperature: float, options: dict[str, Any]) -> dict[str, Any]:
    """Microseconds per output token of case A, and kernel calls; the median of the runs."""
    from quire import LLM, SamplingParams

    library.opener = ClockedLibrary
    runs = []
    with LLM(model, **{"max_model_len": 4096, **options}) as llm:
        work = workload("A", llm.vocab_size)
        count = work.num_output_tokens
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=count, ignore_eos=True)
        for _ in range(repeat + 1):
            llm.clear_prefix_cache()
            ClockedLibrary.seconds, ClockedLibrary.calls = 0.0, 0
            start = time.thread_time()
            llm.generate(work.prompts, params, use_tqdm=False)
            total = time.thread_time() - start
            runs.append((total - ClockedLibrary.seconds, ClockedLibrary.seconds, ClockedLibrary.calls))
    python, kernels, calls = (statistics.median(run[i] for run in runs[1:]) / count for i in range(3))
    return {"temperature": temperature, "python_us_per_token": round(1e6 * python, 1),
            "kernels_us_per_token": round(1e6 * kernels, 1), "kernel_calls_per_token": round(calls, 1),
            "runs_us": [round(1e6 * run[0] / count, 1) for run in runs[1:]]}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4]))))
