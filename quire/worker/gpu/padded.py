"""Small mixed steps in fixed shapes, which graphs can replay: some decoding sequences beside short prompts, padded.

Launched one by one, the kernels of such a step take the host longer than the GPU. Tokens of the decoding sequences come
first, then those of the prompts; unused places are padding (row -1).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.types import HeadShape
from quire.models.decoder import Decoder
from quire.scheduler.plan import PlanEntry
from quire.worker.gpu.batches import LogitRows, MixedBatch, end_of
from quire.worker.gpu.graphs import GraphCache
from quire.worker.gpu.staging import Stage

if TYPE_CHECKING:  # Triton need not be installed
    from quire.attention.triton import TritonAttention

PROMPT_TOKENS = (64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
DECODES = (8, 32, 128, 256, 512)
PROMPTS = 8
"""Prompts of one step, at most."""
_LAUNCHING = 0.36e-3
"""Seconds that the host takes to launch a layer's kernels (H200, 2026-11-15: 10 ms for the 28 layers of 0.6B)."""
_RATE = 6e14
"""Operations per second of the GPU's matrix units, as GEMMs of prefill reach them."""


@dataclass(frozen=True, order=True, slots=True)
class MixedRung:
    """A fixed shape: places for tokens of prompts, and for decoding sequences."""

    tokens: int
    decodes: int

    @property
    def rows(self) -> int:
        return self.decodes + self.tokens

    @property
    def sequences(self) -> int:
        return self.decodes + PROMPTS


