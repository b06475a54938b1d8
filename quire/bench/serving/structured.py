"""`quire bench structured`: chats that answer in the shape of a JSON schema against the same chats without one.

Both in one engine, taking turns; the ratio is the median over the rounds. Case `generate`: `LLM.chat`, whose masks are
filled by one call for all sequences of a step. Case `process`: the engine in its own process, as a server has it, with
matchers in processes of theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any, Final

from quire.async_llm import AsyncLLM
from quire.llm import LLM
from quire.sampling.params import SamplingParams
from quire.structured.spec import StructuredOutputs

EXAMPLES = (
    "examples:\n"
    "  quire bench structured                          both cases, 64 streams of SmolLM2 on this CPU\n"
    "  quire bench structured --device cuda --tokens 256 --cases generate"
)
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array", "minItems": 40,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "minLength": 3, "maxLength": 40},
                               "age": {"type": "integer", "minimum": 0, "maximum": 120},
                               "city": {"enum": ["Bern", "Lima", "Oslo"]}, "member": {"type": "boolean"}},
                "required": ["name", "age", "city", "member"], "additionalProperties": False,
            },
        },
    },
    "required": ["people"], "additionalProperties": False,
}  # fmt: skip
"""Long enough that no answer ends by itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", metavar="NAME", help="model (default: smollm2-135m)")
    parser.add_argument("--device", default="auto", help="where it runs (default: auto)")
    parser.add_argument("--cases", nargs="+", default=["generate", "process"], choices=["generate", "process"],
                        help="which to measure (default: both)")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="chats at once (default: 64)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens of each answer (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="repetitions (default: 3)")


def run(args: argparse.Namespace) -> int:
    from quire.machine import describe_machine

    machine = describe_machine()
    for case in args.cases:
        free, held = _generate(args) if case == "generate" else asyncio.run(_process(args))
        ratios = [mine / other for mine, other in zip(held, free, strict=True)]
        print(json.dumps({
            "bench": "structured", "case": case, "model": args.model, "streams": args.streams, "tokens": args.tokens,
            "tok_s_free": round(statistics.median(free), 1), "tok_s_schema": round(statistics.median(held), 1),
            "ratio": round(statistics.median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios], **machine,
        }), flush=True)
    return 0


def _params(tokens: int) -> tuple[SamplingParams, SamplingParams]:
    """Without and with the schema."""
    plain = SamplingParams(temperature=0.8, max_tokens=tokens, ignore_eos=True, seed=1)
    return plain, SamplingParams(temperature=0.8, max_tokens=tokens, ignore_eos=True, seed=1,
                                 structured_outputs=StructuredOutputs(json=SCHEMA))


def _messages(streams: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"List people number {i} knows, as JSON."}] for i in range(streams)]


def _generate(args: argparse.Namespace) -> tuple[list[float], list[float]]:
    found: tuple[list[float], list[float]] = ([], [])
    with LLM(args.model, device=args.device, max_num_seqs=args.streams) as llm:
        prompts = [llm.chat_prompt(one) for one in _messages(args.streams)]
        for params in _params(4):
            llm.generate(prompts, params, use_tqdm=False)
        for _ in range(args.rounds):
            for params, figures in zip(_params(args.tokens), found, strict=True):
                began = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                figures.append(sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - began))
    return found


async def _process(args: argparse.Namespace) -> tuple[list[float], list[float]]:
    found: tuple[list[float], list[float]] = ([], [])
    async with await AsyncLLM.start(args.model, device=args.device, max_num_seqs=args.streams,
                                    max_waiting_requests=args.streams) as llm:
        prompts = [f"List people number {i} knows, as JSON." for i in range(args.streams)]
        for params in _params(4):
            await _all(llm, prompts, params)
        for _ in range(args.rounds):
            for params, figures in zip(_params(args.tokens), found, strict=True):
                began = time.perf_counter()
                tokens = await _all(llm, prompts, params)
                figures.append(tokens / (time.perf_counter() - began))
    return found


async def _all(llm: AsyncLLM, prompts: list[str], params: SamplingParams) -> int:
    async def one(prompt: str) -> int:
        return sum([len(out.outputs[0].token_ids) async for out in llm.generate(prompt, params, output_kind="delta")])

    return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))
