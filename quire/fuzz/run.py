"""Plays a case through the engine and through the plain path, and says where they differ."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

from quire.engine.outputs.output import CompletionOutput, RequestOutput
from quire.fuzz.case import CHARACTERS, DRAFT, HEADS, FuzzCase, FuzzRequest
from quire.fuzz.head import write_head
from quire.llm import LLM
from quire.sampling.params import BeamSearchParams, SamplingParams

_STEPS_BOUND = 20_000
_COPIES_SECONDS = 30.0
# One request at a time, of at most 256 tokens: the default pool is far larger, and slow to make.
_PLAIN = {"enable_prefix_caching": False, "enable_chunked_prefill": False, "num_kv_blocks": 64}


def sampling_params(request: FuzzRequest) -> SamplingParams:
    params = dict(request.params)
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    return SamplingParams(**params)


def request_params(request: FuzzRequest) -> SamplingParams | BeamSearchParams:
    return sampling_params(request) if request.beam is None else BeamSearchParams(**request.beam)


def find_difference(case: FuzzCase, workdir: Path) -> str | None:
    """None when every request got the tokens and log-probabilities of the plain path, else the first difference."""
    folder = workdir / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.model))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    if importlib.util.find_spec("xgrammar") is None:
        for request in case.requests:
            request.params.pop("structured_outputs", None)
    draft = workdir / DRAFT
    draft.mkdir(parents=True, exist_ok=True)
    (draft / "config.json").write_text(json.dumps(case.model | {"num_hidden_layers": 1}))
    head = case.options.get("speculative_config", {}).get("model")
    if head in HEADS:
        write_head(workdir / head, case.model, head)
    try:
        outputs = _play(case, folder)
    except Exception as error:
        return f"the engine raised {type(error).__name__}: {error}"
    arithmetic = {name: value for name, value in case.options.items()
                  if name.startswith("quantization") or name == "kv_cache_dtype"}
    with _engine(folder, _PLAIN | arithmetic) as plain:
        for request in case.requests:
            difference = _compare(request, outputs.get(request.name), _plain_output(plain, request))
            if difference is not None:
                return difference
    return None


def _plain_output(plain: LLM, request: FuzzRequest) -> RequestOutput:
    if request.beam is not None:
        return plain.beam_search([request.prompt], BeamSearchParams(**request.beam))[0]
    return plain.generate([request.prompt], sampling_params(request), use_tqdm=False)[0]


def _engine(folder: Path, options: dict[str, Any]) -> LLM:
    return LLM(str(folder), load_format="dummy", seed=7, **options)


def _tokenizer() -> dict[str, Any]:
    """One character a token, as a tokenizer.json."""
    # As byte-level vocabularies spell them.
    spelled = {" ": "\u0120", "\n": "\u010a"}
    vocabulary = {"</s>": 0} | {spelled.get(char, char): place for place, char in enumerate(CHARACTERS, start=1)}
    end = {"id": 0, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
           "special": True}
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": []}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}


def _play(case: FuzzCase, folder: Path) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    arrivals = sorted(case.requests, key=lambda r: r.at_step)
    options = dict(case.options)
    speculation = options.get("speculative_config")
    if speculation is not None and "model" in speculation:
        options["speculative_config"] = speculation | {"model": str(folder.with_name(speculation["model"]))}
    with _engine(folder, options) as llm:
        for step in range(_STEPS_BOUND):
            while arrivals and arrivals[0].at_step <= step:
                request = arrivals.pop(0)
                llm.add_request(request.name, request.prompt, request_params(request), priority=request.priority,
                                cache_salt=request.cache_salt, tenant=request.tenant)
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
        _check_counters(_metrics_at_rest(llm), list(outputs.values()))
    return outputs


def _metrics_at_rest(llm: LLM) -> dict[str, int | float]:
    """Once the copies to the host that nobody waits for have been made too."""
    until = time.monotonic() + _COPIES_SECONDS
    while (metrics := llm.metrics())["transfers_under_way"] and time.monotonic() < until:
        time.sleep(0.001)
    return metrics


def _check_counters(metrics: dict[str, int | float], outputs: list[RequestOutput]) -> None:
    """Nothing is held after the last request, and what is counted in total is what was counted for each."""
    for name in ("kv_blocks_used", "host_blocks_used"):
        if metrics[name]:
            raise RuntimeError(f"{metrics[name]} {name} after the last request")
    counts = [output.metrics.counts for output in outputs]
    sums = {
        "preemptions_for_memory": sum(c.preemptions_for_memory for c in counts),
        "preemptions_for_priority": sum(c.preemptions_for_priority for c in counts),
        "preemptions_for_loss": sum(c.preemptions_for_loss for c in counts),
        "preemptions": sum(
            c.preemptions_for_memory + c.preemptions_for_priority + c.preemptions_for_loss for c in counts),
        "preemptions_by_swap": sum(c.swaps_out for c in counts),
        "swaps_out": sum(c.swaps_out for c in counts),
        "swaps_in": sum(c.swaps_in for c in counts),
        "copies_on_write": sum(c.copies_on_write for c in counts),
        "recomputed_tokens": sum(c.recomputed_tokens for c in counts),
        "tier_hits": sum(c.tier_hits for c in counts),
        "tier_hit_tokens": sum(c.tier_hit_tokens for c in counts),
    }
    for name, total in sums.items():
        if metrics[name] != total:
            raise RuntimeError(f"{name} is {metrics[name]} in total and {total} summed over the requests")
    moved = metrics["swap_bytes_out"] + metrics["swap_bytes_in"]
    if moved != sum(c.swap_bytes for c in counts):
        raise RuntimeError(f"{moved} bytes were swapped in total, {sum(c.swap_bytes for c in counts)} by requests")


def _compare(request: FuzzRequest, got: RequestOutput | None, expected: RequestOutput) -> str | None:
    if got is None:
        return None if request.abort_at is not None else f"request {request.name} gave no output at all"
    if got.error is not None and got.error == expected.error and "structured_outputs" in request.params:
        return None  # the shape and the other parameters leave nothing to draw
    if got.error is not None:
        return f"request {request.name} failed: {got.error}"
    aborted = request.abort_at is not None and any(one.finish_reason == "abort" for one in got.outputs)
    if aborted and (request.beam is not None or request.params.get("best_of") is not None):
        return None  # which sequences are the best is decided at the end
    if len(got.outputs) != len(expected.outputs):
        return f"request {request.name} gave {len(got.outputs)} sequences, the plain path {len(expected.outputs)}"
    for mine, plain in zip(got.outputs, expected.outputs, strict=True):
        difference = _compare_sequences(f"sequence {mine.index} of request {request.name}", mine, plain, aborted)
        if difference is not None:
            return difference
    if not aborted and got.prompt_logprobs != expected.prompt_logprobs:
        return f"request {request.name} has prompt log-probabilities whose bits differ from the plain path's"
    return None


def _compare_sequences(name: str, mine: CompletionOutput, plain: CompletionOutput, aborted: bool) -> str | None:
    count = len(mine.token_ids)
    if list(mine.token_ids) != list(plain.token_ids)[: count if aborted else None]:
        return f"{name} gave tokens {list(mine.token_ids)}, the plain path {list(plain.token_ids)}"
    if not aborted and mine.finish_reason != plain.finish_reason:
        return f"{name} finished by {mine.finish_reason}, the plain path by {plain.finish_reason}"
    if list(mine.logprobs or []) != list(plain.logprobs or [])[: count if aborted else None]:
        return f"{name} has log-probabilities whose bits differ from the plain path's"
    if not aborted and (mine.score, mine.cumulative_logprob) != (plain.score, plain.cumulative_logprob):
        return f"{name} has the score {mine.score}, on the plain path {plain.score}"
    return None
