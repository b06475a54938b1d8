"""Attention on a GPU: decode (one new token per sequence) by the split kernel, everything else by the tiled one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attention import prefill_libraries
from quire.attention.backend import FreshPrompts, PrefillLibrary
from quire.errors import InvariantError
from quire.kernels.cuda import attention_cluster, loading
from quire.kernels.decode_lengths import Lengths
from quire.kernels.triton import hopper_prefill
from quire.kernels.triton.attention_decode import DecodeScratch, decode_attention
from quire.kernels.triton.attention_few import MOST_BESIDE_FEW, MOST_SEQUENCES, few_decode_attention
from quire.kernels.triton.attention_few import MOST_DRAFTED as MOST_DRAFTED
from quire.kernels.triton.attention_few import fits as few_fits
from quire.kernels.triton.attention_fresh import fresh_attention, fresh_fits
from quire.kernels.triton.attention_mixed import MixedShape, mixed_attention, query_tiles
from quire.kernels.triton.attention_rope import rope_decode_attention, rope_fits
from quire.kernels.triton.attention_split import (
    HOPPER_SHARED,
    DecodeSplit,
    decode_shape,
    extra_pieces,
    split_decode,
)
from quire.kernels.triton.latent_attention import (
    LatentDecode,
    decode_sizes,
    latent_decode,
    latent_pieces,
    latent_tiles,
)
from quire.kernels.triton.latent_hopper import available, fits, hopper_decode
from quire.kernels.triton.unpacked_pages import PageRoom, UnpackedPages, choose_pages, unpack_pages
from quire.kernels.types import HeadShape, HeadTurn, LatentShape, LayerCache, StepContext, pair_cache

_FIXED = MixedShape(64, 64, 4, 3)
"""The tile of deterministic mode, for every query of every step: bits may depend on its shape."""
_FIXED_HOPPER = MixedShape(64, hopper_prefill.PREFILL.keys, 4, 2)
"""The same where `hopper_prefill` may compute a row: as many keys at a time."""
_FIXED_FLOAT32 = MixedShape(32, 32, 4, 2)
_TWO_BYTES = 2
_TIMED_KV_HEADS = 8
"""Fewer of them leave programs for pieces of sequences, which other sizes were timed for."""
_WIDE = MixedShape(128, 64, 4, 3)
"""H200, 2026-11-15, prompts of 4,096: 401 to 413 TFLOP/s, with 8 warps 318, 64 rows 349."""
_LARGE_HEADS = MixedShape(64, 32, 4, 2)
_LATENTS_FLOAT32, _LATENTS = MixedShape(16, 16, 4, 2), MixedShape(32, 32, 4, 2)
"""Of heads past 256 (latents) on chips with 99 KiB of shared memory for a program (sm_89, sm_120): compiled for them,
never run."""
_LITTLE_SHARED = 112 << 10
"""`_LARGE_HEADS` needs so much for latents of 512."""
_ROWS = MixedShape(64, 32, 4, 3)
"""The tile of prefill attention that reads keys from the step's rows. H200, TFLOP/s of 8,192 tokens of prompts of 100
to 1,024, 32 heads: 304, by the tiles above 232; of 1,024 each, 16 heads: 334 and 280."""
_ROWS_MOST = 2048
"""Tokens of such a prompt at most: longer ones were not compared."""
_FRESH_TOKENS = 512
_FRESH_STEP = 256
"""A prompt without context of so many tokens and a multiple of the step goes to cuDNN: 567 to 600 TFLOP/s
(torch's FlashAttention 305 to 328). cuDNN plans anew for every length, so only few lengths are let through."""

_RAGGED_TOKENS = 64
_SCALE = 0.1


@dataclass(slots=True)
class DeviceContext(StepContext):
    """A step's context as the kernels want it: sequences with one query first, the table's rows named, not
    copied."""

    rows: Tensor | None = None
    """int32 [S]: row of `tables` of each sequence; None: `block_tables` are already one row per sequence."""
    tables: tuple[Tensor, ...] = ()
    """One per cache group: int32 [table rows, max_blocks]."""
    splits: tuple[DecodeSplit, ...] = ()
    """One per cache group: how the keys of those are shared out. Filled on the device by `prepare`."""
    tile_seq: Tensor | None = None
    tile_first: Tensor | None = None
    row_tiles: tuple[Tensor, Tensor] | None = None
    """(sequence, first token) of the tiles of prompts without context, which read keys from the step's rows."""
    paged_tiles: tuple[Tensor, Tensor] | None = None
    """The same of those that `hopper_prefill` takes."""
    unpacked: UnpackedPages | None = None
    """What it reads of a cache in fp8."""
    fuse_rope: bool = False
    """Norm, rotation and KV write run inside decode attention. Only for steps of one query per sequence: with drafts a
    query would need a key that another program of the same launch writes."""
    lengths: Lengths = Lengths.MIDDLE
    """How many keys the sequences of a decode step have: which kernel few of them take."""
    drafted: bool = False
    """Norm, rotation and KV write run inside attention in a step of few rows with drafts in chains too, where
    `few_decode_attention` can."""
    fresh: tuple[tuple[int, int, int], ...] = field(default=())
    """(first token, tokens of each, how many) of neighbouring prompts computed from their first token on, which
    are left out of the tiles."""
    ragged: tuple[FreshPrompts, ...] = field(default=())
    """Such prompts of any length, for `prefill_library`."""


class TritonAttention:
    """The attention of one model on one GPU. Holds the kernels' scratch memory, which all layers share."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        deterministic: bool = False,
        dense_prefill: bool = True,
        prompt_rows: bool = True,
        pdl: bool = False,
        fixed_early: bool = False,
        same_type: bool = False,
    ) -> None:
        """`fixed_early`: in deterministic mode the kernel of an early launch, in every step. `same_type`: keys and
        values have the activations' type, as some kernels need it."""
        self.device = device
        self.deterministic = deterministic
        self._fixed_early = fixed_early and deterministic
        self._same_type = same_type
        self.pdl = pdl
        self._dtype = dtype
        self._dense = dense_prefill and not deterministic and dtype != torch.float32 and device.type == "cuda"
        self._prompt_rows = prompt_rows and not deterministic
        self.prefill_library: PrefillLibrary | None = None
        """Another library's prefill attention, for fresh prompts that cuDNN does not take (see `pick_up`)."""
        self._scratch: dict[HeadShape, DecodeScratch] = {}
        self._room: PageRoom | None = None
        self.beside_few_gemm = False
        """Whether GEMMs of few rows are `few_gemm`'s: then the kernel of few sequences takes more of them."""
        self._processors, self.shared_memory = 4, HOPPER_SHARED
        if device.type == "cuda":
            chip = torch.cuda.get_device_properties(device)
            self._processors = chip.multi_processor_count
            self.shared_memory = getattr(chip, "shared_memory_per_block_optin", HOPPER_SHARED)

    def tile(self, shape: HeadShape) -> MixedShape:
        """One size for a model's layers: what fits a multiprocessor's shared memory with such heads."""
        if shape.head_dim > 256 and self.shared_memory < _LITTLE_SHARED:
            return _LATENTS_FLOAT32 if self._dtype == torch.float32 else _LATENTS
        if self._dtype == torch.float32:
            return _FIXED_FLOAT32
        if shape.head_dim > 128:
            return _LARGE_HEADS
        return _FIXED if self.deterministic else _WIDE

    def _tile_over(self, cache: LayerCache, shape: HeadShape, plain: bool) -> MixedShape:
        """The tile of a layer; `plain`: with neither window, soft cap nor sinks.

        Keys in another type than the queries pass through registers: four warps have too few for 128 rows."""
        tile, same = self.tile(shape), cache.k.dtype == self._dtype
        if tile is _FIXED and plain and same and hopper_prefill.knows(self.device, self._dtype, shape):
            return _FIXED_HOPPER
        return replace(tile, warps=8) if tile is _WIDE and not same else tile

    def tokens_per_tile(self, shape: HeadShape) -> int:
        return self.tile(shape).tokens_of(shape.num_heads // shape.num_kv_heads)

    def takes_fresh(self, start: int, tokens: int, plain: bool) -> bool:
        """Whether a chunk goes to torch's dense attention; `plain`: neither window nor soft cap in any layer."""
        return self._dense and plain and start == 0 and tokens >= _FRESH_TOKENS and tokens % _FRESH_STEP == 0

    def takes_ragged(self, start: int, tokens: int, plain: bool) -> bool:
        """Whether a chunk goes to `prefill_library`."""
        return self.prefill_library is not None and plain and start == 0 and tokens >= _RAGGED_TOKENS

    def takes_rows(self, start: int, tokens: int, plain: bool, shape: HeadShape) -> bool:
        """Whether a chunk reads its keys from its step's rows and not from the cache."""
        fits = self._prompt_rows and plain and fresh_fits(shape, self._dtype)
        return fits and start == 0 and _ROWS.keys <= tokens <= _ROWS_MOST

    def takes_prefill(self, shape: HeadShape, block_size: int, plain: bool) -> bool:
        """Whether chunks of prompts go to `hopper_prefill` as far as it can; `plain` as in `takes_fresh`."""
        fits = plain and (self._same_type or (self._room is not None and self._room.takes(shape, block_size)))
        return fits and hopper_prefill.fits(self.device, self._dtype, shape, block_size)

    def prefill_tiles(
        self, starts: np.ndarray, counts: np.ndarray, shape: HeadShape, block_size: int
    ) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Of all sequences of a step: tiles for `hopper_prefill`, what is unpacked for it of a cache in fp8, and how
        many tokens of each chunk it takes."""
        pages = np.zeros(0, np.int32), np.zeros(0, np.int32)
        if not self._same_type:
            pages = choose_pages(starts, counts, block_size, 0 if self._room is None else self._room.pages)
            counts = np.where(np.isin(np.arange(len(counts)), pages[0]), counts, 0)
        *tiles, taken = hopper_prefill.split_tiles(starts, counts, shape)
        return (tiles[0], tiles[1]), pages, taken

    def row_tiles(self, counts: np.ndarray, shape: HeadShape, first_seq: int) -> tuple[np.ndarray, np.ndarray]:
        return query_tiles(counts, _ROWS.tokens_of(shape.num_heads // shape.num_kv_heads), first_seq)

    def pick_up(self, shape: HeadShape, verdicts: prefill_libraries.Verdicts) -> None:
        """Use the library that is faster than our tiles on prompts of mixed lengths with such heads, if there is one.
        Tried once per machine, installed libraries and heads; `verdicts` keeps the answer."""
        names = prefill_libraries.present()
        if not self._dense or not names:
            return
        machine = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        question = f"{machine}, torch {torch.__version__}, {shape}, {self._dtype}, ours or {', '.join(names)}"
        known = verdicts.of(question)
        if known is None:
            self.try_out(shape, prefill_libraries.installed(names))
            verdicts.keep(question, self.prefill_library.name if self.prefill_library is not None else "")
        elif known:
            self.prefill_library = next(iter(prefill_libraries.installed([known])), None)

    def try_out(self, shape: HeadShape, candidates: Sequence[PrefillLibrary]) -> None:
        """The trial of `pick_up`: every candidate beside our own kernel."""
        lengths = np.array(prefill_libraries.TRIAL_LENGTHS, np.int32)
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(self.device)
        total = int(lengths.sum())
        qkv = torch.randn(total, shape.width, dtype=self._dtype, device=self.device)
        q, k, v = _heads(qkv, shape)
        trial = FreshPrompts(0, total, starts, int(lengths.max()))
        page = 16
        blocks = -(-lengths // page)
        cache = pair_cache(_paged(k, lengths, page), _paged(v, lengths, page), page)
        table = torch.zeros(len(lengths), int(blocks.max()), dtype=torch.int32)
        first = 0
        for row, count in enumerate(blocks.tolist()):
            table[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
            first += count
        seqs, firsts = query_tiles(lengths, self.tokens_per_tile(shape))
        tile_seq, tile_first = (torch.from_numpy(part).to(self.device) for part in (seqs, firsts))
        table, context = table.to(self.device), torch.from_numpy(lengths).to(self.device)
        rows = torch.arange(len(lengths), dtype=torch.int32, device=self.device)

        row_seq, row_first = (torch.from_numpy(part).to(self.device) for part in self.row_tiles(lengths, shape, 0))

        def ours(*_: Any) -> Tensor:
            if self.takes_rows(0, int(lengths.min()), True, shape):
                found = fresh_attention(qkv, starts, row_seq, row_first, shape, _SCALE, sizes=_ROWS)
                return found.view(total, shape.num_heads, shape.head_dim)
            found = mixed_attention(
                qkv, cache, table, rows, starts, context, tile_seq, tile_first, shape, _SCALE, sizes=self.tile(shape)
            )
            return found.view(total, shape.num_heads, shape.head_dim)

        inputs, clock = (q, k, v, trial, _SCALE), prefill_libraries.device_clock
        self.prefill_library = prefill_libraries.pick(candidates, ours, inputs, clock)

    def allocate_split(self, num_seqs: int, shape: HeadShape | LatentShape, long: bool = False) -> DecodeSplit:
        if isinstance(shape, LatentShape):
            # Another block size than the usual one may ask for `latent_decode`, which any split suits.
            programs = 1 if self._wgmma_latents(shape, 16) else self._latent_sizes(shape).programs
            extra = latent_pieces(num_seqs, shape, programs, self._processors)
        else:
            extra = extra_pieces(num_seqs, shape.num_kv_heads, self._processors, long, not self._same_type)
        return DecodeSplit.allocate(num_seqs, extra, self.device)

    def reserve(self, shape: HeadShape, tasks: int, num_seqs: int) -> DecodeScratch:
        """Scratch for so many pieces; call with the largest batch before any graph is captured."""
        held = self._scratch.get(shape)
        if (
            held is None
            or held.partial.shape[0] < tasks * shape.num_kv_heads
            or (held.arrived.shape[0] < num_seqs * shape.num_kv_heads)
        ):
            held = self._scratch[shape] = DecodeScratch.allocate(tasks, num_seqs, shape, self.device)
        return held

    def reserve_room(self, shape: HeadShape, block_size: int, most_tokens: int) -> None:
        """Memory that contexts in fp8 are unpacked to, where `hopper_prefill` can read them: before the KV pool takes
        what is left. In deterministic mode bits would depend on which chunks fit into it, so there it is not used."""
        if self._same_type or self.deterministic or self._room is not None:
            return
        if hopper_prefill.fits(self.device, self._dtype, shape, block_size):
            self._room = PageRoom.allocate(shape, block_size, most_tokens, self._dtype, self.device)

    def prepare(self, ctx: DeviceContext, windows: tuple[int | None, ...]) -> None:
        """Split the decode keys of the step over programs, per cache group: on the device, without a host sync."""
        if not self.deterministic:
            for split, window in zip(ctx.splits, windows, strict=True):
                split_decode(split, ctx.context_len[: ctx.num_decodes], window)

    def __call__(
        self,
        qkv: Tensor,
        cache: LayerCache,
        ctx: StepContext,
        group: int,
        shape: HeadShape,
        scale: float,
        window: int | None,
        softcap: float | None,
        turn: HeadTurn | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """With `turn`, qkv is as the projection left it and the cache without the step's keys (where `turns`); its
        sinks count, not `sinks`."""
        if not isinstance(ctx, DeviceContext):
            ctx = self.adapt(ctx, shape, window)
        out = torch.empty(qkv.shape[0], shape.num_heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        table = ctx.tables[group] if ctx.tables else ctx.block_tables[group]
        options: dict[str, Any] = {
            "window": window,
            "softcap": softcap,
            "out": out,
        }
        if turn is None:
            options["sinks"], options["detours"] = sinks, ctx.detours
        if ctx.num_decodes and ctx.splits:
            split = ctx.splits[group]
            self._decode(qkv, cache, table, ctx, split, shape, scale, turn, options)
        for first, count, many in ctx.fresh:
            end = first + count * many
            _dense(qkv[first:end], many, shape, scale, out[first:end])
        if self.prefill_library is not None:
            for run in ctx.ragged:
                end = run.first + run.tokens
                part = self.prefill_library(*_heads(qkv[run.first : end], shape), run, scale)
                out[run.first : end].view(run.tokens, shape.num_heads, shape.head_dim).copy_(part)
        if ctx.paged_tiles is not None and ctx.paged_tiles[0].shape[0]:
            self._prefill(qkv, cache, table, ctx, ctx.paged_tiles, shape, scale, out)
        if ctx.row_tiles is not None and ctx.row_tiles[0].shape[0]:
            fresh_attention(qkv, ctx.query_start, *ctx.row_tiles, shape, scale, out=out, sizes=_ROWS)
        if ctx.tile_seq is not None and ctx.tile_seq.shape[0] and ctx.tile_first is not None:
            raw = None
            if turn is not None and self.deterministic:
                raw = hopper_prefill.RawHeads(turn, ctx.positions, ctx.slots[group])
            self._tiles(qkv, cache, table, ctx, (ctx.tile_seq, ctx.tile_first), shape, scale, raw, options)
        return out

    def _prefill(
        self, qkv: Tensor, cache: LayerCache, table: Tensor, ctx: DeviceContext, tiles: tuple[Tensor, Tensor],
        shape: HeadShape, scale: float, out: Tensor,
    ) -> None:  # fmt: skip
        """By `hopper_prefill`, over the cache or what is unpacked of it."""
        rows = ctx.rows
        if ctx.unpacked is not None and self._room is not None:
            cache = unpack_pages(cache, table, rows, ctx.unpacked, self._room)
            table, rows = self._room.table(), ctx.unpacked.first
        hopper_prefill.hopper_prefill(
            qkv, cache, table, rows, ctx.query_start, ctx.context_len, *tiles, shape, scale, out=out)

    def _tiles(
        self, qkv: Tensor, cache: LayerCache, table: Tensor, ctx: DeviceContext, tiles: tuple[Tensor, Tensor],
        shape: HeadShape, scale: float, raw: hopper_prefill.RawHeads | None, options: dict[str, Any],
    ) -> None:  # fmt: skip
        """What no other kernel has taken; in deterministic mode, every sequence that decodes. With `raw`, `qkv` is as
        the projection left it: where `turns` has said so."""
        batch = (qkv, cache, table, ctx.rows, ctx.query_start, ctx.context_len, *tiles, shape, scale)
        late = ctx.num_decodes != qkv.shape[0]
        tile = self._tile_over(cache, shape, all(options.get(name) is None for name in ("window", "softcap", "sinks")))
        if tile is _FIXED_HOPPER and options.get("detours") is None:
            sizes = hopper_prefill.decode_sizes(tiles[0].shape[0], shape, self.device)
            if hopper_prefill.fits(self.device, self._dtype, shape, cache.block_size, sizes):
                hopper_prefill.hopper_prefill(
                    *batch, out=options["out"], sizes=sizes, pdl=self._fixed_early, late=late, raw=raw)
                return
        if raw is not None:
            raise InvariantError("a step was to be rotated inside attention, by no kernel that can")
        mixed_attention(
            *batch, sizes=tile, exact=self.deterministic, once=self.deterministic and self._same_type and not late,
            pdl=self._fixed_early, late=late, **options,
        )  # fmt: skip

    def _latent_sizes(self, shape: LatentShape) -> LatentDecode:
        return decode_sizes(shape, self._dtype.itemsize, self.shared_memory)

    def _wgmma_latents(self, shape: LatentShape, block_size: int) -> bool:
        return available(self.device) and fits(shape, self._dtype, block_size)

    def latents(
        self, q: Tensor, cache: LayerCache, ctx: StepContext, group: int, shape: LatentShape, scale: float
    ) -> Tensor:
        """[T, heads * rank]: attention in the latent space; the step's context is that of `shape.blocks`."""
        blocks = shape.blocks
        if not isinstance(ctx, DeviceContext):
            ctx = self.adapt(ctx, blocks, None)
        out = torch.empty(q.shape[0], shape.num_heads * shape.rank, dtype=q.dtype, device=q.device)
        table = ctx.tables[group] if ctx.tables else ctx.block_tables[group]
        if ctx.num_decodes and ctx.splits:
            split, count = ctx.splits[group], ctx.num_decodes
            scratch = self.reserve(blocks, split.tasks, count)
            given = (q, cache, table, ctx.rows, ctx.context_len[:count], split, scratch, shape, scale)
            pdl = self.pdl and count == q.shape[0]
            if self._wgmma_latents(shape, cache.block_size):
                hopper_decode(*given, out=out, pdl=pdl)
            else:
                latent_decode(*given, out=out, sizes=self._latent_sizes(shape), pdl=pdl)
        if ctx.tile_seq is not None and ctx.tile_seq.shape[0] and ctx.tile_first is not None:
            latent_tiles(
                q, cache, table, ctx.rows, ctx.query_start, ctx.context_len, ctx.tile_seq, ctx.tile_first, shape, scale,
                out=out, sizes=replace(self.tile(blocks), warps=8), exact=self.deterministic,
            )  # fmt: skip
        return out

    def may_turn(self, shape: HeadShape | LatentShape, block_size: int, plain: bool) -> bool:
        """Whether norm, rotation and KV write of a decode step with such heads may be part of its attention; `plain` as
        in `takes_fresh`."""
        if not self.deterministic:
            return True
        if isinstance(shape, LatentShape) or not plain or not self._same_type:
            return False
        return hopper_prefill.fits(self.device, self._dtype, shape.evened, block_size, hopper_prefill.DECODE)

    def has_short(self, shapes: Collection[HeadShape], block_size: int, hidden: int) -> bool:
        """Whether short decode steps of a model with such heads in its layers and hidden states of such a width have a
        kernel of their own. The whole model's heads, so that all ranks capture the same steps."""
        narrow = hidden <= attention_cluster.WIDEST_MODEL and self._same_type and not self.deterministic
        return narrow and loading.is_for(self.device, self._dtype) and all(
            shape.num_kv_heads <= attention_cluster.MOST_KV_HEADS
            and attention_cluster.knows(self._dtype, shape, block_size) for shape in shapes)

    def turns(
        self, ctx: StepContext, cache: LayerCache, shape: HeadShape, turn: HeadTurn, window: int | None,
        softcap: float | None,
    ) -> bool:  # fmt: skip
        """Whether norm, rotation and KV write of such a step can be part of its attention."""
        if not isinstance(ctx, DeviceContext):
            return False
        if self.deterministic:
            plain = window is None and softcap is None and ctx.detours is None
            return ctx.fuse_rope and hopper_prefill.turns(shape, turn) and self.may_turn(shape, cache.block_size, plain)
        if not ctx.splits:
            return False
        if ctx.drafted:
            return softcap is None and few_fits(self.device, self._dtype, shape, turn, cache)
        return ctx.fuse_rope and rope_fits(shape, turn)

    def _decode(
        self,
        qkv: Tensor,
        cache: LayerCache,
        table: Tensor,
        ctx: DeviceContext,
        split: DecodeSplit,
        shape: HeadShape,
        scale: float,
        turn: HeadTurn | None,
        options: dict[str, Any],
    ) -> None:
        count, pdl = ctx.num_decodes, self.pdl and ctx.num_decodes == qkv.shape[0]
        batch = (table, ctx.rows, ctx.context_len[:count], split, self.reserve(shape, split.tasks, count), shape, scale)
        most = MOST_BESIDE_FEW if self.beside_few_gemm else MOST_SEQUENCES
        long = ctx.lengths is Lengths.LONG
        few = turn is not None and (ctx.drafted or (count <= most and not long))
        few = few and options["softcap"] is None
        if few and turn is not None and self._decode_in_clusters(qkv, cache, table, ctx, shape, scale, turn, options):
            return
        if few and turn is not None and few_fits(self.device, qkv.dtype, shape, turn, cache):
            few_decode_attention(
                qkv, cache, *batch, turn, window=options["window"], out=options["out"], drafts=ctx.drafted, pdl=pdl)
            return
        timed = (cache.k.element_size() == _TWO_BYTES and ctx.detours is None and options["window"] is None
                 and shape.num_kv_heads >= _TIMED_KV_HEADS)
        sizes = decode_shape(count, shape.head_dim, qkv.element_size(), self.shared_memory, long, timed)
        options = {
            **options, "keys": sizes.keys, "num_warps": sizes.warps, "num_stages": sizes.stages,
            "carried": sizes.carried, "pdl": pdl,
        }  # fmt: skip
        if turn is None:
            decode_attention(qkv, cache, *batch, halves=sizes.carried, **options)
        else:
            rope_decode_attention(qkv, cache, *batch, turn, prefetch=self.device.type == "cuda", **options)

    def _decode_in_clusters(
        self, qkv: Tensor, cache: LayerCache, table: Tensor, ctx: DeviceContext, shape: HeadShape, scale: float,
        turn: HeadTurn, options: dict[str, Any],
    ) -> bool:  # fmt: skip
        """Whether `attention_cluster` has done a step of few sequences."""
        fits = ctx.lengths is Lengths.SHORT and attention_cluster.fits(self.device, qkv.dtype, shape, turn, cache)
        if not fits:
            return False
        count = ctx.num_decodes
        return attention_cluster.cluster_decode_attention(
            qkv, cache, table, ctx.rows, ctx.context_len[:count], shape, scale, turn, window=options["window"],
            out=options["out"], pdl=self.pdl and count == qkv.shape[0]) is not None

    def adapt(self, ctx: StepContext, shape: HeadShape, window: int | None) -> DeviceContext:
        """The context of a caller that did not prepare one: looks at the lengths on the host, so for tests
        only."""
        counts = np.diff(ctx.query_start.cpu().numpy())
        seqs, firsts = query_tiles(counts, self.tokens_per_tile(shape))
        return DeviceContext(
            ctx.positions,
            ctx.query_start,
            ctx.context_len,
            ctx.block_tables,
            ctx.slots,
            tile_seq=torch.from_numpy(seqs).to(self.device),
            tile_first=torch.from_numpy(firsts).to(self.device),
        )


def _heads(qkv: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [tokens, heads, dim], where the projection left them."""
    heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    return q, k, v


def _paged(part: Tensor, lengths: np.ndarray, page: int) -> Tensor:
    """Keys or values [tokens, heads, dim] of some prompts as blocks, one prompt after another."""
    padded = [
        torch.nn.functional.pad(piece, (0, 0, 0, 0, 0, -len(piece) % page)) for piece in part.split(lengths.tolist())
    ]
    return torch.cat(padded).unflatten(0, (-1, page)).transpose(1, 2).contiguous()


@contextmanager
def dense_attention() -> Iterator[None]:
    """Inside, torch's dense attention is cuDNN's wherever it can be; once per step, since switching takes time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


def _dense(qkv: Tensor, many: int, shape: HeadShape, scale: float, out: Tensor) -> None:
    """Causal attention of whole prompts of one length over themselves; q, k, v are read where the projection
    left them."""
    heads = qkv.view(many, qkv.shape[0] // many, -1, shape.head_dim).transpose(1, 2)
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    found = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=shape.num_heads != shape.num_kv_heads
    )
    out.view(many, -1, shape.num_heads, shape.head_dim).copy_(found.transpose(1, 2))
