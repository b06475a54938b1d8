"""The compute operations the layers need: one implementation per device, chosen when a model is built."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.errors import EngineError
from quire.kernels.expert_rows import ExpertRanges, ExpertRows
from quire.kernels.quantized import CodedWeight, Rounding, StoredWeight, WeightUse
from quire.kernels.routing import Clamp, RoutedRows
from quire.kernels.slices import RankTree, Slices
from quire.kernels.types import HeadShape, LayerCache, StepContext
from quire.parallel.collectives import TensorGroup

if TYPE_CHECKING:  # Triton need not be installed
    from quire.attention.triton import TritonAttention


class PackedLinear(Protocol):
    """A weight (and bias) in the form its device wants; only the `Ops` that packed it looks inside."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LinearList:
    """Packed weights one by one: the group of a device without grouped GEMMs."""

    members: tuple[Any, ...]


class Fusion(Enum):
    """What a device fuses across the borders of layers that norm first (x + f(norm(x))), for a step of some rows."""

    NONE = "none"
    """A GEMM adds the residual to its result, a norm runs by itself."""
    SUM_WITH_NORM = "sum with norm"
    """The residual stream owes a GEMM's result until the norm that follows adds it (`add_rms_norm`)."""
    NORM_WITH_GEMM = "norm with GEMM"
    """A GEMM adds the residual to its result, and takes the norm before it along (`norm_linear`)."""
    NORM_WITH_ROUNDED_GEMM = "norm with rounded GEMM"
    """The same with the bits of `SUM_WITH_NORM`: a GEMM's result is rounded before it is added (`add_linear`)."""


