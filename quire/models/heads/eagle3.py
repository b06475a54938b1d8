"""EAGLE-3: hidden states of three layers of the target, a layer that reads two streams, a draft vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import llama_like
from quire.models.heads.format import HeadFormat
from quire.models.heads.spec import HeadSpec
from quire.models.spec import DecoderSpec

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_USUAL = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
          "use_mtp_layernorm": False, "parallel_draft_step": 1}
"""Values of `eagle_config`, as NVIDIA's heads have it, that make the layer which is computed here."""


def read(c: ConfigReader, target: DecoderSpec) -> HeadSpec:
    for field in ("norm_before_fc", "fc_norm"):  # of later heads, which norm the states before they are projected
        c.allow(field, False)
    bias = c.flag("attention_bias", False)
    model = llama_like(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias", False))
    if model.num_layers != 1:
        c.refuse("num_hidden_layers", model.num_layers, ": heads of one layer are")
    c.allow("target_hidden_size", model.hidden_size)
    return HeadSpec(
        c.architecture, model.vocab_size, model.hidden_size, model.max_positions, _states(c, target), model.layers[0],
        model.ropes[0], two_streams=True, norm=model.final_norm, norm_first=c.flag("norm_before_residual", False),
        draft_vocab=0 if c.get("draft_vocab_size") is None else c.size("draft_vocab_size"),
    )


def _states(c: ConfigReader, target: DecoderSpec) -> tuple[str, ...]:
    """Which layers' outputs, by the field's numbers; by default those that the authors of EAGLE-3 take."""
    said = c.get("eagle_config")
    said = {} if said is None else said
    if not isinstance(said, Mapping):
        c.fail("eagle_config", f"must be a mapping, not {said!r:.80}")
    for field, usual in _USUAL.items():
        if said.get(field, usual) != usual:
            c.refuse(f"eagle_config {field}", said[field])
    count, layers = target.num_layers, said.get(_LAYERS)
    layers = c.get(_LAYERS) if layers is None else layers
    layers = [2, count // 2, count - 3] if layers is None else layers
    if not isinstance(layers, list) or not layers or any(
            type(layer) is not int or not 0 <= layer <= count for layer in layers):
        c.fail(_LAYERS, f"must be numbers from 0 to the target's {count} layers, not {layers!r:.80}")
    before = layers if not _by_output(layers, count) else [layer + 1 for layer in layers]
    return tuple("embed" if layer == 0 else f"layers.{layer - 1}" for layer in before)


def _by_output(layers: Sequence[int], count: int) -> bool:
    """Heads number layers in two ways, and do not say which: number i is what layer i takes in (vLLM, speculators), or
    what it puts out (SpecForge, NVIDIA). All begin behind the second layer: the former write 2 for it, the latter 1.
    What the last layer puts out has a number by the first way only."""
    return layers[0] == 1 and count not in layers


FORMAT = HeadFormat(
    ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    read,
    {"input_layernorm": "token_norm", "hidden_norm": "attn_norm", "post_attention_layernorm": "mlp_norm"},
    layers=("midlayer.", "layers.0."),
)
