"""The heads that come with the package: found for their model, refused for others, good for something."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import ConfigError, ModelLoadError
from quire.models.heads.shipped import check_target, shipped_heads
from tests.checkpoints import make_checkpoint

QUESTIONS = ["What is the difference between a lake and a pond?", "How do I boil an egg?"]


def test_smollm2_drafts_with_the_head_that_comes_with_it(smollm2: str) -> None:
    """The tokens of plain decoding in fewer steps, on one rank and on two, whose drafts are as often right."""
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    found, counted = [], []
    drafts: dict[str, Any] = {"speculative_config": {"method": "eagle", "adaptive": False}}
    for more in ({}, drafts, {**drafts, "tensor_parallel_size": 2, "num_threads": 1}):
        with LLM(smollm2, max_model_len=256, num_kv_blocks=64, **more) as llm:
            outputs = llm.chat([[{"role": "user", "content": text}] for text in QUESTIONS], greedy, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            counted.append({name: value for name, value in llm.metrics().items() if name.startswith("spec_")})
    assert found[0] == found[1] == found[2]
    assert counted[1] == counted[2]
    assert counted[1]["spec_tokens_per_step"] > 1.5
    assert counted[1]["spec_acceptance_rate_at_1"] > 0.35


def test_a_method_by_its_name_is_short_for_its_config() -> None:
    options = EngineConfig.create(speculative="eagle").speculation.options
    assert options == EngineConfig.create(speculative_config={"method": "eagle"}).speculation.options
    assert options is not None and options.model is None and options.num_speculative_tokens == 4
    with pytest.raises(ConfigError, match="give one of them"):
        EngineConfig.create(speculative="ngram", speculative_config={"method": "ngram"})


def test_a_model_without_a_head_is_told_so(tmp_path: Path, smollm2: str) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="only for SmolLM2-135M-Instruct"):
        LLM(str(tmp_path), skip_tokenizer_init=True, speculative="eagle")
    named = {"speculative_config": {"method": "eagle", "model": str(next(shipped_heads())[0])}}
    for asked in ({"speculative": "eagle"}, named):
        with pytest.raises(ConfigError, match="trained for SmolLM2-135M-Instruct, and this model only has the shapes"):
            LLM(smollm2, load_format="dummy", num_kv_blocks=8, max_model_len=64, **asked)


@pytest.mark.parametrize("target, said", [
    ({}, "target.name must be a text, not None"),
    ({"name": "x"}, "target.final_norm must be a text, not None"),
    ({"final_norm": "x"}, "target.name must be a text, not None"),
    ({"name": 5, "final_norm": "x"}, "target.name must be a text, not 5"),
    ("x", "target must be a mapping, not 'x'"),
])
def test_a_head_that_half_says_what_it_is_for_is_refused_by_field(target: Any, said: str) -> None:
    decoder: Any = SimpleNamespace(final_norm=None)
    with pytest.raises(ModelLoadError, match=said):
        check_target({"target": target}, decoder)
    check_target({"target": None}, decoder)


def test_the_package_carries_small_heads_with_their_cards() -> None:
    root = Path(__file__).parents[1]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    carried = {path for pattern in patterns["quire.models.heads"]
               for path in (root / "quire/models/heads").glob(pattern)}
    folders = [folder for folder, _ in shipped_heads()]
    assert folders
    for folder in folders:
        files = {path.name: path.stat().st_size for path in folder.iterdir()}
        assert set(files) == {"README.md", "config.json", "model.safetensors"} and sum(files.values()) <= 8_000_000
        assert {folder / name for name in files} <= carried
        assert json.loads((folder / "config.json").read_text())["target"]["name"] in (folder / "README.md").read_text()