class Recorder(Protocol):
    """Runs a decoder's forward, and from the second or third time on without Python's part of it; the same bits."""

    def run(self, variant: Hashable, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache],
            forward: Callable[[], Tensor]) -> Tensor:
        """What `forward` returns; it holds until the next step. Forwards that make other calls have another
        `variant`."""
        ...

    def run_all(self, variant: Hashable, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache],
                forward: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The same with several results."""
        ...


class Ops(AttentionBackend):
    """Every operation a decoder runs. Activations are contiguous [tokens, features] tensors of type `dtype`.

    Contract in fp32: each output element is reduced in an order fixed by the element itself, so that its
    bits do not depend on the other tokens of the step, on chunking, on the block size or on the number of
    threads. A packed weight goes back only to the object that packed it, hence `Any` where one comes in.

    What is abstract every device has. The rest are fused forms: a device that inherits them declines.
    """

    dtype: torch.dtype = torch.float32
    attention: TritonAttention | None = None
    """The attention of a device whose steps are prepared for it (`DeviceContext`); None: any `StepContext` will do."""

    mixes_formats: bool = False
    """Whether `pack_quantized` takes floats (`FloatWeight`) beside codes, of projections that run as one."""

    grows_tables: bool = False
    """Whether tables of positions may be computed between steps, as far as these need them."""

    packs_parts: bool = False
    """Whether it has `pack_parts`."""

    @abstractmethod
    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, slices: Slices | None = None
    ) -> PackedLinear:
        """Take a contiguous weight [N, K] (and bias [N]); the caller drops its own reference afterwards.

        With `slices`, which cover K, the GEMM sums each slice from zero and adds the slices in their tree, then
        bias and residual. On a GPU this holds in deterministic mode.
        """

    def pack_parts(
        self, parts: Sequence[StoredWeight], bias: Tensor | None = None, slices: Slices | None = None
    ) -> PackedLinear:
        """As `pack_linear`, of parts one below the other, which need not be floats yet: nobody puts them together, and
        codes become floats a few rows at a time."""
        raise NotImplementedError

    def quantized(
        self, weight: StoredWeight, slices: Slices | None = None, use: WeightUse = WeightUse.LAYER
    ) -> CodedWeight | None:
        """The codes that this device multiplies with in place of a weight; None: it multiplies floats."""
        return None

    def rounding_to(self, rounding: Rounding) -> AbstractContextManager[None]:
        """Inside, `quantized` rounds as this says, where the device multiplies integers: for weights whose exactness no
        token depends on."""
        return nullcontext()

    def pack_quantized(
        self, parts: Sequence[CodedWeight], bias: Tensor | None = None, slices: Slices | None = None,
        use: WeightUse = WeightUse.LAYER,
    ) -> PackedLinear:
        """As `pack_linear`, of parts one below the other that `quantized` gave for that use. Where the device
        `mixes_formats`, some may be floats."""
        raise EngineError("this device multiplies no codes")

    @abstractmethod
    def linear(self, x: Tensor, w: Any, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """[M, N] = x W^T (+ bias) (+ residual), in that order; into `out` if given. x may also be what `add_rms_norm`
        or `gate` made for this weight."""

    @abstractmethod
    def linear_nodes(self, x: Tensor, w: Any, out: Tensor | None = None) -> Tensor:
        """[nodes, M, N] float32: what a weight packed with a run of a sum's slices adds to each of `slices.nodes()`,
        without bias and residual; into `out` if given. With the nodes of the other runs, `finish_tree` gives the bits
        of the whole."""

    def group_linears(self, ws: Sequence[Any]) -> Any:
        """Packed weights of one shape, without slices, in the form that `grouped_linear` wants. The weights themselves
        are its `members` then, and may lie elsewhere."""
        return LinearList(tuple(ws))

    def grouped_linear(self, x: Tensor, counts: Tensor, group: Any) -> Tensor:
        """[M, N]: the first counts[0] rows of x through the first weight of the group, the next counts[1] through the
        second, and so on; a row has the bits that `linear` gives it. `counts` are int64."""
        out = torch.empty(x.shape[0], group.members[0].out_features, dtype=x.dtype, device=x.device)
        start = 0
        for count, w in zip(counts.tolist(), group.members, strict=True):
            if count:
                self.linear(x[start : start + count], w, None, out[start : start + count])
            start += count
        return out

    def head_linear(self, x: Tensor, group: Any) -> Tensor:
        """[members, T, N] of contiguous x [members, T, K]: each through its own weight of the group."""
        members, tokens, width = x.shape
        found = self.grouped_linear(x.view(members * tokens, width), torch.full((members,), tokens), group)
        return found.view(members, tokens, -1)

    def routed_experts(
        self, x: Tensor, routed: RoutedRows, up: Any, down: Any, kind: str, clamp: Clamp | None,
        residual: Tensor | None = None,
    ) -> Tensor | None:
        """[T, N]: each row's experts, as the router's logits choose them, weighted and summed, and the residual; `up`
        and `down` are the groups of all experts. None: the device has no kernels for all of it in one."""
        return None

    def experts_over_ranks(
        self, x: Tensor, routed: RoutedRows, up: Any, down: Any, kind: str, clamp: Clamp | None,
        residual: Tensor | None, ranks: TensorGroup, runs: Sequence[tuple[int, int]],
    ) -> Tensor | None:
        """`routed_experts` of experts that ranks share: `up` and `down` are those of this rank, `runs` says which each
        has."""
        return None

    def sum_experts(self, found: Tensor, pairs: ExpertRows, ranges: ExpertRanges) -> Tensor:
        """[nodes, T, width]: the weighted sums of each token's experts, of which `found` has a row for each pair: in
        ascending order within a range, the ranges in their tree, as far as these ranges go."""
        tokens, chosen = pairs.places.shape
        there = pairs.places >= 0
        stack: list[Tensor] = []
        for index, merges in enumerate(ranges.merges.tolist(), ranges.first_range):
            total = found.new_zeros(tokens, found.shape[1])
            for pair in range(chosen):
                rows = (there[:, pair] & (pairs.ranges[:, pair] == index)).nonzero().flatten()
                total[rows] += found[pairs.places[rows, pair]] * pairs.weights[rows, pair].unsqueeze(1)
            stack.append(total)
            for _ in range(merges):
                right = stack.pop()
                stack[-1] = stack[-1] + right
        return torch.stack(stack)

    @abstractmethod
    def embed(self, ids: Tensor, w: Any) -> Tensor:
        """Rows `ids` of a packed weight, exactly as before packing (a tied head is one copy of both)."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    @abstractmethod
    def norm_all_heads(self, qkv: Tensor, shape: HeadShape, q_norm: Tensor, k_norm: Tensor, eps: float) -> None:
        """In place on qkv [T, shape.width]: RMS norm of q over all its heads together, then of k.

        Squares are summed inside each head, then over the heads in a fixed binary tree: neighbours first, an odd
        one is carried up. So ranks that hold some of the heads each will get the same bits.
        """

    @abstractmethod
    def head_squares(self, qkv: Tensor, shape: HeadShape) -> Tensor:
        """float32 [T, heads + kv heads]: the sum of squares of each head of q and of k."""

    @abstractmethod
    def norm_some_heads(
        self, qkv: Tensor, shape: HeadShape, squares: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor], eps: float
    ) -> None:
        """As `norm_all_heads`, in place on qkv, where these are some of the layer's heads: `squares` are those of all
        query heads [T, all of them] and of all kv heads; `norms` have the weights of these heads alone."""

    @abstractmethod
    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        """[M, 2I] -> [M, I]: act(first half) * second half; kind is silu, gelu_tanh or gelu."""

    @abstractmethod
    def act(self, x: Tensor, kind: str) -> Tensor:
        """kind is silu, gelu_tanh, gelu or relu."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """[M, N] + [M, N], into memory of its own."""
        return x + y

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """[M, sum of widths]: rows side by side."""
        return torch.cat(tuple(parts), 1)

    def spread(self, found: Tensor, guessed: Tensor, places: Tensor, out: Tensor, least: float) -> None:
        """Logits [R, guessed] of the tokens `guessed` into `out` [R, vocabulary], `least` for all others. `places`
        int32 [vocabulary]: which of `guessed` each token is, -1: none."""
        out.fill_(least)
        out[:, guessed] = found

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x times a float32 factor, into memory of its own."""
        return x * factor

    def clamped_act_mul(self, gate_up: Tensor, limit: float, alpha: float) -> Tensor:
        """[M, 2I] -> [M, I]: g sigmoid(alpha g) (u + 1) of g = min(gate, limit) and u = up within +-limit."""
        gate, up = gate_up.to(torch.float64).chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * torch.sigmoid(gate * alpha) * (up + 1.0)).to(gate_up.dtype)

    def close(self) -> None:
        """Give back what is held outside torch."""

    def recorder(self, ranks: TensorGroup | None = None) -> Recorder | None:
        """A new recorder of steps, for one decoder, where calls of this device's operations can be recorded. `ranks`
        are those that share the decoder's layers."""
        return None

    # ---- fused forms

    def fusion(self, rows: int, width: int) -> Fusion:
        """What is fastest for a residual stream [rows, width] between RMS norms."""
        return Fusion.NONE

    def norm_gain(self, weight: Tensor) -> Tensor:
        """The form in which `norm_linear` takes a norm's weight. Asked for when weights are loaded: it may wait for
        the device, which a step must not."""
        return weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, reader: Any = None) -> Any:
        """residual += x in place; the norm of the sum. `reader`: the packed weight that alone will be multiplied by it,
        so that it may be handed over in a form that only `linear` of that weight takes (quantized rows)."""
        return self.rms_norm(residual.add_(x), weight, eps)

    def gate(self, gate_up: Tensor, kind: str, reader: Any = None) -> Any:
        """`act_mul` for a `reader`, as in `add_rms_norm`."""
        return self.act_mul(gate_up, kind)

    def gated_linear(self, x: Any, w: Any, kind: str, reader: Any = None) -> Any:
        """`gate` of `linear`: in one launch where that is fastest."""
        return self.gate(self.linear(x, w), kind, reader)

    def add_linear(self, x: Tensor, w: Any, rows: Tensor) -> Tensor:
        """rows + linear(x, w), rounded before the sum and after it; only under `Fusion.NORM_WITH_ROUNDED_GEMM`."""
        return self.add(rows, self.linear(x, w))

    def linear_over_ranks(
        self, x: Tensor, w: Any, ranks: TensorGroup, tree: RankTree, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """`linear` of a weight of which every rank has a run of the sum's slices: the same on all of them."""
        room = ranks.room(len(tree.nodes(ranks.rank)) * x.shape[0], w.out_features)
        nodes = self.linear_nodes(x, w, None if room is None else room.view(-1, x.shape[0], w.out_features))
        return ranks.sum_nodes(nodes, tree, bias, residual)

    def embed_over_ranks(
        self, ids: Tensor, w: Any, ranks: TensorGroup, runs: Sequence[tuple[int, int]], ends: Tensor
    ) -> Tensor:
        """`embed` of a table of which each rank has a run of the rows; `ends` are those of the runs. The same on all
        ranks: each looks up the ids that it has (and some row for the others: nobody reads it). Rows are handed round,
        not summed with zeros, so that -0.0 stays -0.0."""
        owners = torch.searchsorted(ends, ids, right=True)
        if not ranks.on_device and ids.numel() and (int(owners.max()) >= len(runs) or int(ids.min()) < 0):
            raise EngineError(f"a token id lies outside 0..{runs[-1][1] - 1}")
        first, last = runs[ranks.rank]
        return ranks.pick(self.embed((ids - first).clamp_(0, last - first - 1), w), owners)

    def norm_linear(
        self, x: Tensor, gain: Tensor, eps: float, w: Any, gated: str | None = None, out: Tensor | None = None
    ) -> Tensor:
        """linear(rms_norm(x)), and the gated activation `gated` of it; only where `fusion` says that norms go with
        GEMMs."""
        found = self.linear(self.rms_norm(x, gain, eps), w, None, None if gated else out)
        if gated is None:
            return found
        found = self.act_mul(found, gated)
        return found if out is None else out.copy_(found)
