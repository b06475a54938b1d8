"""Reorders the rows of q and k of checkpoints that rotate interleaved pairs, so that kernels know one pairing."""

from __future__ import annotations

import math

from quire.kernels.quantized import CodedWeight, StoredWeight
from quire.models.spec import DecoderSpec

_TURNED = ("attn.q", "attn.k", "attn.q_norm", "attn.k_norm", "attn.q_b", "attn.kv_a")


def half_split(name: str, tensor: StoredWeight, spec: DecoderSpec) -> StoredWeight:
    """A parameter as the kernels want it: feature i of a head turns together with i + rotary_dim / 2.

    Where the checkpoint pairs 2i with 2i + 1, the even features of the turned part move before the odd ones, in q
    and k alike, so that every score stays what it was. Tensors of another shape than the spec's are left as they
    are; the decoder refuses them by name.
    """
    place = name.split(".")
    if place[0] != "layers" or ".".join(place[2:-1]) not in _TURNED:
        return tensor
    attention = spec.layers[int(place[1])].attention
    if attention.rope is None or not spec.ropes[attention.rope].interleaved:
        return tensor
    width = () if place[-2].endswith("norm") else tensor.shape[1:]
    dim = attention.head_dim
    if attention.latent is not None and place[-2] == "kv_a":
        dim = attention.latent.width
    if math.prod(tensor.shape) % (dim * math.prod(width)):
        return tensor
    turned = spec.ropes[attention.rope].rotary_dim
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, dim)]
    if attention.latent is not None:  # whose heads turn at their end
        order = [*range(dim - turned), *range(dim - turned, dim, 2), *range(dim - turned + 1, dim, 2)]
    if isinstance(tensor, CodedWeight):
        return tensor.rows([start + feature for start in range(0, tensor.shape[0], dim) for feature in order])
    heads = tensor.reshape(-1, dim, *width)
    return heads[:, order].reshape(tensor.shape)
