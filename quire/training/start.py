"""Where the training of a head begins: at random, or at the target's own last layer."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.mlp import Mlp
from quire.training.head import TrainedHead
from quire.training.target import Target

_OTHERS = 0.1
"""Of the random weights of states, beside the last state itself."""


@torch.no_grad()
def begin_at(head: TrainedHead, target: Target, rms: Tensor, scale: float) -> None:
    """Features begin as the last state (the others count little), and go through the target's last layer, whose
    attention also reads the token, by weights that stay random. `rms`: sizes of the states; logits begin near one as
    they do at random."""
    layer, final, hidden = target.decoder.layers[-1], target.decoder.final_norm, head.shape.hidden
    attn, mlp = layer.attn, layer.mlp
    assert isinstance(attn, Attention) and isinstance(mlp, Mlp) and final is not None  # `begins_at_target`
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
