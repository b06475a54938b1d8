"""Small engines over the plain CPU worker's parts and over the device worker, with the same random model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from quire.config import CacheConfig
from quire.engine.core import EngineCore
from quire.executor.device import DeviceExecutor
from quire.executor.local import LocalExecutor
from quire.kvcache.manager import GroupWindow, KVCacheManager
from quire.models.build import build_decoder, dummy_weights
from quire.models.registry import read_spec
from quire.ops.cpu import CpuOps
from quire.sampling.params import SamplingParams
from quire.sampling.token_logprobs import unpack_all
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Limits, Scheduler
from quire.speculation.assembly import build_speculator
from quire.speculation.options import REJECTION, SpeculationOptions
from quire.worker.cache_engine import CacheEngine
from quire.worker.draft_models import SkippedLayers, SmallerModel
from quire.worker.drafter import Drafter, DraftModel
from quire.worker.gpu.options import DeviceOptions
from quire.worker.gpu.speculation import BuildHead, Speculation
from quire.worker.gpu.worker import GpuWorker
from quire.worker.memory import draft_group, groups_with_draft
from quire.worker.model_runner import ModelRunner
from quire.worker.request_table import RequestTable

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}
GEMMA3: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_local_base_freq": 10000.0,
}
MAX_LEN = 200
SEQS = 6


class PlainWorker:
    """The CPU worker's table, runner and cache, without a model source."""

    def __init__(self, config: dict[str, Any], block_size: int, num_blocks: int,
                 speculation: SpeculationOptions | None = None, draft: dict[str, Any] | None = None) -> None:
        ops = CpuOps(num_threads=1)
        decoder = build_decoder(config, dummy_weights(config), ops, max_model_len=MAX_LEN)
        smaller = None if draft is None else build_decoder(draft, dummy_weights(draft), ops, max_model_len=MAX_LEN)
        group = draft_group(decoder.spec)
        self._cache = CacheEngine(decoder, ops, num_blocks, block_size, draft=smaller, draft_group=group)
        self._table = RequestTable(SEQS, MAX_LEN, block_size, len(_groups(config, draft)))
        model: DraftModel | None = None
        if smaller is not None:
            model = SmallerModel(smaller, self._cache.draft_layers, self._table, group, num_blocks, 0)
        elif speculation is not None and speculation.on_device:
            model = SkippedLayers(decoder, self._cache.layers, self._table, speculation.skipped_layers)
        rejection = speculation is not None and speculation.verifier == REJECTION
        drafter = None if model is None else Drafter(model, self._table, rejection)
        self._runner = ModelRunner(decoder, self._cache, self._table, drafter, rejection)

    def execute(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode():
            self._table.apply(plan)
            drafter = self._runner.drafter
            if plan.copies:
                self._cache.copy(plan.copies)
                if drafter is not None:
                    drafter.model.copied(plan.copies)
            if drafter is not None:
                for start in plan.starts:
                    drafter.model.restart(start.row)
            return StepResult(plan.step, self._runner.run(plan.entries))

    def close(self) -> None:
        pass


def _groups(config: dict[str, Any], draft: dict[str, Any] | None) -> list[Any]:
    return groups_with_draft(read_spec(config), 0 if draft is None else read_spec(draft).kv_bytes_per_token)


def make_engine(
    config: dict[str, Any],
    *,
    device: bool,
    depth: int = 1,
    block_size: int = 8,
    num_blocks: int = 60,
    budget: int = 40,
    options: DeviceOptions | None = None,
    ops: Any = None,
    drafts: int = 0,
    speculation: SpeculationOptions | None = None,
    draft: dict[str, Any] | None = None,
    head: BuildHead | None = None,
    weights: Callable[[dict[str, Any]], Iterable[tuple[str, torch.Tensor]]] = dummy_weights,
    prefix_caching: bool = True,
) -> EngineCore:
    """`drafts`: so many from n-grams; or whatever `speculation` says, with a draft model of the shapes `draft`, or a
    `head` (on the device only). `weights`: of the target, from its config."""
    groups = tuple(GroupWindow(group.window) for group in _groups(config, draft))
    cache = KVCacheManager(num_blocks, block_size, groups=groups, prefix_caching=prefix_caching)
    if drafts:
        speculation = SpeculationOptions("ngram", drafts, adaptive=False)
    rows = 0 if speculation is None else speculation.most_drafts * SEQS
    speculator = build_speculator(speculation, rows if device else 0)
    scheduler = Scheduler(Limits(SEQS, budget, MAX_LEN), cache, clock=lambda: 0.0, speculator=speculator)
    if not device:
        worker = PlainWorker(config, block_size, num_blocks, speculation, draft)
        return EngineCore(scheduler, LocalExecutor(worker), depth)
    options = options or DeviceOptions(
        device="cpu", dtype="float32", max_num_seqs=SEQS, max_num_batched_tokens=budget, max_model_len=MAX_LEN,
    )
    launcher = GpuWorker(
        config,
        weights(config),
        CacheConfig(block_size=block_size, num_kv_blocks=num_blocks),
        replace(options, draft_rows=rows),
        ops=CpuOps(num_threads=1) if ops is None and options.device == "cpu" else ops,
        speculation=None if speculation is None else Speculation(
            speculation, draft, None if draft is None else dummy_weights(draft), head),
    )
    return EngineCore(scheduler, DeviceExecutor(launcher), depth)


def workload(seed: int, count: int, vocab: int = 131) -> list[Request]:
    """Requests of all kinds of sampling, some with a shared prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(30)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.7, "top_k": 9},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 0.9, "min_p": 0.1},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"temperature": 0.6, "logit_bias": {3: 5.0}, "min_tokens": 6},
        {"temperature": 1.0, "allowed_token_ids": [4, 7, 9]},
        {"temperature": 0.5, "prompt_logprobs": 2},
    ]
    requests = []
    for i in range(count):
        prompt = (shared if rng.random() < 0.4 else []) + [rng.randrange(vocab) for _ in range(rng.randrange(1, 70))]
        params = SamplingParams(max_tokens=rng.randrange(8, 30), ignore_eos=i % 3 == 0, **kinds[i % len(kinds)])
        words = [[rng.randrange(vocab)], [rng.randrange(vocab), rng.randrange(vocab)]] if i % 4 == 1 else []
        requests.append(
            Request(
                f"r{i}",
                prompt,
                params,
                seed=1000 + i,
                arrival_time=0.0,
                bad_words=words,
                eos_token_ids=frozenset({5}),
            )
        )
    return requests


def run(core: EngineCore, requests: list[Request]) -> dict[str, tuple[list[int], list[Any], list[Any], str | None]]:
    """Tokens, log-probabilities and errors of every request, in the order they came."""
    logprobs: dict[str, list[Any]] = {}
    prompts: dict[str, list[Any]] = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        for update in core.step():
            logprobs.setdefault(update.request.request_id, []).extend(unpack_all(update.logprobs or []))
            prompts.setdefault(update.request.request_id, []).extend(unpack_all(update.prompt_logprobs or []))
    return {
        r.request_id: (
            r.sequences[0].tokens[r.sequences[0].num_prompt_tokens :],
            logprobs.get(r.request_id, []),
            prompts.get(r.request_id, []),
            r.sequences[0].error,
        )
        for r in requests
    }
