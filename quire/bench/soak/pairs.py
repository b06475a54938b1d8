"""`quire bench soak --disaggregated`: prompts computed by some engines and continued by others, which are killed or
stopped under load. Every answer must be that of one engine alone, and in the end no pool may hold a block.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.errors import EngineDeadError, QueueFullError, QuireError
from quire.llm import LLM
from quire.sampling.params import SamplingParams

_LEASE = 1.0
_SLOWEST = 300.0
_AT_ONCE = 16
_TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
         "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
         "bos_token_id": 1, "eos_token_id": 2}
_HELD = ("kv_blocks_used", "kv_leases", "kv_reservations", "kv_reservations_quarantined", "kv_prefills_open",
         "kv_prompts_open", "requests_running", "requests_waiting", "requests_arriving")


@dataclass(slots=True)
class PairFindings:
    requests: int = 0
    retries: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    """Of all engines: what was counted since each one's last start."""
    seconds: float = 0.0


@dataclass(slots=True)
class _Asked:
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] | None = None


def run_disaggregated(requests: int, kills: int, seed: int, options: dict[str, Any]) -> int:
    """Exit code 1 where anything was wrong."""
    with tempfile.TemporaryDirectory(prefix="quire-soak-") as folder:
        if "model" not in options:
            (Path(folder) / "config.json").write_text(json.dumps(_TINY))
            options = {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True, **options}
        options = {"num_kv_blocks": 160, "max_model_len": 1024, "num_threads": 1, "max_num_batched_tokens": 32,
                   **options}
        secret = Path(folder) / "secret"
        secret.write_text(f"{random.SystemRandom().getrandbits(256):x}")
        found = asyncio.run(soak_pairs(requests, kills, seed, {**options, "kv_secret_file": str(secret)}))
    print(json.dumps({
        "bench": "soak", "disaggregated": True, "requests": found.requests, "seconds": round(found.seconds, 1),
        "kills": dict(found.kills), "retries": found.retries, "totals": dict(sorted(found.totals.items())),
        "wrong": found.wrong[:20]}))
    return 1 if found.wrong else 0


async def soak_pairs(requests: int, kills: int, seed: int, options: dict[str, Any], num_prefill: int = 2,
                     num_decode: int = 2) -> PairFindings:
    found, dice = PairFindings(requests), random.Random(seed)
    # Of one who was killed the next finds the port again.
    ports = _free_ports(num_prefill)
    addresses = [f"kv://127.0.0.1:{port}" for port in ports]
    common = {**options, "kv_lease": _LEASE, "max_restarts": 1000, "heartbeat_timeout": 30.0,
              "max_waiting_requests": 4096}
    common.pop("model", None)
    async with contextlib.AsyncExitStack() as stack:
        prefill = [await stack.enter_async_context(await AsyncLLM.start(
            options["model"], **common, kv_role="prefill", kv_listen=f"127.0.0.1:{port}")) for port in ports]
        decode = [await stack.enter_async_context(await AsyncLLM.start(
            options["model"], **common, kv_role="decode", kv_peers=",".join(addresses), kv_least_tokens=1,
            kv_fetch_timeout=10.0)) for _ in range(num_decode)]
        asked = [_request(dice, options["max_model_len"]) for _ in range(requests)]
        started = time.perf_counter()
        await _load(prefill, decode, asked, kills, dice, found)
        found.seconds = time.perf_counter() - started
        await _look_for_damage(prefill, decode, found)
    _compare(asked, {name: value for name, value in options.items() if not name.startswith("kv_")}, found)
    return found


