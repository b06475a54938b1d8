"""The layer that a model was trained with to predict one token more: the drafts of transformers' layers in plain torch,
and the tokens and bits of decoding without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelLoadError
from tests.checkpoints import make_checkpoint, make_model
from tests.test_eagle import drafts_of
from tests.test_speculation import PROMPTS, run

K = 3
LAYERS = 3
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": K, "adaptive": False}}
FAMILIES = ("deepseek_v3", "glm4_moe")


def tensors(hidden: int = 48) -> dict[str, torch.Tensor]:
    """What lies around the layer. Its input is mostly the token, so that some guesses are right."""
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    passed_on = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    return {"enorm": 1 + noise(hidden), "hnorm": 1 + noise(hidden), "shared_head.norm": 1 + noise(hidden),
            "eh_proj": passed_on + noise(hidden, 2 * hidden) / 10}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, make_target(request.param, tmp_path_factory.mktemp(request.param))


def make_target(family: str, folder: Path) -> Path:
    """A model of four layers whose last is stored behind the third, as public checkpoints have it."""
    make_model(family, num_hidden_layers=LAYERS + 1).save_pretrained(folder, max_shard_size="1GB")
    weights = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{LAYERS}."
    weights |= {f"{prefix}{name}.weight": tensor for name, tensor in tensors().items()}
    weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class PlainLayer:
    """The model and the layer behind it, all of a text at once, by transformers' own layers."""

    def __init__(self, family: str) -> None:
        self._model = make_model(family, num_hidden_layers=LAYERS + 1)
        self._around = tensors()
        self._eps = self._model.config.rms_norm_eps

    def _layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        model, length = self._model.model, x.shape[1]
        places = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        found = model.layers[index](x, attention_mask=mask, position_ids=places,
                                    position_embeddings=model.rotary_emb(x, position_ids=places))
        return found[0] if isinstance(found, tuple) else found

    def states(self, tokens: list[int]) -> torch.Tensor:
        """[1, n, hidden]: after the final norm."""
        x = self._model.model.embed_tokens(torch.tensor([tokens]))
        for index in range(LAYERS):
            x = self._layer(index, x)
        return self._model.model.norm(x)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._around[name]

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        states = self.states(tokens)[:, :-1]
        known, text, found = torch.cat((torch.zeros(1, 1, 48), states), 1), list(tokens), []
        for _ in range(count):
            embedded = self._model.model.embed_tokens(torch.tensor([text]))
            joined = torch.cat((self._norm("enorm", embedded), self._norm("hnorm", known)), -1)
            out = self._layer(LAYERS, joined @ self._around["eh_proj"].T)[:, -1:]
            text.append(int(self._model.lm_head(self._norm("shared_head.norm", out))[0, -1].argmax()))
            found.append(text[-1])
            known = torch.cat((known, out), 1)
        return found


def test_drafts_are_those_of_the_reference(target: tuple[str, Path]) -> None:
    """With blocks shared, swapped and preempted under way."""
    family, folder = target
    torch.set_num_threads(1)
    prompts = [prompt[:20] for prompt in PROMPTS[:5]]
    greedy = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    with LLM(str(folder), skip_tokenizer_init=True, num_threads=1, block_size=4, num_kv_blocks=30, swap_space=0.01,
             preemption_mode="swap", max_num_batched_tokens=11, **MTP) as llm:
        seen = drafts_of(llm)
        llm.generate(prompts, greedy, use_tqdm=False)
        llm.check()
    plain = PlainLayer(family)
    assert len(seen) > 30
    for text, drafts in list(seen.items())[::2]:
        assert list(drafts) == plain.drafts(list(text), len(drafts))


def test_tokens_and_bits_are_those_without_drafts(target: tuple[str, Path]) -> None:
    _, folder = target
    plain = run(folder)
    found = run(folder, block_size=4, num_kv_blocks=60, **MTP)
    assert found[0] == plain[0] and found[1] == plain[1]
    assert found[2]["spec_accepted_tokens"] > 0
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "threads"}
    assert run(folder, block_size=4, num_kv_blocks=60, **MTP, **ranks)[1] == plain[1]


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path, target: tuple[str, Path]) -> None:
    def refused(folder: Path, match: str, **more: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            LLM(str(folder), skip_tokenizer_init=True, **MTP, **more)

    make_checkpoint(tmp_path / "llama", "llama")
    refused(tmp_path / "llama", "num_nextn_predict_layers")
    refused(target[1], "kv_cache_dtype", kv_cache_dtype="int8")


@pytest.mark.parametrize("change, said", [
    (None, "lacks eh_proj.weight of the layer"),
    (torch.zeros(48, 48), r"'eh_proj.weight' of the layer .* has shape \(48, 48\), but the config asks for \(48, 96\)"),
], ids=["missing", "shape"])
def test_what_is_wrong_with_the_layer_is_said_by_its_name_in_the_checkpoint(
        tmp_path: Path, target: tuple[str, Path], change: torch.Tensor | None, said: str) -> None:
    weights = load_file(target[1] / "model.safetensors")
    name = f"model.layers.{LAYERS}.eh_proj.weight"
    del weights[name]
    if change is not None:
        weights[name] = change
    (tmp_path / "config.json").write_text((target[1] / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=said):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_threads=1, **MTP)
