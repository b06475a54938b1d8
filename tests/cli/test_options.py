"""Flags come from the dataclasses: every option has one, and what is given reaches the engine."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from quire.cli import options
from quire.cli.commands import CommandParser, UsageError
from quire.config import option_fields
from quire.errors import InvalidRequestError
from quire.sampling.params import SamplingParams
from quire.structured.spec import StructuredOutputs


def parser() -> CommandParser:
    made = CommandParser(prog="quire test")
    options.add_sampling_options(made, {"max_tokens": 99})
    options.add_engine_options(made, rename={"seed": "--engine-seed"})
    return made


def parse(*words: str) -> argparse.Namespace:
    return parser().parse_args(words)


def test_every_engine_option_has_a_flag_with_its_help() -> None:
    text = parser().format_help()
    for _, f in option_fields():
        flag = "--engine-seed" if f.name == "seed" else options.flag_of(f.name)
        assert flag in text and f.metadata["help"]


def test_every_sampling_field_has_a_flag_with_help() -> None:
    assert set(options.SAMPLING_HELP) == {f.name for f in dataclasses.fields(SamplingParams)}
    text = parser().format_help()
    plain = [f.name for f in dataclasses.fields(SamplingParams) if f.name != "structured_outputs"]
    assert all(options.flag_of(name) in text for name in plain)
    assert set(options.SHAPE_FLAGS) == {f.name for f in dataclasses.fields(StructuredOutputs)}
    assert all(flag in text for flag, _, _ in options.SHAPE_FLAGS.values())


def test_the_shape_of_an_answer_is_given_by_one_flag(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    cases = {
        ("--json-schema", '{"type": "null"}'): StructuredOutputs(json={"type": "null"}),
        ("--json-schema", f"@{file}"): StructuredOutputs(json={"type": "integer"}),
        ("--json-object",): StructuredOutputs(json_object=True),
        ("--regex", "a+"): StructuredOutputs(regex="a+"),
        ("--choice", "yes", "--choice", "no"): StructuredOutputs(choice=["yes", "no"]),
        ("--grammar", 'root ::= "a"'): StructuredOutputs(grammar='root ::= "a"'),
    }
    for words, shape in cases.items():
        assert options.sampling_params(parse(*words), {}).structured_outputs == shape
    with pytest.raises(InvalidRequestError, match="exactly one"):
        options.sampling_params(parse("--regex", "a", "--json-object"), {})


def test_nothing_given_leaves_all_defaults() -> None:
    args = parse()
    assert options.engine_options(args) == {}
    assert options.sampling_params(args, {"max_tokens": 99}) == SamplingParams(max_tokens=99)


def test_given_flags_have_the_types_of_their_fields() -> None:
    args = parse(
        *("--block-size", "32", "--kv-cache-memory", "2GiB", "--no-enable-prefix-caching"),
        *("--scheduling-policy", "priority", "--engine-seed", "5", "--max-model-len", "4_096"),
    )
    assert options.engine_options(args) == {
        "block_size": 32,
        "kv_cache_memory": "2GiB",
        "enable_prefix_caching": False,
        "scheduling_policy": "priority",
        "seed": 5,
        "max_model_len": 4096,
    }


def test_given_sampling_flags_make_the_params() -> None:
    args = parse(
        *(
            "--temperature",
            "0.5",
            "--top-k",
            "7",
            "--seed",
            "3",
            "--stop",
            "a b",
            "--stop",
            "c",
            "--ignore-eos",
        ),
        *("--stop-token-ids", "1,2", "--logit-bias", "4=1.5,6=-2", "--no-skip-special-tokens"),
    )
    assert options.sampling_params(args, {}) == SamplingParams(
        temperature=0.5,
        top_k=7,
        seed=3,
        stop=["a b", "c"],
        ignore_eos=True,
        stop_token_ids=[1, 2],
        logit_bias={4: 1.5, 6: -2.0},
        skip_special_tokens=False,
    )


def test_the_defaults_of_the_command_are_those_in_its_help() -> None:
    assert "most tokens to generate (default: 99)" in " ".join(parser().format_help().split())


def test_a_wrong_value_says_which_flag() -> None:
    with pytest.raises(UsageError, match=r"--block-size.*whole number"):
        parse("--block-size", "big")


def test_options_left_out_have_no_flag() -> None:
    made = CommandParser(prog="quire test")
    options.add_engine_options(made, leave_out=("model", "seed"))
    options.add_sampling_options(made, {}, leave_out=("n",))
    with pytest.raises(UsageError):
        made.parse_args(["--model", "x"])
    with pytest.raises(UsageError):
        made.parse_args(["--n", "2"])
