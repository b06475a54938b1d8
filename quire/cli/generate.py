"""Continues each prompt, or answers it through the model's chat template (--chat).

The text is written as it is made. Several prompts are computed together and shown in their order. A prompt
`-` is read from standard input."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quire.cli.engine import open_llm
from quire.cli.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    read_text,
    sampling_params,
)
from quire.cli.terminal import BOLD, DIM, printable, styled
from quire.cli.throughput import measure
from quire.errors import InvalidRequestError

if TYPE_CHECKING:
    from quire.engine.outputs.output import CompletionOutput, RequestOutput
    from quire.llm import LLM
    from quire.sampling.params import SamplingParams

EXAMPLES = (
    "examples:\n"
    '  quire generate "The capital of France is"\n'
    '  quire generate --chat "Why is the sky blue?" --max-tokens 100 --temperature 0.7\n'
    "  quire generate --file letter.txt --stop END\n"
    "  quire generate --lines --file prompts.txt --json > answers.jsonl\n"
    "  git diff | quire generate --chat --system 'Summarise this change.' -"
)
DEFAULTS: dict[str, Any] = {"max_tokens": 256, "temperature": 0.0}
_SHOWN_PROMPT = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text to continue; - reads standard input"
    )
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="FILE",
        help="take a prompt from a file; may be given several times",
    )
    parser.add_argument(
        "--lines",
        action="store_true",
        help="every line of a file or of standard input is a prompt of its own",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--raw", action="store_true", help="give the model the text as it is (this is the default)"
    )
    form.add_argument(
        "--chat", action="store_true", help="make it a question, with the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt (with --chat)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object per prompt, with tokens, finish reason and timing",
    )
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="write text as it is made, or at the end (default: on, off with --json)",
    )
    add_sampling_options(parser, DEFAULTS)
    add_engine_options(parser, rename={"seed": "--engine-seed"})


def run(args: argparse.Namespace) -> int:
    from quire.cli.commands import UsageError

    if args.json and args.stream:
        raise UsageError("--json writes whole answers: leave --stream out")
    if args.system is not None and not args.chat:
        raise UsageError("--system needs --chat: without it the model gets your text as it is")
    params = sampling_params(args, DEFAULTS)
    prompts = _prompts(args)
    if not prompts:
        raise UsageError("there is no prompt: give one, or --file FILE, or - for standard input")
    with open_llm(engine_options(args), quiet=args.json) as llm:
        texts = [_render(llm, prompt, args) for prompt in prompts]
        if args.json or args.stream is False:
            outputs = llm.generate(texts, params, use_tqdm=sys.stderr.isatty())
            for number, output in enumerate(outputs):
                _print_whole(prompts, number, output, args.json, _has_text(llm, params))
        else:
            outputs = _stream(llm, prompts, texts, params)
    return _finish(outputs, quiet=args.json)


def _finish(outputs: list[RequestOutput], quiet: bool) -> int:
    """The closing line on a terminal, and a failure for each request that the engine gave up."""
    sys.stdout.flush()
    figures = measure(outputs)
    if figures is not None and not quiet and sys.stderr.isatty():
        print(styled(figures.line(), DIM, sys.stderr), file=sys.stderr)
    failed = [
        (number, output.error) for number, output in enumerate(outputs, start=1) if output.error is not None
    ]
    for number, error in failed:
        print(f"quire: error: prompt {number} failed: {error}", file=sys.stderr)
    return 1 if failed else 0


def _prompts(args: argparse.Namespace) -> list[str]:
    """The prompts in the order of the command line, those of files after them."""
    found: list[str] = []
    for prompt in args.prompts:
        found += _split(read_text("-"), args.lines) if prompt == "-" else [prompt]
    for path in args.file:
        found += _split(read_text(path), args.lines)
    return found


def _split(text: str, lines: bool) -> list[str]:
    if lines:
        return [line for line in text.splitlines() if line.strip()]
    return [text.removesuffix("\n")]


def _render(llm: LLM, prompt: str, args: argparse.Namespace) -> Any:
    """What the engine gets: the prompt, the chat around it, or its ids when there is no tokenizer."""
    if args.chat:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        return llm.chat_prompt([*system, {"role": "user", "content": prompt}])
    return _token_ids(prompt) if llm.tokenizer is None else prompt


def _token_ids(prompt: str) -> list[int]:
    try:
        return [int(word) for word in prompt.replace(",", " ").split()]
    except ValueError:
        raise InvalidRequestError(
            "without a tokenizer (--skip-tokenizer-init) a prompt is a list of token ids, as in 1 5 9",
            "prompt",
        ) from None


def _heading(prompts: list[str], number: int) -> str:
    """A line above each answer when there are several."""
    if len(prompts) == 1:
        return ""
    shown = " ".join(printable(prompts[number]).split())
    shown = shown if len(shown) <= _SHOWN_PROMPT else shown[: _SHOWN_PROMPT - 1] + "…"
    before = "\n" if number else ""
    return before + styled(f"[{number + 1}/{len(prompts)}] {shown}", BOLD, sys.stdout) + "\n"


def _has_text(llm: LLM, params: SamplingParams) -> bool:
    """Whether answers are texts; else they are token ids."""
    return llm.tokenizer is not None and params.detokenize


def _answer_text(output: RequestOutput, has_text: bool) -> str:
    """The text of every sequence, or its ids. A text is empty where the model ends at once."""
    return "\n".join(c.text if has_text else " ".join(map(str, c.token_ids)) for c in output.outputs)


def _print_whole(prompts: list[str], number: int, output: RequestOutput, as_json: bool, has_text: bool) -> None:
    if as_json:
        print(json.dumps(_record(prompts[number], output), ensure_ascii=False))
    else:
        print(_heading(prompts, number) + _safe(_answer_text(output, has_text)))


def _safe(text: str) -> str:
    """On a terminal, without control characters; in a pipe, as the model wrote it."""
    return printable(text) if sys.stdout.isatty() else text


def _stream(llm: LLM, prompts: list[str], texts: list[Any], params: SamplingParams) -> list[RequestOutput]:
    """Write answers in order: the first that is unfinished as it grows, later ones when their turn comes."""
    finished: dict[int, RequestOutput] = {}
    latest: dict[int, RequestOutput] = {}
    written: dict[int, int] = {}
    turn, has_text = 0, _has_text(llm, params)
    for number, output in _numbered(llm, texts, params):
        latest[number] = output
        if output.finished:
            finished[number] = output
        while turn < len(texts) and turn in latest:
            text = _answer_text(latest[turn], has_text) if turn in finished else latest[turn].outputs[0].text
            start = written.get(turn)
            heading = _heading(prompts, turn) if start is None else ""
            sys.stdout.write(heading + _safe(text[start or 0 :]))
            written[turn] = len(text)
            sys.stdout.write("\n" if turn in finished else "")
            sys.stdout.flush()
            if turn not in finished:
                break
            turn += 1
    return [finished[number] for number in range(len(texts))]


def _numbered(llm: LLM, texts: list[Any], params: SamplingParams) -> Iterator[tuple[int, RequestOutput]]:
    """The outputs of all prompts, whenever one has grown, with the place of its prompt."""
    for number, text in enumerate(texts):
        try:
            llm.add_request(str(number), text, params)
        except InvalidRequestError as error:
            if len(texts) > 1:
                error.args = (f"prompt {number + 1}: {error}",)
            raise
    while llm.has_unfinished_requests():
        for output in llm.step():
            yield int(output.request_id), output


def _record(prompt: str, output: RequestOutput) -> dict[str, Any]:
    """One line of --json."""
    times = output.metrics
    return {
        "prompt": prompt,
        "outputs": [_completion(c) for c in output.outputs],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "output_tokens": sum(len(c.token_ids) for c in output.outputs),
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "seed": output.seed,
        "error": output.error,
        "time_to_first_token_s": times.time_to_first_token,
        "latency_s": times.latency,
    }


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "cumulative_logprob": completion.cumulative_logprob,
        "logprobs": _logprobs(completion.logprobs),
    }


def _logprobs(positions: Any) -> list[list[dict[str, Any]] | None] | None:
    """Each position as a list, the token itself first (as keys of JSON, ids would become texts)."""
    if positions is None:
        return None
    return [
        position
        if position is None
        else [{"token_id": token, **dataclasses.asdict(entry)} for token, entry in position.items()]
        for position in positions
    ]
