"""Owns a model on a GPU (or, for tests, on CPU tensors) and launches plans on it without waiting for them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.config import CacheConfig
from quire.errors import ConfigError, QuireError
from quire.kernels.quantized import StoredWeight
from quire.kernels.routing import LayerLoad
from quire.kvtransfer.store import KVStore
from quire.models.build import stored_parts
from quire.models.decoder import Decoder
from quire.models.heads.head import DraftHead
from quire.models.heads.spec import HeadSpec
from quire.models.registry import read_spec
from quire.models.shard import Shard, shard_of
from quire.models.spec import DecoderSpec
from quire.ops.interface import Ops
from quire.parallel.place import Place
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import PlanEntry, RowStart, StepPlan, StepResult, TableDiff
from quire.worker.cache_engine import CacheEngine
from quire.worker.draft_models import DraftProgress, check_same_vocabulary, reading_draft_model
from quire.worker.gpu.ahead import DraftsAhead
from quire.worker.gpu.backend import device_ops
from quire.worker.gpu.copies import CopyStream
from quire.worker.gpu.drafter import DeviceDrafter, DraftRunner, without_layers
from quire.worker.gpu.expert_meter import ExpertMeter
from quire.worker.gpu.growing import TreeGrower, expanded_at_once
from quire.worker.gpu.heads import HeadRunner, KeptStates, WatchedPasses
from quire.worker.gpu.memory import explain, explain_start, measure_step, ran_out, size_device_pool
from quire.worker.gpu.options import DTYPES, DeviceOptions, supported
from quire.worker.gpu.passes import CapturingPasses, DevicePasses, DeviceRanks
from quire.worker.gpu.results import PendingStep, ResultCopier, failed
from quire.worker.gpu.runner import DeviceRunner
from quire.worker.gpu.spans import SpanRunner, tree_rungs
from quire.worker.gpu.speculation import Speculation
from quire.worker.gpu.table import DeviceTable, DraftView
from quire.worker.gpu.told import StageTalk, TellingDrafts, ToldDrafts
from quire.worker.gpu.trees import TreeSteps
from quire.worker.gpu.weights import build_on_device, random_weights
from quire.worker.head_progress import HeadProgress
from quire.worker.memory import PoolSize, available_memory, draft_group, groups_with_draft, size_host_tier
from quire.worker.transfer import KVTransfer

_JUDGED_ROWS = 256
"""Rows of weights that exist while some sequences' drafts are judged by rejection."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """What a worker needs to know that is one rank of several."""

    shard: Shard
    ranks: DeviceRanks
    agree: Callable[[PoolSize], PoolSize]
    """Says what this rank could hold, and waits for what all of them will."""
    sharing: int = 1
    """Ranks of the engine on this GPU."""
    talk: StageTalk | None = None
    """How the last stage tells the others of drafts, where there are several."""


_WARM_UP = ((0, 40), (0, 100), (0, 512), (100, 40))
"""Prompts that steps are warmed up with: tokens before the chunk, and its own."""


