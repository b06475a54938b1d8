"""Experts on a GPU: which formats stay packed there, how they are put together, and which kernels multiply them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.quantized import UNIT, CodedWeight, Fp8Weight, Mxfp4Weight, QuantizedWeight, Rounding
from quire.kernels.routing import Clamp, RoutedRows
from quire.kernels.triton import code_planes, expert_codes, expert_codes_few, expert_few, expert_linear, route
from quire.kernels.triton.expert_codes import CodedExperts, stacked
from quire.kernels.triton.linear_planes import narrow
from quire.kernels.triton.route import ExpertBlocks
from quire.ops.cpu_integer import group_of
from quire.ops.device_weights import DeviceGroup, DeviceLinear, ExpertLinear, to_codes, to_fp8, to_int8
from quire.parallel.collectives import TensorGroup

# ---- weights


def quantized(weight: Tensor | CodedWeight, rounding: Rounding | None) -> CodedWeight | None:
    """The codes that stay packed of one expert's weight; None: floats do."""
    if isinstance(weight, CodedWeight):
        return weight if _packs(weight) else None
    if rounding is None or not (rounding.fp8 or rounding.bits):
        return None
    if rounding.fp8 or rounding.bits is None:
        return to_fp8(weight)
    group = group_of(weight.shape[1], None, rounding)
    if group % UNIT:
        return None
    if rounding.bits == 8 and group == weight.shape[1] and not rounding.zero_points:
        return to_int8(weight)
    return to_codes(weight, group, rounding.zero_points, rounding.bits)


def _packs(weight: CodedWeight) -> bool:
    """Whether scales are those of whole rows or of columns that the kernels take at once."""
    if isinstance(weight, Fp8Weight):
        return weight.scales.shape[1] == 1 or weight.group % UNIT == 0
    return isinstance(weight, QuantizedWeight | Mxfp4Weight)


def pack(parts: Sequence[CodedWeight]) -> CodedExperts | Tensor:
    """One expert of parts one below the other (gate and up); a weight of floats where they are of formats that cannot
    be one."""
    alike = _alike([_packed(part) for part in parts])
    if alike is None or any(not _same_order(alike[0], each) for each in alike):
        return torch.cat([part.dequantized() for part in parts])
    whole = stacked([replace(each, order=None) for each in alike])
    return replace(whole, order=alike[0].order, features=sum(each.features for each in alike))


def _packed(weight: CodedWeight) -> CodedExperts:
    features, width = weight.shape
    if isinstance(weight, QuantizedWeight):
        # A scale for a whole row of bytes may as well be exact.
        turned = _turned if weight.group == width and weight.bits == 8 else narrow
        order = None if weight.order is None else weight.order.to(torch.int32).unsqueeze(0)
        offsets = None if weight.offsets is None else turned(weight.offsets)
        pieces = code_planes.planes(weight.codes, weight.bits)
        return CodedExperts(pieces, turned(weight.scales), offsets, order, features, width, weight.bits, weight.zero,
                            weight.group, code_planes.INTEGERS)
    if isinstance(weight, Mxfp4Weight):
        pieces, scales = code_planes.planes(weight.one_a_byte(), 4), _turned(weight.scales)
        return CodedExperts(pieces, scales, None, None, features, width, 4, 0, UNIT, code_planes.E2M1)
    if not isinstance(weight, Fp8Weight):
        raise TypeError(f"no form for experts of {type(weight).__name__}")
    pieces, scales = code_planes.planes(weight.codes.view(torch.uint8), 8), _turned(weight.scales)
    group = width if weight.scales.shape[1] == 1 else weight.group
    return CodedExperts(pieces, scales, None, None, features, width, 8, 0, group, code_planes.E4M3)


def _turned(scales: Tensor) -> Tensor:
    return scales.t().contiguous()


