"""The draft head itself: from tokens and hidden states of the target to guesses, by the layers of any model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.types import LayerCache, StepContext
from quire.layers.attention import Attention
from quire.layers.experts import Moe
from quire.layers.latent import LatentAttention
from quire.layers.linear import Embedding, Linear, VocabularyHead
from quire.layers.mlp import Mlp
from quire.layers.norm import Norm
from quire.layers.rotary import rope_table
from quire.layers.spec import MoeSpec
from quire.layers.stream import ResidualStream, Rows, Unnormed
from quire.models.heads.ends import HeadTarget
from quire.models.heads.spec import HeadSpec
from quire.models.shard import vocabulary_runs
from quire.ops.interface import Fusion
from quire.parallel.collectives import TensorGroup

NO_GUESS = -1.0e9
"""Logit of a token outside the draft vocabulary: too small for any temperature, and finite as logits must be; in
float16, the least that there is."""


class DraftHead:
    """Its embeddings and its head are the target's tensors, but where the checkpoint has its own.

    What it knows of the target is `kept` in one row for each token, and `features` of such rows are what it reads.

    Tensor ranks of a target on GPUs all have the layer whole, and share the projection to the vocabulary: so all of
    them draw from the same logits, whatever their GEMMs round.
    """

    def __init__(self, spec: HeadSpec, target: HeadTarget, max_model_len: int, optional: Sequence[str] = ()) -> None:
        """`optional`: which of `spec.optional` its checkpoint has."""
        ops, layer, hidden, dtype = target.ops, spec.layer, spec.hidden_size, target.weights_dtype
        self.spec = spec
        self._target = target
        self._ops = ops
        self._dtype = dtype
        self._vocab = spec.vocab_size
        self.embed = Embedding(ops, dtype) if "embed.weight" in optional else target.embed
        own_head = "head.weight" in optional
        self.head = Embedding(ops, dtype) if own_head else target.head
        self._has_head = own_head
        self._ranks = target.ranks
        self._shared_head: VocabularyHead | None = None
        self.fuse = Linear(ops, ("",), "fuse.bias" in optional, dtype)
        rope, latent = rope_table(spec.rope, max_model_len, target.asked_len), layer.attention.latent
        self.attn = (Attention(ops, layer.attention, rope, 0, dtype) if latent is None
                     else LatentAttention(ops, layer.attention, latent, rope, 0, dtype))
        self.mlp = Moe(ops, layer.mlp, dtype) if isinstance(layer.mlp, MoeSpec) else Mlp(ops, layer.mlp, dtype)
        self.attn_norm = Norm(ops, layer.norm, hidden)
        self.token_norm = Norm(ops, layer.norm, hidden)
        self.state_norm = Norm(ops, layer.norm, hidden)
        self.mlp_norm = Norm(ops, layer.norm, hidden)
        self.norm = None if spec.norm is None else Norm(ops, spec.norm, hidden)
        self._is_rms = all(each is None or each.kind == "rms" for each in (layer.norm, spec.norm))
        self.guessed: Tensor | None = None
        """Token ids of the draft vocabulary; None: it is the target's."""
        self._places: Tensor | None = None
        """int32 [vocabulary]: which of `guessed` each token is; -1: none."""

    def load(self, weights: Mapping[str, Tensor], guessed: Tensor | None) -> None:
        """All tensors at once; `guessed` are the ids of the draft vocabulary, if it has one."""
        self.guessed = guessed
        if guessed is not None:
            self._places = torch.full((self._vocab,), -1, dtype=torch.int32, device=guessed.device)
            self._places[guessed] = torch.arange(len(guessed), dtype=torch.int32, device=guessed.device)
        for name, tensor in weights.items():
            if name not in ("d2t", "t2d"):
                *path, kind = name.split(".")
                mine = self._own_run(tensor) if name == "head.weight" else tensor
                getattr(self, path[0]).receive(".".join(path[1:]), kind, mine)
        if guessed is not None and not self._has_head:
            # Of the target's head only these rows, narrow: they are read once for every draft. They keep the target's
            # own format where that is narrower than 16 bits.
            rows = self._own_run(self._target.head.rows(guessed))
            narrow = rows if rows.element_size() == 2 else rows.to(torch.bfloat16)
            for part in (rows, narrow):
                self.head = Embedding(self._ops, self._dtype)
                self.head.receive("", "weight", part)
                if self.head.packed.nbytes <= 2 * rows.numel():
                    break
        if self._ranks is not None:
            self._shared_head = VocabularyHead(self.head, self._runs(self._ranks), self._ranks)

    def _runs(self, ranks: TensorGroup) -> Sequence[tuple[int, int]]:
        """Of the tokens that it can guess: those of every rank."""
        return vocabulary_runs(self._vocab if self.guessed is None else len(self.guessed), ranks.size)

    def _own_run(self, table: Tensor) -> Tensor:
        """This rank's rows, in memory of their own: those of the others shall not stay with them."""
        if self._ranks is None:
            return table
        first, last = self._runs(self._ranks)[self._ranks.rank]
        return table[first:last].clone()

    @property
    def layers(self) -> tuple[DraftHead]:
        """It is its one layer: for whoever asks a decoder's layers for the shape of their attention."""
        return (self,)

    @property
    def captured_states(self) -> list[str]:
        """Hidden states of layers before the last that it reads."""
        return self.spec.inner_states

    @property
    def logits_dtype(self) -> torch.dtype:
        return self._ops.dtype

    def allocate_caches(self, num_blocks: Sequence[int], block_size: int) -> list[LayerCache]:
        """For keys and values, and for the target's hidden states."""
        return [self._ops.allocate_cache(kv, num_blocks[0], block_size) for kv in self.spec.kv]

    # ---- what it knows of the target

    def kept(self, stream: ResidualStream, captured: Mapping[str, Tensor]) -> Tensor:
        """What is kept of a step's tokens: rows of the stream after the last layer, or the projection of others."""
        if not self.spec.two_streams:
            return stream.settled()
        states = [captured[name] for name in self.spec.states]
        return self.fuse(states[0] if len(states) == 1 else self._ops.concat(states), None)

    @property
    def state_projection(self) -> Tensor | None:
        """The weight that makes what is kept of several states side by side, where it is a matrix of floats alone."""
        packed = self.fuse.packed if self.spec.two_streams and len(self.spec.states) > 1 else None
        weight = getattr(packed, "weight", None)
        return weight if isinstance(weight, Tensor) and getattr(packed, "bias", None) is None else None

    def features(self, kept: Tensor) -> Tensor:
        """Of rows that were kept, what `forward` reads."""
        norm = self._target.final_norm
        return kept if self.spec.two_streams or norm is None else norm(kept)

    # ---- guesses

    def forward(self, ids: Tensor, features: Tensor, ctx: StepContext, cache: LayerCache) -> Tensor:
        """Rows [T, hidden] of what it takes the target's next hidden states for: the features of its next token."""
        tokens = self.embed.rows(ids)
        if self.spec.two_streams:
            normed = self.attn_norm(features)
            stream = self._stream(normed if self.spec.norm_first else features)
            self.attn.add_to(stream, self._ops.concat((self.token_norm(tokens), normed)), ctx, cache)
        elif self.spec.input_norms:
            fused = self.fuse(self._ops.concat((self.token_norm(tokens), self.state_norm(features))), ctx)
            stream = self._stream(fused)
            self.attn.add_to(stream, stream.normed(self.attn_norm), ctx, cache)
        else:
            fused = self.fuse(self._ops.concat((tokens, features)), ctx)
            stream = self._stream(fused)
            self.attn.add_to(stream, stream.rows, ctx, cache)
        self.mlp.add_to(stream, stream.normed(self.mlp_norm), ctx)
        return stream.settled()

    def _stream(self, rows: Tensor) -> ResidualStream:
        """Where norms are fastest inside their GEMMs. To owe sums gains nothing here: they are settled at once."""
        fused = self._is_rms and self._ops.fusion(*rows.shape) is Fusion.NORM_WITH_GEMM
        return ResidualStream(self._ops, rows, fused)

    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, vocabulary] of rows that came out of `forward`; into `out` if given."""
        if self.guessed is None:
            return self.narrow_logits(rows, out)
        return self.spread(self.narrow_logits(rows), out)

    def narrow_logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """The same of the draft vocabulary alone."""
        normed: Rows = rows if self.norm is None else self._stream(rows).normed(self.norm)
        if self._shared_head is None:
            return self.head(normed, None, out)
        found = self._shared_head.logits(normed.normed() if isinstance(normed, Unnormed) else normed, None, out)
        if found is None:
            raise InvariantError("a head is not shared by ranks on a CPU")
        return found

    def spread(self, found: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits of the draft vocabulary among those of all tokens."""
        if self.guessed is None or self._places is None:
            return found
        if out is None:
            out = torch.empty(len(found), self._vocab, dtype=found.dtype, device=found.device)
        self._ops.spread(found, self.guessed, self._places, out, max(NO_GUESS, torch.finfo(found.dtype).min))
        return out
