# ruff: noqa: B023, B008 (each lambda is called before its loop goes on)
"""All that a GPU must show before anything is tuned: kernels right, kernels timed, a small engine end to end.

python3 tests/gpu/smoke.py            all parts: checks in parallel processes, timings one after another
python3 tests/gpu/smoke.py --part X   one part here
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# Some installed package may have a folder `tests` of its own, and a package with an __init__ would win over
# ours.
_tests = types.ModuleType("tests")
_tests.__path__ = [str(ROOT / "tests")]
sys.modules.setdefault("tests", _tests)

import numpy as np  # noqa: E402
import torch  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
D = "cuda"
ROWS: list[dict[str, Any]] = []
DRY = False
"""Compile and run everything once, time nothing: many such processes fill the kernel cache at once."""


def note(**row: Any) -> None:
    ROWS.append(row)
    if DRY:
        return
    print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def attempt(name: str, check: Callable[[], Any]) -> None:
    """Run one check; a failure is a line, not the end."""
    begin = time.perf_counter()
    try:
        found = check()
        torch.cuda.synchronize()
        if isinstance(found, float):
            print(f"ok   {name} error={found:.2e} ({time.perf_counter() - begin:.1f}s)", flush=True)
        else:
            print(f"ok   {name} ({time.perf_counter() - begin:.1f}s)", flush=True)
    except Exception as error:
        print(f"FAIL {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)


def graph_time(calls: list[Callable[[], Any]], repeats: int = 5, fill: int = 1) -> float:
    """Seconds per call, inside a captured graph of all calls, `fill` times over; the median of replays."""
    if DRY:
        calls[0]()
        return 1.0
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(fill):
            for call in calls:
                call()
    times = []
    for _ in range(repeats + 1):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 1e3)
    return sorted(times[1:])[repeats // 2] / (len(calls) * fill)


# ---- checks


def check_rowwise() -> None:
    from quire.kernels.types import HeadShape
    from tests.kernels.triton import cases

    for dtype in (BF16, FP16, FP32):
        for rows, hidden in ((1, 1024), (7, 5120), (300, 4096), (3, 576)):
            attempt(
                f"norms {dtype} {rows}x{hidden}",
                lambda r=rows, h=hidden, t=dtype: cases.check_norms(D, t, r, h),
            )
        attempt(f"activations {dtype}", lambda t=dtype: cases.check_activations(D, t, 37, 3072))
        for shape, rotary, norms in (
            (HeadShape(32, 8, 128), 128, True),
            (HeadShape(9, 3, 64), 64, False),
            (HeadShape(4, 1, 256), 256, True),
            (HeadShape(6, 2, 80), 32, True),
            (HeadShape(12, 12, 64), None, False),
        ):
            attempt(
                f"rope_cache {dtype} {shape} {rotary}",
                lambda s=shape, r=rotary, n=norms, t=dtype: cases.check_rope_cache(D, t, s, 200, 16, rotary=r, norms=n),
            )
        attempt(f"copies {dtype}", lambda t=dtype: cases.check_copies(D, t, HeadShape(32, 8, 128), 16))
    attempt("inputs", lambda: cases.check_inputs(D))
    for lengths, extra in (([1], 33), ([4096], 33), ([700, 0, 3, 64, 65], 7), (list(range(1, 513)), 528)):
        for window in (None, 100):
            attempt(
                f"split {len(lengths)} {window}",
                lambda n=lengths, e=extra, w=window: cases.check_split(D, n, e, w),
            )
    for rows, vocab, dtype in ((1, 151936, BF16), (256, 151936, BF16), (64, 49152, FP32), (9, 50, FP32)):
        attempt(f"draw {rows}x{vocab} {dtype}", lambda r=rows, v=vocab, t=dtype: cases.check_draw(D, t, r, v))
    for rows, vocab, dtype in ((64, 151936, BF16), (64, 151936, FP32), (40, 5003, FP32)):
        for seed in range(3):
            attempt(f"sampling {rows}x{vocab} {dtype} {seed}",
                    lambda r=rows, v=vocab, t=dtype, s=seed: _sampled(t, r, v, s))


def _sampled(dtype: torch.dtype, rows: int, vocab: int, seed: int) -> int:
    """Rows that drew another token than the sampler on the CPU: exp differs by a unit in the last place."""
    from tests.kernels.triton.sampled import check_sampling

    wrong = check_sampling(D, dtype, rows, vocab, seed)
    if wrong > 1:
        raise AssertionError(f"{wrong} of {rows} rows drew another token")
    return wrong


def check_decode() -> None:
    from quire.kernels.types import HeadShape
    from tests.kernels.triton import cases

    rng = random.Random(5)
    for dtype in (BF16, FP16, FP32):
        for shape in (
            HeadShape(16, 8, 128),
            HeadShape(32, 8, 128),
            HeadShape(40, 8, 128),
            HeadShape(9, 3, 64),
        ):
            for count, top, extra in ((1, 4000, 33), (64, 1500, 132)):
                lengths = [rng.randrange(1, top) for _ in range(count)]
                if count == 1:
                    lengths = [top]
                attempt(
                    f"decode {dtype} {shape} {count}",
                    lambda s=shape, n=lengths, e=extra, t=dtype: cases.check_decode(
                        D, t, s, 16, n, extra=e, rows=True, keys=64 if len(n) == 1 else 128, repeat=20
                    ),
                )
    lengths = [rng.randrange(1, 900) for _ in range(256)]
    lengths[7] = 0
    attempt(
        "decode 256",
        lambda: cases.check_decode(D, BF16, HeadShape(16, 8, 128), 16, lengths, extra=528, repeat=20),
    )
    many = [rng.randrange(1, 700) for _ in range(512)]
    attempt("decode 512", lambda: cases.check_decode(D, BF16, HeadShape(32, 8, 128), 16, many, extra=528, repeat=5))
    attempt(
        "decode pdl",
        lambda: cases.check_decode(D, BF16, HeadShape(16, 8, 128), 16, [600], extra=33, keys=64, pdl=True, repeat=50),
    )
    check_rope_decode(rng)
    for options in ({"window": 100}, {"softcap": 5.0}):
        for page in (1, 16, 64):
            attempt(
                f"decode {options} page {page}",
                lambda o=options, p=page: cases.check_decode(
                    D, BF16, HeadShape(8, 2, 128), p, [5, 777, 1300], extra=9, **o
                ),
            )


def check_rope_decode(rng: random.Random) -> None:
    """Norm, rotation and KV write inside the attention, many times over: a race would show as a difference."""
    from quire.kernels.types import HeadShape
    from tests.kernels.triton import cases

    many = [rng.randrange(1, 900) for _ in range(256)]
    many[7] = 0
    plans: list[tuple[torch.dtype, HeadShape, int, list[int], dict[str, Any]]] = [
        (BF16, HeadShape(16, 8, 128), 16, many, {"extra": 264, "rows": True, "prefetch": True}),
        (BF16, HeadShape(32, 8, 128), 16, many[:64], {"extra": 132, "keys": 64}),
        (BF16, HeadShape(40, 8, 128), 16, [4000], {"extra": 16, "prefetch": True, "pdl": True}),
        (BF16, HeadShape(16, 8, 128), 16, [600], {"extra": 16, "prefetch": True, "pdl": True}),
        (BF16, HeadShape(16, 8, 128), 16, [1, 128, 129, 64, 65], {"prefetch": True}),
        (BF16, HeadShape(16, 8, 128), 16, many, {"extra": 264, "keys": 64, "prefetch": True, "carried": True}),
        (BF16, HeadShape(32, 8, 128), 16, many[:8], {"extra": 16, "keys": 64, "prefetch": True, "carried": True}),
        (BF16, HeadShape(32, 8, 128), 16, many[:32], {"extra": 16, "keys": 32, "prefetch": True, "carried": True}),
        (BF16, HeadShape(8, 2, 64), 1, [5, 777, 1300], {"window": 100, "prefetch": True}),
        (BF16, HeadShape(4, 1, 256), 64, [5, 777, 1300], {"softcap": 5.0, "keys": 64, "prefetch": True}),
        (BF16, HeadShape(32, 8, 128), 16, many[:32], {"kv_dtype": torch.float8_e4m3fn, "kv_scale": 0.5}),
        (BF16, HeadShape(32, 8, 128), 16, [9000, 4001, 1], {
            "kv_dtype": torch.float8_e4m3fn, "kv_scale": 0.5, "extra": 33, "prefetch": True, "carried": True,
            "pdl": True}),
        (BF16, HeadShape(16, 8, 128), 16, many, {
            "kv_dtype": torch.float8_e4m3fn, "extra": 264, "keys": 64, "prefetch": True, "carried": True}),
        (FP16, HeadShape(8, 2, 64), 8, [5, 777], {"kv_dtype": torch.float8_e4m3fn, "window": 100}),
        (FP16, HeadShape(16, 8, 128), 16, many[:32], {"norms": False, "prefetch": True}),
        (FP32, HeadShape(16, 8, 128), 16, many[:32], {"keys": 64, "prefetch": True}),
        (FP32, HeadShape(6, 2, 32), 16, many[:32], {"keys": 64, "window": 200}),
    ]
    for kind, heads in ((BF16, 16), (BF16, 32), (FP16, 40), (FP16, 64)):
        for some in ([1], [129], [600], [2048, 700], [4000], [700, 1, 129, 0, 2048, 64, 128, 333]):
            few = {"extra": 16, "few": True, "pdl": True, "rows": heads == 32, "window": 300 if heads == 40 else None}
            plans.append((kind, HeadShape(heads, 8, 128), 16, some, few))
            fp8 = {"kv_dtype": torch.float8_e4m3fn, "kv_scale": 1.0 if heads == 16 else 0.5, "norms": heads != 64}
            plans.append((kind, HeadShape(heads, 8, 128), 16, some, {**few, **fp8}))
    for dtype, shape, page, lengths, options in plans:
        shown = " ".join(f"{name}={value}" for name, value in options.items())
        attempt(
            f"decode with rope {dtype} {shape} {len(lengths)} {shown}",
            lambda: cases.check_rope_decode(D, dtype, shape, page, lengths, repeat=20, **options),
        )


def check_mixed() -> None:
    from quire.kernels.triton.attention_mixed import MixedShape
    from quire.kernels.types import HeadShape
    from tests.kernels.triton import cases

    wide, narrow, fixed = MixedShape(128, 64, 8, 3), MixedShape(32, 32, 4, 2), MixedShape(64, 64, 4, 3)
    for dtype, sizes in ((BF16, wide), (FP16, wide), (FP32, narrow), (BF16, fixed)):
        for shape in (HeadShape(16, 8, 128), HeadShape(40, 8, 128), HeadShape(9, 3, 64)):
            attempt(
                f"mixed {dtype} {shape} {sizes.rows}",
                lambda s=shape, t=dtype, z=sizes: cases.check_mixed(
                    D, t, s, 16, [1, 700, 65, 1, 33], [900, 0, 130, 17, 0], sizes=z, exact=z is not wide
                ),
            )
        for options in ({"window": 130}, {"softcap": 5.0}, {"tree": True}):
            attempt(
                f"mixed {dtype} {options} {sizes.rows}",
                lambda o=options, t=dtype, z=sizes: cases.check_mixed(
                    D, t, HeadShape(16, 8, 128), 16, [200, 3, 70], [0, 300, 129], sizes=z, exact=z is not wide, **o
                ),
            )


def check_linear() -> None:
    from quire.kernels.triton.linear_fixed import FixedShape, linear_fixed
    from quire.kernels.triton.linear_row import RowShape
    from tests.kernels.triton import cases

    for dtype in (BF16, FP16, FP32):
        for rows in (1, 2, 3, 4):
            attempt(f"few {dtype} {rows}", lambda r=rows, t=dtype: cases.check_linear_few(D, t, r, 6144, 4096))
        attempt(f"few odd {dtype}", lambda t=dtype: cases.check_linear_few(D, t, 3, 130, 576))
        attempt(f"fixed {dtype}", lambda t=dtype: cases.check_linear_fixed(D, t, 300, 1000, 4096))
    attempt("few pdl", lambda: cases.check_linear_few(D, BF16, 1, 6144, 4096, pdl=True))
    for dtype in (BF16, FP16, FP32):
        for sizes in ((1, 2048, 8), (2, 512, 2), (4, 1024, 4)):
            for features, width in ((6144, 4096), (130, 5120)):
                attempt(
                    f"row {dtype} {features}x{width} {sizes}",
                    lambda t=dtype, z=sizes, f=features, w=width: cases.check_linear_row(
                        D, t, f, w, RowShape(*z), pdl=True
                    ),
                )
    x = cases.rand(130, 4096, dtype=BF16, device=D)
    w = cases.rand(1024, 4096, dtype=BF16, device=D)
    base = linear_fixed(x, w)
    for sizes in (
        FixedShape(64, 32, 64),
        FixedShape(64, 128, 64),
        FixedShape(128, 128, 64, 8, 3),
        FixedShape(64, 64, 128),
    ):
        attempt(
            f"fixed tiles {sizes.rows}x{sizes.features}x{sizes.columns}: bits "
            + ("same" if torch.equal(linear_fixed(x, w, sizes=sizes), base) else "differ"),
            lambda: None,
        )


def check_engine() -> None:
    """Eager against graphs, overlapped against not, deterministic, fp32 against torch, on a tiny random
    model."""
    from quire.models.build import build_decoder, dummy_weights
    from quire.ops.reference import TorchOps
    from quire.ops.triton import TritonOps
    from quire.worker.gpu.options import DeviceOptions
    from quire.worker.gpu.weights import build_on_device
    from tests.paged_driver import PagedDriver
    from tests.worker.gpu import engines

    configs = {"qwen3": engines.QWEN3, "gemma3": engines.GEMMA3}

    def logits_close(name: str) -> float:
        config = configs[name]
        host = PagedDriver(build_decoder(config, dummy_weights(config), TorchOps(), max_model_len=200), block_size=8)
        device = torch.device(D)
        ops = TritonOps(device, FP32)
        decoder = build_on_device(config, dummy_weights(config), ops, device, FP32, 200)
        with torch.device(device):
            mine = PagedDriver(decoder, block_size=8)
            tokens = {s: [random.randrange(131) for _ in range(n)] for s, n in enumerate((3, 60, 1, 33))}
            worst = 0.0
            for _ in range(3):
                with torch.device("cpu"):
                    want = host.step(tokens)
                got = mine.step(tokens)
                worst = max(worst, *(float((got[s].cpu() - want[s]).abs().max()) for s in tokens))
                tokens = {s: [random.randrange(131)] for s in tokens}
        if worst > 1e-3:
            raise AssertionError(f"logits differ by {worst}")
        return worst

    def engine(name: str, depth: int, requests: int = 22, **options: Any) -> dict:
        settings = DeviceOptions(
            device=D,
            max_num_seqs=engines.SEQS,
            max_num_batched_tokens=40,
            max_model_len=200,
            gpu_memory_utilization=0.5,
            **options,
        )
        core = engines.make_engine(configs[name], device=True, depth=depth, options=settings)
        found = engines.run(core, engines.workload(0, requests))
        core.close()
        return found

    def same(name: str, a: dict, b: dict) -> None:
        if a.keys() != b.keys() or any(a[k] != b[k] for k in a):
            different = [k for k in a if a[k] != b[k]]
            raise AssertionError(
                f"{len(different)} of {len(a)} requests differ: {different[:5]} "
                f"{[(a[k][0][:8], b[k][0][:8], a[k][3], b[k][3]) for k in different[:2]]}"
            )

    for name in configs:
        attempt(f"logits fp32 {name}", lambda n=name: logits_close(n))
        for dtype in ("float32", "bfloat16"):
            base = None
            try:
                base = engine(name, 1, dtype=dtype)
                errors = [v[3] for v in base.values() if v[3]]
                print(f"     {name} {dtype} errors: {errors[:1]}", flush=True)
            except Exception as error:
                attempt(f"engine {name} {dtype}", lambda e=error: (_ for _ in ()).throw(e))
                continue
            attempt(
                f"engine {name} {dtype} overlapped = not",
                lambda n=name, t=dtype, b=base: same(n, engine(n, 2, dtype=t), b),
            )
            attempt(
                f"engine {name} {dtype} eager = graphs",
                lambda n=name, t=dtype, b=base: same(n, engine(n, 2, dtype=t, enforce_eager=True), b),
            )
        plain = (
            engines.run(engines.make_engine(configs[name], device=False), engines.workload(0, 22))
            if cpu_kernels()
            else None
        )
        if plain is not None:
            found = engine(name, 2, dtype="float32")
            equal = sum(found[k][0] == plain[k][0] for k in plain)
            print(f"     {name} float32 tokens equal to the CPU's: {equal} of {len(plain)} requests", flush=True)
        attempt(
            f"engine {name} deterministic: alone = among others",
            lambda n=name: deterministic(engines, n, engine),
        )


def deterministic(engines: Any, name: str, engine: Callable[..., dict]) -> None:
    many = engine(name, 2, dtype="bfloat16", deterministic=True)
    few = engine(name, 1, requests=3, dtype="bfloat16", deterministic=True, enforce_eager=True)
    for key in few:
        if few[key][0] != many[key][0]:
            raise AssertionError(f"{key} differs: {few[key][0][:8]} {many[key][0][:8]}")


def cpu_kernels() -> bool:
    try:
        from quire.ops.cpu import CpuOps

        CpuOps(num_threads=1)
    except Exception as error:
        print(f"     no CPU kernels here ({str(error)[:100]})", flush=True)
        return False
    return True


# ---- timings

SHAPES = {
    "0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "8b": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
    "14b": [(7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)],
}


def weights_for(features: int, width: int, least: float = 4e8) -> list[torch.Tensor]:
    """Enough copies that the cache cannot hold them."""
    copies = 1 if DRY else max(2, min(64, math.ceil(least / (features * width * 2))))
    return [torch.randn(features, width, device=D, dtype=BF16) for _ in range(copies)]


def time_ceilings() -> None:
    a = torch.empty(1 << 30, dtype=torch.uint8, device=D).random_()
    b = torch.empty_like(a)
    note(time="copy", TBs=2 * a.numel() / graph_time([lambda: b.copy_(a)]) / 1e12)
    x = torch.randn(8192, 8192, device=D, dtype=BF16)
    note(time="gemm8192", TFLOPs=2 * 8192**3 / graph_time([lambda: x @ x]) / 1e12)


_VECTOR_SHAPES = (
    (1, 1024, 4), (1, 1024, 8), (1, 2048, 4), (1, 2048, 8), (1, 4096, 8), (2, 1024, 4), (2, 1024, 8), (2, 2048, 8),
    (4, 512, 4),
)  # fmt: skip


def time_vector(quick: bool) -> None:
    from quire.kernels.triton.linear_few import VectorShape, linear_vector

    for model in ("0.6b", "8b"):
        for features, width in [*SHAPES[model], (151936, SHAPES[model][0][1])]:
            ws = weights_for(features, width)
            x = torch.randn(1, width, device=D, dtype=BF16)
            size = features * width * 2
            row: dict[str, Any] = {
                "time": "vector1",
                "model": model,
                "shape": f"{features}x{width}",
                "cublas": size / graph_time([lambda w=w: torch.mm(x, w.t()) for w in ws]) / 1e12,
            }
            for feats, columns, warps in _VECTOR_SHAPES:
                if columns > width * 2 or (quick and feats == 2):
                    continue
                z = VectorShape(feats, columns, warps)
                for pdl in (False, True):
                    t = graph_time([lambda w=w, p=pdl, z=z: linear_vector(x, w, sizes=z, pdl=p) for w in ws])
                    row[f"f{feats}c{columns}w{warps}{'p' if pdl else ''}"] = size / t / 1e12
            note(**row)


def time_fixed(quick: bool) -> None:
    from quire.kernels.slices import Slices
    from quire.kernels.triton.linear_fixed import FixedShape, linear_fixed

    for features, width in SHAPES["8b"][:3:2]:
        ws = weights_for(features, width)
        for rows in (1, 64, 256, 4096):
            x = torch.randn(rows, width, device=D, dtype=BF16)
            flops = 2 * rows * features * width
            row: dict[str, Any] = {
                "time": "fixed",
                "shape": f"{features}x{width}",
                "rows": rows,
                "cublas_us": 1e6 * graph_time([lambda w=w: torch.mm(x, w.t()) for w in ws[:4]]),
            }
            for z in (FixedShape(), FixedShape(64, 128, 64, 4, 4), FixedShape(128, 128, 64, 8, 3)):
                t = graph_time([lambda w=w, z=z: linear_fixed(x, w, sizes=z) for w in ws[:4]])
                row[f"{z.rows}x{z.features}_us"] = 1e6 * t
            for name, slices in (("heads", Slices.each(width // 128, 128)), ("ranges", Slices.of_width(width))):
                t = graph_time([lambda w=w, s=slices: linear_fixed(x, w, slices=s) for w in ws[:4]])
                row[f"{name}_us"] = 1e6 * t
            note(**row, gflop=flops / 1e9)


def decode_case(heads: int, batch: int, low: int, high: int, page: int = 16, dtype: torch.dtype = BF16) -> Any:
    from quire.kernels.types import HeadShape, pair_cache

    shape = HeadShape(heads, 8, 128)
    rng = random.Random(batch)
    lengths = [rng.randint(low, high) for _ in range(batch)]
    counts = [-(-n // page) for n in lengths]
    copies = max(2, min(16, math.ceil(4e8 / (sum(lengths) * 4096))))
    caches = [
        pair_cache(*(torch.randn(sum(counts) + 1, 8, page, 128, device=D).to(dtype) for _ in range(2)), page)
        for _ in range(copies)
    ]
    blocks = list(range(sum(counts)))
    rng.shuffle(blocks)
    table = torch.zeros(batch, max(counts), dtype=torch.int32)
    for s, n in enumerate(counts):
        table[s, :n] = torch.tensor(blocks[:n])
        del blocks[:n]
    qkv = torch.randn(batch, shape.width, device=D, dtype=BF16)
    return shape, caches, table.to(D), torch.tensor(lengths, dtype=torch.int32, device=D), qkv, sum(lengths)


def time_decode(quick: bool) -> None:
    from quire.kernels.triton.attention_decode import DecodeScratch, decode_attention
    from quire.kernels.triton.attention_split import DecodeSplit, split_decode

    cases = (
        (1, 600, 600),
        (1, 4000, 4000),
        (8, 200, 2000),
        (32, 1024, 1280),
        (64, 200, 2000),
        (256, 200, 2000),
    )
    for heads in (16, 32):
        for batch, low, high in cases:
            shape, caches, table, lengths, qkv, total = decode_case(heads, batch, low, high)
            row: dict[str, Any] = {"time": "decode", "heads": heads, "batch": batch, "keys": total}
            rows = torch.arange(batch, dtype=torch.int32, device=D)
            best = 0.0
            for extra in (16, 33, 66) if batch <= 8 else (66, 132, 264, 528) if batch <= 64 else (264, 528, 1056):
                split = DecodeSplit.allocate(batch, extra, D)
                split_decode(split, lengths, None)
                scratch = DecodeScratch.allocate(split.tasks, batch, shape, D)
                for keys, warps, stages in ((64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 4, 3), (128, 8, 2)):
                    if quick and (keys, warps, stages) not in ((64, 4, 2), (128, 4, 2)):
                        continue
                    t = graph_time(
                        [
                            lambda c=c, k=keys, w=warps, s=stages: decode_attention(
                                qkv,
                                c,
                                table,
                                rows,
                                lengths,
                                split,
                                scratch,
                                shape,
                                0.088,
                                keys=k,
                                num_warps=w,
                                num_stages=s,
                            )
                            for c in caches
                        ]
                    )
                    rate = total * 4096 / t / 1e12
                    row[f"e{extra}k{keys}w{warps}s{stages}"] = rate
                    if rate > best:
                        best, row["best"], row["us"] = (
                            rate,
                            f"e{extra}k{keys}w{warps}s{stages}={rate:.2f}TB/s",
                            t * 1e6,
                        )
            note(**row)


def time_rope_attend(quick: bool) -> None:
    """A layer's attention behind its GEMM, in a graph with early launch: two kernels, one, and their variants."""
    from quire.kernels.triton.attention_decode import DecodeScratch, decode_attention
    from quire.kernels.triton.attention_rope import rope_decode_attention
    from quire.kernels.triton.attention_split import DecodeSplit, decode_shape, extra_pieces, split_decode
    from quire.kernels.triton.linear_row import RowShape, linear_row
    from quire.kernels.triton.rope_cache import rope_and_cache
    from quire.kernels.types import HeadTurn

    for heads in (16, 32):
        for batch, low, high in ((1, 1064, 1064), (8, 900, 1228), (32, 900, 1228), (64, 900, 1228), (256, 200, 1928)):
            shape, caches, table, lengths, _, total = decode_case(heads, batch, low, high)
            width = 1024 if heads == 16 else 4096
            x = torch.randn(batch, width, device=D, dtype=BF16)
            weights = [torch.randn(shape.width, width, device=D, dtype=BF16) / 32 for _ in caches]
            gain, rope = torch.ones(128, device=D), torch.rand(4096, 128, device=D)
            turn = HeadTurn(rope, gain, gain, 1e-6)
            rows = torch.arange(batch, dtype=torch.int32, device=D)
            positions = (lengths - 1).long()
            slots = table.long().gather(1, positions[:, None] // 16)[:, 0] * 16 + positions % 16
            split = DecodeSplit.allocate(batch, extra_pieces(batch, 8, 132), D)
            split_decode(split, lengths, None)
            scratch = DecodeScratch.allocate(split.tasks, batch, shape, D)
            given = (table, rows, lengths, split, scratch, shape, 0.088)

            def gemm(w: torch.Tensor) -> torch.Tensor:
                if batch == 1:
                    return linear_row(x, w, None, None, sizes=RowShape(2, 1024, 4), pdl=True)
                return torch.mm(x, w.t())

            def two(w: torch.Tensor, c: Any, keys: int, stages: int, halves: bool = False,
                    carried: bool = False) -> None:
                qkv = gemm(w)
                rope_and_cache(qkv, c, slots, positions, shape, rope, gain, gain, 1e-6, pdl=True)
                decode_attention(qkv, c, *given, keys=keys, num_stages=stages, halves=halves, carried=carried, pdl=True)

            def one(w: torch.Tensor, c: Any, keys: int, stages: int, prefetch: bool, carried: bool = False,
                    pieces: Any = given) -> None:
                rope_decode_attention(gemm(w), c, *pieces, turn, keys=keys, num_stages=stages, prefetch=prefetch,
                                      carried=carried, pdl=True)

            def seconds(call: Callable[..., Any], *args: Any) -> Any:
                try:
                    return graph_time([lambda w=w, c=c: call(w, c, *args) for w, c in zip(weights, caches)])
                except Exception as error:
                    return type(error).__name__

            base = graph_time([lambda w=w: gemm(w) for w in weights])
            keys, stages = decode_shape(batch, 128, 2).keys, decode_shape(batch, 128, 2).stages
            variants: dict[str, tuple[Any, ...]] = {
                "two": (two, keys, stages), "two_halves": (two, keys, stages, True),
                "one": (one, keys, stages, False), "one_prefetch": (one, keys, stages, True),
            }
            variants[f"one_prefetch_k{192 - keys}"] = (one, 192 - keys, stages, True)
            variants["two_halves_carried_k64s3"] = (two, 64, 3, True, True)
            for k, s in ((32, 4), (64, 2), (64, 3), (64, 4), (128, 2), (128, 3)):
                variants[f"carried_k{k}s{s}"] = (one, k, s, True, True)
            for times in (0.5, 2, 4):
                extra = max(1, int(extra_pieces(batch, 8, 132) * times))
                other = DecodeSplit.allocate(batch, extra, D)
                split_decode(other, lengths, None)
                room = DecodeScratch.allocate(other.tasks, batch, shape, D)
                pieces = (table, rows, lengths, other, room, shape, 0.088)
                for k, s in ((64, 3), (64, 4)):
                    variants[f"carried_k{k}s{s}_pieces{extra}"] = (one, k, s, True, True, pieces)
            row: dict[str, Any] = {"time": "rope_attend", "heads": heads, "batch": batch, "keys": total,
                                   "gemm_us": base * 1e6}
            for name, call in variants.items():
                found = seconds(*call)
                row[f"{name}_us"] = found if isinstance(found, str) else (found - base) * 1e6
            row["gemm+rope_us"] = 1e6 * graph_time([
                lambda w=w, c=c: rope_and_cache(gemm(w), c, slots, positions, shape, rope, gain, gain, 1e-6,
                                                pdl=True) for w, c in zip(weights, caches)])
            timed = {name: row[f"{name}_us"] for name in variants if isinstance(row[f"{name}_us"], float)}
            best = min(timed, key=lambda name: timed[name])
            row["best"] = f"{best}={timed[best]:.1f}us,{total * 4096 / max(timed[best], 1e-3) / 1e6:.2f}TB/s"
            note(**row)


def time_prefill(quick: bool) -> None:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from quire.kernels.triton.attention_mixed import MixedShape, mixed_attention, query_tiles

    for heads, batch, length in ((16, 4, 4096), (32, 4, 4096), (32, 1, 4096), (16, 16, 1024)):
        shape, caches, table, lengths, _, total = decode_case(heads, batch, length, length)
        qkv = torch.randn(total, shape.width, device=D, dtype=BF16)
        flops = 4 * heads * 128 * batch * length * length / 2
        start = torch.arange(batch + 1, dtype=torch.int32, device=D) * length
        row: dict[str, Any] = {"time": "prefill", "heads": heads, "batch": batch, "length": length}
        for r, k, w, s in (
            (128, 64, 8, 3),
            (128, 64, 8, 2),
            (128, 128, 8, 2),
            (64, 64, 4, 3),
            (128, 64, 4, 3),
        ):
            seqs, firsts = (torch.from_numpy(a).to(D) for a in query_tiles(np.full(batch, length), r // (heads // 8)))
            try:
                t = graph_time(
                    [
                        lambda z=MixedShape(r, k, w, s): mixed_attention(
                            qkv, caches[0], table, None, start, lengths, seqs, firsts, shape, 0.088, sizes=z
                        )
                    ],
                    3,
                )
                row[f"r{r}k{k}w{w}s{s}"] = flops / t / 1e12
            except Exception as error:
                row[f"r{r}k{k}w{w}s{s}"] = type(error).__name__
        parts = qkv.view(batch, length, -1, 128).transpose(1, 2)
        q, k, v = parts.split([heads, 8, 8], dim=1)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    t = graph_time(
                        [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)], 3
                    )
                row[backend.name.split("_")[0].lower()] = flops / t / 1e12
            except Exception as error:
                row[backend.name.split("_")[0].lower()] = str(error)[:60].replace(" ", "_")
        note(**row)


def ragged_case(heads: int, lengths: list[int]) -> Any:
    """Whole prompts side by side: q, k, v of their tokens, and the same keys and values in a shuffled paged cache."""
    from quire.kernels.types import HeadShape, pair_cache

    shape, page = HeadShape(heads, 8, 128), 16
    counts = [-(-n // page) for n in lengths]
    qkv = torch.randn(sum(lengths), shape.width, device=D, dtype=BF16)
    order = torch.randperm(sum(counts), device=D)
    cache = pair_cache(*(torch.zeros(sum(counts), 8, page, 128, device=D, dtype=BF16) for _ in range(2)), page)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=D)
    parts = qkv.view(qkv.shape[0], -1, 128)[:, heads:]
    token = block = 0
    for row, (length, count) in enumerate(zip(lengths, counts)):
        mine = order[block : block + count]
        table[row, :count] = mine.to(torch.int32)
        place = torch.arange(length, device=D)
        for store, part in ((cache.k, parts[:, :8]), (cache.v, parts[:, 8:])):
            store[mine[place // page], :, place % page] = part[token : token + length]
        token, block = token + length, block + count
    starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=D)
    return shape, qkv, cache, table, starts, torch.tensor(lengths, dtype=torch.int32, device=D)


def ragged_variants() -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Kernel (paged keys, keys of the step by the copy engine) and sizes: rows, keys, warps, stages."""
    return {
        "base": ("paged", (128, 64, 4, 3)),
        "base_in_order": ("paged in order", (128, 64, 4, 3)),
        "base_r64": ("paged", (64, 64, 4, 3)),
        "tma": ("tma", (128, 64, 4, 2)),
        "tma_s3": ("tma", (128, 64, 4, 3)),
        "tma_k32": ("tma", (128, 32, 4, 3)),
        "tma_w8": ("tma", (128, 64, 8, 2)),
        "tma_w8s3": ("tma", (128, 64, 8, 3)),
        "tma_k128w8": ("tma", (128, 128, 8, 2)),
        "tma_r64": ("tma", (64, 64, 4, 2)),
        "tma_r64k32": ("tma", (64, 32, 4, 3)),
        "tma_r64k128": ("tma", (64, 128, 4, 2)),
        "tma_r256w8": ("tma", (256, 64, 8, 2)),
    }


def time_ragged(quick: bool) -> None:
    """Prompts of mixed lengths, as in case a, by every variant of the tiles; each is checked first."""
    from quire.kernels.triton.attention_fresh import fresh_attention
    from quire.kernels.triton.attention_mixed import MixedShape, attention_reference, mixed_attention, query_tiles
    from tests.kernels.triton import cases

    rng = random.Random(3)
    mixed = [rng.randint(100, 1024) for _ in range(14)]
    mixed.append(max(128, 8192 - sum(mixed)))
    for name, lengths in (("a", mixed), ("1024", [1024] * 8), ("4096", [4096] * 2), ("130", [130] * 60)):
        for heads in (16, 32):
            shape, qkv, cache, table, starts, length = ragged_case(heads, lengths)
            flops = 4 * heads * 128 * sum(n * n for n in lengths) / 2
            some = min(len(lengths), 3) if name != "a" else len(lengths)
            checked = int(sum(lengths[:some]))
            part = (table[:some], starts[: some + 1], length[:some], shape, 0.088)
            want = attention_reference(qkv[:checked], cache, *part)
            row: dict[str, Any] = {"time": "ragged", "case": name, "heads": heads, "tokens": sum(lengths)}
            for variant, (kind, numbers) in ragged_variants().items():
                sizes = MixedShape(*numbers)
                seqs, firsts = query_tiles(np.array(lengths), sizes.rows // (heads // 8))
                if kind == "paged in order":
                    order = np.lexsort((firsts, seqs))
                    seqs, firsts = seqs[order], firsts[order]
                tiles = [torch.from_numpy(part).to(D) for part in (seqs, firsts)]

                def call() -> torch.Tensor:
                    if kind == "tma":
                        return fresh_attention(qkv, starts, *tiles, shape, 0.088, sizes=sizes)
                    return mixed_attention(qkv, cache, table, None, starts, length, *tiles, shape, 0.088, sizes=sizes)

                try:
                    found = cases.error(call()[:checked], want)
                    row[variant] = flops / graph_time([call], 5, 3) / 1e12 if found < 0.01 else f"WRONG({found:.1e})"
                except Exception as error:
                    row[variant] = type(error).__name__
            rates = {key: rate for key, rate in row.items() if key in ragged_variants() and isinstance(rate, float)}
            row["best"] = max(rates, key=lambda key: rates[key], default="none")
            note(**row)


def time_small(quick: bool) -> None:
    """The kernels around the matrices, at the sizes of a decode and a prefill step."""
    from quire.kernels.step_reference import FIELDS
    from quire.kernels.triton import activation, draw, norm, rope_cache
    from quire.kernels.types import HeadShape, pair_cache

    for rows in (1, 256, 8192):
        x = torch.randn(rows, 4096, device=D, dtype=BF16)
        weight = torch.ones(4096, device=D)
        up = torch.randn(rows, 24576, device=D, dtype=BF16)
        shape = HeadShape(32, 8, 128)
        qkv = torch.randn(rows, shape.width, device=D, dtype=BF16)
        cache = pair_cache(*(torch.zeros(rows // 16 + 1, 8, 16, 128, device=D, dtype=BF16) for _ in range(2)), 16)
        index = torch.arange(rows, device=D)
        rope, gain = torch.rand(8192, 128, device=D), torch.ones(128, device=D)
        fill = 10 if rows < 1000 else 1
        note(
            time="small",
            rows=rows,
            rms_us=1e6 * graph_time([lambda: norm.rms_norm(x, weight, 1e-6)], fill=fill),
            add_rms_us=1e6 * graph_time([lambda: norm.add_rms_norm(x, x, weight, 1e-6)], fill=fill),
            act_us=1e6 * graph_time([lambda: activation.act_mul(up, "silu")], fill=fill),
            rope_us=1e6
            * graph_time(
                [lambda: rope_cache.rope_and_cache(qkv, cache, index, index, shape, rope, gain, gain, 1e-6)],
                fill=fill,
            ),
        )
    for rows in (1, 32, 256):
        logits = torch.randn(rows, 151936, device=D, dtype=BF16)
        state = torch.zeros(rows, FIELDS, dtype=torch.int32, device=D)
        state.view(torch.float32)[:, 0] = 0.6
        index = torch.arange(rows, device=D, dtype=torch.int32)
        tokens = torch.zeros(rows, 300, dtype=torch.int32, device=D)
        out = torch.zeros(2, rows, 2, dtype=torch.int32, device=D)
        scratch = draw.DrawScratch.allocate(rows, 151936, D)
        note(
            time="draw",
            rows=rows,
            us=1e6
            * graph_time([lambda: draw.draw(logits, state, index, index, tokens, out, index[:1], scratch)], fill=4),
        )


def time_engine(quick: bool) -> None:
    """Qwen3-0.6B with random weights: start, one stream and a batch, with and without graphs and early
    launch."""
    from quire.bench.gpu.cases import MODELS, requests_of
    from quire.bench.gpu.engine import build_core, build_worker, run_requests
    from quire.worker.gpu.options import DeviceOptions

    tokens: dict[str, Any] = {}
    for name, options in (
        ("graphs", {"launch_early": False}),
        ("graphs+pdl", {"launch_early": True}),
        ("eager", {"enforce_eager": True}),
    ):
        begin = time.perf_counter()
        settings = DeviceOptions(
            max_num_seqs=256,
            max_num_batched_tokens=16384,
            max_model_len=4112,
            gpu_memory_utilization=0.8,
            **options,
        )
        worker = build_worker(MODELS["0.6b"], settings, num_kv_blocks=4000 if DRY else None)
        started = time.perf_counter() - begin
        free = torch.cuda.mem_get_info()[0] / 2**30
        row: dict[str, Any] = {
            "time": "engine",
            "mode": name,
            "start_s": started,
            "free_gib": free,
            "blocks": worker.pool.num_blocks,
            **{f"{k}_s": v for k, v in worker.timings.items()},
        }
        core = build_core(worker, settings)
        for case in ("b", "c") if DRY else ("b", "b", "c", "c", "d", "d"):
            requests = requests_of(case, len(tokens) + 1)
            run = run_requests(core, requests, keep_tokens=True)
            tokens[f"{name}-{case}"] = run.tokens
            row[f"{case}_s"] = run.seconds
            if case == "b":
                row["b_ms"] = 1e3 * (run.seconds - run.first_token) / (run.output_tokens - 1)
            if case == "d":
                row["d_tok_s"] = run.prompt_tokens / run.seconds
            if case == "c":
                row["c_tok_s"] = run.output_tokens / run.seconds
            row[f"{case}_host_ms"] = 1e3 * run.plan_seconds / max(1, run.steps)
        if DRY:
            print(f"     cold start of 0.6B beside the other parts: {row}", flush=True)
        elif name != "eager":
            run = run_requests(core, requests_of("a", 1))
            row.update(
                a_s=run.seconds,
                a_tok_s=run.output_tokens / run.seconds,
                a_steps=run.steps,
                a_host_ms=1e3 * run.plan_seconds / run.steps,
                a_prefill_s=run.first_token,
            )
        note(**row)
        core.close()
        del core, worker
        torch.cuda.empty_cache()
    for case in ("b", "c"):
        for other in ("graphs+pdl", "eager"):
            if f"{other}-{case}" in tokens and f"graphs-{case}" in tokens:
                print(
                    f"case {case}: graphs = {other}: {tokens[f'graphs-{case}'] == tokens[f'{other}-{case}']}",
                    flush=True,
                )


CHECKS = {
    "rowwise": check_rowwise,
    "decode": check_decode,
    "mixed": check_mixed,
    "linear": check_linear,
    "engine": check_engine,
}
TIMES = {
    "ceilings": lambda quick: time_ceilings(),
    "vector": time_vector,
    "fixed": time_fixed,
    "decode": time_decode,
    "rope_attend": time_rope_attend,
    "ragged": time_ragged,
    "prefill": time_prefill,
    "small": time_small,
    "engine": time_engine,
}


def run_part(name: str, quick: bool) -> None:
    torch.manual_seed(int(time.time()))
    random.seed()
    torch.backends.cuda.matmul.allow_tf32 = False
    kind, _, part = name.partition(":")
    begin = time.perf_counter()
    with torch.inference_mode():
        if kind == "check":
            CHECKS[part]()
        else:
            try:
                TIMES[part](quick)
            except Exception as error:
                import traceback

                traceback.print_exc()
                print(f"FAIL time {part}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"-- {name} took {time.perf_counter() - begin:.0f}s", flush=True)
    out = os.environ.get("OUT")
    if out and ROWS:
        Path(out, f"smoke-{part}.json").write_text("\n".join(json.dumps(row) for row in ROWS))


def main() -> None:
    global DRY
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="append", help="check:NAME or time:NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dry", action="store_true", help="compile and run once, time nothing")
    arguments = parser.parse_args()
    DRY = arguments.dry
    if arguments.part and len(arguments.part) == 1:
        run_part(arguments.part[0], arguments.quick)
        return
    parts = arguments.part or [*(f"check:{name}" for name in CHECKS), *(f"time:{name}" for name in TIMES)]
    here = [sys.executable, str(Path(__file__).resolve()), *(["--quick"] if arguments.quick else [])]
    begin = time.perf_counter()
    running = [
        subprocess.Popen(
            [*here, "--part", part, *(["--dry"] if part.startswith("time:") else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in parts
    ]
    for process in running:
        lines = process.communicate()[0].splitlines()
        good = [line for line in lines if line.startswith("ok   ")]
        print("\n".join(line for line in lines if not line.startswith("ok   ") or "bits" in line), flush=True)
        if good:
            print(f"   {len(good)} ok", flush=True)
    print(f"== checked and compiled after {time.perf_counter() - begin:.0f}s", flush=True)
    for part in parts:
        if part.startswith("time:"):
            subprocess.run([*here, "--part", part])
    print(f"== all after {time.perf_counter() - begin:.0f}s", flush=True)


if __name__ == "__main__":
    main()
