"""A constrained request gets the same tokens whatever the path: batch, chunks, preemption, swap, depth, worker."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from quire import SamplingParams
from quire.scheduler.request import Request
from quire.structured.compiler import GrammarCompiler
from quire.structured.vocabulary import read_vocabulary
from tests.structured.test_outputs import PERSON
from tests.structured.tiny import CONFIG, tiny_llm, tokenizer_of
from tests.worker.gpu.engines import make_engine, run

SHAPES: list[dict[str, Any] | None] = [
    {"json": PERSON}, None, {"regex": "[a-f]{3,30}( [0-9]{1,9}){0,6}"}, {"choice": ["one", "two", "twenty"]}, None,
    {"json_object": True}, {"grammar": 'root ::= ("ab" | "c" [x-z]){2,40}'},
]


def wanted(index: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "logprobs": 3},
        {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    ]
    return SamplingParams(seed=100 + index, max_tokens=40, structured_outputs=SHAPES[index % len(SHAPES)],
                          **kinds[index % 4])


def prompt(index: int) -> list[int]:
    rng = random.Random(index)
    return [rng.randrange(4, 500) for _ in range(rng.randrange(2, 50))]


COUNT = 14


@pytest.fixture(scope="module")
def alone(tiny_folder: Path) -> list[Any]:
    with tiny_llm(tiny_folder, enable_prefix_caching=False, enable_chunked_prefill=False) as llm:
        outputs = [llm.generate([prompt(i)], wanted(i), use_tqdm=False)[0] for i in range(COUNT)]
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.error) for o in outputs]


@pytest.mark.parametrize("options", [
    {},
    {"max_num_batched_tokens": 7},
    {"max_steps_in_flight": 2},
    {"max_steps_in_flight": 3, "max_num_batched_tokens": 16},
    {"block_size": 4, "num_kv_blocks": 26},
    {"block_size": 4, "num_kv_blocks": 26, "max_steps_in_flight": 2},
    {"block_size": 4, "num_kv_blocks": 26, "swap_space": 0.01, "preemption_mode": "swap"},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}},
    {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False},
     "max_steps_in_flight": 2},
], ids=str)
def test_tokens_and_logprobs_are_those_of_the_request_alone(
        tiny_folder: Path, alone: list[Any], options: dict[str, Any]) -> None:
    with tiny_llm(tiny_folder, **options) as llm:
        outputs = llm.generate([prompt(i) for i in range(COUNT)], [wanted(i) for i in range(COUNT)], use_tqdm=False)
        metrics = llm.metrics()
        llm.check()
    assert [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.error) for o in outputs] == alone
    if "num_kv_blocks" in options:
        assert metrics["preemptions"] > 0


def requests() -> list[Request]:
    return [Request(f"r{i}", prompt(i), wanted(i), seed=100 + i, arrival_time=0.0, eos_token_ids=frozenset({2}))
            for i in range(COUNT)]


def engine(device: bool, depth: int = 1, **options: Any) -> Any:
    tokenizer = tokenizer_of("byte_level")
    size = tokenizer.vocab_size + 5
    core = make_engine({**CONFIG, "vocab_size": size}, device=device, depth=depth, **options)
    core.grammars = GrammarCompiler(lambda: read_vocabulary(tokenizer, size, {2}))
    return core


@pytest.mark.parametrize("depth, blocks", [(1, 60), (2, 60), (3, 60), (2, 24)])
def test_the_device_worker_draws_what_the_plain_one_does(depth: int, blocks: int) -> None:
    plain = run(engine(device=False), requests())
    assert all(error is None for *_, error in plain.values())
    assert run(engine(device=True, depth=depth, num_blocks=blocks), requests()) == plain


def test_a_plan_ahead_holds_no_sequence_whose_mask_is_unknown() -> None:
    core = engine(device=True, depth=2)
    constrained = {i for i in range(COUNT) if SHAPES[i % len(SHAPES)] is not None}
    submit, overlapping = core.executor.submit, []

    def watch(plan: Any) -> Any:
        if core.scheduler.num_in_flight > 1:
            seats = {seq.row: seq for r in core.scheduler.running.values() for seq in r.live}
            before = {entry.row for entry in core.scheduler._in_flight[0][0].entries if entry.sample}
            overlapping.extend(seats[entry.row] for entry in plan.entries if entry.row in before and entry.row in seats)
        return submit(plan)

    core.executor.submit = watch
    run(core, requests())
    assert overlapping, "no step was planned ahead at all"
    assert not {int(seq.request.request_id[1:]) for seq in overlapping} & constrained


@pytest.mark.parametrize("method", ["ngram", "skip_layers"])
def test_drafts_judged_by_rejection_keep_the_shape(tiny_folder: Path, method: str) -> None:
    """Also where a constraint beside the grammar leaves nothing to draw: that request fails, and it alone."""
    config = {"method": method, "num_speculative_tokens": 3, "verifier": "rejection", "adaptive": False}
    shape = {"regex": "(abc ){6,9}!"}
    with tiny_llm(tiny_folder, speculative_config=config) as llm:
        params = [SamplingParams(seed=i, max_tokens=80, temperature=1.0 + i / 4, structured_outputs=shape, logprobs=2)
                  for i in range(8)]
        stuck = SamplingParams(max_tokens=120, temperature=1.0, structured_outputs=shape, min_tokens=100)
        outputs = llm.generate(["abc abc abc "] * 9, [*params, stuck], use_tqdm=False)
    assert all(re.fullmatch("(abc ){6,9}!", output.outputs[0].text) for output in outputs[:8])
    assert all(entry.logprob > -1e30 for o in outputs[:8] for p in o.outputs[0].logprobs or [] for entry in p.values())
    assert outputs[8].error is not None and "structured_outputs" in outputs[8].error
