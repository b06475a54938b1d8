"""EAGLE-1 and EAGLE-2: one projection of embedding and last hidden state, one layer, the target's own head."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import llama_like
from quire.models.heads.format import HeadFormat
from quire.models.heads.spec import FINAL, HeadSpec
from quire.models.spec import DecoderSpec


def read(c: ConfigReader, target: DecoderSpec) -> HeadSpec:
    """`draft_vocab_size` and `d2t` are EAGLE-3's; here they leave out rows of the target's head."""
    c.allow("add_para_norm", False)
    bias = c.flag("attention_bias", c.flag("qkv_bias", c.architecture.startswith("Qwen2")))
    model = llama_like(c, qkv_bias=bias, out_bias=c.flag("attention_bias", False), mlp_bias=c.flag("mlp_bias", False))
    if model.num_layers != 1:
        c.refuse("num_hidden_layers", model.num_layers, ": an EAGLE head has one layer")
    return HeadSpec(
        c.architecture, model.vocab_size, model.hidden_size, model.max_positions, (FINAL,), model.layers[0],
        model.ropes[0], draft_vocab=0 if c.get("draft_vocab_size") is None else c.size("draft_vocab_size"),
    )


FORMAT = HeadFormat(
    ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "LlamaForCausalLM", "Qwen2ForCausalLMEagle", "Qwen2ForCausalLM"),
    read,
    {"post_attention_layernorm": "mlp_norm"},
)
