"""What families of experts share: how checkpoints spell them, and which layers have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.layers.spec import MlpSpec, MoeSpec
from quire.models.config_reader import MAX_LAYERS, ConfigReader
from quire.models.families import llama
from quire.models.weight_names import Merged, WeightNames

EXPERTS = {
    "mlp.gate": "mlp.router",
    "mlp.experts.{}.gate_proj": "mlp.experts.{}.gate",
    "mlp.experts.{}.up_proj": "mlp.experts.{}.up",
    "mlp.experts.{}.down_proj": "mlp.experts.{}.down",
}
MERGED = {
    "mlp.experts.gate_up_proj": Merged(("mlp.experts.{}.gate", "mlp.experts.{}.up")),
    "mlp.experts.gate_proj": Merged(("mlp.experts.{}.gate",)),
    "mlp.experts.up_proj": Merged(("mlp.experts.{}.up",)),
    "mlp.experts.down_proj": Merged(("mlp.experts.{}.down",)),
}


def names(layer: Mapping[str, str | tuple[str, ...]], alone: Mapping[str, str] | None = None) -> WeightNames:
    """Llama's spelling with experts, one tensor each or all in one, and what else a layer has."""
    return WeightNames(
        top=llama.NAMES.top,
        layer={**layer, **llama.ATTENTION, **llama.NORMS, **llama.MLP, **EXPERTS},
        ignored=llama.NAMES.ignored,
        alone=alone or {},
        merged=MERGED,
    )


def mlp_of(
    c: ConfigReader, experts: MoeSpec, dense_layers: Callable[[int], bool]
) -> Callable[[int], MlpSpec | MoeSpec]:
    """Experts, or a dense MLP of `intermediate_size` where the layer's number says so."""
    count = c.size("num_hidden_layers", most=MAX_LAYERS)
    if not any(dense_layers(index) for index in range(count)):
        return lambda index: experts
    dense = MlpSpec(c.size("intermediate_size"), c.activation("hidden_act", "silu", gated=True))
    return lambda index: dense if dense_layers(index) else experts


def sparse_steps(c: ConfigReader) -> Callable[[int], bool]:
    """Which layers are dense by `decoder_sparse_step` and `mlp_only_layers` (Qwen)."""
    step = c.size("decoder_sparse_step", 1, most=MAX_LAYERS)
    alone = c.get("mlp_only_layers") or []
    if not isinstance(alone, list) or not all(isinstance(index, int) for index in alone):
        c.fail("mlp_only_layers", f"must be a list of layers, not {alone!r}")
    return lambda index: index in alone or (index + 1) % step != 0


def count_of_experts(c: ConfigReader, *fields: str) -> int:
    """The number of experts, under whichever of these names the config has it; `num_experts_per_tok` must fit."""
    found = next((field for field in fields if c.get(field) is not None), fields[0])
    count = c.size(found, most=4096)
    chosen = c.size("num_experts_per_tok", most=4096)
    if chosen > count:
        c.fail("num_experts_per_tok", f"must be at most the {count} experts of {found}, not {chosen}")
    return count
