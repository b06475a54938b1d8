"""Random draft heads for the small engines, on CPU tensors and on a GPU, and targets whose text they can guess."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.models.build import dummy_weights
from quire.models.decoder import Decoder
from quire.models.heads.build import read_head
from quire.models.heads.head import DraftHead
from quire.models.heads.mtp import read_mtp
from quire.models.heads.spec import HeadSpec
from quire.models.spec import DecoderSpec
from quire.models.stored_parts import StoredParts
from quire.speculation.choice import DraftChoice
from quire.speculation.device_speculator import DeviceSpeculator
from quire.speculation.options import SpeculationOptions
from quire.speculation.speculator import Speculator
from tests.checkpoints import _BASE
from tests.worker.gpu.engines import QWEN3

LATENT: dict[str, Any] = {**_BASE["deepseek_v3"][2], "architectures": ["DeepseekV3ForCausalLM"],
                          "num_nextn_predict_layers": 1, "max_position_embeddings": 256, "vocab_size": 131}
TARGETS: dict[str, dict[str, Any]] = {"eagle": QWEN3, "eagle3": QWEN3, "mtp": LATENT}


def faint(config: dict[str, Any], parts: StoredParts | None = None) -> Iterator[tuple[str, Tensor]]:
    """Layers that say little: after a token comes what its embedding says, so that a head can guess it."""
    for name, tensor in dummy_weights(config, parts=parts):
        yield name, tensor * 0.05 if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor


def spec_of(kind: str, target: DecoderSpec) -> HeadSpec:
    """Of a random head."""
    if kind == "mtp":
        return read_mtp(target)
    shapes: dict[str, Any] = {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    if kind == "eagle3":
        shapes |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": target.vocab_size // 2 + 1,
                   "eagle_aux_hidden_state_layer_ids": [0, 1, target.num_layers]}
    return read_head({**QWEN3, **shapes, "vocab_size": target.vocab_size}, target)


def random_head(kind: str) -> Any:
    """Builds a head on the device of its target. It mostly hands on what it reads."""

    def build(target: Decoder, device: torch.device, max_model_len: int) -> DraftHead:
        hidden = target.spec.hidden_size
        head_spec = spec_of(kind, target.spec)
        guessed = torch.arange(0, target.spec.vocab_size, 2, device=device) if kind == "eagle3" else None
        generator = torch.Generator(device="cpu").manual_seed(7)
        weights = {}
        for name, size in head_spec.parameters().items():
            noise = torch.randn(size, generator=generator, device="cpu") * (0.2 if len(size) == 1 else 0.03)
            weights[name] = (1.0 + noise if name.endswith("norm.weight") else noise).to(device)
        fuse = weights["fuse.weight"]
        # A token, or the state of the last layer: both say what comes next, if the layers say little.
        first = fuse.shape[1] - hidden if kind == "eagle3" else 0
        fuse[:, first : first + hidden] += torch.eye(hidden, device=device)
        head = DraftHead(head_spec, target, max_model_len)
        head.load(weights, guessed)
        return head

    return build


def asked(kind: str, drafts: int = 3, verifier: str = "coupled", tree: dict[str, int] | None = None) -> dict[str, Any]:
    """Keywords of `make_engine`."""
    method = {"method": kind} if kind == "mtp" else {"method": "eagle", "model": "given"}
    more: dict[str, Any] = {"num_speculative_tokens": drafts} if tree is None else {"tree": tree}
    options = SpeculationOptions.parse({**method, "adaptive": False, "verifier": verifier, **more})
    return {"speculation": options, "head": random_head(kind), "weights": faint}


class Pause:
    """Drafts always, but none in some steps, in which the head is not fed either."""

    def __init__(self, speculator: Speculator | None, first: int, last: int, tells: bool) -> None:
        """`tells`: the speculator remembers whom it gave up; else it asks for drafts that nobody can make."""
        assert isinstance(speculator, DeviceSpeculator)
        self.asked_after = 0
        """Sequences for which drafts were asked after the pause."""
        self.rested = self._step = 0
        self._span, self._tells, self._speculator = range(first, last), tells, speculator
        self._choose, speculator.choose = speculator.choose, self.choose  # type: ignore[method-assign]
        self._submitted, speculator.submitted = speculator.submitted, self.submitted  # type: ignore[method-assign]

    def choose(self, decoding: list[Any], room: int) -> DraftChoice:
        if self._step in self._span:
            return DraftChoice()
        found = self._choose(decoding, room)
        self.asked_after += len(found.drafts) if self._step >= self._span.stop else 0
        return found

    def submitted(self, planned: list[Any], single: bool = False) -> bool:
        self._submitted(planned, single)
        self._step += 1
        rests = self._step - 1 in self._span and all(entry.decodes for _, entry, _ in planned)
        if rests and self._tells:
            self._speculator._holed.update(seq for seq, _, _ in planned)
        self.rested += rests
        return rests