def _alike(experts: Sequence[CodedExperts]) -> list[CodedExperts] | None:
    """The same weights in one format; None where that would change their codes."""
    if len({(each.bits, each.numbers, each.width, each.order is None) for each in experts}) > 1:
        return None
    group = min(each.group for each in experts)
    if any(each.group % group for each in experts):
        return None
    found = [_regrouped(each, group) for each in experts]
    if len({(each.zero, each.offsets is None) for each in found}) > 1:
        found = [_with_offsets(each) for each in found]
    return found


def _regrouped(weight: CodedExperts, group: int) -> CodedExperts:
    times = weight.group // group
    if times == 1:
        return weight
    offsets = None if weight.offsets is None else weight.offsets.repeat_interleave(times, 0)
    return replace(weight, scales=weight.scales.repeat_interleave(times, 0), offsets=offsets, group=group)


def _with_offsets(weight: CodedExperts) -> CodedExperts:
    """Codes that count from zero."""
    offsets = -weight.zero * weight.scales.float()
    return replace(weight, zero=0, offsets=offsets if weight.offsets is None else offsets + weight.offsets.float())


def _same_order(one: CodedExperts, other: CodedExperts) -> bool:
    return one.order is None or (other.order is not None and torch.equal(one.order, other.order))


def group(ws: Sequence[DeviceLinear | ExpertLinear], dtype: torch.dtype) -> DeviceGroup:
    """All in one, which they then are views of: in codes where all are and have one format, else in floats."""
    first = ws[0].bias
    bias = None if first is None else torch.stack([w.bias for w in ws if w.bias is not None])
    biases = [None] * len(ws) if bias is None else list(bias)
    coded = [w.packed for w in ws if isinstance(w, ExpertLinear)]
    alike = _alike(coded) if len(coded) == len(ws) else None
    if alike is not None:
        whole = stacked(alike)
        members = [ExpertLinear(whole.expert(index), each) for index, each in enumerate(biases)]
        return DeviceGroup(tuple(members), whole, bias)
    weight = torch.stack([w.packed.floats().to(dtype) if isinstance(w, ExpertLinear) else w.weight for w in ws])
    return DeviceGroup(tuple(DeviceLinear(*both) for both in zip(weight, biases, strict=True)), weight, bias)


# ---- steps


