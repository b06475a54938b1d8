"""What a checkpoint's config keeps out of quantization stays as it is, whatever is asked for at load."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import UnsupportedModelError
from quire.kernels.quantized import Rounding
from quire.models.build import build_decoder, dummy_weights
from quire.models.excluded import ExcludedModules
from quire.ops.cpu import CpuOps
from tests.checkpoints import config_of, make_model
from tests.integer_checkpoints import compressed_config

LAYER = "model.layers.1"
NAMES = [f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.mlp.gate.weight", f"{LAYER}.mlp.gate_proj.weight",
         f"{LAYER}0.mlp.gate_proj.weight", "lm_head.weight"]


@pytest.mark.parametrize(("entries", "held"), [
    ({"ignore": [f"{LAYER}.self_attn.k_proj"]}, [0]),
    ({"ignore": ["re:.*mlp.gate$", "lm_head"]}, [1, 4]),
    ({"ignore": [r"re:model\.layers\.\d+\.mlp\."]}, [1, 2, 3]),
    ({"modules_to_not_convert": [LAYER]}, [0, 1, 2]),
    ({"modules_to_not_convert": ["self_attn", "mlp.gate"]}, [0, 1]),
    ({"modules_to_not_convert": ["model.layers.*.self_attn"]}, [0]),
    ({"exclude_modules": ["*mlp.gate", "lm_head*"]}, [1, 4]),
    ({"ignored_layers": [f"{LAYER}.mlp"], "ignore": None}, [1, 2]),
    ({"modules_to_not_convert": None, "ignore": []}, []),
    ({"ignore": [f"{LAYER}.self_attn.k_proj.weight.more", "gate_pro", ""]}, []),
])  # fmt: skip
def test_entries_name_modules_and_all_that_lies_in_them(entries: dict[str, Any], held: list[int]) -> None:
    excluded = ExcludedModules({"quantization_config": entries})
    assert [place for place, name in enumerate(NAMES) if excluded.holds(name)] == held


def test_a_config_without_exclusions_excludes_nothing() -> None:
    assert not any(ExcludedModules(config).holds(name) for name in NAMES
                   for config in ({}, {"quantization_config": None}, {"quantization_config": {"bits": 4}}))


@pytest.mark.parametrize("entries", ["lm_head", [3], ["re:("]])
def test_what_is_no_list_of_names_is_refused_by_its_field(entries: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"quantization_config\.ignore"):
        ExcludedModules({"quantization_config": {"ignore": entries}})


def test_norms_of_an_excluded_module_are_no_matrices() -> None:
    """Cohere's q and k norms have a row for each head."""
    config = config_of(make_model("cohere", use_qk_norm=True)) | {
        "quantization_config": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]}}
    ops = CpuOps(num_threads=1, rounding=Rounding(8))
    decoder = build_decoder(config, dummy_weights(config), ops, max_model_len=64)
    assert not decoder.missing()


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
KEPT = ["lm_head", "model.layers.0.self_attn.k_proj", "re:.*layers.1.mlp.down_proj"]
CONFIG = LLAMA | {"quantization_config": compressed_config(8, -1, plain=True) | {"ignore": KEPT}}


@pytest.mark.parametrize("rounding", [Rounding(8), Rounding(4, 32, True)])
def test_a_cpu_leaves_them_alone(rounding: Rounding) -> None:
    weights = dict(dummy_weights(CONFIG))
    decoder = build_decoder(CONFIG, weights.items(), CpuOps(num_threads=1, rounding=rounding), max_model_len=64)
    first, second = decoder.layers
    forms = [linear.packed.format for linear in (  # type: ignore[attr-defined]
        decoder.head, first.attn.qkv, second.mlp.down, first.mlp.down, second.attn.qkv, decoder.embed)]
    assert ["int" in form for form in forms] == [False, False, False, True, True, True], forms
    everything = build_decoder(LLAMA, weights.items(), CpuOps(num_threads=1, rounding=rounding), max_model_len=64)
    assert "int" in everything.head.packed.format  # type: ignore[attr-defined]