class MixedRungs:
    """The shapes of one engine, and how a step is laid out in them."""

    def __init__(self, max_num_seqs: int, max_tokens: int, tokens_per_tile: int, tile_decodes: bool) -> None:
        self._decodes = _up_to(DECODES, max_num_seqs)
        self._tokens = _up_to(PROMPT_TOKENS, max_tokens)
        self._most_draws = max_num_seqs
        self._tokens_per_tile = tokens_per_tile
        self._tile_decodes = tile_decodes
        self.all = sorted(
            (MixedRung(tokens, decodes) for tokens in self._tokens for decodes in self._decodes),
            key=lambda rung: -rung.rows,
        )
        """Largest first, so that the graphs of the others fit into its memory."""

    @classmethod
    def of(
        cls, attention: TritonAttention | None, decoder: Decoder, max_num_seqs: int, max_tokens: int
    ) -> MixedRungs | None:
        """Those of a model, where the kernels know padding; None if no step (`max_tokens` 0) shall be padded."""
        layer = decoder.layers[0]
        if attention is None or max_tokens == 0:
            return None
        weights = _weights_of_a_layer(decoder)
        # Beyond that the GPU takes longer for a layer than the host for its launches, and padding would only cost.
        worth = int(_LAUNCHING * _RATE / (2 * weights))
        shape = layer.attn.shape
        per_tile = attention.tokens_per_tile(shape.evened if isinstance(shape, HeadShape) else shape.blocks)
        return cls(max_num_seqs, min(max_tokens, worth), per_tile, attention.deterministic)

    @property
    def decode_counts(self) -> list[int]:
        return self._decodes

    def draws(self, rung: MixedRung) -> int:
        """Rows of logits: every sequence may draw, and the samples of one prompt draw from it together."""
        return min(rung.sequences, self._most_draws)

    def fitting(self, batch: MixedBatch, num_draws: int) -> MixedRung | None:
        """The smallest shape for a step, if there is one."""
        singles = batch.num_decodes
        tokens = int(batch.counts[singles:].sum())
        if len(batch.counts) - singles > PROMPTS or singles > self._decodes[-1] or tokens > self._tokens[-1]:
            return None
        rung = MixedRung(self._tokens[bisect_left(self._tokens, tokens)],
                         self._decodes[bisect_left(self._decodes, singles)])
        return rung if num_draws <= self.draws(rung) else None

    def tiles(self, rung: MixedRung) -> int:
        return -(-rung.tokens // self._tokens_per_tile) + PROMPTS + (rung.decodes if self._tile_decodes else 0)

    def empty(self, rung: MixedRung) -> Stage:
        """A step of padding: the layout that every step of the shape has."""
        return self._stage(rung, {})

    def filled(
        self, rung: MixedRung, batch: MixedBatch, reads: LogitRows, entries: Sequence[PlanEntry], slot: int
    ) -> Stage:
        from quire.kernels.triton.attention_mixed import query_tiles

        singles, counts = batch.num_decodes, batch.counts
        gap = rung.decodes - singles
        """How far tokens of prompts move back: the padding of the decoding sequences comes before them."""
        starts = np.zeros(PROMPTS + 1, np.int32)
        np.cumsum(counts[singles:], out=starts[1 : 1 + len(counts) - singles])
        starts[1 + len(counts) - singles :] = starts[len(counts) - singles]
        seqs, firsts = query_tiles(counts[singles:], self._tokens_per_tile, rung.decodes)
        if self._tile_decodes:
            seqs = np.concatenate([np.arange(singles, dtype=np.int32), seqs])
            firsts = np.concatenate([np.zeros(singles, np.int32), firsts])
        lengths = batch.starts + counts
        return self._stage(rung, {
            "ring": np.array([slot], np.int32),
            "token_rows": _spread(batch.token_rows(), singles, gap, -1),
            "positions": _spread(batch.positions(), singles, gap, 0),
            "query_start": np.concatenate([np.arange(rung.decodes, dtype=np.int32), rung.decodes + starts]),
            "lengths": _spread(lengths, singles, gap, 0),
            "rows": _spread(batch.rows, singles, gap, -1),
            "last": np.where(reads.last < singles, reads.last, reads.last + gap),
            "draw_rows": np.array([entries[i].row for i in reads.drawing], np.int32),
            "draw_positions": np.array([end_of(entries[i]) for i in reads.drawing], np.int32),
            "tile_seq": seqs,
            "tile_first": firsts,
        })  # fmt: skip

    def _stage(self, rung: MixedRung, values: dict[str, np.ndarray]) -> Stage:
        draws, tiles = self.draws(rung), self.tiles(rung)
        sizes = {
            "ring": (1, 0), "token_rows": (rung.rows, -1), "positions": (rung.rows, 0),
            "query_start": (rung.sequences + 1, 0), "lengths": (rung.sequences, 0), "rows": (rung.sequences, -1),
            "last": (draws, 0), "draw_rows": (draws, -1), "draw_positions": (draws, 0), "tile_seq": (tiles, -1),
            "tile_first": (tiles, 0),
        }  # fmt: skip
        stage = Stage()
        for name, (size, padding) in sizes.items():
            part = np.full(size, padding, np.int32)
            given = values.get(name)
            if given is not None:
                part[: len(given)] = given
            stage.add(name, part)
        return stage


class PaddedSteps:
    """Launches such steps: through captured graphs once there are some."""

    def __init__(
        self,
        rungs: MixedRungs,
        launch: Callable[[MixedRung, Callable[[str], Tensor], int], None],
        device: torch.device,
        pool: Any,
    ) -> None:
        """`launch` gets a shape, where its arrays lie by name, and its rows of logits. `pool` None: no graphs."""
        self.rungs = rungs
        self._launch = launch
        self._device = device
        self._stage = torch.zeros(max(rungs.empty(rung).size for rung in rungs.all), dtype=torch.int32, device=device)
        self._graphs = None if pool is None else GraphCache(device, self._run, pool)
        self._replays = False

    def rung_of(self, entries: Sequence[PlanEntry], batch: MixedBatch, reads: LogitRows) -> MixedRung | None:
        """The fixed shape that a mixed step is padded to: if it is small, and asks for tokens only. Small means that
        launching would take longer than running, so our tiles attend even where a library would be faster."""
        if reads.ranking or any(entry.prompt_logprobs_from is not None for entry in entries):
            return None
        return self.rungs.fitting(batch, len(reads.drawing))

    def capture(self) -> None:
        if self._graphs is not None:
            for rung in self.rungs.all:
                self.rungs.empty(rung).send(self._device, self._stage)
                self._graphs.capture([rung])
        self._replays = True

    def launch_all(self) -> None:
        """Every shape once, outside graphs, with padding."""
        for rung in self.rungs.all:
            self.rungs.empty(rung).send(self._device, self._stage)
            self._run(rung)

    def run(
        self, rung: MixedRung, batch: MixedBatch, reads: LogitRows, entries: Sequence[PlanEntry], slot: int
    ) -> None:
        self.rungs.filled(rung, batch, reads, entries, slot).send(self._device, self._stage)
        if self._graphs is not None and self._replays:
            self._graphs.run(rung)
        else:
            self._run(rung)

    def _run(self, rung: MixedRung, separate_rope: bool = False) -> None:
        stage = self.rungs.empty(rung)
        self._launch(rung, lambda name: stage.view(self._stage, name), self.rungs.draws(rung))

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        self._graphs = None
        self._launch = _closed


def _weights_of_a_layer(decoder: Decoder) -> int:
    """Weights per layer that every row is multiplied with, averaged over ranks: ranks must agree on the shapes."""
    sizes = {name: shape for name, shape in decoder.spec.parameters().items() if name.startswith("layers.0.")}
    whole = sum(math.prod(shape) for name, shape in sizes.items() if len(shape) == 2 and ".experts." not in name)
    return whole // decoder.shard.place.tensor_size


def _closed(*_: Any) -> None:
    raise InvariantError("this engine is closed: it runs no more steps")


def _up_to(counts: Sequence[int], most: int) -> list[int]:
    """Those below `most`, and the first that holds it."""
    return list(counts[: bisect_left(counts, most) + 1])


def _spread(values: np.ndarray, singles: int, gap: int, padding: int) -> np.ndarray:
    """With `gap` entries of padding between those of the decoding sequences and the others."""
    return np.concatenate([values[:singles], np.full(gap, padding, np.int32), values[singles:]])
