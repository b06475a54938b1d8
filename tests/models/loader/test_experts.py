"""Experts as files store them: merged in GGUF, in four bits in gpt-oss checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from quire.errors import ModelLoadError
from quire.kernels.quantized import CodedWeight, Mxfp4Weight, QuantizedWeight, Rounding
from quire.models.build import build_decoder, stored_parts
from quire.models.loader.source import resolve_model
from quire.models.registry import read_spec
from quire.models.shard import shard_of
from quire.ops.cpu import CpuOps
from quire.parallel.place import Place
from tests.checkpoints import make_model, oracle_logits, weights_of
from tests.models.loader.tiny_gguf import permute_for_llama_cpp, write_vocabulary
from tests.mxfp4_checkpoints import write_mxfp4
from tests.paged_driver import PagedDriver

TOKENS = [5, 3, 90, 0, 41, 7, 8, 9, 10, 11, 12, 13]
ARCHS = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "glm4_moe": "glm4moe",
         "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "gpt_oss": "gpt-oss"}
BLOCK = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.router": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
ALONE = {"self_attn.sinks": "attn_sinks.weight", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
NORM_AFTER = ("glm4_moe", "gpt_oss")
"""Whose second norm is called after attention."""
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight"}


def _of_gpt_oss(layer: str, inner: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Rows of gate and up in turns become two tensors; weights are turned over."""
    kind = "bias" if inner.endswith("_bias") else "weight"
    stored = tensor if kind == "bias" else tensor.transpose(1, 2)
    if "down" in inner:
        return [(f"blk.{layer}.ffn_down_exps.{kind}", stored)]
    return [(f"blk.{layer}.ffn_{part}_exps.{kind}", stored[:, first::2]) for first, part in enumerate(("gate", "up"))]


def _halves(layer: str, config: Any, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    keys, values = tensor.unflatten(0, (config.num_attention_heads, -1)).split(
        [config.qk_nope_head_dim, config.v_head_dim], 1)
    return [(f"blk.{layer}.attn_k_b.weight", keys.transpose(1, 2)), (f"blk.{layer}.attn_v_b.weight", values)]


def _tensors(family: str, model: Any, halves: bool = False) -> list[tuple[str, torch.Tensor]]:
    found = []
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    for name, tensor in weights_of(model, merged=True):
        if name in TOP:
            found.append((TOP[name], tensor))
            continue
        _, _, layer, inner = name.split(".", 3)
        if inner in ALONE:
            found.append((f"blk.{layer}.{ALONE[inner]}", tensor))
            continue
        if family == "gpt_oss" and inner.startswith("mlp.experts"):
            found += _of_gpt_oss(layer, inner, tensor)
            continue
        if halves and inner == "self_attn.kv_b_proj.weight":
            found += _halves(layer, model.config, tensor)
            continue
        if family in NORM_AFTER and inner == "post_attention_layernorm.weight":
            found.append((f"blk.{layer}.post_attention_norm.weight", tensor))
            continue
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


def _write_routed(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    """What GLM-4.5 and DeepSeek have more than others."""
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob and family != "deepseek_v2")
    gating = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(gating.SOFTMAX if family == "deepseek_v2" else gating.SIGMOID)
    if family != "deepseek_v2" and config.n_group is not None:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _write_latent(writer: gguf.GGUFWriter, config: Any, halves: bool) -> None:
    head = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim if halves else head)
    writer.add_value_length(config.kv_lora_rank if halves else config.v_head_dim)
    if halves:
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(config.v_head_dim)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])  # as the converter stores it


