"""Experts as files store them: merged in GGUF, in four bits in gpt-oss checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from quire.errors import ModelLoadError
from quire.models.build import build_decoder
from quire.models.loader.mxfp4 import dequantized
from quire.models.loader.source import resolve_model
from quire.ops.cpu import CpuOps
from tests.checkpoints import config_of, make_model, oracle_logits, weights_of
from tests.models.loader.tiny_gguf import permute_for_llama_cpp, write_vocabulary
from tests.paged_driver import PagedDriver

TOKENS = [5, 3, 90, 0, 41, 7, 8, 9, 10, 11, 12, 13]
ARCHS = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe"}
BLOCK = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight"}


def _tensors(family: str, model: Any) -> list[tuple[str, torch.Tensor]]:
    found = []
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    for name, tensor in weights_of(model, merged=True):
        if name in TOP:
            found.append((TOP[name], tensor))
            continue
        _, _, layer, inner = name.split(".", 3)
        if inner == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, 1)
            found += [(f"blk.{layer}.ffn_gate_exps.weight", gate), (f"blk.{layer}.ffn_up_exps.weight", up)]
            continue
        if family == "mixtral" and inner.startswith(("self_attn.q_proj", "self_attn.k_proj")):
            tensor = permute_for_llama_cpp(tensor, heads if "q_proj" in inner else kv_heads)
        module, _, kind = inner.rpartition(".")
        if inner == "mlp.experts.down_proj":
            module, kind = inner, "weight"
        tensor = tensor.reshape(-1) if module == "mlp.shared_expert_gate" else tensor
        found.append((f"blk.{layer}.{BLOCK[module]}.{kind}", tensor))
    return found


def _write(path: Path, family: str, model: Any) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, ARCHS[family])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_feed_forward_length(config.intermediate_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    write_vocabulary(writer, config.vocab_size)
    for name, tensor in _tensors(family, model):
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ARCHS)
def test_a_gguf_of_experts_gives_the_models_logits(family: str, tmp_path: Path) -> None:
    model = make_model(family, **({"norm_topk_prob": True} if family == "qwen3_moe" else {}))
    _write(tmp_path / "m.gguf", family, model)
    source = resolve_model(str(tmp_path / "m.gguf"))
    decoder = build_decoder(source.config, source.weights(), CpuOps(), max_model_len=64)
    got = PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)])
    assert (got - oracle_logits(model, TOKENS)).abs().max() < 1e-4


def _packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, columns, rows] as MXFP4 blocks and scales: the nearest magnitude at a scale that fits."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.transpose(1, 2).contiguous().unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(groups.abs().amax(-1) / 6.0))
    scaled = groups / torch.exp2(exponent).unsqueeze(-1)
    code = (scaled.abs().unsqueeze(-1) - table).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = code.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponent + 127).to(torch.uint8)


def test_an_mxfp4_checkpoint_is_the_model_with_those_weights(tmp_path: Path) -> None:
    model = make_model("gpt_oss", hidden_size=64, intermediate_size=96)
    stored: dict[str, torch.Tensor] = {}
    floats = dict(model.state_dict())
    for name, tensor in weights_of(model):
        if name.endswith(("gate_up_proj", "down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales = _packed(tensor)
            floats[name] = dequantized(blocks, scales, name).transpose(1, 2).contiguous()
            assert (floats[name] - tensor).abs().max() < 0.3  # it was packed well
        else:
            stored[name] = tensor.contiguous()
    model.load_state_dict(floats)
    config = config_of(model) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(stored, tmp_path / "model.safetensors")
    source = resolve_model(str(tmp_path))
    decoder = build_decoder(source.config, source.weights(), CpuOps())
    got = PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)])
    assert (got - oracle_logits(model, TOKENS)).abs().max() < 1e-4
    stored.pop(next(name for name in stored if name.endswith("_scales")))
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="_blocks"):
        build_decoder(source.config, source.weights(), CpuOps())
