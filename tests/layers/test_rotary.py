"""Rotation tables against transformers' own rotary embeddings, and computed as far as steps need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.layers import rotary
from quire.layers.rotary import RopeTable, rope_table
from quire.models.registry import read_spec
from quire.ops.recording import StepRecorder
from tests.checkpoints import config_of, make_checkpoint, make_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {**LLAMA3, "rope_theta": 500_000.0},
    "yarn": YARN,
    "yarn sharpened": {**YARN, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8},
    "yarn smooth": {**YARN, "truncate": False},
}


def oracle_table(model: Any, length: int, step_by_step: bool = False) -> torch.Tensor:
    """cos || sin as transformers computes them, all at once or one position after another."""
    positions = torch.arange(length)[None]
    x = torch.zeros(1, 1)
    chunks = positions.split(1, dim=1) if step_by_step else (positions,)
    rows = [
        torch.cat([half[0, :, : half.shape[-1] // 2] for half in model.model.rotary_emb(x, p)], -1)
        for p in chunks
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_a_table_turns_as_transformers_does(variant: str, head_dim: int) -> None:
    model = make_model("llama", head_dim=head_dim, rope_parameters=dict(VARIANTS[variant]))
    table = rope_table(read_spec(config_of(model)).ropes[0], 256)
    assert (table - oracle_table(model, 256)).abs().max() < 2e-6


def test_dynamic_scaling_past_the_trained_length_is_that_of_token_by_token_decoding() -> None:
    model = make_model("llama", max_position_embeddings=32, rope_parameters=dict(VARIANTS["dynamic"]))
    table = rope_table(read_spec(config_of(model)).ropes[0], 96)
    # the base is rounded in float32 there and in float64 here, and the angle multiplies the difference
    assert (table - oracle_table(model, 96, step_by_step=True)).abs().max() < 2e-5


@pytest.mark.parametrize(("trained", "length"), [(64, 64), (64, 65), (64, 200), (256, 256)])
def test_longrope_takes_the_factors_of_the_length_a_table_is_for(trained: int, length: int) -> None:
    model = make_model("phi3", original_max_position_embeddings=trained)
    (spec,) = read_spec(config_of(model)).ropes
    table = rope_table(spec, length)
    assert table.shape == (length, 12)
    assert (table - oracle_table(model, length)).abs().max() < 2e-6
    assert (rope_table(spec, 300)[:length] - table).abs().max() > 0.1 or length > trained


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_does_not_depend_on_how_long_the_table_is(variant: str) -> None:
    model = make_model("llama", head_dim=24, rope_parameters=dict(VARIANTS[variant]))
    spec = read_spec(config_of(model)).ropes[0]
    long = rope_table(spec, 5000)
    for length in (1, 37, 4096, 4099):
        assert torch.equal(rope_table(spec, length), long[:length])


@pytest.mark.parametrize("variant", ["default", "dynamic"])
def test_a_table_that_grows_has_the_rows_of_a_whole_one(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(config_of(make_model("llama", rope_parameters=VARIANTS[variant]))).ropes[0]
    whole = rope_table(spec, 150)
    monkeypatch.setattr(rotary, "_ROWS_AT_ONCE", 7)
    table = RopeTable(spec, 150)
    for length, computed in ((0, 0), (1, 7), (7, 7), (30, 35), (149, 150), (10_000, 150)):
        table.reach(length)
        assert table.computed == computed and torch.equal(table.rows[:computed], whole[:computed])


@pytest.mark.parametrize("options", [
    {}, {"speculative_config": {"method": "skip_layers", "skipped_layers": [1], "num_speculative_tokens": 2,
                                "adaptive": False}},
    {"pipeline_parallel_size": 2, "distributed_executor_backend": "threads"},
])  # fmt: skip
def test_an_engine_computes_rotations_before_steps_need_them(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were not computed are not numbers here. Steps are recorded within the first 40 positions, and run from
    the list past them."""
    make_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    prompts, asked = [[5, 6, 7], [8] * 21], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)

    def answers() -> list[Any]:
        with LLM(str(tmp_path), skip_tokenizer_init=True, num_threads=1, **options) as llm:
            outputs = llm.generate(prompts, asked, use_tqdm=False)
        return [(output.error, output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    expected, make = answers(), RopeTable.__init__

    def make_without_numbers(self: RopeTable, *given: Any) -> None:
        make(self, *given)
        self.rows.fill_(torch.nan)

    replayed: list[int] = []
    replay = StepRecorder._replay
    monkeypatch.setattr(StepRecorder, "_replay", lambda *given: replayed.append(1) or replay(*given))
    monkeypatch.setattr(rotary, "_ROWS_AT_ONCE", 20)
    monkeypatch.setattr(RopeTable, "__init__", make_without_numbers)
    assert answers() == expected
    assert len(replayed) > 20
