"""The model that a head is trained for: its hidden states and its predictions, computed by the engine's own decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.types import HeadShape, LayerCache, StepContext
from quire.models.build import build_decoder
from quire.models.decoder import Decoder
from quire.models.loader.source import ModelSource
from quire.ops.cpu import CpuOps
from quire.training.trainable import check_target

_BLOCK = 16
_LOGIT_ROWS = 8192
"""Rows whose logits exist at once: a vocabulary wide."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the target says of a batch of texts [B, T]."""

    states: Tensor
    """[B, T, states * hidden]: the hidden states that the head reads, side by side."""
    final: Tensor
    """[B, T, hidden]: after the final norm, what its head reads."""
    best: Tensor
    """[B, T]: the token that it holds likeliest to come next."""


class Target:
    """Texts of one length at a time, in a KV cache of its own."""

    def __init__(self, source: ModelSource, device: str, threads: int | None = None) -> None:
        self.device = torch.device(device)
        self.decoder = _decoder(source, self.device, threads)
        self._caches: list[LayerCache] = []
        self._blocks = 0
        self._contexts: dict[tuple[int, int], StepContext] = {}

    @property
    def states(self) -> tuple[int, int, int]:
        """Layers whose inputs a head reads: an early and a middle one, and what comes out of the last."""
        count = self.decoder.spec.num_layers
        return min(2, count), (count + 1) // 2, count

    def see(self, tokens: Tensor) -> Seen:
        """Of texts [B, T], on this device."""
        with torch.inference_mode():
            ctx = self._context(*tokens.shape)
            stream, captured = self.decoder.forward_capturing(tokens.reshape(-1), ctx, self._caches, self._names())
            last = stream.copied()
            states = [last if name is None else captured[name] for name in self._wanted()]
            final = self._normed(last)
            best = torch.cat([self.decoder.head(rows.clone(), None).argmax(-1) for rows in final.split(_LOGIT_ROWS)])
        shape = tokens.shape
        # Outside of inference mode, so that training may read them.
        return Seen(torch.cat(states, 1).view(*shape, -1).clone(), final.view(*shape, -1).clone(),
                    best.view(shape).clone())

    def final(self, last: Tensor) -> Tensor:
        """[B, T, hidden]: what its head reads, of the last of the states."""
        with torch.inference_mode():
            found = self._normed(last.reshape(-1, last.shape[-1]))
        return found.view(last.shape).clone()

    def _normed(self, last: Tensor) -> Tensor:
        return last if self.decoder.final_norm is None else self.decoder.final_norm(last.clone())

    def _wanted(self) -> list[str | None]:
        count = self.decoder.spec.num_layers
        return [None if layer == count else f"layers.{layer - 1}" for layer in self.states]

    def _names(self) -> list[str]:
        return [name for name in self._wanted() if name is not None]

    def _context(self, count: int, length: int) -> StepContext:
        """Of texts of one length, and room for their keys. Made once for each size: a GPU would be waited for."""
        each = -(-length // _BLOCK)
        if count * each > self._blocks:
            self._blocks = count * each
            self._caches = []  # what they held goes before the new ones come
            with torch.device(self.device):
                self._caches = self.decoder.allocate_caches([self._blocks] * self._groups, _BLOCK)
        made = self._contexts.get((count, length))
        if made is None:
            made = self._contexts[count, length] = self._new_context(count, length, each)
        return made

    @property
    def _groups(self) -> int:
        return len(self.decoder.spec.cache_groups())

    def _new_context(self, count: int, length: int, each: int) -> StepContext:
        table = torch.arange(count * each, dtype=torch.int32).view(count, each)
        positions = torch.arange(length).repeat(count)
        slots = torch.arange(count).repeat_interleave(length) * (each * _BLOCK) + positions
        ends = torch.arange(count + 1, dtype=torch.int32) * length
        lengths = torch.full((count,), length, dtype=torch.int32)
        positions, slots, ends, lengths, table = (
            part.to(self.device) for part in (positions, slots, ends, lengths, table))
        groups = self._groups
        ctx = StepContext(positions, ends, lengths, (table,) * groups, (slots,) * groups)
        attention = self.decoder.ops.attention
        if attention is None:
            return ctx
        shape = self.decoder.layers[0].attn.shape
        assert isinstance(shape, HeadShape)  # no latents: `check_target`
        adapted = attention.adapt(ctx, shape, None)
        adapted.rows = torch.arange(count, dtype=torch.int32, device=self.device)
        return adapted

    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows of its head."""
        with torch.inference_mode():
            found = self.decoder.ops.embed(ids.to(self.device), self.decoder.head.packed)
        return found.clone()

    def embeddings(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            found = self.decoder.embed.rows(ids.reshape(-1))
        return found.view(*ids.shape, -1).clone()


def _decoder(source: ModelSource, device: torch.device, threads: int | None) -> Decoder:
    if device.type == "cpu":
        decoder = build_decoder(source.config, source.weights(None), CpuOps(num_threads=threads), dtype=None)
    else:
        from quire.ops.triton import TritonOps
        from quire.worker.gpu.weights import build_on_device

        ops = TritonOps(device, torch.bfloat16)
        decoder = build_on_device(source.config, source.weights(None), ops, device, torch.bfloat16,
                                  min(8192, source.config.get("max_position_embeddings", 8192)))
    check_target(decoder.spec)
    return decoder
