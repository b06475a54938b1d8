"""A draft head as plain data: which hidden states of the target it reads, its one layer, its weights; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.kv_spec import KVSpec
from quire.layers.spec import NormSpec, RopeSpec
from quire.models.spec import CacheGroup, LayerSpec, Shape, layer_parameters, norm_parameters

FINAL = "final"
"""The hidden state after the target's last layer, through its final norm."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One decoder layer that guesses the token after next from a token and the target's hidden state before it.

    One stream (EAGLE-1, EAGLE-2): one projection of embedding and hidden state, side by side, is what the layer reads,
    without a norm before its attention. Two streams (EAGLE-3): one projection of the hidden states of several layers is
    the residual; the attention reads the normed embedding and the normed residual side by side.
    """

    architecture: str
    vocab_size: int
    """Of the tokens it reads."""
    hidden_size: int
    max_positions: int
    states: tuple[str, ...]
    """Hidden states of the target: FINAL, or "embed" and "layers.i" for what layer i puts out."""
    layer: LayerSpec
    rope: RopeSpec
    two_streams: bool = False
    norm: NormSpec | None = None
    """Before the head's own projection to the vocabulary."""
    norm_first: bool = False
    """The residual of two streams is the normed one."""
    draft_vocab: int = 0
    """Tokens that it can guess; 0: all."""
    input_norms: bool = False
    """One stream whose token and hidden state are normed before the projection, and a layer as the target's are (a
    layer that was trained with the model)."""

    @property
    def kv(self) -> tuple[KVSpec, KVSpec]:
        """What is kept of each token: the layer's keys and values, and the target's hidden state."""
        return self.layer.kv, KVSpec.feature(self.hidden_size)

    @property
    def inner_states(self) -> list[str]:
        """Those of `states` that layers before the last put out."""
        return [name for name in self.states if name != FINAL]

    @property
    def layers(self) -> tuple[LayerSpec]:
        return (self.layer,)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(each.bytes_per_token() for each in self.kv)

    def kv_bytes_per_block(self, block_size: int, element_size: int = 4) -> int:
        return sum(each.bytes_per_block(block_size, element_size) for each in self.kv)

    def cache_groups(self) -> list[CacheGroup]:
        return [CacheGroup("full", None, (0, 1), self.kv_bytes_per_token)]

    def parameters(self) -> dict[str, Shape]:
        """Name and shape of the tensors that every such head has, in our own names."""
        hidden, fused = self.hidden_size, self.hidden_size * (len(self.states) if self.two_streams else 2)
        inside = layer_parameters(self.layer, hidden, 2 * hidden if self.two_streams else hidden)
        if self.input_norms:
            inside |= norm_parameters("state_norm", self.layer.norm, hidden)
        elif not self.two_streams:
            inside = {name: shape for name, shape in inside.items() if not name.startswith("attn_norm.")}
        if self.input_norms or self.two_streams:
            inside |= norm_parameters("token_norm", self.layer.norm, hidden)
        shapes: dict[str, Shape] = {"fuse.weight": (hidden, fused), **inside}
        return shapes if self.norm is None else shapes | norm_parameters("norm", self.norm, hidden)

    def optional(self) -> dict[str, Shape]:
        """What a checkpoint may have on top. Without a projection or embeddings of its own it has the target's."""
        guessed = self.draft_vocab or self.vocab_size
        return {
            "fuse.bias": (self.hidden_size,),
            "embed.weight": (self.vocab_size, self.hidden_size),
            "head.weight": (guessed, self.hidden_size),
            "d2t": (guessed,),
            "t2d": (self.vocab_size,),
        }
