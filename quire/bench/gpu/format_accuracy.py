"""`quire bench accuracy --device cuda`: what each format of weights, or of the cache, costs on a GPU, against bf16.

The same decoders as an engine runs, on the same questions and passages as on a CPU (`quire.bench.cpu.accuracy`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.bench.cpu.accuracy import Asked
    from quire.models.decoder import Decoder

REFERENCE = "bfloat16"
FORMATS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "file": {"quantization": "file"},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8-kv": {"kv_cache_dtype": "fp8"},
}
"""Engine options of each. Weights are rounded from the floats that the model's file stands for."""
_AS_STORED = ("file", "fp8-kv")
_LONGEST = 2048


def measure(asked: Asked, formats: Sequence[str], kl_texts: int, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """A line for each task and format; `device` cpu runs the kernels in Triton's interpreter, for tests."""
    import torch

    from quire.bench.cpu.accuracy import compared, in_floats, scores
    from quire.machine import describe_machine

    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise QuireError(f"--formats {unknown[0]} is of a CPU; on a GPU there are {', '.join(FORMATS)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise QuireError("`quire bench accuracy --device cuda` needs a CUDA GPU, and torch finds none here")
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    common = {"bench": "accuracy", "model": asked.model, **gpu, **describe_machine()}
    with in_floats(asked.model) as floats, torch.inference_mode():
        plain = _decoder(REFERENCE, asked.model, device)
        reference = [_answers(plain, task, asked, device) for task in asked.tasks]
        for result in reference:
            yield {**common, "format": REFERENCE, **scores(result)}
        for name in formats:
            if name == REFERENCE:
                continue
            mine = _decoder(name, asked.model if name in _AS_STORED else floats, device)
            for task, other in zip(asked.tasks, reference, strict=True):
                result = _answers(mine, task, asked, device)
                yield {**common, "format": name, **scores(result), **compared(result, other)}
            if kl_texts:
                yield {**common, "format": name, **_divergence(mine, plain, asked.model, kl_texts, device)}
            del mine


def _answers(decoder: Decoder, task: str, asked: Asked, device: str) -> Any:
    import torch

    from quire.bench.cpu.accuracy import DecoderScores
    from quire.eval.data import rows
    from quire.eval.tasks import TASKS, Options
    from quire.models.loader.source import resolve_model

    engine = DecoderScores(decoder, resolve_model(asked.model).tokenizer())
    with torch.device(device):  # what a pass is made of lies where the weights are
        (result,) = TASKS[task](engine, rows, Options(asked.limit, shots=0))
    return result


def _divergence(mine: Decoder, plain: Decoder, model: str, count: int, device: str) -> dict[str, Any]:
    import torch

    from quire.bench.cpu.accuracy import divergence_of, passages

    with torch.device(device):
        return divergence_of(mine, plain, passages(model, count))


def _decoder(name: str, stored: str, device: str) -> Decoder:
    """The decoder that an engine with the format's options runs, but for its graphs."""
    import torch

    from quire.config import EngineConfig
    from quire.models.loader.source import resolve_model
    from quire.ops.triton import KV_DTYPES, TritonOps
    from quire.worker.gpu.weights import build_on_device

    config = EngineConfig.create(model=stored, device="cuda", **FORMATS[name])
    source, place = resolve_model(stored), torch.device(device)
    ops = TritonOps(place, torch.bfloat16, rounding=config.model.rounding,
                    kv_dtype=KV_DTYPES[config.cache.kv_cache_dtype])
    weights = source.weights(None) if config.model.quantization is None else source.stored_weights()
    return build_on_device(source.config, weights, ops, place, torch.bfloat16, _LONGEST)