def _write(
    path: Path, family: str, model: Any, tensors: list[tuple[str, torch.Tensor]] | None = None, *,
    halves: bool = False, experts: gguf.GGMLQuantizationType | None = None, extra: int = 0,
) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, ARCHS[family])
    latent = family.startswith("deepseek")
    writer.add_block_count(config.num_hidden_layers + extra)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if halves else config.num_key_value_heads)
    writer.add_feed_forward_length(config.intermediate_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if latent:
        _write_latent(writer, config, halves)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if latent or family == "glm4_moe":
        _write_routed(writer, family, config)
    if family == "glm4_moe":
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters["partial_rotary_factor"]))
    if family == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if extra:
        writer.add_nextn_predict_layers(extra)
        writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", torch.zeros(4, 4).numpy())
        writer.add_tensor(f"blk.{config.num_hidden_layers}.attn_q.weight", torch.zeros(4, 4).numpy())
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    fields = ("num_experts", "n_routed_experts", "num_local_experts")
    writer.add_expert_count(next(getattr(config, field) for field in fields if getattr(config, field, None)))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    write_vocabulary(writer, config.vocab_size)
    for name, tensor in _tensors(family, model, halves) if tensors is None else tensors:
        values = tensor.float().contiguous().numpy()
        kind = experts if name.endswith("_exps.weight") else None
        writer.add_tensor(name, values if kind is None else gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_gate_and_up_of_all_experts_may_be_one_tensor(family: str, tmp_path: Path) -> None:
    """As llama.cpp's converter writes them with `--fuse-gate-up-exps`."""
    model = make_model(family, norm_topk_prob=True)
    apart = dict(_tensors(family, model))
    fused = {name.replace("_gate_", "_gate_up_") if "_gate_exps" in name else name: tensor
             for name, tensor in apart.items() if "_up_exps" not in name}
    for name in fused:
        if "_gate_up_exps" in name:
            gate, up = (apart[name.replace("_gate_up_", part)] for part in ("_gate_", "_up_"))
            fused[name] = torch.cat([gate, up], 1)
    _write(tmp_path / "m.gguf", family, model, list(fused.items()))
    source = resolve_model(str(tmp_path / "m.gguf"))
    decoder = build_decoder(source.config, source.weights(), CpuOps(), max_model_len=64)
    got = PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)])
    assert (got - oracle_logits(model, TOKENS)).abs().max() < 1e-4
    damaged = next(name for name in fused if "_gate_up_exps" in name)
    _write(tmp_path / "m.gguf", family, model, [item for item in fused.items() if item[0] != damaged])
    with pytest.raises(ModelLoadError, match=damaged):
        source = resolve_model(str(tmp_path / "m.gguf"))
        build_decoder(source.config, source.weights(), CpuOps(), max_model_len=64)


@pytest.mark.parametrize("family", ARCHS)
def test_a_gguf_of_experts_gives_the_models_logits(family: str, tmp_path: Path) -> None:
    model = make_model(family, **({"norm_topk_prob": True} if family == "qwen3_moe" else {}))
    _write(tmp_path / "m.gguf", family, model)
    source = resolve_model(str(tmp_path / "m.gguf"))
    decoder = build_decoder(source.config, source.weights(), CpuOps(), max_model_len=64)
    got = PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)])
    assert (got - oracle_logits(model, TOKENS)).abs().max() < 1e-4


DAMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "missing": lambda tensor: None,
    "one fewer": lambda tensor: tensor[:-1],
    "one more": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "narrower": lambda tensor: tensor[..., :-1],
    "flat": lambda tensor: tensor.reshape(-1),
}


