"""`quire bench kv-benefit`: when is fetching a prefix from a pool faster than computing it?

Prints a table for networks, prompt lengths and a model, from the bytes of its KV and the cost of its prefill, and marks
where the pool loses. The cost of prefill is measured here, or given for another machine (--prefill-rate). --measure
compares some cells with real runs: a prompt computed, and the same prompt after a restart with its prefix from disk,
and from a peer's memory over TCP.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire.bench.figures.drawing import check_drawable
from quire.bench.kv.benefit_plot import benefit_plot
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kvpool.benefit import LATENCIES, Benefit, KVShape, Network, benefit, break_even
from quire.kvpool.keys import UNIT_TOKENS

EXAMPLES = (
    "examples:\n"
    "  quire bench kv-benefit                                  SmolLM2 on this machine, 10/100/400 Gbit/s\n"
    "  quire bench kv-benefit --shape 32 32 128 2 --prefill-rate 2000\n"
    "  quire bench kv-benefit --measure 512 2048               with real runs, about a minute"
)
_REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="whose KV and prefill (default: smollm2-135m)")
    parser.add_argument("--shape", type=int, nargs=4, metavar=("LAYERS", "KV_HEADS", "HEAD_DIM", "BYTES"),
                        help="instead of a model: shape of its KV and bytes of an element; needs --prefill-rate")
    parser.add_argument("--prefill-rate", type=float, metavar="TOK/S",
                        help="prompt tokens computed in a second (default: measured here)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 8192, 32768], metavar="N",
                        help="prompt lengths (default: 128 1024 8192 32768)")
    parser.add_argument("--gbits", type=float, nargs="+", default=[10.0, 100.0, 400.0], metavar="G",
                        help="networks in Gbit/s (default: 10 100 400)")
    parser.add_argument("--network", choices=sorted(LATENCIES), nargs="+", default=["rdma"],
                        help="what the latency is that of (default: rdma)")
    parser.add_argument("--efficiency", type=float, default=1.0, help="share of the line rate reached (default: 1)")
    parser.add_argument("--measure", type=int, nargs="*", metavar="N",
                        help="compare with real runs of prompts of N tokens (default of N: 512 2048)")
    parser.add_argument("--plot", metavar="FILE", help="draw which network is fast enough: .svg or .png")
    parser.add_argument("--json", action="store_true", help="one JSON line per cell instead of a table")


def run(args: argparse.Namespace) -> int:
    _check(args)
    check_drawable(args.plot)
    if args.shape is not None:
        per_token, rate, what = KVShape(*args.shape).bytes_per_token, float(args.prefill_rate), "the given shape"
    else:
        per_token, measured = _model(args.model, args.prefill_rate is None)
        rate, what = args.prefill_rate or measured, args.model
    if not args.json:
        print(f"{what}: {per_token:,} bytes of KV a token, {per_token * 16 / 1e6:.1f} MB in a block of 16, "
              f"{per_token * UNIT_TOKENS / 1e6:.1f} MB in a unit of {UNIT_TOKENS}")
        print(f"prefill {rate:,.0f} tok/s: below {break_even(per_token, rate):.2f} Gbit/s computing is faster\n")
    for kind in args.network:
        networks = [Network(gbits, kind, args.efficiency) for gbits in args.gbits]
        rows = [[benefit(tokens, per_token, rate, network) for network in networks] for tokens in args.tokens]
        _print(args, networks, rows)
    if args.plot is not None:
        shapes = {what: per_token, "32 KV heads": KVShape(32, 32, 128, 2).bytes_per_token,
                  "8 KV heads": KVShape(32, 8, 128, 2).bytes_per_token}
        benefit_plot(shapes, args.gbits).save(args.plot)
    if args.measure is not None:
        _measure(args, per_token)
    return 0


def _check(args: argparse.Namespace) -> None:
    numbers = [*args.tokens, *args.gbits, args.efficiency, *(args.shape or ()), *(args.measure or ()),
               1 if args.prefill_rate is None else args.prefill_rate]
    if min(numbers) <= 0:
        raise ConfigError("tokens, networks, shapes and rates must be above 0")
    if args.shape is not None and args.prefill_rate is None:
        raise ConfigError("--shape says nothing of speed: give --prefill-rate too", field="prefill-rate")
    if args.shape is not None and args.measure is not None:
        raise ConfigError("--measure needs a model that can run, not a --shape", field="measure")


def _model(name: str, measure: bool) -> tuple[int, float]:
    """Bytes of KV a token in this engine's cache, and prompt tokens a second here."""
    from quire import LLM

    if not measure:
        from quire.engine.assembly.source import open_source
        from quire.models.registry import read_spec

        return read_spec(open_source(EngineConfig.create(model=name)).config).kv_bytes_per_token, 0.0
    with LLM(name, skip_tokenizer_init=True, max_model_len=2048) as llm:
        metrics = llm.metrics()
        per_token = int(metrics["kv_pool_bytes"] // metrics["kv_blocks_total"]) // llm.config.cache.block_size
        seconds = min(_first_token(llm, 1024, seed)[0] for seed in range(_REPEATS))
        return per_token, 1024 / seconds


def _print(args: argparse.Namespace, networks: list[Network], rows: list[list[Benefit]]) -> None:
    if args.json:
        for row in rows:
            for network, cell in zip(networks, row, strict=True):
                print(json.dumps({"network": network.kind, "gbits": network.gigabits, "tokens": cell.tokens,
                                  "bytes": cell.num_bytes, "prefill_ms": round(cell.prefill * 1e3, 3),
                                  "fetch_ms": round(cell.fetch * 1e3, 3), "saved_ms": round(cell.saved * 1e3, 3),
                                  "pool_wins": cell.saved > 0}))
        return
    kind = networks[0].kind
    print(f"{kind}, {LATENCIES[kind] * 1e6:.0f} us; ms to fetch, and what that saves (LOSES: computing is faster)")
    heads = "".join(f"{f'{network.gigabits:g} Gbit/s':>26}" for network in networks)
    print(f"{'tokens':>8}{'MB':>10}{'prefill ms':>12}{heads}")
    for row in rows:
        cells = "".join(f"{cell.fetch * 1e3:>13.1f}{_saving(cell):>13}" for cell in row)
        print(f"{row[0].tokens:>8}{row[0].num_bytes / 1e6:>10.1f}{row[0].prefill * 1e3:>12.1f}{cells}")
    print()


def _saving(cell: Benefit) -> str:
    if not cell.num_bytes:
        return "no unit"
    return f"{cell.saved * 1e3:.1f}" if cell.saved > 0 else "LOSES"


# ---- real runs


def _measure(args: argparse.Namespace, per_token: int) -> None:
    lengths = args.measure or [512, 2048]
    if not args.json:
        print("real runs: seconds to the first token; 'expected' from the bandwidth that the engine measured")
        print(f"{'tokens':>8}{'computed':>10}{'from':>8}{'fetched':>9}{'expected':>10}{'MB/s':>8}{'cached':>8}")
    for tokens in lengths:
        for where in ("disk", "peer"):
            found = _real(args.model, tokens, where, per_token)
            if args.json:
                print(json.dumps(found))
            else:
                print(f"{tokens:>8}{found['computed_s']:>10.3f}{where:>8}{found['fetched_s']:>9.3f}"
                      f"{found['expected_s']:>10.3f}{found['mb_per_s']:>8.0f}{found['cached_tokens']:>8}")


def _real(model: str, tokens: int, where: str, per_token: int) -> dict[str, Any]:
    """One prompt computed by an engine that then gives its units away, and fetched by another engine."""
    from quire import LLM

    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": tokens + 16, "kv_pool_policy": "all",
                               "kv_lookup_timeout": 1000.0}
    with tempfile.TemporaryDirectory() as folder, _pool(where, Path(folder)) as pool, ExitStack() as engines:
        first = engines.enter_context(LLM(model, **options, **pool))
        _first_token(first, UNIT_TOKENS, seed=1)
        computed, _ = _first_token(first, tokens, seed=2)
        _wait_until_written(first, tokens // UNIT_TOKENS)
        if where == "disk":
            first.close()
        second = engines.enter_context(LLM(model, **options, **pool))
        # Kernels and files are warm in both, as in an engine that has run for a while.
        _first_token(second, UNIT_TOKENS, seed=1)
        fetched, cached = _first_token(second, tokens, seed=2)
        metrics = second.metrics()
    bandwidth = metrics["kv_disk_bandwidth" if where == "disk" else "kv_pool_bandwidth"]
    expected = cached * per_token / bandwidth + (tokens - cached) * computed / tokens
    return {"tokens": tokens, "from": where, "computed_s": round(computed, 4), "fetched_s": round(fetched, 4),
            "expected_s": round(expected, 4), "mb_per_s": round(bandwidth / 1e6, 1), "cached_tokens": cached,
            "times_faster": round(computed / fetched, 2)}


class _pool:
    """Options of engines that share a disk, or an index of their memories kept in this process."""

    def __init__(self, where: str, folder: Path) -> None:
        self._where, self._folder = where, folder
        self._stop: Any = None

    def __enter__(self) -> dict[str, Any]:
        if self._where == "disk":
            return {"kv_disk": f"{self._folder}/kv:100GiB"}
        from quire.bench.kv.index_server import serve_index

        secret = self._folder / "secret"
        secret.write_text("a secret of this benchmark alone")
        url, self._stop = serve_index(secret.read_bytes())
        return {"kv_pool": f"{url}?share=4GiB", "kv_secret_file": str(secret)}

    def __exit__(self, *_: object) -> None:
        if self._stop is not None:
            self._stop()


def _first_token(llm: Any, tokens: int, seed: int) -> tuple[float, int]:
    """Seconds, and tokens whose KV was not computed."""
    from quire import SamplingParams

    rng = random.Random(seed)
    prompt = [rng.randrange(100, 1000) for _ in range(tokens)]
    began = time.perf_counter()
    answer = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)[0]
    return time.perf_counter() - began, int(answer.num_cached_tokens or 0)


def _wait_until_written(llm: Any, units: int) -> None:
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        metrics = llm.metrics()
        if sum(metrics.get(f"kv_{tier}_units_written", 0) for tier in ("disk", "pool")) > units:
            return
        time.sleep(0.05)
