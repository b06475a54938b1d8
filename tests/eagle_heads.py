"""Tiny EAGLE heads as public checkpoints have them, and what they guess, written down in plain torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CAPTURED = (1, 2, 3)
"""Layers whose inputs the tiny EAGLE-3 head reads; the last is what comes out of the third layer."""
GUESSED = tuple(range(0, 97, 2))


def make_head(folder: Path, target: Path, kind: str, seed: int = 5) -> Path:
    """A head for a tiny Llama with heads of 8, of its shape. EAGLE-1: it mostly repeats what the token alone would
    give, so that some are right."""
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, scale: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=generator) * scale / shape[-1] ** 0.5

    read = 2 * hidden if kind == "eagle3" else hidden
    prefix = "midlayer." if kind == "eagle3" else "layers.0."
    weights = {
        f"{prefix}self_attn.q_proj.weight": noise(heads * 8, read, scale=2.0),
        f"{prefix}self_attn.k_proj.weight": noise(kv * 8, read, scale=2.0),
        f"{prefix}self_attn.v_proj.weight": noise(kv * 8, read),
        f"{prefix}self_attn.o_proj.weight": noise(hidden, heads * 8),
        f"{prefix}mlp.gate_proj.weight": noise(inner, hidden),
        f"{prefix}mlp.up_proj.weight": noise(inner, hidden),
        f"{prefix}mlp.down_proj.weight": noise(hidden, inner),
        f"{prefix}post_attention_layernorm.weight": 1 + noise(hidden),
    }
    if kind == "eagle3":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(GUESSED),
                   "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(CAPTURED)}}
        theirs = {name: part for file in target.glob("*.safetensors") for name, part in load_file(file).items()}
        weights |= {
            f"{prefix}input_layernorm.weight": 1 + noise(hidden), f"{prefix}hidden_norm.weight": 1 + noise(hidden),
            "fc.weight": noise(hidden, 3 * hidden, scale=1.0), "norm.weight": 1 + noise(hidden),
            "lm_head.weight": theirs["lm_head.weight"][list(GUESSED)].clone(),
            "d2t": torch.tensor(GUESSED) - torch.arange(len(GUESSED)),
            "t2d": torch.tensor([token in GUESSED for token in range(97)]),
        }
    else:
        passed_on = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
        weights |= {"fc.weight": passed_on + noise(hidden, 2 * hidden, scale=0.1)}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


class PlainHead:
    """The same arithmetic without a cache: every guess computes the whole text again."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._weights = {name.replace("midlayer.", "layers.0."): tensor.double()
                         for name, tensor in load_file(folder / "model.safetensors").items()}
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        layers = self._config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [])
        self._states = [f"layers.{layer - 1}" for layer in layers]
        self._norm_first = self._config.get("norm_before_residual", False)
        theirs = load_file(target / "model.safetensors")
        self._embed = theirs["model.embed_tokens.weight"].double()
        self._target_head = theirs["lm_head.weight"].double()
        self._two_streams = "norm.weight" in self._weights
        self._eps = self._config["rms_norm_eps"]

    def features(self, states: Mapping[str, Tensor]) -> Tensor:
        if not self._two_streams:
            return states["final"].double()
        joined = torch.cat([states[name] for name in self._states], 1).double()
        return joined @ self._weights["fc.weight"].T

    def drafts(self, tokens: Sequence[int], features: Tensor, count: int) -> list[int]:
        """What follows `tokens`, of all but the last of which the target's features are known."""
        return self.chain(tokens, features, count)[0]

    def chain(self, tokens: Sequence[int], features: Tensor, count: int) -> tuple[list[int], list[float]]:
        """The same, and how likely each beginning of it is."""
        known, found = self._begun(tokens, features), list[int]()
        chances: list[float] = []
        for _ in range(count):
            likely, known = self._guesses([*tokens, *found], known, 1)
            [(token, chance)] = likely
            chances.append(chance * (chances[-1] if chances else 1.0))
            found.append(token)
        return found, chances

    def tree(
        self, tokens: Sequence[int], features: Tensor, width: int, depth: int, nodes: int
    ) -> dict[tuple[int, ...], float]:
        """The likeliest `nodes` candidates of a tree after `tokens`, by their path: of every level the likeliest few
        (`nodes / depth`, at most `width`) get `width` children each."""
        found: dict[tuple[int, ...], float] = {}
        level = {(): (1.0, self._begun(tokens, features))}
        for _ in range(depth):
            below = {}
            for path, (chance, known) in level.items():
                likely, grown = self._guesses([*tokens, *path], known, width)
                below |= {(*path, token): (chance * share, grown) for token, share in likely}
            found |= {path: chance for path, (chance, _) in below.items()}
            few = sorted(below, key=lambda path: -below[path][0])[: max(1, min(width, nodes // depth))]
            level = {path: below[path] for path in few}
        return {path: found[path] for path in sorted(found, key=lambda path: -found[path])[:nodes]}

    def _begun(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """What is read beside each token: zeros, then the features of the token before."""
        return torch.cat((torch.zeros(1, 48).double(), features[: len(tokens) - 1]))

    def _guesses(self, text: Sequence[int], known: Tensor, count: int) -> tuple[list[tuple[int, float]], Tensor]:
        """The likeliest tokens after a text with their probabilities, and `known` for the text with one more."""
        out = self._layer(self._embed[torch.tensor(text)], known)[-1:]
        if self._two_streams:
            shift = self._weights["d2t"].long()
            guessed = torch.arange(len(shift)) + shift
            rows = self._weights.get("lm_head.weight", self._target_head[guessed].bfloat16().double())
            logits = (self._norm("norm", out) @ rows.T)[0]
        else:
            logits = (out @ self._target_head.T)[0]
            guessed = torch.arange(len(logits))
        best = logits.softmax(0).topk(count)
        likely = [(int(guessed[place]), float(share)) for share, place in zip(best.values, best.indices, strict=True)]
        return likely, torch.cat((known, out))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._weights[f"{name}.weight"]

    def _layer(self, embedded: Tensor, features: Tensor) -> Tensor:
        def of(name: str) -> Tensor:
            return self._weights[f"layers.0.{name}.weight"]

        if self._two_streams:
            normed = self._norm("layers.0.hidden_norm", features)
            x = normed if self._norm_first else features
            read = torch.cat((self._norm("layers.0.input_layernorm", embedded), normed), 1)
        else:
            x = read = torch.cat((embedded, features), 1) @ self._weights["fc.weight"].T
        length = len(x)
        q, k, v = ((read @ of(f"self_attn.{part}_proj").T).view(length, -1, 8).transpose(0, 1) for part in "qkv")
        q, k = self._turned(q), self._turned(k)
        k, v = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
        scores = q @ k.transpose(1, 2) / 8**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        x = x + mixed @ of("self_attn.o_proj").T
        normed = self._norm("layers.0.post_attention_layernorm", x)
        gate = torch.nn.functional.silu(normed @ of("mlp.gate_proj").T)
        return x + (gate * (normed @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T

    def _turned(self, x: Tensor) -> Tensor:
        theta = self._config.get("rope_parameters", self._config).get("rope_theta", 10000.0)
        angles = torch.arange(x.shape[1])[:, None] * theta ** -(torch.arange(0, 8, 2).double() / 8)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin


def target_states(folder: Path, tokens: Sequence[int]) -> dict[str, Tensor]:
    """Hidden states of a text, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: dict[str, Tensor] = {}
    hooks = [layer.register_forward_hook(
        lambda _, __, out, index=index: seen.update(
            {f"layers.{index}": (out[0] if isinstance(out, tuple) else out).reshape(len(tokens), -1)}))
        for index, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        seen["final"] = model.model(torch.tensor([list(tokens)])).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return seen