@pytest.mark.parametrize("family", ARCHS)
def test_a_gguf_with_other_experts_is_refused_by_the_tensors_name_in_the_file(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    stored = _tensors(family, model)
    for ending in ("ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"):
        damaged = next(name for name, _ in stored if name.endswith(ending))
        for how, damage in DAMAGES.items():
            tensors = [(name, damage(tensor) if name == damaged else tensor) for name, tensor in stored]
            _write(tmp_path / "m.gguf", family, model, [item for item in tensors if item[1] is not None])
            with pytest.raises(ModelLoadError, match=damaged):
                source = resolve_model(str(tmp_path / "m.gguf"))
                build_decoder(source.config, source.weights(), CpuOps(), max_model_len=64)
                pytest.fail(f"{damaged} {how}")


@pytest.mark.parametrize("experts, groups", [(256, (8, 4)), (160, (8, 3)), (384, (1, 1)), (64, (1, 1))])
def test_a_deepseek_gguf_without_keys_for_groups_has_those_of_the_published_model(
    experts: int, groups: tuple[int, int], tmp_path: Path
) -> None:
    model = make_model("deepseek_v3", n_routed_experts=experts, n_group=None, topk_group=None, num_hidden_layers=2)
    _write(tmp_path / "m.gguf", "deepseek_v3", model)
    config = resolve_model(str(tmp_path / "m.gguf")).config
    assert (config["n_group"], config["topk_group"]) == groups


@pytest.mark.parametrize(("family", "sharper"), [("deepseek_v2", 0.707), ("deepseek_v3", 1.0)])
def test_a_latents_yarn_sharpens_scores_as_the_file_says(family: str, sharper: float, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 16}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": sharper, "mscale_all_dim": sharper}
    model = make_model(family, rope_parameters=yarn)
    _write(tmp_path / "m.gguf", family, model)
    source = resolve_model(str(tmp_path / "m.gguf"))
    decoder = build_decoder(source.config, source.weights(), CpuOps(), max_model_len=64)
    expected = oracle_logits(model, TOKENS)
    assert (PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)]) - expected).abs().max() < 1e-4
    plain = {**source.config["rope_scaling"], "mscale": None, "mscale_all_dim": None}
    decoder = build_decoder({**source.config, "rope_scaling": plain}, source.weights(), CpuOps(), max_model_len=64)
    assert (PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)]) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_keys_and_values_of_a_latent_may_be_two_tensors(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    _write(tmp_path / "m.gguf", family, model, halves=True)
    source = resolve_model(str(tmp_path / "m.gguf"))
    weights = list(source.weights())
    decoder = build_decoder(source.config, weights, CpuOps(), max_model_len=64)
    want = PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)])
    assert (want - oracle_logits(model, TOKENS)).abs().max() < 1e-4
    # Of two ranks each reads its own part of what was put together, and of the merged experts its own.
    spec = read_spec(source.config)
    for rank in range(2):
        shard = shard_of(spec, Place(rank, 2))
        mine = dict(source.weights(None, stored_parts(source.config, shard)))
        name = "model.layers.1.self_attn.kv_b_proj.weight"
        whole, cut = dict(weights)[name], shard.cut("layers.1.attn.kv_b.weight")
        assert cut is not None and torch.equal(mine[name], whole[cut.start : cut.stop])
        experts = mine["model.layers.1.mlp.experts.up_proj.weight"]
        assert experts.dim() == 3 and len(experts) < len(dict(weights)["model.layers.1.mlp.experts.up_proj.weight"])
    del source._file.tensors["blk.1.attn_v_b.weight"]
    with pytest.raises(ModelLoadError, match=r"layers\.1\.self_attn\.k_b_proj.*no counterpart"):
        list(source.weights())


def test_layers_that_guess_further_tokens_are_not_read(tmp_path: Path) -> None:
    model = make_model("glm4_moe")
    _write(tmp_path / "m.gguf", "glm4_moe", model, extra=1)
    source = resolve_model(str(tmp_path / "m.gguf"))
    assert source.config["num_hidden_layers"] == model.config.num_hidden_layers
    assert build_decoder(source.config, source.weights(), CpuOps(), max_model_len=64).missing() == []


