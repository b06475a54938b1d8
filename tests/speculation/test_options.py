"""speculative_config is checked as a whole, and what is wrong is said by name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.speculation.assembly import build_speculator
from quire.speculation.options import SpeculationOptions
from quire.speculation.tree import TreeShape


@pytest.mark.parametrize("given, said", [
    ({}, "needs a method"),
    ({"method": "magic"}, "method must be one of"),
    ({"method": "ngram", "num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
    ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be an integer between 1"),
    ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
    ({"method": "ngram", "adaptive": 1}, "adaptive must be true or false"),
    ({"method": "ngram", "verifier": "hope"}, "verifier must be one of"),
    ({"method": "ngram", "model": "x"}, "model is for method draft_model"),
    ({"method": "draft_model"}, "needs a model"),
    ({"method": "draft_model", "model": "x", "prompt_lookup_min": 2}, "prompt_lookup_min is for method ngram"),
    ({"method": "eagle", "min_draft_probability": 1.5}, "min_draft_probability must be a number between 0 and 1"),
    ({"method": "eagle", "min_draft_probability": True}, "min_draft_probability must be a number"),
    ({"method": "eagle", "min_draft_probability": 0.1, "tree": {"width": 2}}, "min_draft_probability is for chains"),
    ({"method": "ngram", "min_draft_probability": 0.1}, "min_draft_probability is for method eagle or mtp"),
    ({"method": "skip_layers", "skipped_layers": [1.5]}, "skipped_layers must be a list of layer numbers"),
    ({"method": "skip_layers", "skipped_layers": []}, "skipped_layers must be a list of layer numbers"),
    ({"method": "ngram", "tree": 4}, "tree must be a mapping with some of width, depth, nodes"),
    ({"method": "ngram", "tree": {"branches": 4}}, "tree must be a mapping with some of"),
    ({"method": "ngram", "tree": {"width": 1}}, "tree width must be an integer between 2 and 16"),
    ({"method": "ngram", "tree": {"depth": 0}}, "tree depth must be an integer between 1 and 64"),
    ({"method": "ngram", "tree": {"depth": 5, "nodes": 4}}, "tree nodes must be an integer between 5 and 64"),
    ({"method": "ngram", "num_speculative_tokens": 5, "tree": {"depth": 3}}, "5 and tree depth 3: with a tree"),
    ({"method": "suffix", "tree": {"nodes": 65}}, "tree nodes must be an integer between 8 and 64"),
])
def test_what_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        EngineConfig.create(speculative_config=given)
    assert error.value.field == "speculative_config"


def test_without_it_there_is_no_speculation() -> None:
    assert EngineConfig.create().speculation.options is None


def test_defaults_are_exact_and_adaptive() -> None:
    options = SpeculationOptions.parse({"method": "ngram"})
    assert options.verifier == "coupled"
    assert options.adaptive


def test_a_head_cuts_its_chains_where_only_what_pays_is_drafted() -> None:
    assert SpeculationOptions.parse({"method": "eagle"}).chain_floor > 0.0
    assert SpeculationOptions.parse({"method": "eagle", "adaptive": False}).chain_floor == 0.0
    assert SpeculationOptions.parse({"method": "eagle", "tree": {"width": 2}}).chain_floor > 0.0
    assert SpeculationOptions.parse({"method": "draft_model", "model": "x"}).chain_floor == 0.0
    options = SpeculationOptions.parse({"method": "mtp", "adaptive": False, "min_draft_probability": 0.2})
    assert options.chain_floor == 0.2
    with pytest.raises(ConfigError, match="min_draft_probability is for device='cpu'"):
        build_speculator(options, draft_rows=8)


def test_a_tree_is_as_deep_as_the_drafts_and_has_twice_as_many_nodes() -> None:
    options = SpeculationOptions.parse({"method": "ngram", "num_speculative_tokens": 5, "tree": {}})
    assert options.tree == TreeShape(width=4, depth=5, nodes=10)
    assert options.most_drafts == 10
    assert SpeculationOptions.parse({"method": "ngram"}).most_drafts == 8
