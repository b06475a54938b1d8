"""Checkpoints of several alike layers, to see what loading them holds at once: of a quantized one never all weights in
16 bits as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quire.kernels.quantized import Rounding
from quire.models.build import build_decoder, dummy_weights
from quire.models.loader.source import resolve_model
from quire.ops.triton import TritonOps
from tests import fp8_checkpoints as fp8
from tests.integer_checkpoints import AWQ, Packer, awq, compressed, compressed_config, gptq, store_checkpoint

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}
KINDS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "AWQ": (awq(), AWQ),
    "GPTQ with act-order": (gptq(act_order=True), GPTQ),
    "compressed-tensors int8": (compressed(8, -1, plain=True), compressed_config(8, -1, plain=True)),
    "fp8 in blocks": fp8.KINDS["blocks"],
}


def write_layers(folder: Path, kind: str, layers: int, hidden: int) -> int:
    """A checkpoint whose layers are nearly all of it; what its projections would take in 16 bits."""
    pack, quantization = KINDS[kind]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden, "head_dim": 64,
        "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64, "vocab_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    store_checkpoint(folder, pack, config | {"quantization_config": quantization}, dummy_weights(config))
    return 2 * layers * (4 + 6) * hidden * hidden


def load(folder: Path, device: str, packed: bool) -> Any:
    """The decoder of `quantization="file"`, or, not `packed`, of floats."""
    source = resolve_model(str(folder))
    weights = source.stored_weights() if packed else source.weights()
    ops = TritonOps(torch.device(device), torch.bfloat16, rounding=Rounding(None) if packed else None)
    return build_decoder(source.config, weights, ops, dtype=torch.bfloat16)
