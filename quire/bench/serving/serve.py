"""`quire bench serve`: Sends load to a server of the OpenAI API and reports throughput and latency.

Any server will do: Quire's, vLLM's, a hosted one. Requests are random texts, ShareGPT conversations, or a production
trace replayed; they arrive at a rate, or as fast as a number at a time allows."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from quire.bench.figures.drawing import check_drawable
from quire.bench.serving.load_client import PATHS, Sent, Target, send_all
from quire.bench.serving.load_data import LoadRequest, arrival_times, random_requests, sharegpt_requests, trace_requests
from quire.bench.serving.load_report import parse_goodput, picture, report, table
from quire.cli.options import flag_of, integer, number
from quire.cli.remote import add_endpoint_options, endpoint_of
from quire.client.endpoint import EndpointError
from quire.errors import ConfigError

EXAMPLES = (
    "examples:\n"
    "  quire bench serve --num-prompts 200 --request-rate 4\n"
    "  quire bench serve --backend openai-chat --max-concurrency 16 --random-input-len 256 --random-output-len 64\n"
    "  quire bench serve --dataset-name trace --dataset-path conversation_trace.jsonl --trace-speed 4\n"
    "  quire bench serve --goodput ttft:500 tpot:50 --save-result run.json --plot run.png"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_endpoint_options(parser)
    parser.add_argument("--backend", choices=tuple(PATHS), default="openai",
                        help="which route to load: completions or chat completions (default: %(default)s)")
    parser.add_argument("--endpoint", metavar="PATH", help="path of the route, where it is another than the usual one")
    _add_data(parser.add_argument_group("requests"))
    _add_load(parser.add_argument_group("load"))
    out = parser.add_argument_group("report")
    out.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS",
                     help="count the requests that keep these bounds, as in ttft:200 tpot:50 e2el:5000")
    out.add_argument("--metric-percentiles", default="99", metavar="P,...", help="percentiles (default: %(default)s)")
    out.add_argument("--json", action="store_true", help="print the figures as one JSON object, not as a table")
    out.add_argument("--save-result", metavar="FILE", help="write the figures as JSON, too")
    out.add_argument("--save-detailed", action="store_true", help="with every request's times in it")
    out.add_argument("--plot", metavar="FILE", help="draw how the latencies are spread (.png or .svg)")
    out.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_data(data: Any) -> None:
    data.add_argument("--dataset-name", choices=("random", "sharegpt", "trace"), default="random",
                      help="what to send (default: %(default)s)")
    data.add_argument("--dataset-path", metavar="FILE",
                      help="ShareGPT's JSON; a trace in Mooncake's format, or Azure's (.csv)")
    data.add_argument("--num-prompts", type=integer, default=100, metavar="N", help="requests (default: %(default)s)")
    data.add_argument("--random-input-len", type=integer, default=512, metavar="N", help="tokens of a random prompt, "
                      "one a word unless --tokenizer is given (default: %(default)s)")
    data.add_argument("--random-output-len", type=integer, default=128, metavar="N",
                      help="tokens to generate for it (default: %(default)s)")
    data.add_argument("--random-range-ratio", type=number, default=0.0, metavar="X",
                      help="spread both lengths by this share to either side (default: %(default)s)")
    data.add_argument("--random-prefix-len", type=integer, default=0, metavar="N",
                      help="tokens at the beginning that all random prompts share (default: %(default)s)")
    data.add_argument("--sharegpt-output-len", type=integer, metavar="N",
                      help="tokens to generate (default: as many as the answer in the data)")
    data.add_argument("--trace-speed", type=number, default=1.0, metavar="X",
                      help="replay a trace this many times as fast (default: %(default)s)")
    data.add_argument("--max-input-len", type=integer, metavar="N", help="cut longer prompts of a trace")
    data.add_argument("--max-output-len", type=integer, metavar="N", help="generate at most this, in a trace")
    data.add_argument("--tokenizer", metavar="MODEL", help="count prompts exactly, with this model's tokenizer")
    data.add_argument("--seed", type=integer, default=0, metavar="N",
                      help="of data and arrivals (default: %(default)s)")
    data.add_argument("--temperature", type=number, default=0.0, metavar="X", help="(default: %(default)s)")
    data.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=None,
                      help="generate to the full length, where the server knows ignore_eos (default: for random data)")
    data.add_argument("--extra-body", metavar="JSON", default="{}", help="more fields for every request")


def _add_load(load: Any) -> None:
    load.add_argument("--request-rate", type=number, default=math.inf, metavar="X",
                      help="requests a second; inf sends them at once (default: %(default)s)")
    load.add_argument("--burstiness", type=number, default=1.0, metavar="X",
                      help="1 is Poisson, less is burstier, more is steadier (default: %(default)s)")
    load.add_argument("--max-concurrency", type=integer, metavar="N",
                      help="most requests under way (default: no bound)")
    load.add_argument("--num-warmups", type=integer, default=1, metavar="N",
                      help="requests before the clock starts (default: %(default)s)")
    load.add_argument("--ready-check-timeout-sec", type=number, default=30.0, metavar="X",
                      help="wait this long for the server to answer (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    _check(args)
    bounds, percentiles = parse_goodput(args.goodput), _percentiles(args.metric_percentiles)
    requests = _requests(args)
    if len(requests) < args.num_prompts:
        print(f"the dataset has only {len(requests)} usable requests of {args.num_prompts}", file=sys.stderr)
    target = Target(endpoint_of(args), args.backend, _fields(args), args.endpoint)
    _wait_until_ready(target, args.ready_check_timeout_sec)
    times = ([request.at or 0.0 for request in requests] if args.dataset_name == "trace"
             else arrival_times(len(requests), args.request_rate, args.burstiness, args.seed))
    sent, seconds = asyncio.run(_measure(args, target, requests, times))
    found = {**_settings(args, target), "num_prompts": len(requests), **report(sent, seconds, bounds, percentiles)}
    print(json.dumps(found) if args.json else table(found))
    if args.save_result:
        detail = {"requests": [_detail(one, sent[0].start) for one in sent]} if args.save_detailed else {}
        Path(args.save_result).write_text(json.dumps(found | detail, indent=1))
    if args.plot:
        print(f"picture: {picture(sent, _title(args)).save(args.plot)}", file=sys.stderr)
    return 0 if found["completed"] else 1


def _check(args: argparse.Namespace) -> None:
    for name, low in (("num_prompts", 1), ("random_input_len", 1), ("random_output_len", 1), ("random_prefix_len", 0),
                      ("num_warmups", 0), ("max_concurrency", 1)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise ConfigError(f"{flag_of(name)} must be at least {low}, not {value}", field=name)
    for name in ("request_rate", "burstiness", "trace_speed"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"{flag_of(name)} must be above 0, not {getattr(args, name)}", field=name)
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError("--random-range-ratio must be at least 0 and below 1", field="random_range_ratio")
    if args.save_result is not None and not Path(args.save_result).absolute().parent.is_dir():
        raise ConfigError(f"--save-result {args.save_result}: there is no such folder", field="save_result")
    check_drawable(args.plot)
    if args.dataset_name == "random" and args.dataset_path is not None:
        raise ConfigError("--dataset-path is for --dataset-name sharegpt or trace", field="dataset_path")
    if args.dataset_name != "random" and args.dataset_path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path", field="dataset_path")


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= share <= 100 for share in found):
        raise ConfigError(f"--metric-percentiles takes numbers from 0 to 100, as in 50,90,99, not {text!r}",
                          field="metric_percentiles")
    return found


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    try:
        extra = json.loads(args.extra_body)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}", field="extra_body") from error
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body must be a JSON object", field="extra_body")
    ignore = args.dataset_name == "random" if args.ignore_eos is None else args.ignore_eos
    return {"temperature": args.temperature, **({"ignore_eos": True} if ignore else {}), **extra}


def _requests(args: argparse.Namespace) -> list[LoadRequest]:
    path = Path(args.dataset_path or "")
    if args.dataset_name == "trace":
        return trace_requests(path, args.num_prompts, speed=args.trace_speed, max_input_len=args.max_input_len,
                              max_output_len=args.max_output_len, seed=args.seed)
    tokenizer = _tokenizer(args.tokenizer)
    if args.dataset_name == "sharegpt":
        return sharegpt_requests(path, args.num_prompts, output_len=args.sharegpt_output_len, seed=args.seed,
                                 count_tokens=None if tokenizer is None else lambda text: len(tokenizer.encode(text)))

    def shorten(text: str, count: int) -> str:
        return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:count]))

    return random_requests(args.num_prompts, args.random_input_len, args.random_output_len,
                           prefix_len=args.random_prefix_len, range_ratio=args.random_range_ratio, seed=args.seed,
                           shorten=None if tokenizer is None else shorten)


def _tokenizer(model: str | None) -> Any:
    if model is None:
        return None
    from quire.models.loader.source import resolve_model

    return resolve_model(model, load_format="dummy").tokenizer()  # which needs no weights


def _wait_until_ready(target: Target, seconds: float) -> None:
    """The model's name is asked for; a server that is starting gets time to answer."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            target.endpoint.model_name()
            return
        except EndpointError as error:
            if (error.status is not None and error.status < 500) or time.monotonic() >= deadline:
                raise
            time.sleep(0.5)


