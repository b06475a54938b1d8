"""The heads that come with the package: one folder each, and which model it was trained for.

The config of such a head has a field `target`: the model's name, its number of layers, and a digest of its final norm,
which every format of a checkpoint keeps as it is, however its matrices are quantized.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.errors import ConfigError, ModelLoadError
from quire.models.heads.ends import HeadTarget
from quire.models.spec import DecoderSpec

_FOLDER = Path(__file__).with_name("shipped")


def shipped_heads() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and config of each."""
    for path in sorted(_FOLDER.glob("*/config.json")):
        yield path.parent, json.loads(path.read_text(encoding="utf-8"))


def shipped_head(spec: DecoderSpec) -> Path:
    """The one for a model of these shapes. Whether it is the very model is seen when its weights are there:
    `check_target`."""
    names = []
    for folder, config in shipped_heads():
        names.append(config["target"]["name"])
        shapes = config["hidden_size"], config["vocab_size"], config["target"]["num_hidden_layers"]
        if shapes == (spec.hidden_size, spec.vocab_size, spec.num_layers):
            return folder
    known = f"only for {', '.join(names)}" if names else "for none"
    raise ConfigError("speculative_config method 'eagle' has no model, and no head comes with Quire for this model "
                      f"({known}): give the path or hub id of a head as model, or make one with quire train eagle",
                      field="speculative_config")


def check_target(config: Mapping[str, Any], decoder: HeadTarget) -> None:
    """Refuse a head that says which model it is for with one that only has the shapes of that."""
    target, norm = config.get("target"), decoder.final_norm
    if target is None:
        return
    if not isinstance(target, dict):
        raise ModelLoadError(f"config.json of the head: target must be a mapping, not {target!r:.80}")
    for field in ("name", "final_norm"):
        if not isinstance(target.get(field), str):
            raise ModelLoadError(f"config.json of the head: target.{field} must be a text, not "
                                 f"{target.get(field)!r:.80}")
    if norm is None or digest(norm.weight) != target["final_norm"]:
        raise ConfigError(f"speculative_config method 'eagle': the head was trained for {target['name']}, and this "
                          "model only has the shapes of that: give the path or hub id of a head for this model as "
                          "model, or make one with quire train eagle", field="speculative_config")


def digest(norm: Tensor) -> str:
    """Of the weight of a final norm."""
    return hashlib.sha256(norm.float().cpu().contiguous().numpy().tobytes()).hexdigest()
