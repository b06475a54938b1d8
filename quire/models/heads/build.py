"""Puts a draft head together from a checkpoint in a public format, checked against the target it is for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.kernels.quantized import Rounding
from quire.models.config_reader import ConfigReader
from quire.models.heads import eagle, eagle3, speculators
from quire.models.heads.ends import HeadTarget
from quire.models.heads.format import HeadFormat
from quire.models.heads.head import DraftHead
from quire.models.heads.same import same_rows
from quire.models.heads.shipped import check_target
from quire.models.heads.spec import HeadSpec
from quire.models.spec import DecoderSpec

FORMATS: dict[str, HeadFormat] = {name: file.FORMAT for file in (eagle, eagle3, speculators)
                                  for name in file.FORMAT.architectures}

_ROUNDING = Rounding(bits=4, zero_points=True, alike=True)
"""Of heads that are stored quantized, in 8 bits too: a draft costs what it reads. A file's 4 bits are found again."""


def format_of(config: Mapping[str, Any]) -> HeadFormat:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or names[0] not in FORMATS:
        raise UnsupportedModelError(
            f"config.json: {names!r:.80} is no kind of EAGLE head that is known here: {', '.join(FORMATS)}")
    if names[0] == "LlamaForCausalLM" and config.get("draft_vocab_size") is not None:
        return eagle3.FORMAT  # so the authors of EAGLE call their heads of all versions
    return FORMATS[names[0]]


def read_head(config: Mapping[str, Any], target: DecoderSpec) -> HeadSpec:
    """The head that a config describes; one that is not for this target is refused, by the field that differs."""
    reader = ConfigReader(config, config.get("architectures", ["?"])[0])
    spec = format_of(config).read(reader, target)
    for field, own, wanted in (("hidden_size", spec.hidden_size, target.hidden_size),
                               ("vocab_size", spec.vocab_size, target.vocab_size)):
        if own != wanted:
            reader.fail(field, f"is {own} and the target's {wanted}: the head is not for this model")
    if target.embed_dim != target.hidden_size or target.embed_scale != 1.0 or target.positions is not None:
        raise UnsupportedModelError(f"{target.architecture} changes its embeddings before the first layer: EAGLE heads "
                                    "for such models are not supported")
    return spec


def build_head(config: Mapping[str, Any], weights: Iterable[tuple[str, Tensor]], target: HeadTarget,
               max_model_len: int) -> DraftHead:
    """A ready head. Embeddings that are the target's, row for row, are not kept twice."""
    spec, form = read_head(config, target.spec), format_of(config)
    check_target(config, target)
    wanted, optional = spec.parameters(), spec.optional()
    found: dict[str, Tensor] = {}
    for stored, tensor in weights:
        name = form.name(stored)
        shape = None if name is None else wanted.get(name) or optional.get(name)
        if name is None or shape is None:
            raise ModelLoadError(f"tensor {stored!r} is not one that {spec.architecture} has")
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(f"tensor {stored!r} has shape {tuple(tensor.shape)}, but the config asks for {shape}")
        if config.get("quantization_config") is not None and tensor.dim() == 2:
            tensor = tensor.to(torch.bfloat16)  # integers come as float32: wider than they are worth
        if name != "embed.weight" or not same_rows(tensor, target.embed):
            found[name] = tensor
    missing = [form.stored_name(name) for name in wanted if name not in found]
    if missing:
        raise ModelLoadError(f"{len(missing)} tensors of {spec.architecture} are missing: {', '.join(missing[:4])}")
    head = DraftHead(spec, target, max_model_len, [name for name in optional if name in found])
    # Stored as integers it is multiplied as such, whatever the target's arithmetic: no token depends on a guess.
    integers = config.get("quantization_config") is not None
    with target.ops.rounding_to(_ROUNDING) if integers else nullcontext():
        head.load(found, _guessed(spec, found))
    return head


def _guessed(spec: HeadSpec, found: Mapping[str, Tensor]) -> Tensor | None:
    """Token ids of the draft vocabulary: d2t says how far each lies behind its number."""
    if "d2t" not in found:
        if spec.draft_vocab not in (0, spec.vocab_size):
            raise ModelLoadError(f"{spec.architecture} guesses {spec.draft_vocab} of {spec.vocab_size} tokens, but "
                                 "there is no tensor 'd2t' that says which")
        return None
    ids = torch.arange(len(found["d2t"])) + found["d2t"].to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size or len(ids.unique()) != len(ids):
        raise ModelLoadError(f"tensor 'd2t' names tokens outside 0..{spec.vocab_size - 1}, or some twice")
    return ids