def test_experts_of_four_bits_in_gguf_are_the_dequantized_ones(tmp_path: Path) -> None:
    model = make_model("gpt_oss", hidden_size=64, intermediate_size=96)
    kind = gguf.GGMLQuantizationType.MXFP4
    _write(tmp_path / "m.gguf", "gpt_oss", model, experts=kind)
    source = resolve_model(str(tmp_path / "m.gguf"))
    read = dict(source.weights())
    for name, tensor in _tensors("gpt_oss", model):
        if name.endswith("_exps.weight"):
            _, layer, part, _ = name.split(".")
            want = gguf.quants.dequantize(gguf.quants.quantize(tensor.contiguous().numpy(), kind), kind)
            got = read[f"model.layers.{layer}.mlp.experts.{part.split('_')[1]}_proj.weight"]
            assert torch.equal(got, torch.from_numpy(want))
    assert build_decoder(source.config, source.weights(), CpuOps(), max_model_len=64).missing() == []
    for name, weight in source.stored_weights():
        if name.endswith("_proj.weight") and ".experts." in name:
            assert isinstance(weight, Mxfp4Weight)
            assert torch.equal(weight.dequantized(), read[name].flatten(0, 1))


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0], ids=str)
def test_experts_of_a_gguf_keep_their_bits_and_a_rank_reads_its_own(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    model = make_model("qwen3_moe", hidden_size=64, moe_intermediate_size=96, norm_topk_prob=True)
    _write(tmp_path / "m.gguf", "qwen3_moe", model, experts=kind)
    source = resolve_model(str(tmp_path / "m.gguf"))
    floats, bits = dict(source.weights()), 4 if kind is gguf.GGMLQuantizationType.Q4_0 else 8
    shard = shard_of(read_spec(source.config), Place(1, tensor_size=2))
    mine = shard.layer(0).expert_run
    run = slice(mine.border(mine.first), mine.border(mine.last))
    for parts, part in ((None, slice(None)), (stored_parts(source.config, shard), run)):
        coded = {name: weight for name, weight in source.stored_weights(parts) if ".experts." in name}
        assert len(coded) == 3 * model.config.num_hidden_layers
        for name, weight in coded.items():
            assert isinstance(weight, QuantizedWeight) and weight.bits == bits
            assert torch.equal(weight.dequantized(), floats[name][part].flatten(0, 1))
    decoder = build_decoder(source.config, source.stored_weights(), CpuOps(rounding=Rounding(None)), max_model_len=64)
    got = PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)])
    want = PagedDriver(build_decoder(source.config, floats.items(), CpuOps(), max_model_len=64)).run(
        0, TOKENS, [len(TOKENS)])  # fmt: skip
    off = (got - want).norm(dim=1) / want.norm(dim=1)
    # Rows in 8 bits. The fourth token may choose another expert then, and those behind it attend to it.
    assert 0 < off[:3].max() < 0.02


def test_an_mxfp4_checkpoint_is_the_model_with_those_weights(tmp_path: Path) -> None:
    model = make_model("gpt_oss", hidden_size=64, intermediate_size=96)
    stored = write_mxfp4(tmp_path, model)
    source = resolve_model(str(tmp_path))
    decoder = build_decoder(source.config, source.weights(), CpuOps())
    got = PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)])
    assert (got - oracle_logits(model, TOKENS)).abs().max() < 1e-4
    coded = [weight for _, weight in source.stored_weights() if isinstance(weight, CodedWeight)]
    assert len(coded) == 2 * model.config.num_hidden_layers and all(isinstance(each, Mxfp4Weight) for each in coded)
    decoder = build_decoder(source.config, source.stored_weights(), CpuOps(rounding=Rounding(None)))
    assert torch.equal(PagedDriver(decoder).run(0, TOKENS, [len(TOKENS)]), got)
    shard = shard_of(read_spec(source.config), Place(1, tensor_size=2))
    run, count = shard.layer(0).expert_run, model.config.num_local_experts
    mine = [weight for _, weight in source.stored_weights(stored_parts(source.config, shard))]
    for part, whole in zip((each for each in mine if isinstance(each, CodedWeight)), coded, strict=True):
        each = whole.shape[0] // count
        wanted = whole.rows(slice(run.border(run.first) * each, run.border(run.last) * each))
        assert part.shape[0] < whole.shape[0] and torch.equal(part.dequantized(), wanted.dequantized())
    stored.pop(next(name for name in stored if name.endswith("_scales")))
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="_blocks"):
        build_decoder(source.config, source.weights(), CpuOps())
