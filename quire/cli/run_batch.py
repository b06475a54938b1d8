"""Answers the requests of an OpenAI batch file, many at once, and writes each answer when it is there.

Input: one request a line, with custom_id, method, url (/v1/chat/completions or /v1/completions) and body. Output: one
answer a line, in the order in which they come. Run it again after it was stopped and it goes on: lines that have an
answer are not done again. The model runs here, or on a server (--url). Exits with 1 where a request was refused: the
output says why, beside the other answers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from quire.cli.options import add_engine_options, engine_options, flag_of, integer
from quire.cli.remote import add_endpoint_options, endpoint_of
from quire.cli.terminal import printable
from quire.client.batch import BatchLine, BatchOutput, read_batch
from quire.client.endpoint import Endpoint, EndpointError
from quire.errors import ConfigError

EXAMPLES = (
    "examples:\n"
    "  quire run-batch -i questions.jsonl -o answers.jsonl\n"
    "  quire run-batch -i questions.jsonl -o answers.jsonl --model gemma3-270m --max-num-seqs 64\n"
    "  quire run-batch -i questions.jsonl -o answers.jsonl --url http://127.0.0.1:8000"
)
_UNREACHABLE = 0
_RETRIED = (_UNREACHABLE, 429, 500, 502, 503, 504)
"""Answers that another try may better: too many requests, an engine that restarts."""
Ask = Callable[[BatchLine], Awaitable[tuple[int, Any, float]]]
"""Sends one request: status, answer, seconds to wait before trying again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument("-i", "--input-file", metavar="FILE", required=True, help="requests, one JSON object a line")
    files.add_argument("-o", "--output-file", metavar="FILE", required=True, help="answers, appended as they come")
    files.add_argument("--overwrite", action="store_true", help="forget the answers that the output file holds")
    load = parser.add_argument_group("load")
    load.add_argument("--max-concurrency", type=integer, default=128, metavar="N",
                      help="requests under way at once (default: %(default)s)")
    load.add_argument("--tries", type=integer, default=5, metavar="N",
                      help="how often a request is sent that a busy or restarting server turns down "
                           "(default: %(default)s)")
    add_endpoint_options(parser, url_default=None)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    for name in ("max_concurrency", "tries"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{flag_of(name)} must be at least 1", field=name)
    options = engine_options(args)
    if args.url is not None and options:
        first = min(options)
        raise ConfigError(f"{flag_of(first)} is for the server to decide: leave it out with --url", field=first)
    if Path(args.input_file).resolve() == Path(args.output_file).resolve():
        raise ConfigError("the output file is the input file: name another", field="output_file")
    lines = list(read_batch(Path(args.input_file)))  # a mistake in line 900 is told before line 1 is computed
    with BatchOutput(Path(args.output_file), fresh=args.overwrite) as output:
        todo = [line for line in lines if line.custom_id not in output.finished]
        if len(todo) < len(lines):
            print(f"{len(lines) - len(todo)} of {len(lines)} requests have an answer already", file=sys.stderr)
        if todo:
            asyncio.run(_answer_all(args, options, todo, output))
        refused = {line.custom_id: why for line in lines if (why := output.finished[line.custom_id]) is not None}
    print(f"{len(lines) - len(refused)} answered, {len(refused)} failed: {args.output_file}", file=sys.stderr)
    if refused:
        name, why = next(iter(refused.items()))
        print(f"the first that failed is {name}, with {printable(why).splitlines()[0][:300]}", file=sys.stderr)
    return 1 if refused else 0


async def _answer_all(args: argparse.Namespace, options: dict[str, Any], todo: list[BatchLine],
                      output: BatchOutput) -> None:
    from tqdm import tqdm

    sending = _remote(endpoint_of(args)) if args.url is not None else _local(options, args.max_concurrency)
    waiting = iter(todo)
    async with sending as ask:
        with tqdm(total=len(todo), unit="request", disable=not sys.stderr.isatty()) as bar:

            async def worker() -> None:
                for line in waiting:
                    status, body = await _try(ask, line, args.tries)
                    if status == _UNREACHABLE:
                        raise EndpointError(f"{body}: start the batch again when it is back, it goes on from here")
                    output.write(line, _id_of(body, line), status, body)
                    bar.update()

            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(min(args.max_concurrency, len(todo))):
                        workers.create_task(worker())
            except ExceptionGroup as group:
                raise group.exceptions[0] from None


async def _try(ask: Ask, line: BatchLine, tries: int) -> tuple[int, Any]:
    while True:
        status, body, wait = await ask(line)
        tries -= 1
        if status not in _RETRIED or tries == 0:
            return status, body
        await asyncio.sleep(wait)


def _id_of(body: Any, line: BatchLine) -> str:
    found = body.get("id") if isinstance(body, dict) else None
    return str(found) if found else f"line-{line.number}"


@contextlib.asynccontextmanager
async def _local(options: dict[str, Any], concurrency: int) -> AsyncIterator[Ask]:
    """The model in a process of its own, behind the very routes that a server has."""
    import httpx

    from quire.async_llm import AsyncLLM
    from quire.cli.engine import fetch
    from quire.config import EngineConfig
    from quire.server.access.auth import ApiKeys
    from quire.server.app import build_app
    from quire.server_config import ServerConfig

    engine = EngineConfig.create(**options)
    fetch(engine.model.model, engine.model.cache_dir)
    llm = await AsyncLLM.start(**{"max_waiting_requests": concurrency + 1, **options})
    try:
        app = build_app(llm, ServerConfig.create(request_timeout=1e6), keys=ApiKeys())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost",
                                     timeout=None) as client:
            yield lambda line: _post(client, line, None)
    finally:
        await llm.shutdown()


@contextlib.asynccontextmanager
async def _remote(endpoint: Endpoint) -> AsyncIterator[Ask]:
    import httpx

    model = endpoint.model_name()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=endpoint.url, headers=endpoint.headers, timeout=endpoint.timeout,
                                 limits=limits) as client:
        yield lambda line: _post(client, line, model)


async def _post(client: Any, line: BatchLine, model: str | None) -> tuple[int, Any, float]:
    import httpx

    body = line.body if model is None or "model" in line.body else {"model": model, **line.body}
    try:
        answer = await client.post(line.path, json=body)
    except httpx.HTTPError as error:
        return _UNREACHABLE, f"the server cannot be reached ({error or type(error).__name__})", 1.0
    try:
        found = answer.json()
    except json.JSONDecodeError:
        found = {"error": {"message": answer.text[:300]}}
    return answer.status_code, found, _seconds(answer.headers.get("retry-after"))


def _seconds(text: str | None) -> float:
    try:
        return min(max(float(text or 1.0), 0.05), 60.0)
    except ValueError:
        return 1.0
