"""`quire bench accuracy --device cuda`: what each format of weights, or of the cache, costs on a GPU, against bf16.

The same decoders as an engine runs, on the same questions and passages as on a CPU (`quire.bench.cpu.accuracy`), and
the same layouts of files.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.bench.cpu.accuracy import Asked, DecoderScores
    from quire.eval.tasks import Result
    from quire.models.decoder import Decoder

REFERENCE = "bfloat16"
FORMATS: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "bfloat16"},
    "file": {"quantization": "file"},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4-64": {"quantization": "int4", "quantization_group_size": 64},
    "fp8-kv": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
"""Engine options of each; layouts have those of `file`. Weights are rounded from the floats that the model's file
stands for."""
_AS_STORED = ("file", "fp8-kv")
_LONGEST = 2048


def measure(asked: Asked, formats: Sequence[str], kl_texts: int, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """A line for each task and format; `device` cpu runs the kernels in Triton's interpreter, for tests."""
    import torch

    from quire.bench.cpu.accuracy import DecoderScores, compared, contenders, divergence_of, passages, scores
    from quire.machine import describe_machine
    from quire.models.loader.source import resolve_model

    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise QuireError(f"--formats {unknown[0]} is of a CPU; on a GPU there are {', '.join(FORMATS)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise QuireError("`quire bench accuracy --device cuda` needs a CUDA GPU, and torch finds none here")
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    common = {"bench": "accuracy", "model": asked.model, **gpu, **describe_machine()}
    tokenizer = resolve_model(asked.model).tokenizer()
    texts = passages(tokenizer, kl_texts) if kl_texts else []
    with torch.inference_mode():
        plain, size = _sized(REFERENCE, asked.model, device)
        reference = [_answers(DecoderScores(plain, tokenizer), task, asked, device) for task in asked.tasks]
        for result in reference:
            yield {**common, **size, "format": REFERENCE, **scores(result)}
        for name, stored in contenders(asked, formats, _AS_STORED, device):
            mine, size = _sized(name, stored, device)
            for task, other in zip(asked.tasks, reference, strict=True):
                began = time.perf_counter()
                result = _answers(DecoderScores(mine, tokenizer), task, asked, device)
                yield {**common, **size, "format": name, **scores(result), **compared(result, other),
                       "seconds": round(time.perf_counter() - began, 1)}
            if texts:
                with torch.device(device):
                    found = divergence_of(mine, plain, texts)
                yield {**common, **size, "format": name, **found}
            del mine


def _answers(engine: DecoderScores, task: str, asked: Asked, device: str) -> Result:
    import torch

    from quire.eval.data import rows
    from quire.eval.tasks import TASKS, Options

    with torch.device(device):  # what a pass is made of lies where the weights are
        (result,) = TASKS[task](engine, rows, Options(asked.limit, shots=0))
    return result


def _sized(name: str, stored: str, device: str) -> tuple[Decoder, dict[str, int]]:
    """A decoder, and what its weights, tables and scratch memory take on a GPU."""
    import torch

    gc.collect()  # what the format before has left
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    decoder = _decoder(name, stored, device)
    return decoder, {"weight_bytes": torch.cuda.memory_allocated() - before} if device == "cuda" else {}


def _decoder(name: str, stored: str, device: str) -> Decoder:
    """The decoder that an engine with the format's options runs, but for its graphs."""
    import torch

    from quire.config import EngineConfig
    from quire.models.loader.source import resolve_model
    from quire.ops.triton import KV_DTYPES, TritonOps
    from quire.worker.gpu.weights import build_on_device

    config = EngineConfig.create(model=stored, device="cuda", **FORMATS.get(name, FORMATS["file"]))
    source, place = resolve_model(stored), torch.device(device)
    ops = TritonOps(place, torch.bfloat16, rounding=config.model.rounding,
                    kv_dtype=KV_DTYPES[config.cache.kv_cache_dtype])
    weights = source.weights(None) if config.model.asks_for_floats else source.stored_weights()
    return build_on_device(source.config, weights, ops, place, torch.bfloat16, _LONGEST)
