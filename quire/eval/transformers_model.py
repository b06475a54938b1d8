"""The same model in transformers, for comparison only; nothing of Quire's run time imports this."""

from __future__ import annotations

from typing import Any

from quire.models.loader.source import resolve_model


def load_in_transformers(model: str) -> tuple[Any, int]:
    """(network in fp32 with Quire's own reading of the weights, size of its vocabulary)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = resolve_model(model, progress=False)
    config = AutoConfig.for_model(**source.config)
    torch.set_default_dtype(torch.float32)
    network = AutoModelForCausalLM.from_config(config)
    missing, unexpected = network.load_state_dict(dict(source.weights()), strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise RuntimeError(f"the weights do not fit transformers' model: missing {missing}, unexpected {unexpected}")
    network.tie_weights()
    return network.eval(), int(config.vocab_size)