class GpuWorker:
    """Plans in, futures out. `weights` None: random ones, made on the device; of a `share` they are its part.

    As one rank of several it gets every plan. All tensor ranks of the last stage draw, and the same; other stages are
    told by `learn`.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Iterable[tuple[str, StoredWeight]] | None,
        cache: CacheConfig,
        options: DeviceOptions,
        ops: Ops | None = None,
        speculation: Speculation | None = None,
        share: RankShare | None = None,
        kernels_ready: Callable[[], None] | None = None,
    ) -> None:
        """`kernels_ready`: waits for those who compile kernels beside this start; called before the first step."""
        self.spec = read_spec(config)
        self._kernels_ready = kernels_ready
        self._share = share
        self.shard = shard_of(self.spec, Place()) if share is None else share.shard
        self._speculation = speculation
        self._grower: TreeGrower | None = None
        self._drafter: DeviceDrafter | None = None
        model = None if speculation is None else speculation.config
        with reading_draft_model(None if speculation is None else speculation.options.model):
            small = None if model is None else read_spec(model)
        if small is not None:
            check_same_vocabulary(self.spec, small)
        self._draft_spec: DecoderSpec | HeadSpec | None = small
        if speculation is not None and speculation.head_spec is not None:
            self._draft_spec = speculation.head_spec
        self._check_trees(small)
        self.device = torch.device(options.device)
        if self.device.type == "cuda":
            options = supported(options, torch.cuda.get_device_capability(self.device))
        self._options = options
        self.timings: dict[str, float] = {}
        shown: QuireError | None = None
        try:
            with torch.inference_mode():
                self._build(config, weights, cache, ops)
        except BaseException as error:
            if not ran_out(error):
                self.close()
                raise
            shown = explain_start(error)
        if shown is not None:
            # Outside the handler, since the error's traceback holds the memory that is to be freed.
            self.close()
            raise shown
        self._copier = ResultCopier(self.device, nullcontext if share is None else share.ranks.watched)
        if self.device.type == "cuda":
            # A full collection looks at all of torch for 0.15 s, in which the GPU runs dry: what is here now stays.
            gc.collect()
            gc.freeze()

    def _build(
        self,
        config: Mapping[str, Any],
        weights: Iterable[tuple[str, StoredWeight]] | None,
        cache: CacheConfig,
        ops: Ops | None,
    ) -> None:
        options, dtype = self._options, DTYPES[self._options.dtype]
        self.ops = device_ops(options, self.device, dtype) if ops is None else ops
        started = time.perf_counter()
        length = _length(self.spec.max_positions, options.max_model_len)
        parts = None if self.shard.is_whole else stored_parts(config, self.shard)
        stream = random_weights(config, self.device, dtype, options.seed, parts) if weights is None else weights
        ranks = None if self._share is None else self._share.ranks
        self.decoder = build_on_device(config, stream, self.ops, self.device, dtype, length, self.shard,
                                       None if ranks is None else ranks.group)
        self._expert_meter = ExpertMeter(self.decoder.expert_load, self.device)
        draft = self._build_draft_model(length, dtype)
        if isinstance(draft, DraftHead):
            self._draft_spec = draft.spec
        self._mark("weights", started)
        kept = self._draft_spec
        groups = len(groups_with_draft(self.spec, 0 if kept is None else kept.kv_bytes_per_token))
        seqs = options.max_num_seqs
        self.table = DeviceTable(seqs, length, cache.block_size, groups, self.spec.vocab_size, self.device)
        self._runner = DeviceRunner(
            self.decoder,
            self.ops,
            self.table,
            self.device,
            max_num_seqs=seqs + options.draft_rows,
            use_graphs=not options.enforce_eager,
            fuse_rope=options.fuse_rope,
            mixed_tokens=options.max_num_batched_tokens if options.pad_mixed else 0,
            rejection=self._speculation is not None and self._speculation.rejection,
            ranks=ranks,
            passes=self._watched_passes(draft, ranks),
        )
        self._runner.trees = self._tree_steps()
        drafting = self._build_draft_runner(draft)
        self.pool = self._size_pool(cache, length)
        if self._share is not None:
            self.pool = self._share.agree(self.pool)
        self._cache = CacheEngine(
            self.decoder, self.ops, self.pool.num_blocks + 1, cache.block_size, self.pool.num_host_blocks,
            draft=draft, draft_group=draft_group(self.spec)
        )
        self.arrivals = self._cache.arrivals
        self._copies = CopyStream(self.device, self._cache, self.table)
        self._runner.caches = self._cache.layers
        if drafting is not None:
            self._connect(drafting, cache)
        elif self._is_told and self._talk is not None:
            self._runner.drafter = ToldDrafts(self._talk)
        self._prepare(drafting)

    def kv_memory(self) -> KVStore:
        """The model's caches, or this rank's share of them, for whoever moves KV to and from other engines."""
        return KVStore(self._cache.layers, self._cache.groups, first_layer=self.shard.first_layer,
                       heads=self.shard.kv_heads)

    def learn(self, row: int, position: int, tokens: Sequence[int]) -> None:
        """Tokens that a later stage drew for a row, the first one for `position`; called before the plan that continues
        from there. An empty row is skipped."""
        self.table.learn(row, position, tokens)
        if self._runner.trees is not None:
            self._runner.trees.learn(row, position, tokens)

    def device_bytes(self) -> int:
        """Of the GPU's memory that this process holds, cached pieces included."""
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def expert_load(self) -> list[LayerLoad]:
        """Rows per expert so far, read without waiting for the device: the copy that the previous call started."""
        return self._expert_meter.read()

    def connect(self, transfer: KVTransfer) -> None:
        """Move blocks to and from one more tier."""
        self._cache.connect(transfer)

    def _prepare(self, drafting: DraftRunner | None) -> None:
        """Capture graphs and compile kernels before anybody waits for them."""
        started = time.perf_counter()
        for runner in (self._runner, drafting):
            if runner is not None:
                runner.capture(self._options.max_num_seqs)
        if self._grower is not None:
            self._grower.capture()
        self._mark("graphs", started)
        started = time.perf_counter()
        if self.device.type == "cuda":
            self._runner.contexts.pick_up_prompts()
            if self._runner.sampled is not None:
                self._runner.sampled.prepare()
            for decodes in (1, 12, 24, 140):
                self._warm_up(min(decodes, self._options.max_num_seqs - 1))
        self._mark("warm_up", started)

    def launch_captured(self) -> None:
        """Every step that a start captures, once and outside graphs: for whoever wants to know their kernels."""
        self._runner.launch_captured(self._options.max_num_seqs)

    # ---- a model that proposes

    def _build_draft_model(self, length: int, dtype: torch.dtype) -> Decoder | DraftHead | None:
        asked = self._speculation
        if self._is_told:
            return None
        if asked is not None and asked.head is not None:
            ranks = DeviceRanks() if self._share is None else self._share.ranks
            # Ranks read rows of the tables that they share.
            with reading_draft_model(asked.options.model), torch.device(self.device), ranks.watched():
                head = asked.head(self.decoder, self.device, length)
                if ranks.group is not None:
                    ranks.group.settle()
                return head
        if asked is None or asked.config is None:
            return None
        weights = asked.weights
        if weights is None:
            weights = random_weights(asked.config, self.device, dtype, self._options.seed)
        with reading_draft_model(asked.options.model):
            return build_on_device(asked.config, weights, self.ops, self.device, dtype, length)

    @property
    def _talk(self) -> StageTalk | None:
        return None if self._share is None else self._share.talk

    @property
    def _is_told(self) -> bool:
        """A stage that is told the drafts of a head, which the last stage has."""
        asked = self._speculation
        return asked is not None and asked.head is not None and not self.shard.place.is_last

    def _watched_passes(self, draft: Decoder | DraftHead | None, ranks: DeviceRanks | None) -> DevicePasses | None:
        """Of a target with a head, which reads its hidden states."""
        if self._is_told and isinstance(self._draft_spec, HeadSpec):
            return CapturingPasses(self.decoder, ranks, self._draft_spec.inner_states)
        if not isinstance(draft, DraftHead):
            return None
        self._states = KeptStates(self.table, draft_group(self.spec))
        return WatchedPasses(self.decoder, ranks, draft, self._states)

    def _check_trees(self, draft: DecoderSpec | None) -> None:
        """Latents are attended to along chains. Lookups have a first branch to take then; of a model's tree nobody
        knows it."""
        asked = self._speculation
        if asked is None or asked.options.tree is None or not asked.options.on_device:
            return
        named = f"speculative_config tree of method {asked.options.method!r} is not drafted on a GPU"
        latent = any(layer.attention.latent is not None for spec in (self.spec, draft) if spec is not None
                     for layer in spec.layers)
        if latent:
            raise ConfigError(f"{named} with latent attention (MLA): leave tree out for chains, or use device='cpu'",
                              field="speculative_config")

    def _tree_steps(self) -> TreeSteps | None:
        """Latents are attended to along chains."""
        asked = self._speculation
        if asked is None or asked.options.tree is None:
            return None
        if any(layer.attention.latent is not None for layer in self.spec.layers):
            return None
        graphs = self._runner.graphs
        groups = self.spec.group_of_layer()[self.shard.first_layer : self.shard.last_layer]
        steps = TreeSteps(self._runner.launches, self.ops, self.table, asked.options.tree, self._runner.rungs, groups,
                          None if graphs is None else graphs.pool)
        if self._is_told:
            options = self._span_options(asked)
            steps.most_growing = max(tree_rungs(*(options[name] for name in
                                                  ("max_num_seqs", "span", "most_rows", "nodes"))), default=0)
        return steps

    def _build_head_runner(self, head: DraftHead, asked: Speculation) -> HeadRunner:
        return HeadRunner(
            head,
            self.ops,
            DraftView(self.table, [draft_group(self.spec)]),
            self.device,
            states=self._states,
            ranks=None if self._share is None else self._share.ranks,
            **self._span_options(asked),
        )

    def _span_options(self, asked: Speculation) -> dict[str, Any]:
        """Of a runner that catches up with several tokens of a sequence in one captured step."""
        options, tree = self._options, asked.options.tree
        deepest = max(asked.options.num_speculative_tokens, 0 if tree is None else tree.depth)
        return {
            "span": deepest + 1,
            "most_rows": options.max_num_seqs + options.draft_rows,
            "nodes": 0 if tree is None else expanded_at_once(tree),
            "max_num_seqs": options.max_num_seqs,
            "use_graphs": not options.enforce_eager,
            "fuse_rope": options.fuse_rope,
            "rejection": asked.rejection,
        }

    def _build_draft_runner(self, draft: Decoder | DraftHead | None) -> DraftRunner | None:
        """Of the draft model, or of the target without some layers, over the same table."""
        asked, options = self._speculation, self._options
        if asked is None or not asked.options.on_device or self._is_told:
            return None
        if isinstance(draft, DraftHead):
            return self._build_head_runner(draft, asked)
        windows: tuple[int | None, ...] | None = None
        ranks: DeviceRanks | None = None
        if draft is None:
            draft, self._kept_layers = without_layers(self.decoder, asked.options.skipped_layers)
            windows = tuple(group.window for group in self.spec.cache_groups())
            view = DraftView(self.table, range(len(windows)))
            ranks = None if self._share is None else self._share.ranks  # which have the other parts of these layers
        else:
            view = DraftView(self.table, [draft_group(self.spec)] * len(draft.spec.cache_groups()))
        if asked.options.tree is not None:
            return SpanRunner(draft, self.ops, view, self.device, windows=windows, ranks=ranks,
                              **self._span_options(asked))
        return DraftRunner(
            draft,
            self.ops,
            view,
            self.device,
            max_num_seqs=options.max_num_seqs,
            use_graphs=not options.enforce_eager,
            fuse_rope=options.fuse_rope,
            windows=windows,
            rejection=asked.rejection,
            ranks=ranks,
        )

    def _connect(self, drafting: DraftRunner, cache: CacheConfig) -> None:
        """Give the draft model its caches, and the target's runner its drafts."""
        progress = None
        if self._cache.draft_layers:
            group = draft_group(self.spec)
            drafting.caches = self._cache.draft_layers
            if isinstance(drafting, HeadRunner):
                drafting.caches, kept = self._cache.draft_layers[:1], self._cache.draft_layers[1]
                self._states.connect(kept)
                if self._runner.trees is not None:
                    self._runner.trees.also_moves(kept, group)
            kind = HeadProgress if isinstance(drafting, HeadRunner) else DraftProgress
            progress = kind(self.table.host_tables[group], cache.block_size, group, self.pool.num_blocks,
                            self.pool.num_host_blocks)
        else:
            drafting.caches = [self._cache.layers[index] for index in self._kept_layers]
        ahead = None
        asked = self._speculation
        chains = asked is not None and asked.options.tree is None and not asked.rejection
        if isinstance(drafting, HeadRunner) and chains:
            ahead = DraftsAhead(drafting, self.table, draft_group(self.spec))
            drafting.follow(self._runner.launches)
        self._drafter = DeviceDrafter(drafting, progress, self._options.max_num_batched_tokens,
                                      not isinstance(drafting, HeadRunner), self._build_grower(drafting), ahead)
        self._runner.drafter = self._drafter
        if self._talk is not None and self._share is not None and isinstance(drafting, HeadRunner):
            self._runner.drafter = TellingDrafts(self._drafter, self._talk, self._share.ranks.watched)

    def _build_grower(self, drafting: DraftRunner) -> TreeGrower | None:
        trees, asked = self._runner.trees, self._speculation
        if trees is None or asked is None or not isinstance(drafting, SpanRunner) or asked.options.tree is None:
            return None
        grower = trees.grower = TreeGrower(drafting, trees, self.table, asked.options.tree, asked.rejection)
        self._grower = grower
        return grower

    def _mark(self, name: str, started: float) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.timings[name] = time.perf_counter() - started

    def _size_pool(self, cache: CacheConfig, length: int) -> PoolSize:
        started = time.perf_counter()
        if self._kernels_ready is not None:
            self._kernels_ready()
            self._mark("kernels", started)
            started = time.perf_counter()
        if self.device.type != "cuda":
            blocks = cache.num_kv_blocks or -(-length // cache.block_size) * 4
            per_block = self.spec.kv_bytes_per_block(cache.block_size)
            draft = 0 if self._draft_spec is None else self._draft_spec.kv_bytes_per_token
            host = size_host_tier(cache, per_block, available_memory())
            return PoolSize(blocks, min(length, blocks * cache.block_size), per_block, host, draft)
        step = measure_step(lambda: self._largest_step(cache.block_size), self.device)
        if self._speculation is not None and self._speculation.rejection:
            # Of every draft a row of weights stays until it is judged.
            step += 8 * self.spec.vocab_size * (self._options.draft_rows + _JUDGED_ROWS)
        free, total = torch.cuda.mem_get_info(self.device)
        element = 1 if self._options.kv_cache_dtype == "fp8" else DTYPES[self._options.dtype].itemsize
        pool = size_device_pool(
            self.shard,
            cache,
            length,
            element,
            free,
            total,
            self._options.gpu_memory_utilization,
            step,
            given_len=self._options.max_model_len is not None,
            draft=self._draft_spec,
            sharing=1 if self._share is None else self._share.sharing,
        )
        host = size_host_tier(cache, pool.bytes_per_block, available_memory())
        pool = replace(pool, num_host_blocks=host)
        self._mark("profile", started)
        return pool

    def _largest_step(self, block_size: int) -> None:
        """A step with as many tokens and sequences as the limits allow, over a cache of one block."""
        options = self._options
        groups = len(self.spec.cache_groups())
        self._runner.caches = self.decoder.allocate_caches([2] * groups, block_size)
        seqs = options.max_num_seqs
        each = max(1, min(options.max_num_batched_tokens // seqs, self.table.max_model_len))
        plan = StepPlan(0)
        left = options.max_num_batched_tokens
        for row in range(seqs):
            count = min(each if row < seqs - 1 else left, left, self.table.max_model_len)
            if count < 1:
                break
            left -= count
            blocks = -(-count // block_size)
            plan.starts.append(RowStart(row, [0] * count, count, SamplingParams(temperature=1.0), 0, 0))
            plan.diffs = [*plan.diffs, *(TableDiff(row, group, 0, [0] * blocks) for group in range(groups))]
            plan.entries.append(PlanEntry(row, 0, count, sample=True))
        self._runner.run(plan)
        self._runner.run(StepPlan(1, freed_rows=list(range(seqs))))
        self._runner.caches = []

    def _warm_up(self, decodes: int) -> None:
        """A step of prompts beside decoding sequences, before anybody waits for its kernels to be compiled; several
        steps, where it has no room for all of them."""
        limit, seqs = min(self.table.max_model_len, self.pool.max_model_len), self._options.max_num_seqs
        chunks = [(0, 1)] * decodes + [(start, count) for start, count in _WARM_UP if start + count <= limit]
        for first in range(0, len(chunks), seqs):
            self._warm_up_chunks(chunks[first : first + seqs])

    def _warm_up_chunks(self, chunks: Sequence[tuple[int, int]]) -> None:
        """One step: of each, tokens that are computed already, and tokens to be computed."""
        plan = StepPlan(0)
        for row, (start, count) in enumerate(chunks):
            length = start + count
            blocks = [0] * -(-length // self.table.block_size)
            plan.starts.append(RowStart(row, [0] * length, length, SamplingParams(temperature=1.0), 0, 0))
            plan.diffs = [*plan.diffs,
                          *(TableDiff(row, group, 0, blocks) for group in range(len(self.table.tables)))]
            plan.entries.append(PlanEntry(row, start, count, sample=True))
        # As large steps run, kernel by kernel: a padded one would replay a graph, whose kernels are compiled already.
        padded, self._runner.padded = self._runner.padded, None
        try:
            self._runner.run(plan)
        finally:
            self._runner.padded = padded
        if self._drafter is not None:
            self._drafter.runner.begin()
            self._drafter.runner.launch(plan.entries)
            self._drafter.runner.begin()
        self._runner.run(StepPlan(1, freed_rows=list(range(len(chunks)))))

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Launch a plan without waiting. Steps run in the order of their plans; the future completes when its step
        has."""
        try:
            with torch.inference_mode():
                if self._runner.trees is not None and self._runner.trees.settle_learned():
                    self._copies.more_launched()
                self._move_blocks(plan)
                pending = self._run(plan)
                future = self._copier.send(pending)
        except Exception as error:
            self._copies.failed()
            if not ran_out(error):
                return failed(error)
            torch.cuda.empty_cache()
            return failed(explain(error))
        self._copies.launched(plan, future)
        lost = self._draft_on(pending) if plan.drafts_follow else None
        return future if lost is None else failed(lost)

    def _draft_on(self, pending: PendingStep) -> Exception | None:
        """Drafts for the next step. That step needs none of them, and this one is under way: what fails here costs no
        token, and a GPU that is broken says so with the next result. But not with several ranks: the others have
        launched the same drafts, and wait for this rank in them."""
        try:
            with torch.inference_mode():
                if self._runner.draft_on(pending):
                    self._copies.more_launched()
        except Exception as error:
            self._copies.failed()
            if not self.shard.is_whole:
                return explain(error) if ran_out(error) else error
            if ran_out(error):
                torch.cuda.empty_cache()
        return None

    @property
    def launch(self) -> Callable[[StepPlan], Future[StepResult]]:
        """For a rank: the next step may be launched while one runs."""
        return self.submit

    def _move_blocks(self, plan: StepPlan) -> None:
        """Launch the plan's copies, then start its transfers, which wait for all that was launched before them."""
        try:
            if plan.copies:
                self._copies.run(plan.copies)
        except BaseException as error:
            self._cache.refuse_transfers(plan, error)
            raise
        self._cache.start_transfers(plan)

    def _run(self, plan: StepPlan) -> PendingStep:
        """Launch the step. If it runs out of memory it is tried once more after the allocator has freed its cache:
        applying a plan twice changes nothing. Not with several ranks: the others would not try again."""
        try:
            return self._runner.run(plan)
        except RuntimeError as error:
            if not ran_out(error) or not self.shard.is_whole:
                raise
        torch.cuda.empty_cache()
        return self._runner.run(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).result()

    def close(self) -> None:
        """Give the memory back even while somebody still holds the worker."""
        if "_copier" in self.__dict__:
            self._copier.close()
        if "_cache" in self.__dict__:
            self._cache.close()
        if self._grower is not None:
            self._grower.close()
        if "_runner" in self.__dict__:
            if self._drafter is not None:
                self._drafter.runner.close()
            self._runner.close()
        if self._share is not None:
            self._share.ranks.close()
        if "ops" in self.__dict__:
            self.ops.close()
        for name in ("_runner", "_copies", "_cache", "table", "decoder", "ops", "_copier"):
            self.__dict__.pop(name, None)
        self._grower = self._drafter = None
        if self.device.type == "cuda":
            # What is left refers to itself in circles; the allocator can only return what nobody holds.
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()


def _length(max_positions: int, wanted: int | None) -> int:
    if wanted is not None and wanted > max_positions:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {max_positions} positions the model was made for: lower it",
            field="max_model_len",
        )
    return max_positions if wanted is None else wanted
