"""`quire bench speculative --shapes`: drafts on a worker of a GPU, at batch sizes and acceptances that are set.

Two workers of one shape, with rows for drafts and without, say a text that is known beforehand
(`quire.bench.speculation.known_text`). So `known` drafts are right as often as asked for, and what verifying k + 1
tokens costs and gains is measured apart from how well somebody guesses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.bench.speculation.known_text import KnownSource, KnownText, untied, weights_of_known_text

if TYPE_CHECKING:
    from torch import Tensor

    from quire.bench.gpu.engine import Run
    from quire.ops.interface import Ops
    from quire.speculation.speculator import Speculator
    from quire.worker.gpu.options import DeviceOptions
    from quire.worker.gpu.speculation import Speculation
    from quire.worker.gpu.worker import GpuWorker

TEXTS = ("repeating", "free", "misleading")
_PROMPT = 256
_BLOCK = 16


class Bench:
    """The two workers, and what they are asked."""

    def __init__(self, config: dict[str, Any], args: argparse.Namespace, ops: Ops | None = None) -> None:
        self.config = untied(config)
        self.args = args
        self.ops = ops
        self.text = KnownText(config["vocab_size"])
        self.seqs = max(args.batch)
        self.plain = self._worker(0)
        self.drafting: GpuWorker | None = None
        self._for: tuple[int, Speculation | None] = (0, None)
        self._plain_runs: dict[tuple[str, int], list[Run]] = {}

    def _options(self, draft_rows: int) -> DeviceOptions:
        from quire.worker.gpu.options import DeviceOptions

        on_gpu = self.args.device == "cuda"
        return DeviceOptions(
            device=self.args.device, dtype="bfloat16" if on_gpu else "float32", max_num_seqs=self.seqs,
            max_num_batched_tokens=max(2048, self.seqs * _PROMPT), max_model_len=_PROMPT + self.args.max_tokens + 16,
            draft_rows=draft_rows, few_rows=getattr(self.args, "few_rows", True))

    def _worker(self, draft_rows: int, speculation: Speculation | None = None) -> GpuWorker:
        from quire.config import CacheConfig
        from quire.worker.gpu.worker import GpuWorker

        options = self._options(draft_rows)
        blocks = (self.seqs + 1) * -(-(options.max_model_len or 0) // _BLOCK)
        if speculation is not None and speculation.config is not None:
            speculation = replace(speculation, weights=self._weights(speculation.config))
        return GpuWorker(self.config, self._weights(self.config), CacheConfig(block_size=_BLOCK, num_kv_blocks=blocks),
                         options, self.ops, speculation)

    def _weights(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        import torch

        from quire.worker.gpu.options import DTYPES
        from quire.worker.gpu.weights import random_weights

        options = self._options(0)
        random = random_weights(config, torch.device(options.device), DTYPES[options.dtype])
        return weights_of_known_text(random, self.text)

    def drafting_worker(self, method: Method) -> GpuWorker:
        """With room for the drafts of a method, and its model; one at a time."""
        wanted = method.rows(self.seqs), method.speculation(self.config)
        if self.drafting is None or self._for != wanted:
            if self.drafting is not None:
                self.drafting.close()
                self.drafting = None
            self.drafting, self._for = self._worker(*wanted), wanted
        return self.drafting

    def close(self) -> None:
        self.plain.close()
        if self.drafting is not None:
            self.drafting.close()

    # ---- runs

    def run(self, worker: GpuWorker, speculator: Speculator | None, kind: str, batch: int) -> Run:
        from quire.bench.gpu.engine import build_core, run_requests
        from quire.sampling.params import SamplingParams
        from quire.scheduler.request import Request

        core = build_core(worker, worker._options, block_size=_BLOCK, partial_prefills=batch, speculator=speculator)
        params = SamplingParams(temperature=0.0, max_tokens=self.args.max_tokens, ignore_eos=True)
        requests = [Request(f"{kind}{i}", self.text.prompt(kind, _PROMPT, i, self.args.max_tokens), params, i, 0.0)
                    for i in range(batch)]
        return run_requests(core, requests, keep_tokens=True)

    def plain_runs(self, kind: str, batch: int) -> list[Run]:
        """The same without drafts, once for all methods."""
        found = self._plain_runs.get((kind, batch))
        if found is None:
            runs = [self.run(self.plain, None, kind, batch) for _ in range(1 + self.args.repeat)]
            found = self._plain_runs[kind, batch] = runs[1:]
        return found

    def case(self, method: Method, kind: str, batch: int) -> dict[str, Any]:
        plain = self.plain_runs(kind, batch)
        worker = self.drafting_worker(method)
        runner = worker._runner
        runs, speculators = [], []
        for turn in range(1 + self.args.repeat):
            speculator = method.speculator(self.text, worker, self.seqs)
            before = runner.replays
            run = self.run(worker, speculator, kind, batch)
            if turn:
                runs.append(run)
                speculators.append(speculator)
        replayed = None if runner.graphs is None else runner.replays - before
        return {"batch": batch, "text": kind, **_figures(plain, runs, speculators, batch), "steps": runs[-1].steps,
                "replayed_graphs": replayed}


@dataclass(frozen=True, slots=True)
class Method:
    """Who proposes: a speculative_config, or drafts that are right with probability `acceptance`."""

    name: str
    config: dict[str, Any]
    acceptance: float | None = None

    @property
    def most(self) -> int:
        return int(self.config.get("num_speculative_tokens", 8))

    def rows(self, seqs: int) -> int:
        from quire.worker.gpu.options import MOST_DRAFT_ROWS

        # As many for all methods, so that they share a worker.
        return min(max(8, self.most) * seqs, MOST_DRAFT_ROWS)

    def speculation(self, config: dict[str, Any]) -> Speculation | None:
        """What the worker has to know: nothing, where the host looks drafts up and the target's draws judge them."""
        from quire.bench.gpu.cases import MODELS
        from quire.speculation.options import SpeculationOptions
        from quire.worker.gpu.speculation import Speculation

        if self.acceptance is not None:
            return None
        options = SpeculationOptions.parse(self.config)
        if options.method != "draft_model":
            return Speculation(options) if options.on_device or options.verifier != "coupled" else None
        small = MODELS["0.6b"]
        if config["vocab_size"] != small["vocab_size"] or config["hidden_size"] <= small["hidden_size"]:
            small = {**config, "num_hidden_layers": max(1, config["num_hidden_layers"] // 2)}
        return Speculation(options, untied(small))

    def speculator(self, text: KnownText, worker: GpuWorker, seqs: int) -> Speculator:
        from quire.config import EngineConfig
        from quire.engine.assembly.calibration import measure_step_times
        from quire.executor.device import DeviceExecutor
        from quire.speculation.assembly import build_speculator
        from quire.speculation.options import SpeculationOptions
        from quire.speculation.speculator import LookupSpeculator

        if self.acceptance is not None:
            found: Speculator = LookupSpeculator(KnownSource(text, self.acceptance), self.most, adaptive=False)
            found.most_in_step = self.rows(seqs)
            return found
        made = build_speculator(SpeculationOptions.parse(self.config), self.rows(seqs))
        if made is None:
            raise ValueError("a method without a speculator")
        if made.adaptive:
            config = EngineConfig.create(model="known text", block_size=_BLOCK)
            measure_step_times(made, DeviceExecutor(worker), config, worker.spec, worker.pool)
        return made


def _figures(plain: list[Run], runs: list[Run], speculators: list[Speculator], batch: int) -> dict[str, Any]:
    def decoding(run: Run) -> float:
        return (run.seconds - run.first_token) / (run.output_tokens - batch) * batch * 1e3

    before, after = statistics.median(map(decoding, plain)), statistics.median(map(decoding, runs))
    stats = speculators[-1].stats
    equal = total = 0
    for mine, other in zip(runs[-1].tokens, plain[-1].tokens, strict=True):
        equal += sum(a == b for a, b in zip(mine, other, strict=True))
        total += len(mine)
    offered = sum(stats.offered)
    return {
        "plain_ms_per_token": round(before, 4),
        "ms_per_token": round(after, 4),
        "ratio": round(before / after, 3),
        "tokens_per_s": round(batch * 1e3 / after, 1),
        "tokens_per_step": round(stats.decode_tokens / max(1, stats.decode_steps), 3),
        "drafts_per_step": round(offered / max(1, stats.decode_steps), 3),
        "acceptance": round(sum(stats.accepted) / offered, 3) if offered else None,
        "acceptance_by_position": [round(a / o, 3) for a, o in zip(stats.accepted, stats.offered, strict=True)],
        "equal_tokens": round(equal / total, 4),
        "ms_per_step": round((runs[-1].seconds - runs[-1].first_token) / max(1, runs[-1].steps - 1) * 1e3, 4),
        "host_ms_per_step": round(runs[-1].plan_seconds / runs[-1].steps * 1e3, 4),
    }


def methods_of(args: argparse.Namespace, configs: dict[str, dict[str, Any]]) -> list[Method]:
    """`known` stands for one method per acceptance and number of drafts."""
    found = []
    for name, config in configs.items():
        if config.get("method") == "draft_model":
            config = {**config, "model": "known text"}
        if name == "known":
            found += [Method(f"known {acceptance:g}", {"num_speculative_tokens": drafts}, acceptance)
                      for drafts in args.drafts for acceptance in args.acceptance]
        else:
            found.append(Method(name, config))
    return found


def run_shapes(model: dict[str, Any], args: argparse.Namespace, configs: dict[str, dict[str, Any]],
               machine: dict[str, Any], ops: Ops | None = None) -> int:
    """A JSON line for each method, text and batch; what fails is told and the others go on."""
    head = {"bench": "speculative", "model": args.shapes, "device": args.device}
    print(json.dumps({**head, **machine, "prompt_tokens": _PROMPT, "max_tokens": args.max_tokens}), flush=True)
    bench = Bench(model, args, ops)
    failed = 0
    try:
        for method in methods_of(args, configs):
            texts = ("free",) if method.acceptance is not None else TEXTS
            for kind in texts:
                for batch in args.batch:
                    line = {**head, "method": method.name, "drafts": method.most}
                    try:
                        print(json.dumps({**line, **bench.case(method, kind, batch)}), flush=True)
                    except Exception as error:
                        failed += 1
                        traceback.print_exc(file=sys.stderr)
                        print(json.dumps({**line, "text": kind, "batch": batch, "error": str(error)}), flush=True)
    finally:
        bench.close()
    return 1 if failed else 0
