"""Plays a case through the engine and through the plain path, and says where they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.engine.output import RequestOutput
from quire.fuzz.case import FuzzCase, FuzzRequest
from quire.llm import LLM
from quire.sampling.params import SamplingParams

_STEPS_BOUND = 20_000
# One request at a time, of at most 256 tokens: the default pool is far larger, and slow to make.
_PLAIN = {"enable_prefix_caching": False, "enable_chunked_prefill": False, "num_kv_blocks": 17}


def sampling_params(request: FuzzRequest) -> SamplingParams:
    params = dict(request.params)
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    return SamplingParams(**params)


def find_difference(case: FuzzCase, workdir: Path) -> str | None:
    """None when every request got the tokens and log-probabilities of the plain path, else the first difference."""
    folder = workdir / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.model))
    try:
        outputs = _play(case, folder)
    except Exception as error:
        return f"the engine raised {type(error).__name__}: {error}"
    with _engine(folder, _PLAIN) as plain:
        for request in case.requests:
            expected = plain.generate([request.prompt], sampling_params(request), use_tqdm=False)[0]
            difference = _compare(request, outputs.get(request.name), expected)
            if difference is not None:
                return difference
    return None


def _engine(folder: Path, options: dict[str, Any]) -> LLM:
    return LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, seed=7, **options)


def _play(case: FuzzCase, folder: Path) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    arrivals = sorted(case.requests, key=lambda r: r.at_step)
    with _engine(folder, case.options) as llm:
        for step in range(_STEPS_BOUND):
            while arrivals and arrivals[0].at_step <= step:
                request = arrivals.pop(0)
                llm.add_request(request.name, request.prompt, sampling_params(request), priority=request.priority,
                                cache_salt=request.cache_salt)
            for request in case.requests:
                if request.abort_at == step:
                    llm.abort(request.name)
            for output in llm.step():
                outputs[output.request_id] = output
            llm.check()
            if not arrivals and not llm.has_unfinished_requests():
                break
        else:
            raise RuntimeError(f"requests were still unfinished after {_STEPS_BOUND} steps")
        used = llm.metrics()["kv_blocks_used"]
        if used:
            raise RuntimeError(f"{used} KV blocks are still in use after the last request")
    return outputs


def _compare(request: FuzzRequest, got: RequestOutput | None, expected: RequestOutput) -> str | None:
    if got is None:
        return None if request.abort_at is not None else f"request {request.name} gave no output at all"
    mine, plain = got.outputs[0], expected.outputs[0]
    if got.error is not None:
        return f"request {request.name} failed: {got.error}"
    aborted = request.abort_at is not None and mine.finish_reason == "abort"
    count = len(mine.token_ids)
    if list(mine.token_ids) != list(plain.token_ids)[: count if aborted else None]:
        return f"request {request.name} gave tokens {list(mine.token_ids)}, the plain path {list(plain.token_ids)}"
    if not aborted and mine.finish_reason != plain.finish_reason:
        return f"request {request.name} finished by {mine.finish_reason}, the plain path by {plain.finish_reason}"
    if list(mine.logprobs or []) != list(plain.logprobs or [])[: count if aborted else None]:
        return f"request {request.name} has log-probabilities whose bits differ from the plain path's"
    if not aborted and got.prompt_logprobs != expected.prompt_logprobs:
        return f"request {request.name} has prompt log-probabilities whose bits differ from the plain path's"
    return None
