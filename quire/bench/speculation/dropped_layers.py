"""A draft model made of another model by dropping layers: a folder with config.json and weights that can be loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

from quire.models.loader.source import ModelSource
from quire.worker.draft_models import kept_layers

_LAYER = re.compile(r"^(.*\.layers\.)(\d+)(\..*)$")


def write_dropped(source: ModelSource, folder: Path, kept: list[int] | None = None) -> list[int]:
    """Write the model with the layers `kept` (default: those that `skip_layers` keeps); returns which they are."""
    import torch
    from safetensors.torch import save_file

    config = dict(source.config)
    count = int(config["num_hidden_layers"])
    kept = kept_layers(count, None) if kept is None else kept
    number = {layer: place for place, layer in enumerate(kept)}
    weights: dict[str, torch.Tensor] = {}
    for name, weight in source.weights():
        match = _LAYER.match(name)
        if match is None:
            weights[name] = weight.to(torch.float16)
        elif int(match[2]) in number:
            weights[f"{match[1]}{number[int(match[2])]}{match[3]}"] = weight.to(torch.float16)
    folder.mkdir(parents=True, exist_ok=True)
    config["num_hidden_layers"] = len(kept)
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = [config["layer_types"][layer] for layer in kept]
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return kept
