"""`quire bench structured`: chats that answer in the shape of a JSON schema against the same chats without one.

Both in one engine, taking turns at being first; the ratio is the median over the rounds. All answers have the same
length, and the grammar is compiled before. Case `generate`: `LLM.chat`, whose masks are filled by one call for all
sequences of a step. Case `process`: the engine in its own process, as a server has it, with matchers in processes of
theirs. Steps are reported, too: a sequence whose mask is late is missing from its step, and one more is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from quire.async_llm import AsyncLLM
from quire.errors import QuireError
from quire.llm import LLM
from quire.sampling.params import SamplingParams
from quire.structured.spec import StructuredOutputs

if TYPE_CHECKING:
    from quire.tokenizer.tokenizer import Tokenizer

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
        ratios = [mine.rate / other.rate for mine, other in zip(held, free, strict=True)]
        print(json.dumps({
            "bench": "structured", "case": case, "model": args.model, "streams": args.streams, "tokens": args.tokens,
            "tok_s_free": round(statistics.median(one.rate for one in free), 1),
            "tok_s_schema": round(statistics.median(one.rate for one in held), 1),
            "ratio": round(statistics.median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios],
            "steps_free": [one.steps for one in free], "steps_schema": [one.steps for one in held], **machine,
        }), flush=True)
    return 0


@dataclass(frozen=True, slots=True)
class Turn:
    """All chats once."""

    rate: float
    """Tokens a second."""
    steps: int


def _params(tokens: int) -> tuple[SamplingParams, SamplingParams]:
    """Without and with the schema."""
    plain = SamplingParams(temperature=0.8, max_tokens=tokens, ignore_eos=True, seed=1)
    return plain, SamplingParams(temperature=0.8, max_tokens=tokens, ignore_eos=True, seed=1,
                                 structured_outputs=StructuredOutputs(json=SCHEMA))


def _prompts(tokenizer: Tokenizer | None, streams: int) -> list[dict[str, Any]]:
    assert tokenizer is not None
    return [{"prompt": tokenizer.apply_chat_template(
        [{"role": "user", "content": f"List people number {i} knows, as JSON."}]), "add_special_tokens": False}
        for i in range(streams)]


def _turns(args: argparse.Namespace) -> list[tuple[int, SamplingParams]]:
    """0: without the schema, 1: with it. Who is first changes, so that what grows slower, or faster, meets both."""
    pair = list(enumerate(_params(args.tokens)))
    return [turn for place in range(args.rounds) for turn in (pair if place % 2 == 0 else pair[::-1])]


def _generate(args: argparse.Namespace) -> tuple[list[Turn], list[Turn]]:
    found: tuple[list[Turn], list[Turn]] = ([], [])
    with LLM(args.model, device=args.device, max_num_seqs=args.streams) as llm:
        prompts = _prompts(llm.tokenizer, args.streams)
        for params in _params(4):
            llm.generate(prompts, params, use_tqdm=False)
        for which, params in _turns(args):
            before, began = llm.metrics()["steps"], time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            found[which].append(_turn(args, tokens, seconds, llm.metrics()["steps"] - before))
    return found


async def _process(args: argparse.Namespace) -> tuple[list[Turn], list[Turn]]:
    found: tuple[list[Turn], list[Turn]] = ([], [])
    async with await AsyncLLM.start(args.model, device=args.device, max_num_seqs=args.streams,
                                    max_waiting_requests=args.streams) as llm:
        prompts = _prompts(llm.tokenizer, args.streams)
        for params in _params(4):
            await _all(llm, prompts, params)
        for which, params in _turns(args):
            before, began = (await llm.metrics(refresh=True))["steps"], time.perf_counter()
            tokens = await _all(llm, prompts, params)
            seconds = time.perf_counter() - began
            found[which].append(_turn(args, tokens, seconds, (await llm.metrics(refresh=True))["steps"] - before))
    return found


def _turn(args: argparse.Namespace, tokens: int, seconds: float, steps: float) -> Turn:
    if tokens != args.streams * args.tokens:
        raise QuireError(f"{tokens} tokens came instead of {args.streams * args.tokens}: an answer ended by itself, or "
                         "failed")
    return Turn(tokens / seconds, int(steps))


async def _all(llm: AsyncLLM, prompts: list[dict[str, Any]], params: SamplingParams) -> int:
    async def one(prompt: dict[str, Any]) -> int:
        return sum([len(out.outputs[0].token_ids) async for out in llm.generate(prompt, params, output_kind="delta")])

    return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))