async def _measure(args: argparse.Namespace, target: Target, requests: list[LoadRequest],
                   times: list[float]) -> tuple[list[Sent], float]:
    from tqdm import tqdm

    for _ in range(args.num_warmups):
        warm, _ = await send_all(target, [LoadRequest("Hello", 2)], [0.0], None, lambda _: None)
        if warm[0].error is not None:
            raise EndpointError(f"{target.url} does not serve what is asked: {warm[0].error}")
    hidden = args.disable_tqdm or not sys.stderr.isatty()
    with tqdm(total=len(requests), unit="request", disable=hidden) as bar:
        return await send_all(target, requests, times, args.max_concurrency, lambda _: bar.update() and None)


def _settings(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    rate = args.request_rate if math.isfinite(args.request_rate) else "inf"
    return {"bench": "serve", "backend": args.backend, "url": target.url, "model": target.endpoint.model_name(),
            "dataset": args.dataset_name, "num_prompts": args.num_prompts, "request_rate": rate,
            "burstiness": args.burstiness, "max_concurrency": args.max_concurrency, "seed": args.seed}


def _title(args: argparse.Namespace) -> str:
    load = f"at most {args.max_concurrency} at once" if args.max_concurrency else f"{args.request_rate:g} requests/s"
    return f"{args.num_prompts} requests, {args.dataset_name}, {load}"


def _detail(one: Sent, origin: float) -> dict[str, Any]:
    return {"start": one.start - origin, "pieces": [at - one.start for at in one.pieces], "error": one.error,
            "prompt_tokens": one.prompt_tokens, "output_tokens": one.output_tokens}
