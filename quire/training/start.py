"""Where the training of a head begins: at random, or at the target's own last layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.mlp import Mlp
from quire.layers.spec import MlpSpec
from quire.training.head import TrainedHead
from quire.training.target import Target

_OTHERS = 0.1
"""Of the random weights of states, beside the last state itself."""


def can_begin_at(target: Target, intermediate: int) -> bool:
    """Whether its last layer has the parts of a head, of the same sizes."""
    layer = target.decoder.spec.layers[-1]
    own, mlp = layer.attention, layer.mlp
    norms = (layer.norm, target.decoder.spec.final_norm)
    return (
        layer.placement == "pre" and isinstance(mlp, MlpSpec) and mlp.intermediate == intermediate and mlp.gated
        and mlp.activation == "silu" and not mlp.bias and not own.qkv_bias and not own.out_bias
        and own.qk_norm is None and own.softcap is None and own.window is None and not own.sinks
        and own.growth is None and own.rope == 0 and math.isclose(own.scale, own.head_dim**-0.5)
        and (own.num_heads, own.num_kv_heads) == (target.decoder.spec.layers[0].attention.num_heads,
                                                  target.decoder.spec.layers[0].attention.num_kv_heads)
        and all(norm is not None and norm.kind == "rms" for norm in norms)
    )  # fmt: skip


@torch.no_grad()
def begin_at(head: TrainedHead, target: Target, rms: Tensor, scale: float) -> None:
    """Features begin as the last state (the others count little), and go through the target's last layer, whose
    attention also reads the token, by weights that stay random. `rms`: sizes of the states; logits begin near one as
    they do at random."""
    layer, final, hidden = target.decoder.layers[-1], target.decoder.final_norm, head.shape.hidden
    attn, mlp = layer.attn, layer.mlp
    assert isinstance(attn, Attention) and isinstance(mlp, Mlp) and final is not None  # `can_begin_at`
    own, size = head.fc.view(hidden, -1, hidden), rms[-1]
    own *= _OTHERS
    own[:, -1] += torch.eye(hidden) / size
    qkv = _dense(target, attn.qkv) * layer.attn_norm.weight.cpu()
    for part, rows in zip((head.q, head.k, head.v), qkv.split([len(head.q), len(head.k), len(head.v)]), strict=True):
        part[:, hidden:] = rows
    # Residual rows are of size one here.
    head.o.copy_(_dense(target, attn.out) / size)
    gate, up = _dense(target, mlp.up).chunk(2)
    head.gate.copy_(gate)
    head.up.copy_(up)
    head.down.copy_(_dense(target, mlp.down) / size)
    head.post_attention_layernorm.copy_(layer.mlp_norm.weight)
    head.norm.copy_(final.weight * (scale / final.weight.square().mean().sqrt()))


def _dense(target: Target, linear: Linear) -> Tensor:
    """Its weight, in whatever form a device holds it: what it makes of the unit vectors."""
    with torch.inference_mode():
        units = torch.eye(linear.packed.in_features, device=target.device, dtype=target.decoder.ops.dtype)
        found = linear(units, None).float().cpu()
    return found.clone().t()
