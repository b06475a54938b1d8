"""An EAGLE-3 head that can be trained: the arithmetic of `quire.models.heads.head` with gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.training.chains import chain_attention
from quire.training.rounded import on_grid

Matrices = dict[str, Tensor]
"""By name, as a pass multiplies by them."""
Mixed = list[tuple[Tensor, Tensor]]
"""Keys and values [B, heads, T, dim] of each drafted step so far."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head."""

    hidden: int
    states: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    theta: float


class TrainedHead(nn.Module):
    """Names of parameters are those of public checkpoints, but for the dots, which torch takes for modules."""

    def __init__(self, shape: HeadShape, rms: Tensor, scale: float, seed: int, rounds: bool = False) -> None:
        """Random, and sure of nothing. `rms` are the sizes of the states, so that all count alike at first; `scale` is
        what the last norm multiplies by: with it, logits begin near one. One that `rounds` computes with matrices in
        4 bits, as it is stored, and its gradients are those of what was rounded: so it learns to bear it."""
        super().__init__()
        self.shape, self.rounds = shape, rounds
        generator = torch.Generator().manual_seed(seed)
        hidden, read = shape.hidden, 2 * shape.hidden

        def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=generator) * scale / math.sqrt(columns))

        fc = torch.randn(hidden, shape.states, hidden, generator=generator) / math.sqrt(shape.states * hidden)
        self.fc = nn.Parameter((fc / rms.view(1, -1, 1)).reshape(hidden, -1))
        self.q = matrix(shape.heads * shape.head_dim, read)
        self.k = matrix(shape.kv_heads * shape.head_dim, read)
        self.v = matrix(shape.kv_heads * shape.head_dim, read)
        self.o = matrix(hidden, shape.heads * shape.head_dim, 0.3)
        self.gate = matrix(shape.intermediate, hidden)
        self.up = matrix(shape.intermediate, hidden)
        self.down = matrix(hidden, shape.intermediate, 0.3)
        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden))
        self.norm = nn.Parameter(torch.full((hidden,), scale))

    def matrices(self, dtype: torch.dtype) -> Matrices:
        """Made once for all drafted steps of a batch."""
        parts = {name: part for name, part in self.named_parameters() if part.dim() == 2}
        if self.rounds:
            flat = torch.cat([part.flatten() for part in parts.values()])
            flat = flat + (on_grid(flat.detach()) - flat.detach())
            pieces = flat.split([part.numel() for part in parts.values()])
            parts = {name: piece.view_as(parts[name]) for name, piece in zip(parts, pieces, strict=True)}
        return {name: part.to(dtype) for name, part in parts.items()}

    def fused(self, states: Tensor, by: Matrices) -> Tensor:
        """The features of tokens whose states are known. Slot p holds those of token p - 1: they are `moved_on`."""
        return F.linear(states, by["fc"])

    def step(self, embedded: Tensor, features: Tensor, before: Mixed, by: Matrices) -> tuple[Tensor, Mixed]:
        """One drafted step of every slot. Step j of slot p follows step j - 1 of slot p - 1 and so on, back to slot
        p - j, before which all features are the target's. `before` are keys and values of the steps before."""
        x = self._rms(features, self.hidden_norm)
        read = torch.cat((self._rms(embedded, self.input_layernorm), x), -1)
        q, k, v = (self._heads(F.linear(read, by[name])) for name in "qkv")
        angles = _angles(q.shape[2], self.shape, q.device)
        q, k, v = _turned(q, angles), self._shared(_turned(k, angles)), self._shared(v)
        steps = [*before, (k, v)]
        mixed = chain_attention(q, steps).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, by["o"])
        normed = self._rms(x, self.post_attention_layernorm)
        inner = F.silu(F.linear(normed, by["gate"])) * F.linear(normed, by["up"])
        return x + F.linear(inner, by["down"]), steps

    def read_out(self, x: Tensor, rows: Tensor) -> Tensor:
        """Logits over the draft vocabulary, whose rows of the target's head are given."""
        return F.linear(self.normed(x), rows)

    def normed(self, x: Tensor) -> Tensor:
        """What the rows of the head are multiplied with."""
        return self._rms(x, self.norm)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.shape.head_dim).transpose(1, 2)

    def _shared(self, x: Tensor) -> Tensor:
        """Keys or values for each query head."""
        return x.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        # One type for both, or torch takes apart what a GPU does in one kernel.
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.shape.eps)

    def exported(self, scale: float = 1.0) -> dict[str, Tensor]:
        """Under the names of public checkpoints, with its logits times `scale`; not rounded."""
        inner = {
            "self_attn.q_proj": self.q, "self_attn.k_proj": self.k, "self_attn.v_proj": self.v,
            "self_attn.o_proj": self.o, "mlp.gate_proj": self.gate, "mlp.up_proj": self.up, "mlp.down_proj": self.down,
            "input_layernorm": self.input_layernorm, "hidden_norm": self.hidden_norm,
            "post_attention_layernorm": self.post_attention_layernorm,
        }
        named = {"fc.weight": self.fc, "norm.weight": self.norm * scale}
        named |= {f"midlayer.{name}.weight": part for name, part in inner.items()}
        return {name: part.detach().cpu().contiguous() for name, part in named.items()}


def moved_on(x: Tensor) -> Tensor:
    """Row p of [B, T, ...] at p + 1; nothing comes before the first."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))


def _angles(length: int, shape: HeadShape, device: torch.device) -> tuple[Tensor, Tensor]:
    pairs = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(length, device=device)[:, None] * shape.theta**-pairs
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def _turned(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part.to(x.dtype) for part in angles)
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
