"""The family of docs/adding-a-family.md, taken from the page as it stands, gives the logits of transformers."""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quire.errors import UnsupportedModelError
from quire.models.build import build_decoder
from quire.models.registry import FAMILIES, read_spec
from quire.ops.cpu import CpuOps
from tests.checkpoints import SMALL, config_of, oracle_logits, weights_of
from tests.paged_driver import PagedDriver

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-family.md"


@pytest.fixture
def phi3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's file, imported and registered."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "phi3.py"
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("phi3_of_the_docs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(FAMILIES, module.FAMILY.architecture, module.FAMILY)
    return module


def tiny(**overrides: object) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.Phi3Config(**{**SMALL, "sliding_window": 24, **overrides})
    config._attn_implementation = "eager"
    return transformers.Phi3ForCausalLM(config).float().eval()


@pytest.mark.parametrize("overrides", [{}, {"sliding_window": None, "num_key_value_heads": 6}], ids=["window", "mha"])
def test_its_logits_are_those_of_transformers(phi3: ModuleType, overrides: dict[str, object]) -> None:
    model = tiny(**overrides)
    tokens = random.Random(0).choices(range(97), k=60)
    expected = oracle_logits(model, tokens)
    driver = PagedDriver(build_decoder(config_of(model), weights_of(model), CpuOps()), block_size=8, num_blocks=40)
    for chunks in ([60], [7, 1, 30, 22]):
        assert (driver.run(0, tokens, chunks) - expected).abs().max() < 1e-4
        driver.release(0)


def test_what_it_does_not_handle_is_refused(phi3: ModuleType) -> None:
    config = config_of(tiny())
    with pytest.raises(UnsupportedModelError, match="attention_bias"):
        read_spec({**config, "attention_bias": True})
    with pytest.raises(UnsupportedModelError, match="rope_type"):
        read_spec({**config, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}})


def test_without_it_the_architecture_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'Phi3ForCausalLM' is not supported.*LlamaForCausalLM"):
        read_spec({"architectures": ["Phi3ForCausalLM"]})


def test_the_page_names_files_that_exist() -> None:
    root = PAGE.parents[1]
    named = set(re.findall(r"`((?:quire|tests)/[\w/]+\.py)`", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 6
    assert {name for name in named if not (root / name).is_file()} == {"quire/models/families/phi3.py"}
