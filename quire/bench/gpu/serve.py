"""`quire bench gpu --serve`: 256 streams of 512 in, 512 out over HTTP, and the same through `LLM.generate`, one after
the other in one run. The model has random weights and a made-up vocabulary, so nothing is downloaded."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from quire.errors import QuireError

STREAMS: Final = 256
_TOKENS: Final = 512
NEEDED: Final = ("msgspec", "zmq", "pydantic", "starlette", "uvicorn", "aiohttp", "tqdm")
"""What a server and this client need beyond the engine itself."""


def check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise QuireError(f"--serve starts a server, for which this machine lacks {', '.join(missing)}: install them, "
                         "or leave --serve out (the engine by itself does without)")


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A folder that an engine takes for a model: its shapes, and a tokenizer with as many words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "config.json").write_text(json.dumps(config))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"\u0120w{number}" for number in range(config["vocab_size"] - len(letters))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def prompts_of(count: int, tokens: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randint(300, 10000) for _ in range(tokens)] for _ in range(count)]


def measure(config: dict[str, Any], model: str, options: dict[str, Any], *, streams: int = STREAMS,
            tokens: int = _TOKENS) -> dict[str, Any]:
    """Tokens a second of both; `options`: of the engine."""
    check_installed()
    prompts = prompts_of(streams, tokens)
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), config)
        engine = {"model": name, "load_format": "dummy", "max_num_seqs": streams, "max_model_len": 2 * tokens + 16,
                  **options}
        offline = _offline(engine, prompts, tokens)
        served = _served(engine, prompts, tokens)
    return {"bench": "gpu", "case": "serve", "model": model, "streams": streams, "tokens": tokens, "unit": "tok/s",
            "http": round(served, 1), "generate": round(offline, 1), "ratio": round(served / offline, 3)}


def _offline(engine: dict[str, Any], prompts: list[list[int]], tokens: int) -> float:
    from quire.llm import LLM
    from quire.sampling.params import SamplingParams

    with LLM(**engine) as llm:
        for length in (4, tokens):
            params = SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True, seed=0)
            llm.clear_prefix_cache()
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def _served(engine: dict[str, Any], prompts: list[list[int]], tokens: int) -> float:
    from quire.bench.serving.load_client import Target, send_all
    from quire.bench.serving.load_data import LoadRequest
    from quire.bench.serving.served import serve_process
    from quire.client.endpoint import Endpoint

    flags = {**engine, "max_waiting_requests": len(prompts)}
    model = flags.pop("model")
    with serve_process(flags, ["--model", model]) as address:
        target = Target(Endpoint(address), "openai", {"temperature": 0.6, "ignore_eos": True, "seed": 0})
        target.endpoint.model_name()
        for length in (4, tokens):
            requests = [LoadRequest(_ids(prompt, length), length) for prompt in prompts]
            sent, seconds = asyncio.run(send_all(target, requests, [0.0] * len(prompts), None, lambda _: None))
            errors = [one.error for one in sent if one.error]
            if errors:
                raise QuireError(f"{len(errors)} of {len(sent)} requests failed: {errors[0]}")
    return sum(one.output_tokens for one in sent) / seconds


def _ids(prompt: list[int], length: int) -> Any:
    """A prompt of token ids, which is not that of another round: nothing of it is in the cache."""
    return [300 + length % 1000, *prompt[1:]]


def text(line: dict[str, Any]) -> str:
    return (f"serve {line['model']}: {line['streams']} streams of {line['tokens']} in and out, {line['http']:g} tok/s "
            f"over HTTP, {line['generate']:g} through generate: {line['ratio']:.2f}")