@dataclass(frozen=True, slots=True)
class ExpertKernels:
    """Runs the experts of a step, without a host sync on the routing, so that graphs can hold it."""

    dtype: torch.dtype
    deterministic: bool
    pdl: bool
    shared_memory: int
    copy_engine: bool

    def few(
        self, x: Tensor, up: DeviceGroup, down: DeviceGroup, chosen: Tensor, gains: Tensor, kind: str,
        clamp: Clamp | None, residual: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """[T, N] of a handful of pairs."""
        if isinstance(up.weight, CodedExperts):
            inner = expert_codes_few.coded_few_up(x, up.weight, up.bias, chosen, kind, clamp, pdl=self.pdl)
        else:
            inner = expert_few.few_up(x, up.weight, up.bias, chosen, kind, clamp, pdl=self.pdl)
        if isinstance(down.weight, CodedExperts):
            return expert_codes_few.coded_few_down(inner, down.weight, down.bias, chosen, gains, residual,
                                                   pdl=self.pdl)
        return expert_few.few_down(inner, down.weight, down.bias, chosen, gains, residual, pdl=self.pdl)

    def pairs(
        self, x: Tensor, up: DeviceGroup, down: DeviceGroup, chosen: Tensor, gains: Tensor, experts: int, kind: str,
        clamp: Clamp | None, fixed: bool,
    ) -> Tensor:  # fmt: skip
        """[pairs, N]: those of experts that are not there (-1) are uninitialised. `fixed`: blocks of one size,
        whatever the step."""
        rows = expert_linear.ExpertShape().rows if fixed else expert_linear.expert_choice(
            chosen.numel(), experts).up.rows  # fmt: skip
        blocks = route.block_experts(chosen, experts, rows)
        inner = self._up(x, up, chosen, blocks, experts, kind, clamp, fixed)
        return self._down(inner, down, chosen, gains, blocks, experts, fixed)

    def _up(
        self, x: Tensor, up: DeviceGroup, chosen: Tensor, blocks: ExpertBlocks, experts: int, kind: str,
        clamp: Clamp | None, fixed: bool,
    ) -> Tensor:  # fmt: skip
        if isinstance(up.weight, CodedExperts):
            coded = self._coded_shape(chosen, up.weight, fixed)
            return expert_codes.up_coded_experts(x, up.weight, up.bias, chosen, blocks, kind, clamp, coded)
        shape = expert_linear.ExpertShape() if fixed else expert_linear.suited(
            expert_linear.expert_choice(chosen.numel(), experts).up, True, *self._chip)  # fmt: skip
        return expert_linear.up_experts(x, up.weight, up.bias, chosen, blocks, kind, clamp, shape)

    def _down(
        self, inner: Tensor, down: DeviceGroup, chosen: Tensor, gains: Tensor, blocks: ExpertBlocks, experts: int,
        fixed: bool,
    ) -> Tensor:  # fmt: skip
        if isinstance(down.weight, CodedExperts):
            coded = self._coded_shape(chosen, down.weight, fixed)
            return expert_codes.down_coded_experts(inner, down.weight, down.bias, chosen, gains, blocks, coded)
        shape = expert_linear.ExpertShape() if fixed else expert_linear.suited(
            expert_linear.expert_choice(chosen.numel(), experts).down, False, *self._chip)  # fmt: skip
        return expert_linear.down_experts(inner, down.weight, down.bias, chosen, gains, blocks, shape)

    @property
    def _chip(self) -> tuple[int, int, bool]:
        return self.dtype.itemsize, self.shared_memory, self.copy_engine

    def _coded_shape(self, chosen: Tensor, weight: CodedExperts, fixed: bool) -> expert_codes.CodedShape:
        if fixed:
            return expert_codes.CodedShape()
        return expert_codes.coded_shape(chosen.numel(), weight, self.shared_memory)

    def routed(
        self, x: Tensor, routed: RoutedRows, up: DeviceGroup, down: DeviceGroup, kind: str, clamp: Clamp | None,
        residual: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """[T, N] of experts that are all here. In deterministic mode blocks have one size."""
        chosen, gains = route.choose(routed)
        if not self.deterministic and chosen.numel() <= expert_few.FEW_PAIRS:
            return self.few(x, up, down, chosen, gains, kind, clamp, residual)
        found = self.pairs(x, up, down, chosen, gains, routed.router.num_experts, kind, clamp, self.deterministic)
        return expert_linear.sum_pairs(found, routed.router.top_k, residual)

    def over_ranks(
        self, x: Tensor, routed: RoutedRows, up: DeviceGroup, down: DeviceGroup, kind: str, clamp: Clamp | None,
        residual: Tensor | None, ranks: TensorGroup, runs: Sequence[tuple[int, int]],
    ) -> Tensor:  # fmt: skip
        """In deterministic mode every pair of a row and an expert comes from the rank that has the expert, and is added
        where one rank would add it; else ranks add what they have."""
        chosen, gains = route.choose(routed)
        first, last = runs[ranks.rank]
        # No torch.where with a number: it would copy the number to the device, and no graph can hold such a copy.
        mine = (chosen - first).masked_fill_((chosen < first) | (chosen >= last), -1)
        found = self.pairs(x, up, down, mine, gains, last - first, kind, clamp, True)
        if self.deterministic:
            owners = torch.zeros_like(chosen).view(-1)
            for _, end in runs[:-1]:
                owners += chosen.view(-1) >= end
            return expert_linear.sum_pairs(ranks.pick(found, owners), routed.router.top_k, residual)
        found.masked_fill_(mine.view(-1, 1) < 0, 0.0)  # rows of other ranks' experts are uninitialised
        return ranks.sum_parts(expert_linear.sum_pairs(found, routed.router.top_k), None, residual)
