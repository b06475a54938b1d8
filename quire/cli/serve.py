"""`quire serve`: Answers the OpenAI API on a port of this machine.

The server listens on loopback unless told otherwise. Set API keys (QUIRE_API_KEYS or --api-key-file) before it listens
anywhere else. SIGTERM and Ctrl-C let running requests finish, within --drain-timeout."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import signal
from typing import Any, NoReturn

from quire.cli.options import add_engine_options, add_options_of, engine_options, options_of
from quire.server_config import GuardConfig, ServerConfig

EXAMPLES = (
    "examples:\n"
    "  quire serve\n"
    "  quire serve Qwen/Qwen3-0.6B --port 8080 --max-model-len 4096\n"
    "  QUIRE_API_KEYS=$(openssl rand -hex 16) quire serve --host 0.0.0.0\n"
    "  quire serve --data-parallel-size 2\n"
    "  quire serve --port 0 --register http://127.0.0.1:8000\n"
    "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n"
    '       -d \'{"messages": [{"role": "user", "content": "Hello!"}]}\''
)
_PREFIX, _GUARD_PREFIX = "server:", "guard:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_name", nargs="?", metavar="MODEL",
                        help="alias, path or hub id, as --model (default: smollm2-135m)")
    add_options_of(parser, "server", _PREFIX, dataclasses.fields(ServerConfig))
    # How long a request may take is the server's option.
    guard = [f for f in dataclasses.fields(GuardConfig) if f.name != "request_timeout"]
    add_options_of(parser, "guarding the engine", _GUARD_PREFIX, guard)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    with contextlib.suppress(ValueError):  # not the main thread: tests
        signal.signal(signal.SIGTERM, _stop)  # until the server has its own, which may take a second of imports
    from quire.cli.engine import fetch
    from quire.config import EngineConfig
    from quire.router.registration import check_registration, heartbeat_of
    from quire.server.access.auth import ApiKeys
    from quire.server.run import run as serve
    from quire.server.telemetry import log

    config = ServerConfig.create(**options_of(args, _PREFIX))
    options = _engine_options(args, len(ApiKeys.of(config)))
    guard = options_of(args, _GUARD_PREFIX)
    GuardConfig.split(guard)
    engine = EngineConfig.create(**options)  # wrong options are refused before anything is fetched
    fetch(engine.model.model, engine.model.cache_dir)
    log.set_up(config.log_format, config.log_level)

    async def start() -> Any:
        if config.data_parallel_size > 1:
            from quire.router.engines import ReplicatedLLM

            return await ReplicatedLLM.start(config.data_parallel_size, **options, **guard)
        from quire.async_llm import AsyncLLM

        return await AsyncLLM.start(**options, **guard)

    check_registration(config)
    beats: list[asyncio.Task[None]] = []

    def ready(address: str, app: Any) -> None:
        if config.register is not None:
            beat = heartbeat_of(config, address, engine.cache.kv_secret, engine.transfer.kv_role or "both")
            beats.append(asyncio.create_task(beat.run(lambda: app.service.draining), name="quire-heartbeat"))

    return serve(config, start, ready=ready)


def _stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(0)


def _engine_options(args: argparse.Namespace, num_keys: int) -> dict[str, Any]:
    from quire.cli.commands import UsageError

    options = engine_options(args)
    if args.model_name is not None:
        if "model" in options:
            raise UsageError("the model is named twice: give MODEL or --model")
        options["model"] = args.model_name
    if num_keys > 1:
        options.setdefault("scheduling_policy", "fair")  # one key's load must not starve another's
    return options