def _request(dice: random.Random, max_model_len: int) -> _Asked:
    prompt = [dice.randrange(3, 500) for _ in range(dice.randint(20, max_model_len // 3))]
    return _Asked(prompt, SamplingParams(max_tokens=dice.randint(1, 24), seed=dice.getrandbits(32), ignore_eos=True,
                                         temperature=dice.choice([0.0, 1.0])))


# ---- load and kills


async def _load(prefill: list[AsyncLLM], decode: list[AsyncLLM], asked: list[_Asked], kills: int, dice: random.Random,
                found: PairFindings) -> None:
    gate = asyncio.Semaphore(_AT_ONCE)
    left = [kills]
    done = asyncio.Event()

    async def one(place: int, request: _Asked) -> None:
        async with gate:
            await _answer(decode, place, request, found)

    async def killer() -> None:
        while left[0] and not done.is_set():
            await _hurt(prefill, decode, dice, found)
            left[0] -= 1
            if dice.random() < 0.8:  # mostly one at a time, so that there is something to be hit
                await _all_up([*prefill, *decode])
                await asyncio.sleep(dice.uniform(1.0, 2.0))

    killing = asyncio.create_task(killer())
    waves = [asyncio.create_task(one(place, request)) for place, request in enumerate(asked)]
    await asyncio.gather(*waves)
    # All kills are wanted: the load goes round again until the last one.
    while not killing.done():
        again = dice.sample(asked, min(len(asked), _AT_ONCE))
        await asyncio.gather(*[_answer(decode, place, _Asked(each.prompt, each.params), found)
                               for place, each in enumerate(again)])
    done.set()
    await killing


async def _answer(decode: list[AsyncLLM], place: int, request: _Asked, found: PairFindings) -> None:
    """As a front does: a request whose engine dies is given to the next."""
    deadline = time.monotonic() + _SLOWEST
    while time.monotonic() < deadline:
        place += 1
        try:
            async for output in decode[place % len(decode)].generate(request.prompt, request.params,
                                                                     output_kind="final"):
                if output.error is not None:
                    found.wrong.append(f"a request failed: {output.error}")
                request.tokens = list(output.outputs[0].token_ids)
            return
        except (EngineDeadError, QueueFullError):
            found.retries += 1
            await asyncio.sleep(0.1)
        except QuireError as error:
            found.wrong.append(f"a request was refused: {error}")
            return
    found.wrong.append(f"a request got no answer within {_SLOWEST:g} s")


async def _hurt(prefill: list[AsyncLLM], decode: list[AsyncLLM], dice: random.Random, found: PairFindings) -> None:
    """Kill an engine that is up, or stop it for longer than the lease."""
    kind, engines = dice.choice([("prefill", prefill), ("decode", decode)])
    engine, number = dice.choice(engines), dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    deadline = time.monotonic() + _SLOWEST
    while time.monotonic() < deadline:
        await asyncio.sleep(dice.uniform(0.2, 1.0))
        pid = engine.engine_pid
        try:
            await engine.check_health()
            if pid is None:
                continue
            os.kill(pid, number)
        except (QuireError, ProcessLookupError):
            continue
        found.kills[f"{kind} {number.name}"] += 1
        if number is signal.SIGSTOP:
            await asyncio.sleep(2.5 * _LEASE)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return


async def _all_up(engines: list[AsyncLLM]) -> None:
    deadline = time.monotonic() + _SLOWEST
    for engine in engines:
        while time.monotonic() < deadline:
            try:
                await engine.check_health()
                break
            except QuireError:
                await asyncio.sleep(0.1)


# ---- afterwards


async def _look_for_damage(prefill: list[AsyncLLM], decode: list[AsyncLLM], found: PairFindings) -> None:
    for name, engines in (("prefill", prefill), ("decode", decode)):
        for index, engine in enumerate(engines):
            held = await _settled(engine)
            if held:
                found.wrong.append(f"{name} engine {index} holds {held} when all is over")
            try:
                await engine.check()
            except QuireError as error:
                found.wrong.append(f"{name} engine {index}: {error}")
            metrics = await engine.metrics(refresh=True)
            for key in ("kv_prefills_done", "kv_prefills_failed", "kv_prefills_cancelled", "kv_prompts_arrived",
                        "kv_prompts_failed", "kv_prompts_computed_here", "kv_links_lost", "invariant_errors"):
                found.totals[key] += int(metrics.get(key, 0))
    if found.totals["invariant_errors"]:
        found.wrong.append("an engine found its bookkeeping broken")


async def _settled(engine: AsyncLLM) -> dict[str, Any]:
    """What an engine still holds after a while in which it should have let go of everything."""
    held: dict[str, Any] = {"unreachable": True}
    deadline = time.monotonic() + 60.0
    while held and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        with contextlib.suppress(QuireError):
            await engine.check_health()
            metrics = await engine.metrics(refresh=True)
            held = {key: metrics[key] for key in _HELD if metrics.get(key)}
    return held


def _compare(asked: list[_Asked], options: dict[str, Any], found: PairFindings) -> None:
    """Against one engine that does everything itself."""
    EngineConfig.create(**options)
    with LLM(**options) as alone:
        outputs = alone.generate([request.prompt for request in asked], [request.params for request in asked],
                                 use_tqdm=False)
    for request, output in zip(asked, outputs, strict=True):
        if request.tokens != list(output.outputs[0].token_ids):
            found.wrong.append(f"a prompt of {len(request.prompt)} tokens gave {request.tokens}, and must give "
                               f"{output.outputs[0].token_ids}")


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
