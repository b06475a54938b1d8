"""Loads the default model, downloading it the first time, and lets it answer three questions.

The text appears as it is made; a closing line says how fast that was."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from quire.cli.engine import open_llm
from quire.cli.options import add_engine_options, engine_options, integer
from quire.cli.terminal import BOLD, DIM, GREEN, LiveText, bar, process_age, styled
from quire.cli.throughput import measure

if TYPE_CHECKING:
    from quire.engine.outputs.output import RequestOutput
    from quire.llm import LLM
    from quire.sampling.params import SamplingParams

EXAMPLES = "examples:\n  quire demo\n  quire demo --max-tokens 40 --num-threads 1"
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "How do plants make their food?",
    "Give three tips for learning to cook.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-tokens",
        type=integer,
        default=96,
        metavar="N",
        help="most tokens of each answer (default: %(default)s)",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from quire.sampling.params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    with open_llm(engine_options(args)) as llm:
        started = process_age()
        outputs = [_answer(llm, number, params) for number in range(len(QUESTIONS))]
    figures = measure(outputs)
    if figures is not None:
        line = f"\n{len(outputs)} answers, {figures.line()} · ready {started:.1f} s after start"
        print(styled(line, GREEN, sys.stdout), flush=True)
    return 0


def _answer(llm: LLM, number: int, params: SamplingParams) -> RequestOutput:
    """Ask one question and show the answer while it is made, with a bar below it."""
    question = QUESTIONS[number]
    print(styled(f"\n› {question}", BOLD, sys.stdout), flush=True)
    prompt: Any = question
    if llm.tokenizer is not None and llm.tokenizer.chat_template is not None:
        prompt = llm.chat_prompt([{"role": "user", "content": question}])
    with LiveText() as screen:
        screen.write("", _status(number, 0, params.max_tokens or 1, None))
        for output in llm.stream(prompt, params):
            made = len(output.outputs[0].token_ids)
            screen.write(output.outputs[0].text_delta, _status(number, made, params.max_tokens or 1, output))
        if output.outputs[0].finish_reason == "length":
            screen.write(" …")
    if output.error is not None:
        print(styled(f"(the answer failed: {output.error})", DIM, sys.stdout))
    return output


def _status(number: int, made: int, most: int, output: RequestOutput | None) -> str:
    share = (number + min(made / most, 1.0)) / len(QUESTIONS)
    text = f"{bar(share)} answer {number + 1} of {len(QUESTIONS)} · {made} tokens"
    first = None if output is None else output.metrics.first_token_time
    if first is None or made < 2:
        return text
    return f"{text} · {(made - 1) / max(time.time() - first, 1e-9):.0f} tok/s"
